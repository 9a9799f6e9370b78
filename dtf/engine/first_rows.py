"""Whether all ranks read the same rows, and read them again, and among others, with the same numbers: what depends on a
seed that nobody set, on a process, on a clock or on the rows of a batch shows before the first step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.data.row_draws import Positions
from dtf.data.splits import Splits
from dtf.distributed.world import World

ROWS = 2
CLOSE = 1e-3
"""Relative difference of numbers of a row between ranks: hosts may decode images with other instructions."""


_DRAW = (
    "so no two runs would train on the same rows; draw with dtf.draws(seed, epoch, ids, count), or give the seed to "
    "dtf.map_style(rows, seed=seed)"
)
_ALONE = (
    "so what a rank reads would depend on the number of ranks; return a tensor of its own for each row, and leave what "
    "needs a whole batch to the model; or set shapes_vary=True: each micro-batch is then fetched by itself"
)


def check_first_rows(splits: Splits, recipe: str, world: World) -> None:
    """Read a few rows of both splits, twice, and among more where these may not change them. ConfigError on all ranks
    where the numbers differ, or are drawn under no seed. Collective.
    """
    found: dict[str, Any] = {}
    for split, data, read in (
        ("train", splits.train, lambda rows: splits.first_rows(0, rows)),
        ("eval", splits.eval, splits.first_eval_rows),
    ):
        tensors = _tensors(read(ROWS))
        positions = Positions.now()
        again = _tensors(read(ROWS))
        found[split] = {name: _numbers(tensor) for name, tensor in tensors.items()}
        if not all(name in again and _same(tensor, again[name]) for name, tensor in tensors.items()):
            found[split] = f"gives other numbers for the same ids when it is called again, {_DRAW}"
        elif positions.moved():  # rows that draw may be the same by chance
            found[split] = f"draws from the generators of torch, Python or NumPy, {_DRAW}"
        elif not data.shapes_vary:
            more = _tensors(read(2 * ROWS))
            changed = [name for name, tensor in tensors.items() if not _same(tensor, more[name][: len(tensor)])]
            if changed:
                found[split] = f"gives other {changed[0]} for the same ids with other rows beside them, {_ALONE}"
    everyone, refusal = world.gather(found), ""
    if everyone is not None:
        refusal = next((text for split in found if (text := _refusal(recipe, split, everyone))), "")
    refusal = world.broadcast(refusal)
    if refusal:
        raise ConfigError(refusal)


def _refusal(recipe: str, split: str, everyone: list[Any]) -> str:
    first, *others = (found[split] for found in everyone)
    if changing := next((each for each in (first, *others) if isinstance(each, str)), ""):
        return f"recipe={recipe}: fetch() of the data of open_data({split!r}) {changing}"
    for rank, other in enumerate(others, 1):
        for name in sorted(first.keys() | other.keys()):
            if not _close(first.get(name), other.get(name)):
                return (
                    f"recipe={recipe}: {name} of the first rows of open_data({split!r}) differ between rank 0 and rank "
                    f"{rank}; the rows must depend on nothing but the seed that open_data gets, the ids and the epoch"
                )
    return ""


def _tensors(rows: Batch) -> dict[str, Tensor]:
    return nest.named(rows.inputs, "inputs") | nest.named(rows.targets, "targets")


def _same(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return bool(torch.equal(one, two)) or bool(torch.equal(one.nan_to_num(), two.nan_to_num()))


def _numbers(tensor: Tensor) -> list[Any]:
    """The shape and the format; the sum of absolute numbers, and that of numbers by their places."""
    values = tensor.detach().double().nan_to_num().flatten()
    places = torch.linspace(1, 2, len(values), dtype=torch.float64)
    return [list(tensor.shape), str(tensor.dtype), float(values.abs().sum()), float((values * places).sum())]


def _close(one: list[Any] | None, two: list[Any] | None) -> bool:
    if one is None or two is None or one[:2] != two[:2]:
        return False
    size = max(one[2], two[2])
    return all(a == b or abs(a - b) <= CLOSE * size for a, b in zip(one[2:], two[2:], strict=True))
