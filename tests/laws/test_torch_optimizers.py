"""Law: classes of torch.optim, and others like them, give the same numbers under every strategy, and go on exactly; or
are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(("strategy", "options", "optimizer"), crossed(variants(), NAMES, each=1, turns=NAMES[::-1]))
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
        lambda first, second, name: (first, name) in (("fsdp", "asgd"), ("pipeline", "counting")),
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
        lambda strategy, name: (strategy, name) in (("fsdp", "nadam"), ("ddp", "counting"), ("pserver", "rprop")),
    ),
)
def test_resume_is_exact(strategy: str, optimizer: str, tmp_path: Path) -> None:
    case: dict[str, Any] = SHORT | {"optimizer": optimizer, "steps": 8, "precision": "fp32"}
    whole = spread(strategy, 2, folder=str(tmp_path), save_every=4, **case)
    again = spread(strategy, 2, start=str(tmp_path / "step_000004"), **case)
    assert again["tensors"] == whole["tensors"] and len(again["ids"]) == 4


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
