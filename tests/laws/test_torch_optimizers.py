"""Law: classes of torch.optim, and others like them, give the same numbers under every strategy, and go on exactly; or
are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.api.registry import registered
from dtf.config.settings import load_parts
from dtf.optim.torch_class import TorchOptimizer
from tests.support.arrays import crossed, seldom
from tests.support.harness import difference, reference, spread, variants

load_parts([])
NAMES = [
    *(
        name
        for name, cls in registered("optimizer").items()
        if issubclass(cls, TorchOptimizer) and cls.__module__.startswith("dtf.")
    ),
    "lion",
    "counting",
]
PLUGIN = "tests.support.foreign_plugin"
SHORT: dict[str, Any] = {"steps": 4, "eval_every": 4, "plugin": PLUGIN, "lr": "cosine", "ema": 0.9}


@pytest.mark.parametrize(
    ("strategy", "options", "optimizer"), crossed(variants(), NAMES, each=1, turns=[*NAMES[-2:], None, None, None])
)
def test_the_same_numbers_under_every_strategy(strategy: str, options: dict, optimizer: str) -> None:
    case: dict[str, Any] = {"optimizer": optimizer, **SHORT}
    assert difference(reference(**case), spread(strategy, 2, options=options, **case)) <= 1e-10


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    seldom(
        [
            (first, second, name)
            for name in NAMES
            for first, second in (("fsdp", "pserver"), ("pipeline", "tensor"), ("zero1", "dp"))
        ],
        lambda first, second, name: (first, name) in (("fsdp", "asgd"),),
    ),
)
def test_state_travels(first: str, second: str, optimizer: str, tmp_path: Path) -> None:
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "steps": 8}
    whole = reference(**case)
    spread(first, 2, folder=str(tmp_path), save_every=4, halt=True, **case)
    found = spread(second, 3, start=str(tmp_path / "step_000004"), **case)
    whole |= {key: {step: whole[key][step] for step in found[key]} for key in ("train", "eval", "ids")}
    assert difference(whole, found) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    seldom(
        [(strategy, name) for strategy in ("ddp", "fsdp", "pserver") for name in NAMES],
        lambda strategy, name: (strategy, name) in (("fsdp", "nadam"), ("pserver", "rprop")),
    ),
)
def test_resume_is_exact(strategy: str, optimizer: str, tmp_path: Path) -> None:
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "steps": 8, "precision": "fp32"}
    whole = spread(strategy, 2, folder=str(tmp_path), save_every=4, **case)
    again = spread(strategy, 2, start=str(tmp_path / "step_000004"), **case)
    assert again["tensors"] == whole["tensors"] and len(again["ids"]) == 4


@pytest.mark.parametrize(
    ("strategy", "optimizer"),
    seldom(
        [(strategy, name) for strategy in ("fsdp", "pipeline", "pserver") for name in ("asgd", "rprop", "counting")],
        lambda strategy, name: (strategy, name) == ("fsdp", "rprop"),
    ),
)
def test_a_step_that_is_not_finite_leaves_no_trace(strategy: str, optimizer: str) -> None:
    """Whichever step meets the bad row: a class that has not begun begins with the next one."""
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "steps": 3, "skip_nonfinite": 9}
    case["recipe"] = {"rows": 42, "bad_row": 17}
    runs = [reference(**case), spread(strategy, 2, **case)]
    for run in runs:
        bad = [step for step, values in run["train"].items() if not np.isfinite(values["grad_norm"])]
        assert len(bad) == 1
        del run["train"][bad[0]]
    assert difference(runs[0], runs[1]) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"), [("fsdp", "bf16_master"), ("ddp", "fp16"), ("zero1", "bf16_params")]
)
@pytest.mark.parametrize("optimizer", ["nadam", "adadelta", "lion"])
def test_other_precisions_stay_close(strategy: str, precision: str, optimizer: str) -> None:
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "precision": precision, "lr_options": {"peak": 0.01}}
    assert difference(reference(**case), spread(strategy, 2, **case), ("optimizer/",)) <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
@pytest.mark.parametrize("optimizer", ["nadam", "rprop", "counting"])
def test_parameter_servers_that_do_not_wait_take_them(mode: str, optimizer: str) -> None:
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "steps": 8, "lr_options": {"peak": 0.01}}
    found = spread("pserver", 2, options={"mode": mode}, **case)
    assert all(np.isfinite(tensor).all() for tensor in found["tensors"].values())
    begun = [float(tensor) for name, tensor in found["tensors"].items() if name.endswith("/started")]
    assert begun and min(begun) > 0


@pytest.mark.parametrize("strategy", ["zero1", "pipeline", "pserver"])
def test_what_looks_at_whole_tensors_runs_where_they_are_whole(strategy: str) -> None:
    case: dict[str, Any] = {"optimizer": "norm_of_rows", **SHORT}
    options = {"servers": 2, "min_block": 1} if strategy == "pserver" else {}
    assert difference(reference(**case), spread(strategy, 2, options=options, **case)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "optimizer", "reason"),
    [
        (
            "fsdp",
            "norm_of_rows",
            "this strategy divides tensors; use one that keeps them whole: strategy=ddp, zero1, dp, pipeline",
        ),
        ("tensor", "norm_of_rows", "this strategy divides tensors"),
        ("ddp", "in_itself", "keeps more than the state of its parameters"),
        ("pserver", "in_itself", "keeps more than the state of its parameters"),
    ],
)
def test_what_cannot_be_right_is_refused_on_all_ranks(strategy: str, optimizer: str, reason: str) -> None:
    with pytest.raises(AssertionError, match=f"ConfigError.*optimizer={optimizer} .*{reason}"):
        spread(strategy, 2, optimizer=optimizer, **SHORT)
