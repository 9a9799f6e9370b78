"""Which rows make up which global batch: every sample once per epoch, whoever computes it."""

from __future__ import annotations

import re
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dtf.api.options import StepOptions
from dtf.api.recipe import Recipe
from dtf.api.registry import lookup, registered
from dtf.api.sampler import Sampler, Tail, row_traits
from dtf.config.compose import compose
from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Shard
from dtf.data.batches import Epochs, micro_batch_bounds, micro_batches_of
from dtf.data.samplers import Repeated, Weighted
from dtf.data.splits import Splits
from tests.support.toy import Rows, Toy

load_parts([])

NAMES = list(registered("sampler"))
ONCE = [name for name, cls in registered("sampler").items() if cls.once]
sizes = st.integers(1, 300)
batches = st.integers(1, 70)
seeds = st.integers(0, 2**63 - 1)
epochs = st.integers(0, 10_000)


def make(name: str, tail: Tail) -> Sampler:
    return registered("sampler")[name](tail=tail)


def visit(plan: Epochs, epoch: int) -> list[np.ndarray]:
    found = [plan.ids(epoch, index) for index in range(plan.batches)]
    assert [len(ids) for ids in found] == [plan.size(index) for index in range(plan.batches)]
    assert all(ids.dtype == np.int64 for ids in found)
    return found


@pytest.mark.parametrize("name", ONCE)
@given(rows=sizes, batch=batches, seed=seeds, epoch=epochs)
@example(rows=1, batch=1, seed=0, epoch=0)
@example(rows=3, batch=64, seed=0, epoch=0)
def test_partial_visits_every_row_once(name: str, rows: int, batch: int, seed: int, epoch: int) -> None:
    found = visit(Epochs(make(name, Tail.partial), rows, batch, seed), epoch)
    assert sorted(np.concatenate(found)) == list(range(rows))
    assert all(len(ids) == batch for ids in found[:-1]) and 1 <= len(found[-1]) <= batch


@pytest.mark.parametrize("name", ONCE)
@given(rows=sizes, batch=batches, seed=seeds, epoch=epochs)
@example(rows=3, batch=64, seed=0, epoch=0)
@example(rows=10, batch=9, seed=0, epoch=0)
def test_fill_completes_the_last_batch_with_other_rows(name: str, rows: int, batch: int, seed: int, epoch: int) -> None:
    found = visit(Epochs(make(name, Tail.fill), rows, batch, seed), epoch)
    assert all(len(ids) == batch for ids in found)
    visited = np.concatenate(found)
    assert sorted(visited[:rows]) == list(range(rows)), "every row once before any row twice"
    if batch <= rows:
        assert len(set(found[-1])) == batch, "no row twice within a batch while there are others"
    assert max(np.bincount(visited, minlength=rows)) <= -(-len(visited) // rows) + (batch <= rows), (
        "repeats are spread evenly"
    )


@given(rows=st.integers(40, 300), batch=st.integers(2, 40), seed=seeds)
def test_fill_repeats_other_rows_in_other_epochs(rows: int, batch: int, seed: int) -> None:
    missing = -rows % batch
    plan = Epochs(make("shuffle", Tail.fill), rows, batch, seed)
    extra = [set(plan.ids(epoch, plan.batches - 1)[batch - missing :]) for epoch in range(12)]
    assert missing == 0 or len(set.union(*extra)) > missing


@pytest.mark.parametrize("name", ONCE)
@given(rows=sizes, batch=batches, seed=seeds, epoch=epochs)
def test_drop_leaves_out_the_incomplete_batch_only(name: str, rows: int, batch: int, seed: int, epoch: int) -> None:
    found = visit(Epochs(make(name, Tail.drop), rows, batch, seed), epoch)
    assert len(found) == rows // batch
    visited = [row for ids in found for row in ids]
    assert len(visited) == len(set(visited)) == rows // batch * batch and all(0 <= row < rows for row in visited)


@pytest.mark.parametrize("tail", Tail)
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(rows=sizes, batch=batches, seed=seeds, data=st.data())
def test_batches_are_a_pure_function_of_seed_epoch_and_index(
    name: str, tail: Tail, rows: int, batch: int, seed: int, data: st.DataObject
) -> None:
    """Asked in any order and by a restarted run, a batch is the same."""
    groups = np.arange(rows) % 3
    plan = Epochs(make(name, tail), rows, batch, seed, groups)
    expected = {(epoch, index): ids.copy() for epoch in range(3) for index, ids in enumerate(visit(plan, epoch))}
    again = Epochs(make(name, tail), rows, batch, seed, groups)
    for epoch, index in data.draw(st.permutations(sorted(expected))):
        assert np.array_equal(again.ids(epoch, index), expected[epoch, index])


