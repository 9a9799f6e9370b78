"""kill -9 of a rank in the middle of a run costs nothing but time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.checkpoint.manifest import Objective
from dtf.checkpoint.storage import read_manifest
from dtf.runs.compare import RecordedRun, compare
from dtf.runs.record import Record
from dtf.runs.recorded_run import records
from tests.conftest import Result

RUN = [
    "plugins=[tests.support.broken_strategies]", "recipe=mortal", "recipe.rows=100", "step.batch_size=24",
    "step.micro_batch_rows=5",
    "train.steps=17", "train.log_every=4",
    "train.eval_every=6", "checkpoint.every_steps=3", "checkpoint.keep_last=9", "train.record=true", "lr.warmup=0",
    "observer=[jsonl]",
]  # fmt: skip
ALONE = [*RUN, "launcher=inline"]
"""In one process, where nobody is killed."""


def measurements(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "rows_per_s", "model_flops_per_s")}
        for line in lines
    ]


@pytest.fixture
def calm(run_dtf: Any) -> Callable[..., Result]:
    """The run that nothing happens to, made once in this file for the same words."""

    def run(*words: str) -> Result:
        if words not in CALM:
            CALM[words] = run_dtf(*words)
        return CALM[words]

    return run


PARTS = ["noticed", "stopped", "started", "met", "built", "loaded", "stepped"]
CALM: dict[tuple[str, ...], Result] = {}


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.slow),
        pytest.param("zero1", 2, marks=pytest.mark.slow),
        pytest.param("dp", 2, marks=pytest.mark.slow),
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        ("mesh pipeline=2", 2),
        pytest.param("mesh pipeline=2 tensor=2", 4, marks=pytest.mark.slow),
        pytest.param("mesh pipeline=2 shard=2 zero=2", 4, marks=pytest.mark.slow),
        pytest.param("mesh shard=2 tensor=2", 4, marks=pytest.mark.slow),
        pytest.param("mesh replicate=2 context=2", 4, marks=pytest.mark.slow),
        pytest.param("mesh context=2 tensor=2", 4, marks=pytest.mark.slow),
        pytest.param("mesh replicate=2 pipeline=2 virtual=2 tensor=2", 8, marks=pytest.mark.slow),
        pytest.param("mesh pipeline=2 shard=2 tensor=2 zero=1", 8, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_leaves_the_run_bit_for_bit_as_it_would_have_been(
    strategy: str, processes: int, run_dtf: Any, calm: Callable[..., Result], tmp_path: Path
) -> None:
    name, *options = strategy.split()
    spread = [f"strategy={name}", *(f"strategy.{option}" for option in options), f"launcher.processes={processes}"]
    if "pipeline=2" in options:
        spread.append("strategy.balance=flops")  # measured times may cut the undisturbed run elsewhere
    if "context=2" in options:
        spread.append("recipe=mortal_text")
    marker = tmp_path / "killed"
    whole = calm(*RUN, *spread)
    killed = run_dtf(*RUN, *spread, f"recipe.marker={marker}", "observer=[jsonl,events]")
    assert whole.code == 0 and killed.code == 0, killed.err
    assert marker.exists()
    events = [json.loads(line) for line in (killed.folder / "events.jsonl").read_text().splitlines()]
    (told,) = [event["text"] for event in events if event.get("text", "").startswith("recovered in ")]
    assert re.findall(r"(\w+) \d+\.\d\d(?:,|$)", told) == PARTS
    a, b = RecordedRun.read(whole.folder), RecordedRun.read(killed.folder)
    assert {name: t.tobytes() for name, t in a.tensors.items()} == {name: t.tobytes() for name, t in b.tensors.items()}
    assert a.ids == b.ids and a.held == b.held
    assert measurements(whole.folder) == measurements(killed.folder)
    visits = Counter(i for step in b.ids if step < 15 for rank in b.ids[step] for i in rank)
    assert visits == Counter(dict.fromkeys(range(100), 3)), "three epochs, each row once in each"


@pytest.mark.parametrize(
    ("strategy", "processes"),
    [("dp", 2), *(pytest.param(*way, marks=pytest.mark.slow) for way in (("ddp", 2), ("ddp", 3), ("fsdp", 2)))],
)
def test_a_run_stopped_where_nobody_saves_goes_on_bit_for_bit(
    strategy: str, processes: int, run_dtf: Any, calm: Callable[..., Result]
) -> None:
    spread = [f"strategy={strategy}", f"launcher.processes={processes}"]
    whole, cut = calm(*RUN, *spread), run_dtf(*RUN, *spread, "train.until=10")
    assert run_dtf(*RUN, *spread, folder=cut.folder).code == 0
    a, b = RecordedRun.read(whole.folder), RecordedRun.read(cut.folder)
    assert {name: t.tobytes() for name, t in a.tensors.items()} == {name: t.tobytes() for name, t in b.tensors.items()}
    assert measurements(whole.folder) == measurements(cut.folder)


def test_a_length_that_lies_behind_is_refused(run_dtf: Any) -> None:
    first = run_dtf(*ALONE, "train.until=9")
    for shorter, said in (
        ("train.until=6", "train.until=6 ends before step 9"),
        ("train.steps=7", "a run of 7 steps ends before step 9"),
    ):
        refused = run_dtf(*ALONE, shorter, "checkpoint.keep_last=1", "checkpoint.keep_best=0", folder=first.folder)
        assert refused.code == 2 and said in refused.err
        assert len(list((first.folder / "checkpoints").glob("step_*"))) == 3, "a refused start removes nothing"


def test_measurements_that_a_killed_launcher_did_not_read_come_back_from_the_checkpoint(run_dtf: Any) -> None:
    base = [*ALONE, "train.log_every=1"]
    calm = run_dtf(*base)
    cut = run_dtf(*base, "train.until=12")
    path = cut.folder / "metrics.jsonl"
    # three saves back
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if json.loads(line)["step"] < 5))
    assert run_dtf(*base, folder=cut.folder).code == 0
    assert measurements(calm.folder) == measurements(cut.folder)


def test_a_start_that_is_refused_removes_no_checkpoint(run_dtf: Any) -> None:
    first = run_dtf(*ALONE, "train.until=9")
    kept = sorted(path.name for path in (first.folder / "checkpoints").iterdir())
    refused = run_dtf(
        *ALONE, "run.objective=loss", "checkpoint.keep_last=1", "checkpoint.keep_best=0", folder=first.folder
    )
    assert refused.code == 2 and "objective" in refused.err
    assert sorted(path.name for path in (first.folder / "checkpoints").iterdir()) == kept and len(kept) == 4


def test_checkpoints_are_ranked_by_the_objective_of_the_run(run_dtf: Any) -> None:
    """The recipe's own is top1."""
    done = run_dtf(*ALONE, "run.objective=loss", "train.eval_every=3", "checkpoint.every_steps=3")
    assert done.code == 0, done.err
    losses = {
        line["step"]: Objective("loss", "min", line["loss"])
        for line in measurements(done.folder)
        if line["split"] == "eval"
    }
    saved = [read_manifest(path) for path in (done.folder / "checkpoints").glob("step_*")]
    assert {manifest.step: manifest.objective for manifest in saved} == losses and len(losses) == 6


