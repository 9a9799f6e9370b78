"""Sparse tables: whatever is asked of one in whatever order, it answers as a dict of rows would."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.api.row_optimizer import RowOptimizer
from dtf.api.sparse_table import Table
from dtf.core.errors import ConfigError, DataError
from dtf.core.seeding import mix, seed_of
from dtf.sparse.id_arrays import gather, segment_sum, unique
from dtf.sparse.row_optimizers import RowAdagrad, RowSgd
from dtf.sparse.store import SparseTable

LEAST, LARGEST = -(2**63), 2**63 - 1
WIDTH = 3


def table(
    size: int = 0,
    rule: RowOptimizer | None = None,
    capacity: int = 1000,
    dtype: type = np.float64,
    width: int = WIDTH,
    seed: int = 1,
) -> SparseTable:
    return SparseTable(Table(width, size, capacity, 0.1), rule or RowSgd(), seed, "t", dtype)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def drawn(key: int, ids: np.ndarray, width: int, scale: float) -> np.ndarray:
    """What `draw` says it computes, with numpy's logarithm, sine and cosine."""
    golden, pairs = np.uint64(0x9E3779B97F4A7C15), np.arange((width + 1) // 2, dtype=np.uint64)
    with np.errstate(over="ignore"):
        start = mix(ids.astype(np.uint64) * golden + np.uint64(key))[:, None]
        first, second = (
            mix(start + (np.uint64(2) * pairs + np.uint64(more)) * golden) >> np.uint64(11) for more in (1, 2)
        )
    radius = scale * np.sqrt(-2.0 * np.log((first + np.uint64(1)) * 2.0**-53))
    turns = second * 2.0**-53 - 0.125
    return np.stack([radius * np.cos(2 * np.pi * turns), radius * np.sin(2 * np.pi * turns)], -1).reshape(len(ids), -1)[
        :, :width
    ]


# ---------------------------------------------------------------- rows as they are drawn


@pytest.mark.parametrize("width", [1, 2, 7, 17])
def test_rows_are_drawn_as_documented(width: int) -> None:
    ids = np.concatenate([np.arange(5000), ints(LARGEST, 2**40)])
    rows = table(width=width).lookup(ids, create=False)
    assert np.abs(rows - drawn(seed_of(1, "table", "t"), ids, width, 0.1)).max() < 1e-14


def test_drawn_rows_are_normal() -> None:
    values = table(width=16, seed=5).lookup(np.arange(20_000), create=False).reshape(-1) / 0.1
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1 and abs((np.abs(values) < 1).mean() - 0.6827) < 0.003
    assert abs(np.corrcoef(values[::2], values[1::2])[0, 1]) < 0.01


def test_a_row_depends_on_seed_table_and_id_alone() -> None:
    ids = np.arange(50)
    rows = table().lookup(ids, create=True)
    backwards = table(size=60).lookup(ids[::-1].copy(), create=False)[::-1]
    assert (rows == backwards).all()
    assert (table(dtype=np.float32).lookup(ids, create=True) == rows.astype(np.float32)).all()
    for other in (table(seed=2), SparseTable(Table(WIDTH, 0, 100, 0.1), RowSgd(), 1, "u", np.float64)):
        assert (other.lookup(ids, create=True) != rows).all()


# ---------------------------------------------------------------- any sequence of lookups and updates

RANGE = st.integers(-1, 40)
HUGE = st.one_of(st.integers(-3, 12), st.integers(LEAST, LARGEST), st.sampled_from([LEAST, LARGEST]))


def calls(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[tuple[str, list[int]]]]:
    return st.lists(
        st.tuples(st.sampled_from(["train", "eval", "update", "reload"]), st.lists(ids, unique=True, max_size=30)),
        max_size=12,
    )


def run_both(size: int, sequence: list[tuple[str, list[int]]]) -> None:
    """The calls on a table and on a dict of rows, with Adagrad."""
    rule = RowAdagrad(initial_accumulator=0.25, lr_factor=2.0)
    held, reference = table(size, rule), {}
    key = seed_of(1, "table", "t")
    for number, (call, some) in enumerate(sequence):
        ids = np.array(some, np.int64)
        if call == "reload":
            kept, held = held.export(), table(size, rule)
            held.put(*kept)
            continue
        known = {
            id: reference.get(id, (drawn(key, ints(id), WIDTH, 0.1)[0], np.full(WIDTH, 0.25)))
            for id in some
            if id != -1
        }
        if call != "eval":
            reference |= known
        if call == "update":
            gradients = np.random.default_rng(number).normal(size=(len(ids), WIDTH))
            held.update(ids, gradients, 0.1, 0.5, number)
            for id, gradient in zip(some, gradients * 0.5, strict=True):
                if id != -1:
                    row, total = reference[id]
                    total = total + gradient**2
                    reference[id] = (row - 0.2 * gradient / (np.sqrt(total) + rule.eps), total)
        else:
            rows = held.lookup(ids, create=call == "train")
            wanted = np.array([known[id][0] if id != -1 else np.zeros(WIDTH) for id in some]).reshape(len(some), WIDTH)
            np.testing.assert_allclose(rows, wanted, rtol=1e-12, atol=1e-14)
        assert len(held) == len(reference)
    ids, rows, states = held.export()
    assert ids.tolist() == sorted(reference)
    for id, row, total in zip(ids.tolist(), rows, states["sum"], strict=True):
        np.testing.assert_allclose(row, reference[id][0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(total, reference[id][1], rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(calls(RANGE))
def test_a_table_of_a_range_is_a_dict_of_rows(sequence: list[tuple[str, list[int]]]) -> None:
    run_both(41, sequence)


@settings(max_examples=60, deadline=None)
@given(calls(HUGE))
def test_a_table_of_any_ids_is_a_dict_of_rows(sequence: list[tuple[str, list[int]]]) -> None:
    run_both(0, sequence)


def test_it_grows() -> None:
    grown = table(capacity=50_000)
    ids = np.random.default_rng(0).integers(0, LARGEST, 40_000)
    before = grown.byte_count()
    for part in np.array_split(ids, 7):
        grown.lookup(part, create=True)
    assert len(grown) == len(np.unique(ids)) and grown.byte_count() > before
    assert (grown.lookup(ids, create=False) == table().lookup(ids, create=False)).all()
    assert (grown.export().ids == np.unique(ids)).all()


@pytest.mark.parametrize("size", [0, 1000])
def test_a_step_touches_nothing_outside_its_batch(size: int) -> None:
    held = table(size, RowAdagrad(), dtype=np.float32)
    held.lookup(np.arange(500), create=True)
    before = held.export()
    held.update(ints(3, -1, 77), np.ones((3, WIDTH)), 0.1, 1.0, 0)
    after = held.export()
    others = ~np.isin(before.ids, [3, 77])
    for old, new in ((before.rows, after.rows), (before.states["sum"], after.states["sum"])):
        assert old[others].tobytes() == new[others].tobytes()
        assert (old[~others] != new[~others]).all()


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize("size", [0, 100])
def test_a_full_table_says_so_and_stays_as_it_was(size: int) -> None:
    full = table(size, capacity=5)
    full.lookup(np.arange(4), create=True)
    before = full.export()
    for attempt in (
        lambda: full.lookup(ints(9, 10), create=True),
        lambda: full.update(ints(9, 10), np.ones((2, WIDTH)), 0.1, 1.0, 0),
    ):
        with pytest.raises(
            ConfigError,
            match="table t is full: capacity=5 rows, 6 are wanted; go on in this run.dir with sparse.when_full=evict "
            "or refuse, or in a new one with checkpoint.resume=OLD and a larger capacity",
        ):
            attempt()
    full.lookup(ints(9, 10), create=False)
    after = full.export()
    assert (after.ids == before.ids).all() and (after.rows == before.rows).all()
    full.lookup(ints(9), create=True)
    assert len(full) == 5


@pytest.mark.parametrize("id", [10, -2, LEAST, LARGEST])
def test_ids_that_cannot_be(id: int) -> None:
    with pytest.raises(DataError, match=f"table t: id {id} must be 0 to 9"):
        table(10).lookup(ints(1, id), create=True)


def test_no_room_is_told() -> None:
    with pytest.raises(
        ConfigError, match=f"capacity={2**60} rows of {WIDTH} numbers with their state: .*; set a smaller cap"
    ):
        table(capacity=2**60)
    with pytest.raises(ConfigError, match=r"rows, one for each id, of .*; set a smaller recipe.rows"):
        SparseTable(Table(1, 2**60, 2**60, 0, capacity_key="recipe.rows"), RowSgd(), 1, "t")


@pytest.mark.parametrize("size", [1000 * 2**11, 10**15])
def test_a_range_costs_what_its_rows_cost(size: int) -> None:
    """Either index has the same rows; that of the larger range has no slot for each id."""
    held, ids = table(size, capacity=1000), ints(0, size - 1, size // 2)
    rows = held.lookup(ids, create=True)
    assert (rows == table().lookup(ids, create=False)).all() and held.export().ids.tolist() == sorted(ids.tolist())
    assert held.byte_count() < 2**20


def test_capacity_costs_nothing_until_it_is_used() -> None:
    wide = table(capacity=2**28, dtype=np.float32)
    wide.lookup(ints(1, 2), create=True)
    assert wide.byte_count() < 2**20


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    with pytest.raises(ValueError, match="gradients"):
        table().update(ints(1, 2), np.ones((1, WIDTH)), 0.1, 1.0, 0)
    with pytest.raises(ValueError, match="gradients"):
        segment_sum(np.ones((1, WIDTH)), np.zeros(2, np.int32), 1)
    with pytest.raises(ValueError, match="do not fit"):
        gather(np.ones((2, WIDTH)), np.zeros(3, np.int32), np.empty((2, WIDTH)))


@pytest.mark.parametrize(
    ("ids", "rows", "states"),
    [
        ((1, 1), (2, WIDTH), {"sum": (2, WIDTH)}),
        ((1, -1), (2, WIDTH), {"sum": (2, WIDTH)}),
        ((1, 2), (2, 1), {"sum": (2, WIDTH)}),
        ((1, 2), (2, WIDTH), {}),
        ((1, 2), (2, WIDTH), {"sum": (2, 1)}),
        ((1, 2), (2, WIDTH), {"sum": (1, WIDTH)}),
        ((1, 2), (2, WIDTH), {"sum": ()}),
        ((1, 2), (2, WIDTH), {"sum": (2, WIDTH), "decayed": (2, 2)}),
        ((1, 2), (2, WIDTH), {"z": (2, WIDTH), "n": (2, WIDTH)}),
    ],
)
def test_what_no_export_gave_is_refused(
    ids: tuple[int, ...], rows: tuple[int, ...], states: dict[str, tuple[int, ...]]
) -> None:
    held = table(rule=RowAdagrad())
    with pytest.raises(DataError, match="table t"):
        held.put(ints(*ids), np.ones(rows), {name: np.ones(shape) for name, shape in states.items()})
    assert not len(held)


@pytest.mark.parametrize("kind", [np.int32, np.uint64, np.float64, bool])
def test_ids_and_rows_of_another_kind_are_refused(kind: type) -> None:
    held = table()
    with pytest.raises(DataError, match="not 64-bit integers"):
        held.put(ints(0, 1).astype(kind), np.ones((2, WIDTH)), {})
    with pytest.raises(DataError, match="not 64-bit integers"):
        held.put(ints(0, 1)[None], np.ones((2, WIDTH)), {})
    if kind is not np.float64:
        with pytest.raises(DataError, match="real numbers"):
            held.put(ints(0, 1), np.ones((2, WIDTH), kind), {})
    assert not len(held)


@pytest.mark.parametrize("size", [0, 10])
def test_an_id_that_comes_again_in_a_later_piece_is_refused(size: int) -> None:
    held = table(size)
    held.put(ints(1, 2), np.ones((2, WIDTH)), {})
    with pytest.raises(DataError, match="table t: an id is there twice"):
        held.put(ints(3, 2), np.zeros((2, WIDTH)), {})
    assert len(held) == 2 and (held.export().rows == 1).all()


def test_a_cleared_table_is_a_new_one() -> None:
    held = table(rule=RowSgd(weight_decay=0.1))
    held.update(ints(1, 2), np.ones((2, WIDTH)), 0.1, 1.0, 0)
    held.clear()
    assert not len(held) and (held.lookup(ints(1, 2), create=True) == table().lookup(ints(1, 2), create=True)).all()


def test_numba_is_asked_for_by_name() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from dtf.core.errors import ConfigError\nfrom dtf.sparse.store import unique\nimport numpy\n"
        "try: unique(numpy.arange(3))\nexcept ConfigError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'dtf[ctr]'" in done.stdout, done.stderr


# ---------------------------------------------------------------- unique, gather, segment_sum


@settings(max_examples=100, deadline=None)
@given(st.lists(HUGE, max_size=200))
def test_unique_in_order_of_appearance(values: list[int]) -> None:
    ids = np.array(values, np.int64)
    found, inverse = unique(ids)
    assert found.tolist() == list(dict.fromkeys(values)) and inverse.dtype == np.int32
    assert (found[inverse] == ids).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_out_and_gradients_back(dtype: type) -> None:
    random = np.random.default_rng(0)
    ids = random.zipf(1.3, 3000) % 500
    values = random.normal(size=(len(ids), 5)).astype(dtype)
    found, inverse = unique(ids)
    rows = values[: len(found)]
    assert (gather(rows, inverse, np.empty_like(values)) == rows[inverse]).all()
    wanted = np.zeros((len(found), 5), dtype)
    np.add.at(wanted, inverse, values)
    assert segment_sum(values, inverse, len(found)).tobytes() == wanted.tobytes()


def test_a_table_holds_only_what_was_trained() -> None:
    held = table()
    held.lookup(np.arange(10), create=False)
    held.lookup(ints(), create=True)
    held.update(ints(-1), np.ones((1, WIDTH)), 0.1, 1.0, 0)
    assert (held.lookup(ints(-1), create=True) == 0).all()
    assert not len(held) and not len(held.export().ids)