@given(rows=sizes, times=st.integers(2, 7), seed=seeds)
def test_repeated_shows_each_chosen_row_in_so_many_views_one_after_the_other(rows: int, times: int, seed: int) -> None:
    order = Repeated(times=times).order(rows, seed, 0, None)
    assert len(order) == rows == len(set(order))
    views = [list(order[i : i + times]) for i in range(0, rows, times)]
    assert all(
        [*np.array(view) % rows] == [view[0]] * len(view) and [*np.array(view) // rows] == list(range(len(view)))
        for view in views
    )


@pytest.mark.parametrize(("balance", "share"), [(0.0, 0.1), (0.5, 0.25), (1.0, 0.5)])
def test_weighted_balances_classes(balance: float, share: float) -> None:
    """100 rows of one class and 900 of another: n ** (1 - balance) of each."""
    groups = np.repeat([0, 1], [100, 900])
    drawn = np.concatenate([Weighted(balance=balance).order(1000, 0, epoch, groups) for epoch in range(40)])
    assert abs((groups[drawn] == 0).mean() - share) < 0.012
    assert drawn.min() >= 0 and drawn.max() < 1000


def test_weighted_follows_a_file(tmp_path: Path) -> None:
    file = tmp_path / "weights.txt"
    file.write_text("0\n1\n0\n3\n")
    drawn = np.concatenate([Weighted(weights=str(file)).order(4, 0, epoch, None) for epoch in range(500)])
    assert set(drawn) == {1, 3} and abs((drawn == 3).mean() - 0.75) < 0.04


@pytest.mark.parametrize("text", ["1\n2\n", "1\n-1\n1\n", "0\n0\n0\n", "nan\n1\n1\n", "one\n"])
def test_weights_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "weights.txt"
    file.write_text(text)
    with pytest.raises(DataError, match="sampler.weights="):
        Weighted(weights=str(file)).order(3, 0, 0, None)


class InRuns(Rows):
    """Rows that are read in runs, without classes, with one view of each."""

    def runs(self) -> np.ndarray:
        return np.arange(0, len(self) + 1, 4)


@pytest.mark.parametrize("name", registered("sampler"))
def test_rows_that_a_recipe_does_not_describe_are_judged_when_they_are_open(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Toy, "open_data", lambda toy, split, seed: InRuns(8, split, -1))
    sampler = make(name, Tail.partial)
    splits = Splits(Toy(), sampler, 4, 0, pin=False)
    with pytest.raises(ConfigError, match=f"sampler={name} .* recipe=toy ") if sampler.needs else nullcontext():
        splits.cut()


@given(seed=seeds, epoch=epochs)
def test_order_differs_between_epochs_and_seeds(seed: int, epoch: int) -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(make("shuffle", Tail.partial).order(100, seed, epoch, None))

    assert order(seed, epoch) == order(seed, epoch)
    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


def test_shuffle_favours_no_place() -> None:
    """Over many epochs each row's mean place is the middle: 5 standard deviations of a mean of 2000 uniform places."""
    places = np.zeros(20)
    for epoch in range(2000):
        places += np.argsort(make("shuffle", Tail.partial).order(20, 7, epoch, None))
    spread = np.sqrt((20**2 - 1) / 12 / 2000)
    assert np.abs(places / 2000 - 9.5).max() < 5 * spread


def test_order_is_the_same_on_every_machine() -> None:
    """A changed order would break every checkpoint's data position: it is part of the format."""
    assert list(make("shuffle", Tail.partial).order(8, 0, 0, None)) == [5, 2, 3, 7, 1, 4, 6, 0]


@given(rows=st.integers(1, 2000), size=st.integers(1, 300))
@example(rows=1, size=4)
@example(rows=2, size=1)
@example(rows=9, size=8)
@example(rows=9, size=2)
def test_micro_batches_partition_the_global_batch(rows: int, size: int) -> None:
    bounds = micro_batch_bounds(rows, size)
    assert bounds[0] == 0 and bounds[-1] == rows
    lengths = np.diff(bounds)
    assert all(lengths[:-1] == size) and 1 <= lengths[-1] <= size + (size > 1)
    assert size == 1 or rows == 1 or min(lengths) > 1, "a single row has no batch statistics"


@given(batch=st.integers(1, 2000), count=st.integers(1, 17), data=st.data())
def test_without_fixed_rows_a_shard_has_at_most_one_micro_batch(batch: int, count: int, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, batch), "rows of a last batch")
    bounds = micro_batch_bounds(rows, StepOptions(batch_size=batch).rows_each(count))
    assert len(bounds) - 1 <= count
    assert all(
        last - first <= 1
        for first, last in (micro_batches_of(len(bounds) - 1, Shard(index, count)) for index in range(count))
    )


@given(micro_batches=st.integers(0, 500), count=st.integers(1, 33))
def test_shares_partition_the_micro_batches_evenly(micro_batches: int, count: int) -> None:
    parts = [micro_batches_of(micro_batches, Shard(index, count)) for index in range(count)]
    assert parts[0][0] == 0 and parts[-1][1] == micro_batches
    assert all(one[1] == other[0] for one, other in pairwise(parts))
    lengths = [last - first for first, last in parts]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("name", ["resnet_shapes", "ctr_generated"])
def test_recipes_say_what_their_rows_have(name: str) -> None:
    """As the data themselves do."""
    recipe = lookup("recipe", name)()
    assert isinstance(recipe, Recipe) and recipe.row_traits is not None
    data = recipe.open_data("train", 0)
    assert set(recipe.row_traits) == row_traits(data.repeats, data.groups(), data.runs())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "recipe=ctr_clicks sampler=weighted",
            "sampler=weighted balances classes, and the rows of recipe=ctr_generated (by GeneratedClicks.row_traits) "
            "have none;",
        ),
        ("recipe=ctr_clicks sampler=repeated", "sampler=repeated shows rows several times, and the data of"),
        (
            "recipe=frappe sampler=weighted sampler.weights=w recipe.data.mode=queue",
            "sampler=weighted chooses single rows, and the data of recipe=ctr_log (by ClickLog.row_traits) are read in "
            "runs of rows; use sampler=shuffle",
        ),
        ("recipe=ctr_clicks sampler=weighted sampler.weights=w", ""),
        ("recipe=ctr_clicks sampler=weighted job=describe", ""),
        ("recipe=resnet_shapes sampler=weighted", ""),
        ("recipe=resnet_shapes sampler=repeated", ""),
    ],
)
def test_a_sampler_that_the_rows_do_not_fit_is_refused_before_ranks_start(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        compose(line.split()).check(data=False)
