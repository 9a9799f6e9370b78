"""Law: one recipe, any synchronous strategy, any world size: the numbers of the one-process reference."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.support.arrays import crossed, plain, seldom
from tests.support.harness import difference, meshes, reference, spread, variants

SHORT: dict[str, Any] = {"steps": 3, "eval_every": 3}
"""Enough steps for a state that is used again."""

LONG: dict[str, Any] = {"steps": 4}
"""An epoch, and the first step of the next."""


@pytest.mark.parametrize(
    ("strategy", "options", "processes"), crossed(variants(), [1, 2, 3, 4], usual=[3, 2], each=1, turns=[2, 3])
)
def test_every_strategy_follows_the_reference_in_fp64(strategy: str, options: dict, processes: int) -> None:
    """42 rows, batch 19 and micro-batches of 5: uneven shares, a partial last batch, ranks without rows; batch norm
    and dropout.
    """
    assert difference(reference(**LONG), spread(strategy, processes, options=options, **LONG)) <= 1e-10


@pytest.mark.parametrize(("strategy", "options", "processes"), crossed(meshes(), [2, 4, 6], turns=[4, None, None, 4]))
def test_combined_with_data_parallelism(strategy: str, options: dict, processes: int) -> None:
    """By default four ranks; six (slow) are three shares of five micro-batches of two ranks each."""
    assert difference(reference(**LONG), spread(strategy, processes, options=options, **LONG)) <= 1e-10


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"schedule": "gpipe"}, marks=pytest.mark.slow), {"cuts": ["4", "7", "9"]}], ids=str
)
def test_interleaved_stages(options: dict) -> None:
    """Two ranks with two stages each, five micro-batches: the last group of two is incomplete."""
    assert difference(reference(), spread("pipeline", 2, options={"virtual": 2} | options)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "options", "optimizer"),
    crossed(variants(), ["adamw", "adagrad", "lars"], each=1, turns=["lars", None, None]),
)
def test_with_every_optimizer(strategy: str, options: dict, optimizer: str) -> None:
    case: dict[str, Any] = {"optimizer": optimizer, **SHORT}
    assert difference(reference(**case), spread(strategy, 2, options=options, **case)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "tail"),
    seldom([*product(["dp", "ddp"], ["fill", "drop"])], lambda strategy, tail: (strategy == "dp") == (tail == "fill")),
)
def test_with_every_tail(strategy: str, tail: str) -> None:
    assert difference(reference(tail=tail), spread(strategy, 3, tail=tail)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "options", "precision"),
    crossed(
        variants(),
        ["fp32", "bf16", "bf16_params", "bf16_master", "fp16"],
        usual=["fp32", "fp16"],
        each=1,
        turns=["bf16", None, None, None, None],
    ),
)
def test_other_precisions_stay_close(strategy: str, options: dict, precision: str) -> None:
    """fp32 within rounding; half formats within theirs: a sum in another order moves the last bits, and may tip a ReLU,
    which a momentum shows.
    """
    bound = {"fp32": 1e-4, "bf16_params": 0.3, "bf16_master": 0.2}.get(precision, 0.05)  # bf16 gradients add up in bf16
    without = () if precision == "fp32" else ("optimizer/",)
    case: dict[str, Any] = {"precision": precision, **SHORT}
    assert difference(reference(**case), spread(strategy, 2, options=options, **case), without) <= bound


@pytest.mark.parametrize(("strategy", "options"), plain(variants()))
def test_micro_batches_of_the_strategys_own_choice(strategy: str, options: dict) -> None:
    """The last batch has 4 rows: fewer micro-batches of the same size, none of a single row."""
    found = spread(strategy, 3, options=options, micro_batch_rows=0)
    assert difference(reference(micro_batch_rows=found["micro_batch_rows"]), found) <= 1e-10


def test_the_micro_batch_decides_batch_statistics() -> None:
    """The law needs the micro-batch: with another one, batch statistics and so the numbers differ."""
    assert difference(reference(micro_batch_rows=5), reference(micro_batch_rows=12)) > 1e-3


@pytest.mark.parametrize("hook", ["fp16", "bf16", "powersgd"])
def test_communication_hooks_approximate(hook: str) -> None:
    """They change the numbers, as their help says, but not by much."""
    options = {"comm_hook": hook, "powersgd_start": 2} if hook == "powersgd" else {"comm_hook": hook}
    found = difference(
        reference(precision="fp32", clip_norm=0.0), spread("ddp", 2, options=options, precision="fp32", clip_norm=0.0)
    )
    assert 1e-6 < found < 5.0


@pytest.mark.parametrize(
    ("strategy", "options", "processes"),
    crossed(variants(), [2, 3], usual=[2], turns=[None]),
)
def test_dropout_by_functions_of_torch_and_in_attention(strategy: str, options: dict, processes: int) -> None:
    case: dict[str, Any] = {"plugin": "tests.support.attentive_toy", "recipe": {"name": "attentive"}, **SHORT}
    assert difference(reference(**case), spread(strategy, processes, options=options, **case)) <= 1e-10