def test_the_gradient_norm_of_a_window_does_not_depend_on_saves(run_dtf: Any) -> None:
    """Steps that overflow, as fp16 has them at first, count neither in the sum nor in the number."""
    base = [*ALONE, "precision=fp16", "precision.loss_scale=1e9", "train.log_every=17", "train.steps=17"]
    often, once = run_dtf(*base, "checkpoint.every_steps=2"), run_dtf(*base, "checkpoint.every_steps=17")
    assert often.code == once.code == 0
    (a,), (b,) = (
        [line["grad_norm"] for line in measurements(run.folder) if line["split"] == "train"] for run in (often, once)
    )
    assert a == pytest.approx(b, rel=1e-12)


def test_a_loss_scale_that_never_finds_its_value_fails_the_run(run_dtf: Any) -> None:
    never = [*ALONE, "precision=fp16", "precision.loss_scale=1e30"]
    cut = run_dtf(*never, "train.until=9")
    assert cut.code == 0, "it may yet find it"
    failed = run_dtf(*never, folder=cut.folder)
    assert failed.code == 79 and "no update was made; set a smaller precision.loss_scale" in failed.err


def test_a_rank_killed_before_its_first_step_leaves_the_evidence_of_earlier_ones(tmp_path: Path) -> None:
    first = Record(tmp_path, 1, 2, 0)
    for step in (0, 1, 2):
        first.write(step, np.arange(4))
    Record(tmp_path, 1, 2, 2)  # goes on from step 2, and is killed
    assert [json.loads(line)["step"] for line in (tmp_path / "record_rank_1.jsonl").read_text().splitlines()] == [0, 1]


