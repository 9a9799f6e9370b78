"""All ranks read the same rows, and read them again with the same numbers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dtf.core.errors import ConfigError
from dtf.core.types import WHOLE, Batch
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.map_style import map_style
from dtf.data.samplers import Sequential
from dtf.engine.first_rows import check_first_rows


class Rows:
    """Two splits, whose rows are made by a function of the split, the rank and how often they were read."""

    def __init__(self, make: Any, rank: int) -> None:
        self._make, self._rank, self._read = make, rank, 0
        self.train = self.eval = SimpleNamespace(shapes_vary=False)

    def first_rows(self, index: int, count: int) -> Batch:
        return self._batch("train", count)

    def first_eval_rows(self, count: int) -> Batch:
        return self._batch("eval", count)

    def _batch(self, split: str, count: int) -> Batch:
        self._read += 1
        inputs, targets = self._make(split, self._rank, self._read)
        return Batch(inputs, targets, torch.ones(count), np.arange(count))


class Found(Exception):
    """What one rank has found."""


class World:
    """Rank 0 of a world, which gets what other ranks have found; or another one, which is asked for it."""

    def __init__(self, others: list[Any] | None) -> None:
        self._others = others

    def gather(self, value: Any) -> list[Any] | None:
        if self._others is None:
            raise Found(value)
        return [value, *self._others]

    def broadcast(self, value: Any) -> Any:
        return value


def check(make: Any) -> None:
    found = []
    for rank in (1, 2):
        with pytest.raises(Found) as raised:
            check_first_rows(Rows(make, rank), "mine", World(None))  # type: ignore[arg-type]
        found.append(raised.value.args[0])
    check_first_rows(Rows(make, 0), "mine", World(found))  # type: ignore[arg-type]


def of(split: str, rank: int, read: int) -> tuple[Any, torch.Tensor]:
    pixels = torch.linspace(-1, 1, 12).reshape(2, 6)
    return {"pixels": pixels, "gaps": torch.tensor([[1.0, float("nan")]] * 2)}, torch.tensor([3, 1])


def test_the_same_rows() -> None:
    check(of)


def test_a_last_bit_of_another_processor_is_no_difference() -> None:
    def make(split: str, rank: int, read: int) -> Any:
        inputs, targets = of(split, rank, read)
        return inputs | {"pixels": inputs["pixels"] * (1 + rank * 1e-6)}, targets

    check(make)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("part", ["order", "numbers", "format", "shape", "names", "targets"])
def test_rows_of_another_rank(split: str, part: str) -> None:
    def make(which: str, rank: int, read: int) -> Any:
        inputs, targets = of(which, rank, read)
        if which != split or rank != 2:
            return inputs, targets
        pixels = inputs["pixels"]
        others = {
            "order": pixels.flip(0),
            "numbers": pixels + 0.1,
            "format": pixels.double(),
            "shape": pixels[:, :5],
        }
        if part == "names":
            return {"pixels": pixels}, targets
        return inputs | {"pixels": others.get(part, pixels)}, targets.flip(0) if part == "targets" else targets

    name = {"names": "inputs['gaps']", "targets": "targets"}.get(part, "inputs['pixels']")
    with pytest.raises(ConfigError) as refused:
        check(make)
    assert f"{name} of the first rows of open_data('{split}') differ between rank 0 and rank 2" in str(refused.value)


@pytest.mark.parametrize("split", ["train", "eval"])
def test_rows_that_are_drawn_anew(split: str) -> None:
    def make(which: str, rank: int, read: int) -> Any:
        inputs, targets = of(which, rank, read)
        return inputs["pixels"] + (read * 1e-6 if which == split and rank == 1 else 0), targets

    with pytest.raises(ConfigError, match=f"open_data.'{split}'. gives other numbers for the same ids"):
        check(make)


@pytest.mark.parametrize("draw", [torch.rand, lambda _: random.random(), np.random.rand])
def test_rows_that_draw_and_are_the_same_by_chance(draw: Any) -> None:
    """As images that are mirrored at random: both readings may have mirrored the same."""

    def make(which: str, rank: int, read: int) -> Any:
        if which == "train":
            draw(1)
        return of(which, rank, read)

    with pytest.raises(ConfigError, match="open_data.'train'. draws from the generators .*map_style.rows, seed=seed"):
        check(make)


def test_another_generator_of_numpy_is_seen_too() -> None:
    numpy: Any = np.random
    before = numpy.get_bit_generator()
    numpy.set_bit_generator(numpy.PCG64(3))
    try:
        check(of)
        with pytest.raises(ConfigError, match="draws from the generators"):
            check(lambda *key: (np.random.rand(), of(*key))[1])
    finally:
        numpy.set_bit_generator(before)


def test_rows_that_put_the_generators_back_are_taken() -> None:
    def make(which: str, rank: int, read: int) -> Any:
        torch.manual_seed(3)
        return torch.rand(2, 6), torch.tensor([3, 1])

    check(make)


class Buffer:
    """Rows that are all the same tensor, with other numbers each time."""

    def __init__(self) -> None:
        self.row = torch.zeros(3)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> Any:
        return self.row.fill_(number), number


def centred(items: list[Any]) -> Any:
    rows = torch.stack([row for row, _ in items])
    return rows - rows.mean(0), torch.tensor([number for _, number in items])


@pytest.mark.parametrize("kind", ["one buffer for all rows", "a batch's mean"])
def test_rows_that_depend_on_those_beside_them(kind: str) -> None:
    own = [(torch.full((3,), float(number)), number) for number in range(12)]
    data = map_style(Buffer()) if "buffer" in kind else map_style(own, collate_fn=centred, shapes_vary=False)
    loader = Loader(data, Epochs(Sequential(), 12, 6, 0), WHOLE, 2)
    splits = SimpleNamespace(
        train=data, eval=data, first_rows=lambda index, count: loader.rows(np.arange(count), 0),
        first_eval_rows=lambda count: loader.rows(np.arange(count), 0),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"gives other inputs for the same ids with other rows beside them"):
        check_first_rows(splits, "mine", World([]))  # type: ignore[arg-type]
    data.shapes_vary = True
    if "mean" in kind:
        check_first_rows(splits, "mine", World([]))  # type: ignore[arg-type]
    loader.close()
