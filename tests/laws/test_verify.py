"""`job=verify` is clean for what is right and names what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dtf.api.registry import registered
from dtf.config.settings import load_parts
from dtf.core.errors import Exit
from dtf.core.types import Note
from dtf.launch import waits

SMALL = [
    "recipe=resnet_shapes",
    "recipe.data.pixels=8",
    "job.steps=2",
    "job.batch_size=14",
    "job.precisions=[fp64]",
    "job.micro_batches=[2]",
    "job.eval_rows=24",  # in micro-batches of 4: as many on each of two ranks
]

TOYS = [
    "plugins=[tests.support.rounding_models]",
    "train.steps=4",
    "job.steps=4",
    "job.batch_size=14",
    "job.micro_batches=[2]",
    "job.processes=[2]",
    "job.eval_rows=20",
    "optimizer=adagrad",
]


@pytest.fixture
def verify(run_dtf: Any, tmp_path: Path) -> Any:
    def call(*overrides: str) -> tuple[int, dict[str, Any], str]:
        done = run_dtf("job=verify", *SMALL, *overrides)
        return done.code, json.loads((done.folder / "verify.json").read_text()), done.out

    return call


GPT = [
    "recipe=gpt_text",
    "recipe.data.length=16",
    "recipe.data.train_rows=256",
    "recipe.data.eval_rows=32",
    "recipe.model.width=32",
    "job.steps=4",
    "job.batch_size=14",
    "job.precisions=[fp64]",
    "job.micro_batches=[2]",
    "job.processes=[2]",
    "job.eval_rows=32",
]

USUAL = ("ddp", "tensor", "pipeline")
"""By default: those of the others that record in a way of their own have segments in the test of job=relay."""
TOY = [*TOYS, "recipe=toy", "job.precisions=[fp64]"]


@pytest.mark.parametrize(
    ("recipe", "some"),
    [
        (TOY, USUAL),
        pytest.param(TOY, None, marks=pytest.mark.slow),
        pytest.param([*SMALL, "job.processes=[2]"], None, marks=pytest.mark.slow),
        pytest.param([*GPT, "recipe.model.dropout=0.1"], ("dp", "ddp", "fsdp"), marks=pytest.mark.slow),
        pytest.param(GPT, ("pipeline",), marks=pytest.mark.slow),
    ],
    ids=["toy, some", "toy", "shapes", "gpt", "gpt, pipeline"],
)
def test_clean_for_every_strategy_there_is(run_dtf: Any, recipe: list[str], some: tuple[str, ...] | None) -> None:
    load_parts([])
    # other tests register faulty ones
    own = some or [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]
    done = run_dtf("job=verify", *recipe, f"job.strategies=[{','.join(own)}]")
    report = json.loads((done.folder / "verify.json").read_text())
    assert done.code == 0 and report["ok"], done.out
    assert {row["strategy"] for row in report["runs"]} >= set(own)
    assert all(row["tensor"] <= 1e-10 and len(row["tensors"]) > 20 for row in report["runs"])


def test_fp32_is_judged_by_all_parameters_together(verify: Any) -> None:
    code, report, out = verify("job.precisions=[fp32]", "job.processes=[2]", "job.strategies=[ddp]")
    assert code == 0, out
    assert 0 < report["runs"][0]["parameters"] <= 1e-5


@pytest.mark.slow
def test_rounding_that_a_recipe_amplifies_is_told_from_a_fault(verify: Any) -> None:
    violent = [
        "job.precisions=[fp64,fp32]",
        "job.processes=[3]",
        "job.strategies=[ddp]",
        "job.steps=8",
        "lr=constant",
        "lr.peak=4",
    ]
    code, report, out = verify(*violent)
    exact, rounded = report["runs"]
    assert exact["ok"] and not exact["rounding"]
    assert not rounded["ok"] and code == 1
    assert "fp64 agrees, so this is probably rounding that the recipe amplifies" in out


FAULTS = {  # each kind of evidence finds one: numbers of a module, rows, running averages; of a step, a fault of docs/
    "wrong_shard_offset": r"loss at step 0: .*; first differs: layer2\.0\.conv1 \(output\), step 0$",
    "swapped_batch": "sample ids at step 0: the same rows in another order",
    "stale_average": "running averages: model/.*running_",
}
MORE_FAULTS = {  # found by the same evidence
    "skipped_all_reduce": "grad_norm at step 0: .*ranks 0 and 1 hold different .*gradients were not summed",
    "wrong_scale": "grad_norm at step 0: .* 2 x the reference's$",
    "missed_reduce_scatter": "grad_norm at step 0: 0 instead of",
    "stale_stage": "loss at step 1: ",
    "lost_rows": "sample ids at step 0: 6 missing",
    "unsummed_row": r"loss at step 0: .*; first differs: layer2\.0\.conv2 \(output\), step 0$",
    "forgotten_fan": "grad_norm at step 0: ",
    "skipped_micro_batch": "grad_norm at step 0: ",
}


@pytest.mark.parametrize("faults", [FAULTS, pytest.param(MORE_FAULTS, marks=pytest.mark.slow)], ids=["kinds", "more"])
def test_a_planted_fault_is_found_and_named(verify: Any, faults: dict[str, str]) -> None:
    code, report, _ = verify(
        "plugins=[tests.support.broken_strategies]", f"job.strategies=[{','.join(faults)}]", "job.processes=[2]"
    )
    assert code == 1 and not report["ok"]
    found = {row["strategy"]: row["first"] for row in report["runs"] if not row["ok"]}
    assert found.keys() == faults.keys()
    assert {fault: first for fault, first in found.items() if not re.search(faults[fault], first)} == {}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("nope", "job.strategies names 'nope'; choices: "),
        ("tensor 2", "job.strategies has 'tensor 2'; after the strategy's name come options as key=value"),
        ("tensor degree=2 degree=1", "job.strategies has 'tensor degree=2 degree=1', which gives degree twice"),
        (
            "tensor degre=2",
            "job.strategies has 'tensor degre=2', but degre is no option of tensor; did you mean degree?",
        ),
        ("fsdp replicate=x", "job.strategies has 'fsdp replicate=x': strategy.replicate=x is not of type int"),
        (
            "tensor launcher.processes=3",
            "launcher.processes is no option of tensor; choices: degree, tables; numbers of processes are in "
            "job.processes",
        ),
        (
            "tensor degree=3",
            "nothing to compare: none of job.strategies=['tensor degree=3'] runs on job.processes=[2, 4]: "
            "strategy.degree=3 does not divide job.",
        ),
    ],
)
def test_an_entry_that_cannot_run_is_named_before_anything_runs(run_dtf: Any, entry: str, words: str) -> None:
    done = run_dtf("job=verify", *SMALL, "job.processes=[2,4]", f"job.strategies=['{entry}']")
    assert done.code == 2 and words in done.err and not done.folder.exists()


@pytest.mark.parametrize(
    ("recipe", "precision"),
    [
        pytest.param("cancelled_bias", "fp64", marks=pytest.mark.slow),
        ("key_bias", "fp32"),
        pytest.param("cancelled_bias", "fp32", marks=pytest.mark.slow),
        pytest.param("key_bias", "fp64", marks=pytest.mark.slow),
    ],
)
def test_rounding_alone_is_no_break(run_dtf: Any, recipe: str, precision: str) -> None:
    """Adagrad makes whole steps of a gradient that is rounding: the tensor is told, and how far it may be."""
    done = run_dtf("job=verify", *TOYS, f"recipe={recipe}", f"job.precisions=[{precision}]", "job.strategies=[ddp]")
    (row,) = json.loads((done.folder / "verify.json").read_text())["runs"]
    assert done.code == 0 and row["ok"], done.out
    bias = {"cancelled_bias": "model/0.bias", "key_bias": "model/key.bias"}[recipe]
    assert row["tensors"][bias] > 1e-10 and row["loss"] < 1e-6
    assert bias in row["rounding"] and "rounding: " in done.out and len(row["rounding"]) < 6


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cancelled_bias", "key_bias"])
def test_a_fault_beside_rounding_is_found(run_dtf: Any, recipe: str) -> None:
    """The same models, and one tensor that is wrong by a millionth, after the last update, so that losses agree."""
    tensor = {"cancelled_bias": "3.bias", "key_bias": "last.bias"}[recipe]
    fault = f"job.strategies=['one_tensor_off last_step=3 tensor={tensor}']"
    done = run_dtf("job=verify", *TOYS, f"recipe={recipe}", "job.precisions=[fp64]", fault)
    (row,) = json.loads((done.folder / "verify.json").read_text())["runs"]
    assert done.code == 1 and not row["ok"]
    assert f"model/{tensor}" in row["first"] and f"model/{tensor}" not in row["rounding"]
    assert row["tensors"][f"model/{tensor}"] == pytest.approx(1e-6, rel=0.01)


@pytest.mark.slow
def test_an_evaluation_that_differs_is_a_break(run_dtf: Any) -> None:
    """A strategy whose evaluation counts one row for another: training agrees."""
    done = run_dtf("job=verify", *TOYS, "recipe=toy", "job.precisions=[fp64]", "job.strategies=[evaluates_wrong]")
    (row,) = json.loads((done.folder / "verify.json").read_text())["runs"]
    assert done.code == 1 and row["first"].startswith("evaluation after step 4: loss is ")
    assert row["loss"] <= 1e-10 and row["tensor"] <= 1e-10 < row["evaluation"]


@pytest.mark.slow  # by default `wrong_shard_offset` above is found by it
def test_the_first_module_that_differs_is_named(run_dtf: Any) -> None:
    done = run_dtf("job=verify", *TOYS, "recipe=toy", "job.precisions=[fp64]", "job.strategies=[wrong_module]")
    (row,) = json.loads((done.folder / "verify.json").read_text())["runs"]
    assert done.code == 1 and row["first"].endswith("first differs: 5 (output), step 0")


@pytest.mark.slow
def test_a_refusal_says_why_in_its_row(run_dtf: Any) -> None:
    """One that a strategy makes is no break; a layout that names a module wrongly is the recipe's mistake."""
    toys = ["job=verify", *TOYS[:-1], "optimizer=sgd", "job.precisions=[fp64]", "job.strategies=[ddp,tensor]"]
    done = run_dtf(*toys, "recipe=cancelled_bias")
    assert done.code == 0 and "refused: strategy=tensor: the layout of CancelledBias splits no module" in done.out
    done = run_dtf(*toys, "recipe=wrong_layout")
    assert done.code == 2 and "refused: the recipe's layout splits 1 as row" in done.out
    assert "the recipe's own layout is wrong" in done.out and "splits 1 as row" not in done.err, "it is said once"


