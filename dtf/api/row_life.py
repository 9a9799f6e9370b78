"""When the rows of sparse tables are made, and when they leave: the part of the config node `sparse` that all row
optimizers have. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from dtf.api.registry import option
from dtf.api.schema import KeyProblem
from dtf.api.sparse_table import Table

SHARDS = 1024
"""Virtual shards of a large table, see `RowLife.shards`."""

LEAST_ROWS = 64
"""Of a virtual shard where rows have a life."""

DECAY = 0.9999


class WhenFull(Enum):
    error = "error"
    evict = "evict"
    refuse = "refuse"


@dataclass(kw_only=True)
class RowLife:
    """When rows are made and when they leave. With the defaults an id has a row from its first step on, for ever."""

    admit_count: int = option(
        default=1,
        least=1,
        most=255,
        doc="an id gets a row when it was shown so often, as a filter of bounded memory counts; until then it reads as "
        "it is drawn, and learns nothing",
        unit="shows",
    )
    admit_probability: float = option(
        default=1.0,
        least=1e-9,
        most=1,
        doc="each time that an id without a row is shown, it gets one with this probability",
    )
    evict_unseen: int = option(
        default=0, least=0, most=1 << 30, doc="rows that were not shown for so many steps leave; 0: none", unit="steps"
    )
    evict_score: float = option(
        default=0.0,
        least=0,
        doc="rows whose score is less leave; 0: none. A score is the sum of the row's shows, and of its clicks where "
        "the recipe says what a click is, each times `score_decay` for every step since",
    )
    score_decay: float = option(
        default=DECAY,
        above=0,
        most=1,
        doc="what a step leaves of a score; 0.9999 halves it in 6,931 steps, 1: no decay",
    )
    when_full: WhenFull | None = option(
        default=None,
        doc="what a table does that has no room. `error`: it ends the run; `evict`: the rows of least score leave; "
        "`refuse`: new ids get no row; null: `evict` where another of these options is set, else `error`",
    )

    @property
    def lives(self) -> bool:
        """Whether any of these options is set, so that rows may be refused or leave."""
        asks = self.admit_count > 1 or self.admit_probability < 1 or self.evict_unseen > 0 or self.evict_score > 0
        return asks or self.when_full not in (None, WhenFull.error)

    @property
    def evicts_when_full(self) -> bool:
        """Whether a table without room lets the rows of least score leave."""
        return self.lives and self.when_full is not WhenFull.refuse

    def shards(self, table: Table) -> int:
        """Into how many virtual shards a hash of the id divides a table. Rows of one shard are always together, and
        rows leave and are refused within a shard. Depends on no number of processes: 1,024, or fewer, a power of two,
        such that a shard of a table whose rows have a life has room for at least 64.
        """
        return min(SHARDS, 1 << max(0, (table.capacity // LEAST_ROWS).bit_length() - 1)) if self.lives else SHARDS

    def check_life(self) -> None:
        """Raise KeyProblem for options that contradict each other."""
        if self.lives and self.when_full is WhenFull.error:
            key = next(
                key for key, value in life_values(self).items() if value != _DEFAULTS[key] and key != "when_full"
            )
            raise KeyProblem(
                "sparse.when_full",
                f"sparse.when_full=error ends the run when the table is full, and sparse.{key} asks for rows that have "
                "a life; use evict or refuse, or leave one of them out",
            )
        leave = self.evicts_when_full or self.evict_unseen > 0 or self.evict_score > 0
        if self.score_decay != DECAY and not leave:
            raise KeyProblem(
                "sparse.score_decay",
                f"sparse.score_decay={self.score_decay:g} is of no account where no row leaves by its score; set "
                "sparse.when_full=evict or sparse.evict_score too, or leave it out",
            )

    def life_text(self) -> str:
        """For the start-up table; empty where rows have no life."""
        if not self.lives:
            return ""
        chance = f" with probability {self.admit_probability:g}" if self.admit_probability < 1 else ""
        texts = [f"an id gets a row{chance} at show {self.admit_count}" if self.admit_count > 1 or chance else ""]
        texts.append(f"rows leave when not shown for {self.evict_unseen:,} steps" if self.evict_unseen else "")
        texts.append(f"rows leave below a score of {self.evict_score:g}" if self.evict_score else "")
        texts.append(
            "a full table evicts the least scores" if self.evicts_when_full else "a full table refuses new ids"
        )
        return "; ".join(filter(None, texts))


def life_values(life: RowLife) -> dict[str, Any]:
    """The values of these options alone, by key."""
    return {field.name: getattr(life, field.name) for field in fields(RowLife)}


_DEFAULTS = life_values(RowLife())
