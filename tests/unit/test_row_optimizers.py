"""Row optimizers: torch's numbers, or the published formula; decay of rows that no step touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.registry import registered
from dtf.api.row_optimizer import RowOptimizer, Scheduled
from dtf.api.sparse_table import Table
from dtf.core.errors import ConfigError
from dtf.sparse.row_optimizers import Ftrl, LazyAdam, RowAdagrad, RowSgd, RowwiseAdagrad
from dtf.sparse.store import SparseTable

ROWS = 20
LRS = [0.1, 0.2, 0.05, 0.1, 0.3, 0.1, 0.1, 0.02, 0.5, 0.1]
TOLERANCE: dict[type, Any] = {np.float32: {"rtol": 2e-5, "atol": 2e-6}, np.float64: {"rtol": 1e-11, "atol": 1e-13}}


def touched(step: int) -> np.ndarray:
    """Ids of a step: some rows often, some never."""
    return np.random.default_rng(step).permutation(ROWS - 3)[: 3 + step % 4].astype(np.int64)


def gradients(step: int, width: int) -> np.ndarray:
    return np.random.default_rng(100 + step).normal(size=(len(touched(step)), width))


def make(rule: RowOptimizer, dtype: type, width: int = 5, scale: float = 0.1, size: int = 0) -> SparseTable:
    return SparseTable(Table(width, size, ROWS, scale), rule, 7, "t", dtype)


def train(table: SparseTable, steps: range = range(len(LRS))) -> np.ndarray:
    """Rows of all ids after these steps, whether the table holds them or not."""
    for step in steps:
        table.lookup(touched(step), create=True)
        table.update(touched(step), gradients(step, table.spec.width), LRS[step], 1.0, step)
    return table.lookup(np.arange(ROWS), create=False)


def train_torch(
    build: Callable[[list], torch.optim.Optimizer], dtype: type, sparse: bool, width: int = 5
) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.from_numpy(make(RowSgd(), dtype, width).lookup(np.arange(ROWS), create=False)))
    optimizer = build([parameter])
    for step, lr in enumerate(LRS):
        values = torch.from_numpy(gradients(step, width).astype(dtype))
        gradient = torch.sparse_coo_tensor(
            torch.from_numpy(touched(step))[None], values, parameter.shape, check_invariants=True
        )
        parameter.grad = gradient if sparse else gradient.to_dense()
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return parameter.detach().numpy()


TWINS: dict[str, tuple[RowOptimizer, Callable[[list], torch.optim.Optimizer], bool]] = {
    "sgd": (RowSgd(), lambda rows: torch.optim.SGD(rows, lr=1.0), True),
    "sgd-decay": (RowSgd(weight_decay=0.2), lambda rows: torch.optim.SGD(rows, lr=1.0, weight_decay=0.2), False),
    "adagrad": (RowAdagrad(), lambda rows: torch.optim.Adagrad(rows), True),
    "adagrad-options": (
        RowAdagrad(initial_accumulator=0.3, eps=1e-3),
        lambda rows: torch.optim.Adagrad(rows, initial_accumulator_value=0.3, eps=1e-3),
        True,
    ),
    "lazy_adam": (LazyAdam(), lambda rows: torch.optim.SparseAdam(rows), True),
    "lazy_adam-options": (
        LazyAdam(beta1=0.8, beta2=0.9, eps=1e-4),
        lambda rows: torch.optim.SparseAdam(rows, betas=(0.8, 0.9), eps=1e-4),
        True,
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own Adagrad leaves them out
def test_the_same_numbers_as_torch(name: str, dtype: type) -> None:
    rule, build, sparse = TWINS[name]
    np.testing.assert_allclose(train(make(rule, dtype)), train_torch(build, dtype, sparse), **TOLERANCE[dtype])


def train_by_hand(rule: Any, first: np.ndarray, width: int) -> np.ndarray:
    """The published formulas, row by row, in float64."""
    rows = first.astype(np.float64)
    one, two = np.zeros_like(rows), np.zeros_like(rows)
    sums = np.full(len(rows), getattr(rule, "initial_accumulator", 0.0))
    for step, lr in enumerate(LRS):
        for id, g in zip(touched(step), gradients(step, width), strict=True):
            w = rows[id]
            g = g + getattr(rule, "weight_decay", 0.0) * w
            if isinstance(rule, RowwiseAdagrad):
                sums[id] += np.mean(g**2)
                rows[id] = w - lr * g / (np.sqrt(sums[id]) + rule.eps)
            elif isinstance(rule, RowAdagrad):
                one[id] += g**2
                rows[id] = w - lr * g / (np.sqrt(one[id]) + rule.eps)
            elif isinstance(rule, LazyAdam):
                one[id] = rule.beta1 * one[id] + (1 - rule.beta1) * g
                two[id] = rule.beta2 * two[id] + (1 - rule.beta2) * g**2
                rate = lr * np.sqrt(1 - rule.beta2 ** (step + 1)) / (1 - rule.beta1 ** (step + 1))
                rows[id] = w - rate * one[id] / (np.sqrt(two[id]) + rule.eps)
            else:  # McMahan et al. 2013, algorithm 1: z, n
                sigma = (np.sqrt(two[id] + g**2) - np.sqrt(two[id])) / rule.alpha
                one[id] += g - sigma * w
                two[id] += g**2
                solved = -(one[id] - np.sign(one[id]) * rule.l1) / (
                    (rule.beta + np.sqrt(two[id])) / rule.alpha + rule.l2
                )
                rows[id] = np.where(np.abs(one[id]) <= rule.l1, 0.0, solved)
    return rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 5, 16, 17])
@pytest.mark.parametrize(
    "rule",
    [
        RowwiseAdagrad(initial_accumulator=0.1, weight_decay=0.3),
        RowwiseAdagrad(),
        RowAdagrad(weight_decay=0.3),
        LazyAdam(weight_decay=0.3),
        Ftrl(),
        Ftrl(alpha=0.3, beta=0.5, l1=0.4, l2=0.2),
    ],
    ids=repr,
)
def test_the_published_formula(rule: RowOptimizer, width: int, dtype: type) -> None:
    scale = 0.0 if isinstance(rule, Ftrl) else 0.1  # FTRL as published starts from 0
    first = make(rule, dtype, width, scale).lookup(np.arange(ROWS), create=False)
    trained = train(make(rule, dtype, width, scale))
    np.testing.assert_allclose(
        trained,
        train_by_hand(rule, first, width),
        rtol=2e-4 if dtype is np.float32 else 1e-11,
        atol=TOLERANCE[dtype]["atol"],
    )
    assert not isinstance(rule, Ftrl) or not rule.l1 or (trained[: ROWS - 3] == 0).any(), "the penalty must bite"


def test_ftrl_starts_from_what_was_drawn() -> None:
    """A small gradient moves a row a little, wherever it was drawn; the published start from 0 would throw it there."""
    table = make(Ftrl(l1=0.5, l2=0.1), np.float64)
    before = table.lookup(np.arange(ROWS), create=True)
    table.update(np.arange(ROWS), np.full((ROWS, 5), 1e-6), 0.1, 1.0, 0)
    moved = table.lookup(np.arange(ROWS), create=False) - before
    assert (moved < 0).all() and np.abs(moved).max() < 1e-6


RULES = [
    cls(**({"weight_decay": 0.1} if hasattr(cls, "weight_decay") else {})) for cls in registered("sparse").values()
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize("cut", [0, 1, 4, 9])
def test_export_and_put_leave_no_trace(rule: RowOptimizer, dtype: type, cut: int) -> None:
    """Bit for bit, cut at any step, loaded in pieces of another order, from a range into any ids and back."""
    table = make(rule, dtype, size=ROWS)
    train(table, range(cut))
    ids, rows, states = table.export()
    assert (np.diff(ids) > 0).all() and all(len(values) == len(ids) for values in states.values())
    fresh = make(rule, dtype)
    fresh.decayed = table.decayed
    for piece in np.array_split(np.random.default_rng(0).permutation(len(ids)), 3):
        fresh.put(ids[piece], rows[piece], {name: values[piece] for name, values in states.items()})
    again = fresh.export()
    assert again.rows.tobytes() == rows.tobytes() and {k: v.tobytes() for k, v in again.states.items()} == {
        k: v.tobytes() for k, v in states.items()
    }
    rest = range(cut, len(LRS))
    assert train(fresh, rest).tobytes() == train(table, rest).tobytes()


@pytest.mark.parametrize("size", [0, ROWS])
def test_decay_of_rows_that_no_step_touched_is_exact(size: int) -> None:
    """Against SGD on the whole table, read at every step: rows that come late, rows never seen, a changing rate."""
    rule = RowSgd(weight_decay=0.3, lr_factor=0.5)
    table, whole = make(rule, np.float64, size=size), make(rule, np.float64).lookup(np.arange(ROWS), create=False)
    for step, lr in enumerate(LRS):
        dense = np.zeros_like(whole)
        dense[touched(step)] = gradients(step, 5)
        whole -= 0.5 * lr * (dense + 0.3 * whole)
        table.update(touched(step), gradients(step, 5), lr, 1.0, step)
        np.testing.assert_allclose(table.lookup(np.arange(ROWS), create=False), whole, rtol=1e-12, atol=1e-15)
    assert len(table) < ROWS


def test_decay_goes_on_from_a_checkpoint_under_another_strength() -> None:
    before = make(RowSgd(weight_decay=0.3), np.float64)
    wanted = train(before, range(5))
    for rule in (RowSgd(), RowSgd(weight_decay=0.1)):
        after = make(rule, np.float64)
        after.decayed = before.decayed
        after.put(*before.export())
        np.testing.assert_array_equal(after.lookup(np.arange(ROWS), create=False), wanted)
        after.update(np.zeros(0, np.int64), np.zeros((0, 5)), 0.5, 1.0, 5)
        np.testing.assert_allclose(
            after.lookup(np.arange(ROWS), create=False), wanted * (1 - 0.5 * rule.weight_decay), rtol=1e-12
        )


@pytest.mark.parametrize("rates", [[0.01, 1.0], [0.1, 0.01, 0.001]], ids=["warm-up", "fall"])
def test_a_rate_that_changes_moves_no_ftrl_row_by_itself(rates: list[float]) -> None:
    """A row's gradients so far are kept as a sum that holds alpha; another alpha would multiply the row."""
    table = make(Ftrl(alpha=0.05), np.float64)
    first = table.lookup(np.arange(ROWS), create=True)
    for step, lr in enumerate(rates):
        table.update(np.arange(ROWS), np.full((ROWS, 5), 1e-6), lr, 1.0, step)
    np.testing.assert_allclose(table.lookup(np.arange(ROWS), create=False), first, atol=1e-6)


