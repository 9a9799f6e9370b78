"""Seeds and draws by name: the same numbers wherever they are asked for, and numbers that look random."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dtf.core.seeding import draws, seed_of

IDS = np.arange(4000)


def uniform_chi2(values: np.ndarray, bins: int = 64) -> float:
    """How far the histogram is from flat, in standard deviations of the chi-squared statistic."""
    counts = np.histogram(values, bins=bins, range=(0.0, 1.0))[0]
    expected = values.size / bins
    return float((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / np.sqrt(2 * (bins - 1)))


@given(parts=st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=5))
def test_a_seed_is_a_function_of_its_parts(parts: list[int | str]) -> None:
    assert seed_of(*parts) == seed_of(*parts)
    assert 0 <= seed_of(*parts) < 2**63
    assert seed_of(*parts) != seed_of(*parts, 0)


def test_seeds_do_not_run_together() -> None:
    assert seed_of("ab", "c") != seed_of("a", "bc") != seed_of("abc")
    assert len({seed_of(0, "initialise", f"layer{index}") for index in range(10_000)}) == 10_000


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(0, "shuffle", 3) == 4148880691514717893


def test_draws_are_the_same_on_every_machine() -> None:
    assert draws(0, 0, np.array([0, 7]), 2).tolist() == [
        [0.1460730252123189, 0.4380570128750265],
        [0.3321670425571658, 0.5233637594785671],
    ]


@given(
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 1000),
    ids=st.lists(st.integers(0, 2**62), min_size=1, max_size=20),
    count=st.integers(1, 6),
    data=st.data(),
)
def test_a_draw_depends_on_its_row_and_column_alone(
    seed: int, epoch: int, ids: list[int], count: int, data: st.DataObject
) -> None:
    """Whatever other rows are fetched beside it, and however many columns are asked for."""
    table = draws(seed, epoch, np.array(ids, dtype=np.int64), count)
    assert table.shape == (len(ids), count) and table.dtype == np.float64
    assert ((table >= 0.0) & (table < 1.0)).all()
    row = data.draw(st.integers(0, len(ids) - 1))
    assert np.array_equal(draws(seed, epoch, np.array(ids[row : row + 1], dtype=np.int64), count)[0], table[row])
    assert np.array_equal(draws(seed, epoch, np.array(ids, dtype=np.int64), count + 2)[:, :count], table)


def test_draws_are_uniform_in_every_column() -> None:
    table = draws(0, 0, IDS, 8)
    assert max(abs(uniform_chi2(table[:, column])) for column in range(8)) < 5
    assert abs(table.mean() - 0.5) < 5 / np.sqrt(12 * table.size)


def test_draws_of_one_row_are_uniform_over_columns_and_epochs() -> None:
    assert abs(uniform_chi2(draws(0, 0, IDS[:1], 20_000)[0])) < 5
    assert abs(uniform_chi2(np.array([draws(0, epoch, IDS[:1], 1)[0, 0] for epoch in range(4000)]))) < 5


def test_draws_do_not_follow_each_other() -> None:
    """Correlation of neighbouring rows, neighbouring columns, epochs and seeds: 5 standard deviations of independent
    draws.
    """
    table = draws(0, 0, IDS, 8)
    pairs = {
        "rows": (table[:-1], table[1:]),
        "columns": (table[:, :-1], table[:, 1:]),
        "diagonal": (table[:-1, :-1], table[1:, 1:]),
        "antidiagonal": (table[:-1, 1:], table[1:, :-1]),
        "epochs": (table, draws(0, 1, IDS, 8)),
        "seeds": (table, draws(1, 0, IDS, 8)),
    }
    for name, (one, other) in pairs.items():
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(one.size), name
    low = np.floor(table * 2**53).astype(np.int64) & 1
    assert abs(low.mean() - 0.5) < 5 * 0.5 / np.sqrt(low.size), "lowest bit"


def test_draws_do_not_repeat() -> None:
    table = draws(0, 0, np.arange(50_000), 4)
    assert len(np.unique(table)) == table.size