BROKEN = [*TOYS, "plugins=[tests.support.rounding_models,tests.support.broken_strategies]", "recipe=toy"]


@pytest.mark.slow
def test_ranks_that_never_meet_or_are_lost_are_a_break_at_once_and_the_others_go_on(run_dtf: Any) -> None:
    done = run_dtf("job=verify", *BROKEN[1:], "job.precisions=[fp64]", "job.strategies=[never_meets,dies,ddp]")
    wrong, lost, right = json.loads((done.folder / "verify.json").read_text())["runs"]
    assert done.code == Exit.BUG and right["ok"] and not wrong["ok"] and not lost["ok"], done.out
    assert "exit code 69: killed by SIGKILL" in lost["first"]
    assert "strategy=never_meets on 2 processes with precision=fp64 ended with exit code 2: " in wrong["first"]
    assert "They never meet" in wrong["first"] and "restart" not in done.err


@pytest.mark.slow
def test_who_waits_is_told_and_a_run_that_is_cut_meanwhile_is_no_break(
    run_dtf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "WAIT_S", 1.0)

    def note(level: str, text: str) -> Note:
        if "has waited" in text:
            os.kill(os.getpid(), signal.SIGINT)
        return Note(level, text)

    monkeypatch.setattr(waits, "Note", note)
    done = run_dtf(
        "job=verify",
        *BROKEN[1:],
        "job.precisions=[fp64]",
        "job.strategies=[broadcasts_alone,ddp]",
        "launcher.grace_s=0",
    )
    assert done.code == Exit.PREEMPTED and "BREAK" not in done.out, done.out
    assert re.search(
        r"strategy=broadcasts_alone on 2 processes with precision=fp64: rank 1 has waited for \d+ s in .*, rank 0 has "
        r"not entered it: it has waited for \d+ s in complete_gradients of the strategy's Sharding",
        done.err,
    ), done.err
    assert "E_PREEMPTED" in done.err.splitlines()[-1] and not list(done.folder.glob("runs-*"))