def test_a_rate_that_turns_rows_over_is_refused() -> None:
    table = make(RowSgd(weight_decay=2.0), np.float64)
    with pytest.raises(ConfigError, match=r"sparse.weight_decay=2 times the learning rate 0.5 must be less than 1"):
        table.update(np.arange(2), np.zeros((2, 5)), 0.5, 1.0, 0)


@pytest.mark.parametrize("rule", [rule for rule in RULES if isinstance(rule, Scheduled)], ids=repr)
def test_the_learning_rate_factor_multiplies_the_rate(rule: RowOptimizer) -> None:
    doubled = type(rule)(**{**vars(rule), "lr_factor": 2.0})
    one, two = make(rule, np.float64), make(doubled, np.float64)
    for step in range(3):
        one.update(touched(step), gradients(step, 5), 0.2, 0.5, step)
        two.update(touched(step), gradients(step, 5) * 0.5, 0.1, 1.0, step)
    assert (one.export().rows == two.export().rows).all()


@pytest.mark.parametrize("cls", registered("sparse").values())
def test_decay_says_whether_it_is_exact(cls: type) -> None:
    told = {field.name: field.metadata.get("doc", "") for field in cls.__dataclass_fields__.values()}
    assert "weight_decay" not in told or ("exact" in told["weight_decay"]) != ("approximate" in told["weight_decay"])
