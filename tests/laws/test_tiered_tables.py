"""Laws, for tables of which a part lies on disk: the numbers of tables in memory, under every strategy, and one
checkpoint for both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.laws.test_sharded_tables import ANY, LIFE, WAYS
from tests.support.checkpoints import same_tensors
from tests.support.harness import difference, reference, spread

slow = pytest.mark.slow
RECIPE = ANY | {"values": 4000, "capacity": 5000}
MEMORY_GB = 42e-6
"""Of both tables in a process: of two hundred rows, and a step meets about half as many."""

DISKS = {name: way for name, way in WAYS.items() if name != "columns"}


def tiered(folder: Path, **options: Any) -> dict[str, Any]:
    """A case whose rows lie on disk, but for a few."""
    return {"sparse_options": {"disk": str(folder / "rows"), "memory_gb": MEMORY_GB, **options}, "recipe": RECIPE}


def living(folder: Path | None, **options: Any) -> dict[str, Any]:
    """A case whose rows leave, in memory, or on disk but for about as many as a step meets."""
    disk = {"disk": str(folder / "rows"), "memory_gb": 46e-6} if folder else {}
    return LIFE | {"sparse_options": LIFE["sparse_options"] | disk | options}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("rows", "two servers") else slow) for way in DISKS]
)
def test_every_strategy_gives_the_numbers_of_tables_in_memory(way: str, tmp_path: Path) -> None:
    strategy, processes, options = DISKS[way]
    found = spread(strategy, processes, options=options, steps=8, **tiered(tmp_path))
    assert difference(reference(steps=8, recipe=RECIPE), found) <= 1e-10


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in ("replicated", "two servers") else slow) for way in DISKS]
)
def test_rows_on_disk_live_and_leave_as_those_in_memory(way: str, tmp_path: Path) -> None:
    strategy, processes, options = DISKS[way]
    found = spread(strategy, processes, options=options, **living(tmp_path))
    assert difference(reference(**LIFE), found) <= 1e-10


@pytest.mark.parametrize(("precision", "values"), [("fp64", "param"), pytest.param("fp32", "bf16", marks=slow)])
def test_rows_that_leave_have_the_bits_of_those_in_memory(precision: str, values: str, tmp_path: Path) -> None:
    """With decay that acts on rows nobody touches, and what is known of each row."""
    case: dict[str, Any] = {"sparse": "sgd", "precision": precision, "save_every": 12}
    more = {"weight_decay": 0.1, "values": values}
    on_disk = spread("ddp", 1, folder=str(tmp_path / "a"), **living(tmp_path, **more), **case)
    in_memory = spread("ddp", 1, folder=str(tmp_path / "b"), **living(None, **more), **case)
    assert difference(in_memory, on_disk) == 0
    same_tensors(*(tmp_path / run / "step_000012" for run in "ab"))


@pytest.mark.parametrize("rule", ["sgd", pytest.param("rowwise_adagrad", marks=slow)])
@pytest.mark.parametrize(("precision", "values"), [("fp64", "param"), ("fp32", "bf16")])
def test_bits_are_those_of_a_table_in_memory(precision: str, values: str, rule: str, tmp_path: Path) -> None:
    more = {"weight_decay": 0.1, "values": values}
    case: dict[str, Any] = {"sparse": rule, "precision": precision, "steps": 8}
    case |= {"save_every": 8}
    on_disk = spread("ddp", 1, folder=str(tmp_path / "a"), **case, **tiered(tmp_path, **more))
    in_memory = spread("ddp", 1, folder=str(tmp_path / "b"), recipe=RECIPE, sparse_options=more, **case)
    assert difference(in_memory, on_disk) == 0
    same_tensors(*(tmp_path / run / "step_000008" for run in "ab"))


PAIRS = [
    ("rows", True, "two servers", True),
    ("two servers of rows", True, "columns", False),
    ("columns", False, "rows", True),
    ("replicated", True, "server", False),
    ("server", False, "one process", True),
    ("one process", True, "rows", True),
]


@pytest.mark.parametrize(
    ("first", "is_tiered", "second", "goes_on_tiered"),
    [pytest.param(*pair, marks=slow if i % 4 else ()) for i, pair in enumerate(PAIRS)],
)
def test_a_checkpoint_of_rows_that_leave_goes_on_on_disk_and_in_memory(
    first: str, is_tiered: bool, second: str, goes_on_tiered: bool, tmp_path: Path
) -> None:
    cases = [living(tmp_path if on_disk else None) for on_disk in (is_tiered, goes_on_tiered)]
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    a = spread(one, processes, options=options, folder=str(tmp_path), save_every=5, halt=True, **cases[0])
    b = spread(other, more, options=others, start=str(tmp_path / "step_000005"), **cases[1])
    whole = b | {key: a[key] | b[key] for key in ("train", "eval", "ids")}
    assert difference(reference(**LIFE), whole) <= 1e-10


@pytest.mark.parametrize(
    ("first", "is_tiered", "second", "goes_on_tiered"),
    [pytest.param(*pair, marks=slow if i % 3 else ()) for i, pair in enumerate(PAIRS)],
)
def test_a_checkpoint_goes_on_on_disk_and_in_memory(
    first: str, is_tiered: bool, second: str, goes_on_tiered: bool, tmp_path: Path
) -> None:
    """With weight decay that acts on rows nobody touches, some of which are on disk."""
    decay = {"weight_decay": 0.1}
    plain: dict[str, Any] = {"recipe": RECIPE, "sparse_options": decay}
    case: dict[str, Any] = {"sparse": "sgd", "steps": 9}
    cases = [tiered(tmp_path, **decay) if on_disk else plain for on_disk in (is_tiered, goes_on_tiered)]
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    a = spread(one, processes, options=options, folder=str(tmp_path), save_every=4, halt=True, **case, **cases[0])
    b = spread(other, more, options=others, start=str(tmp_path / "step_000004"), **case, **cases[1])
    whole = b | {key: a[key] | b[key] for key in ("train", "eval", "ids")}
    assert difference(reference(**case, **plain), whole) <= 1e-10


@pytest.mark.parametrize("on_disk", [(True, True, False), pytest.param((False, True, False), marks=slow)])
def test_weight_decay_that_ends_has_acted_on_all_rows(on_disk: tuple[bool, ...], tmp_path: Path) -> None:
    """Also on those that no step has touched since, and on rows that are made later."""
    case: dict[str, Any] = {"sparse": "sgd", "steps": 12, "save_every": 4}
    ends = {}
    for way, places in {"memory": (False,) * 3, "disk": on_disk}.items():
        start = None
        for until, tier, decay in zip((4, 8, 12), places, (0.5, 0.0, 0.0), strict=True):
            more = {"weight_decay": decay}
            chosen = tiered(tmp_path, **more) if tier else {"recipe": RECIPE, "sparse_options": more}
            run = {"halt": True} if until == 4 else {}
            ends[way] = spread("ddp", 1, start=start, folder=str(tmp_path / way), **run, **case, **chosen)
            start = str(tmp_path / way / f"step_{until:06}")
    assert difference(ends["memory"], ends["disk"]) <= 1e-10
