"""Law: rows of many lengths, padded by a collate function, give the numbers of one process under every strategy."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support.harness import difference, reference, spread, variants

CASE: dict[str, Any] = {"steps": 4, "recipe": {"name": "varying"}}


QUICK = {"dp": 2, "ddp": 3, "zero1": 2, "fsdp": 2, "tensor": 2, "pipeline": 2, "pserver": 2}
WAYS = [
    pytest.param(name, options, count, marks=[] if not options and QUICK.get(name) == count else [pytest.mark.slow])
    for (name, options), count in product(variants(), [1, 2, 3, 4])
]


@pytest.mark.parametrize(("strategy", "options", "processes"), WAYS)
def test_rows_of_many_lengths_give_the_numbers_of_one_process(strategy: str, options: dict, processes: int) -> None:
    """42 rows, batch 19 and micro-batches of 5, each padded to its longest row; a nest of every kind."""
    assert difference(reference(**CASE), spread(strategy, processes, options=options, **CASE)) <= 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_replicas_compare_a_micro_batch_of_many_lengths(strategy: str) -> None:
    """`train.guard_every` gives the rows of one rank to all."""
    options = {"degree": 2} if strategy == "pipeline" else {}
    guarded = spread(strategy, 4 if options else 2, options=options, guard_every=1, **CASE)
    assert difference(reference(**CASE), guarded) <= 1e-10


def test_the_padding_of_a_micro_batch_shows() -> None:
    """The law needs each micro-batch padded by itself: with others, the numbers differ."""
    assert difference(reference(**CASE, micro_batch_rows=5), reference(**CASE, micro_batch_rows=12)) > 1e-3
