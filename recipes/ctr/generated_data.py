"""Generated clicks: the config node `recipe.data` of the recipe that needs no files.

Imports without torch, numpy and numba.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.api.registry import option
from dtf.core.errors import ConfigError
from dtf.recipes.ctr.data import MOST_ROWS, DataOptions

if TYPE_CHECKING:
    from dtf.recipes.ctr.clicks import Generated


@dataclass(kw_only=True)
class ClicksOptions(DataOptions):
    """Rows that are generated; see `dtf.recipes.ctr.clicks.World`."""

    train_rows: int = option(default=1_000_000, least=1, most=MOST_ROWS, doc="training rows to generate", unit="rows")
    eval_rows: int = option(default=100_000, least=1, most=MOST_ROWS, doc="evaluation rows to generate", unit="rows")
    categories: int = option(default=26, least=1, most=1000, doc="categories of a row; there are 13 integers besides")
    values: int = option(
        default=5000, least=1, most=1 << 40, doc="values of all categories together, which are the ids 0 to values - 1"
    )
    bag_values: int = option(
        default=0,
        least=0,
        most=1 << 20,
        doc="one more category of none to this many values of the last one, which say nothing of the click; 0: there "
        "is none",
    )
    skew: float = option(
        default=1.1,
        least=0,
        most=4,
        doc="the k-th most frequent value of a category occurs k^-skew times as often as the first",
    )
    seed: int = option(default=0, least=0, doc="of the generated rows; the run's own seed does not change them")

    @property
    def fields(self) -> int:
        return self.categories

    @property
    def bag_fields(self) -> int:
        return int(self.bag_values > 0)

    def rows_of_fields(self) -> list[int]:
        offsets = self.open("eval", 0).offsets
        sizes = (offsets[1:] - offsets[:-1]).tolist()
        return sizes + sizes[-1:] * self.bag_fields

    def preprocessing(self) -> dict[str, Any]:
        from dtf.recipes.ctr.preprocessing import generated

        return generated(self.open("eval", 0).offsets.tolist(), self.integers_count, bool(self.bag_values))

    @property
    def integers_count(self) -> int:
        return 13

    @property
    def table_rows(self) -> int:
        return self.values

    def check(self) -> None:
        if self.values < 2 * self.categories:
            raise ConfigError(
                f"recipe.data.values={self.values} must be at least {2 * self.categories}, two for each of "
                f"recipe.data.categories={self.categories}"
            )
        if importlib.util.find_spec("numba") is None:
            raise ConfigError("recipe.data generates clicks with numba, which is not installed; pip install 'dtf[ctr]'")

    def open(self, split: str, seed: int) -> Generated:
        import torch

        from dtf.recipes.ctr.clicks import Generated, World

        world = World.make(self.seed, self.categories, self.values, self.skew)
        rows = self.train_rows if split == "train" else self.eval_rows
        return Generated(world, rows, self.seed, split, torch.get_num_threads(), self.bag_values)

    def best_possible(self) -> dict[str, float]:
        """The best AUC and log loss to be expected over the evaluation rows."""
        return self.open("eval", 0).best_possible()
