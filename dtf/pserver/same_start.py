"""Whether trainers have the same model before they train: what a constructor keeps outside of parameters and buffers is
in no message, and each trainer would compute with its own.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

from dtf.model.attributes import digests
from dtf.model.fingerprint import fingerprints
from dtf.model.memory import row_flops
from dtf.strategies.replica import Replica
from dtf.strategies.start_check import Numbers, numbers_differ

NAMED = 4
"""Attributes that a refusal names."""


class TrainerStart(NamedTuple):
    """What a trainer's model is before it takes anything from servers.

    `numbers`: of a trial pass over rows that are the same for all trainers. `tensors`: a digest of all parameters and
    buffers. `attributes`: digests of plain attributes, by name. `row_flops`: see `Program.row_flops`.
    """

    numbers: Numbers
    tensors: int
    attributes: dict[str, int]
    row_flops: float | None

    @classmethod
    def of(cls, replica: Replica, recipe: object) -> TrainerStart:
        """That of a replica, after its `warmup`."""
        tensors = [*replica.model.parameters(), *replica.model.buffers()]
        texts = digests(replica.model, recipe)
        return cls(
            replica.start_numbers,
            zlib.crc32(repr(fingerprints(tensors)).encode()),
            {name: zlib.crc32(text.encode()) for name, text in texts.items()},
            row_flops(replica.trials),
        )

    @classmethod
    def from_json(cls, value: Any) -> TrainerStart:
        """The inverse of `list(start)`. ValueError for anything else."""
        match value:
            case [dict() as numbers, int() as tensors, dict() as attributes, (int() | float() | None) as flops] if all(
                isinstance(number, int | float) for number in [*numbers.values(), *attributes.values()]
            ):
                return cls({name: float(number) for name, number in numbers.items()}, tensors, attributes, flops)
        raise ValueError("no start of a trainer")


def start_difference(first: TrainerStart, other: TrainerStart, bound: float) -> str:
    """In what two trainers differ that servers cannot make alike; empty: in nothing that shows. `bound`: of relative
    differences by rounding.

    Parameters and buffers may differ, as machines may draw differently: all take those of the servers. Then passes
    cannot show whether an attribute that differs, which may be a clock, changes the numbers.
    """
    names = [name for name in {**first.attributes, **other.attributes} if _differ(first, other, name)]
    kept = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if names[NAMED:] else "")
    if first.tensors != other.tensors:
        return f"drew other initial numbers, and has other attributes: {kept}" if names else ""
    if numbers_differ(first.numbers, other.numbers, bound):
        return "gets other numbers from the same rows" + (f", and has other attributes: {kept}" if names else "")
    return ""


def _differ(first: TrainerStart, other: TrainerStart, name: str) -> bool:
    return first.attributes.get(name) != other.attributes.get(name)