def test_steps_that_are_done_again_without_a_rank_leave_its_evidence(tmp_path: Path) -> None:
    """Its samples of these steps were others' in the attempt that counts, under a strategy with fewer readers."""
    written = [Record(tmp_path, rank, 3, 0) for rank in range(3)]
    for step in (0, 1, 2):
        for rank, record in enumerate(written):
            record.write(step, np.arange(4) + 4 * rank)
    Record(tmp_path, 0, 2, 1).write(1, np.arange(12))  # goes on from step 1; rank 1 has not begun
    steps = {
        rank: [json.loads(line)["step"] for line in path.read_text().splitlines()]
        for rank, path in records(tmp_path).items()
    }
    assert steps == {0: [0, 1], 1: [0, 1, 2], 2: [0]}


def test_evidence_of_ranks_that_are_no_more_says_nothing_of_those_that_went_on(run_dtf: Any) -> None:
    cut = run_dtf(*RUN, "train.until=6", "launcher.processes=3")
    assert run_dtf(*RUN, "launcher.processes=1", folder=cut.folder).code == 0
    assert len(RecordedRun.read(cut.folder).held) == 1
    assert sum(len(rows) for rows in RecordedRun.read(cut.folder).ids[0]) == 24, "but their samples were trained on"


def test_going_on_with_other_arithmetic_is_said(run_dtf: Any) -> None:
    cut = run_dtf(*ALONE, "train.until=9")
    again = run_dtf(*ALONE, "observer=[console]", "precision=bf16", "optimizer.weight_decay=0.25", folder=cut.folder)
    assert again.code == 0
    assert re.search(
        r"from step 9 on with optimizer.weight_decay=0.25 \(was .*precision.compute=bf16 \(was fp32\)", again.out
    ), again.out


def test_another_length_is_said_by_the_key_that_was_set(run_dtf: Any) -> None:
    cut = run_dtf(*ALONE, "train.until=2")
    again = run_dtf(*ALONE, "observer=[console]", "train.steps=null", "train.epochs=2", folder=cut.folder)
    assert again.code == 0, again.err
    assert re.search(r"from step 2 on with train.epochs=2, that is \d+ steps \(was \d+\)", again.out), again.out


@pytest.mark.slow
def test_dp_and_ddp_go_on_from_each_other_by_command(run_dtf: Any) -> None:
    base = [*RUN, "checkpoint.every_steps=6"]
    first = run_dtf(*base, "precision=fp64", "strategy=ddp", "launcher.processes=3", "train.steps=12", "lr=constant")
    calm = run_dtf(*base, "precision=fp64", "strategy=ddp", "launcher.processes=1", "lr=constant")
    second = run_dtf(
        *base,
        "precision=fp64",
        "strategy=dp",
        "launcher.processes=2",
        "lr=constant",
        f"checkpoint.resume={first.folder}",
    )
    assert [first.code, calm.code, second.code] == [0, 0, 0], second.err
    a, b = RecordedRun.read(calm.folder), RecordedRun.read(second.folder)
    b.metrics, b.ids = (
        a.metrics,
        {step: [list(chain(*ranks))] for step, ranks in (RecordedRun.read(first.folder).ids | b.ids).items()},
    )
    assert compare(a, b, exact=True).ok, compare(a, b, exact=True).first
