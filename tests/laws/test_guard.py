"""The guard against silent data corruption: what is flipped is found and named, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dtf.api.registry import lookup, registered
from dtf.api.schema import KeyProblem
from dtf.api.strategy import check_guard
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.options import Every
from dtf.config.settings import load_parts
from dtf.core.errors import CorruptionError
from dtf.core.types import State, Train
from dtf.engine.guarded_steps import GuardedSteps
from dtf.strategies.guard.votes import Seen, judge, near
from tests.support.harness import _enums, spread, variants
from tests.support.ranks import ranks
from tests.support.toy import Toy

load_parts([])
GUARDED = {
    "dp": [({"reduce": "all"}, 2)],
    "ddp": [({}, 2), ({}, 3)],
    "fsdp": [({"replicate": 2}, 2), ({"replicate": 2}, 4)],
    "tensor": [({"degree": 2}, 4)],
    "pipeline": [({"degree": 2}, 4), ({"degree": 1}, 2)],
    "mesh": [({"replicate": 2, **axis}, 4) for axis in ({}, {"pipeline": 2}, {"tensor": 2})],
}
"""Strategies with replicas: options, and processes."""
UNGUARDED = {"zero1", "pserver"}
ALL = [(name, *each) for name, cases in GUARDED.items() for each in cases]
SMALL = {"micro_batch_rows": 0, "batch_size": 18, "precision": "fp32", "recipe": {"rows": 36}}


def test_each_strategy_is_guarded_or_refused() -> None:
    own = {name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")}
    assert own == GUARDED.keys() | UNGUARDED
    for name, options, processes in ALL:
        cls = lookup("strategy", name)
        check_guard(cls(**_enums(cls, options)), Toy(), 5, processes)
    for name, options in variants():
        cls = lookup("strategy", name)
        if name != "ddp" and (name, options) != ("dp", {"reduce": "all"}):
            with pytest.raises(KeyProblem, match="train.guard_every=5 can compare nothing .*use"):
                check_guard(cls(**_enums(cls, options)), Toy(), 5, 2)
        with pytest.raises(KeyProblem, match="train.guard_every=5"):
            check_guard(cls(**_enums(cls, options)), Toy(), 5, 1)
        check_guard(cls(**_enums(cls, options)), Toy(), 0, 1)


@pytest.mark.parametrize(
    ("strategy", "options", "processes"),
    [pytest.param(*each, marks=() if each in [ALL[0], ALL[3]] else pytest.mark.slow) for each in ALL],
)
@pytest.mark.parametrize("micro_batch_rows", [5, pytest.param(0, marks=pytest.mark.slow)])
def test_a_guarded_run_has_the_bits_of_an_unguarded_one(
    strategy: str, options: dict[str, Any], processes: int, micro_batch_rows: int
) -> None:
    case = {"options": options, "steps": 4, "ema": 0.9, "micro_batch_rows": micro_batch_rows}
    assert spread(strategy, processes, guard_every=1, **case) == spread(strategy, processes, **case)


def test_a_flip_of_what_replicas_hold_is_found() -> None:
    case = {"every": 3, "strategy": "ddp", "precision": "fp32", "optimizer": "adamw"}
    met = ranks(3, "tests.support.flips:persistent", shared=True, trials=6, seed=1, **case)[0]
    assert (
        met["found"] + met["healed"] == 6 and met["found"] >= 4 and not met["missed"] and met["named"] == met["found"]
    )


def test_a_flip_in_a_pass_is_found_and_names_the_rank() -> None:
    met = ranks(2, "tests.support.flips:transient", shared=True, trials=8, seed=3, strategy="ddp", **SMALL)[0]
    assert met["beyond"] >= 2 and met["found"] == met["blamed"] == met["beyond"], met


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options", "processes", "trials", "slots"),
    [
        ("ddp", {}, 2, 100, 0),
        ("ddp", {}, 3, 60, 0),
        ("dp", {"reduce": "all"}, 1, 40, 2),
        ("fsdp", {"replicate": 2}, 2, 40, 0),
        ("tensor", {"degree": 2}, 4, 30, 0),
        ("pipeline", {"degree": 2}, 4, 30, 0),
    ],
)
def test_300_flips_of_what_replicas_hold(
    strategy: str, options: dict[str, Any], processes: int, trials: int, slots: int
) -> None:
    case = {"strategy": strategy, "options": options, "slots": slots, "precision": "fp32", "optimizer": "adamw"}
    target = "tests.support.flips:persistent"
    met = ranks(processes, target, timeout_s=600, trials=trials, seed=1, every=4, **case)[0]
    assert met["found"] + met["healed"] == trials and met["found"] > 0.9 * trials, met
    assert not met["missed"] and not met["wrong"], met
    assert met["named"] == met["found"] or processes != 3, met


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_300_flips_in_passes(processes: int) -> None:
    target = "tests.support.flips:transient"
    met = ranks(processes, target, timeout_s=600, trials=300, seed=processes, strategy="ddp", **SMALL)[0]
    assert met["beyond"] > 100 and met["blamed"] >= 0.99 * met["beyond"], met


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "options", "processes"), [ALL[1], ALL[3], ALL[5], ALL[6]])
def test_nothing_is_found_in_5000_clean_steps(strategy: str, options: dict[str, Any], processes: int) -> None:
    case = {"strategy": strategy, "options": options, "precision": "fp32"}
    met = ranks(processes, "tests.support.flips:clean", timeout_s=1800, steps=5000, **case)[0]
    assert met == {"said": [], "notes": []}


@pytest.mark.slow
def test_a_run_goes_back_to_before_the_flip(run_dtf: Any) -> None:
    plugins = "plugins=[tests.support.toy,tests.support.flip_once]"
    short = ("recipe=toy", "strategy=ddp", "launcher.processes=2", "train.steps=8", "train.eval_every=0")
    options = (plugins, *short, "train.guard_every=2", "checkpoint.every_steps=2", "step.batch_size=16")
    done = run_dtf(*options, "observer=[console,flip_once]", "observer.flip_once.step=5")
    assert done.code == 0, done.err
    said = " ".join((done.out + done.err).split())
    assert said.count("nothing tells which of them is right") == 1, "it is told once"
    assert re.search(
        r"warning: at step \d+: .*, which replicas hold alike, differs: rank 0 .*and rank 1 .*disagree.*step 4 was the "
        "last without a difference.*the next start goes on from step_000004; restart 1 of 3",
        said,
    ), said
    clean = run_dtf(*options[:-3], "checkpoint.every_steps=2", "step.batch_size=16", "observer=[jsonl]")
    last = [folder / "checkpoints/step_000008/rank_0.safetensors" for folder in (done.folder, clean.folder)]
    assert last[0].read_bytes() == last[1].read_bytes()
    again = run_dtf(
        *options,
        "observer=[flip_once]",
        "observer.flip_once.step=5",
        "observer.flip_once.attempts=9",
        "launcher.max_restarts=1",
    )
    assert again.code == 71 and "error[E_HARDWARE] step=" in again.err
    assert "launcher.max_restarts=1 is used up; start again with the same run.dir\n" in again.err


class _Alone:
    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


class _Failing:
    """A guard that finds something in a certain step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def compare_state(self) -> None: ...

    def step(self, turn: int, ticket: Train, batch: Any, see: Any) -> Any:
        if ticket.step == self._step:
            raise CorruptionError("rank 1 is wrong", 1)


def test_what_was_saved_since_the_last_clean_step_is_set_aside(tmp_path: Path) -> None:
    options = Every(every_steps=1, keep_last=1, keep_best=0)
    folder = tmp_path / "checkpoints"
    saver = Checkpointer(folder, options, _Alone(), "run", ("loss", "min"), "ddp")
    said: list[str] = []
    guard: Any = _Failing(8)
    steps = GuardedSteps(guard, 4, 0, saver, said.append)
    for step in range(8):
        if steps.due(step):
            steps.step(Train(step, 0, 0, 1, 0.1), None)
        saver.save(step + 1, State([], {}), {})
    kept = ["step_000004", "step_000008"]  # the last, and the one from before the last clean step
    assert sorted(path.name for path in folder.glob("step_*")) == kept
    saver.save(9, State([], {}), {})
    with pytest.raises(
        CorruptionError, match="aside: step_000009.suspect-run; the next start goes on from step_000004"
    ):
        steps.step(Train(8, 0, 0, 1, 0.1), None)
    assert said == [], "who catches the error tells it"
    assert (folder / "latest").read_text() == "step_000004\n"
    assert saver.find(1) == folder / "step_000004"


A, B, C = Seen(1, (1.0, 0.5)), Seen(2, (1.0, 0.6)), Seen(3, (1.0, 0.6 + 1e-9))


@pytest.mark.parametrize(
    ("results", "wrong"),
    [
        ({0: [A], 1: [A], 2: [A]}, None),
        ({0: [A], 1: [B], 2: [A]}, (1,)),
        ({0: [A, A], 1: [A, B]}, (1,)),
        ({0: [A, B], 1: [A, A]}, (0,)),
        ({0: [A, A], 1: [B, B]}, ()),
        ({0: [A, B], 1: [B, A]}, ()),
        ({0: [A], 1: [B], 2: [A], 3: [B]}, ()),
        ({0: [A], 1: [B], 2: [A], 3: [C], 4: [A]}, (1, 3)),
    ],
)
def test_the_largest_group_that_agrees_is_right(results: dict[int, list[Seen]], wrong: tuple[int, ...] | None) -> None:
    verdict = judge(results, lambda one, other: one == other)
    assert (None if verdict is None else verdict.wrong) == wrong


def test_rounding_is_no_difference() -> None:
    assert near(B, C, 1e-6) and not near(A, B, 1e-6) and near(A, A, 0.0)
    infinite, nan = Seen(4, (float("inf"), 1.0)), Seen(5, (float("nan"), 1.0))
    assert near(infinite, nan, 1e-6) and not near(A, nan, 1e-6)


def test_a_run_that_goes_on_knows_the_last_step_without_a_difference(run_dtf: Any) -> None:
    """What was saved after it may be wrong, however often the run is started again."""
    words = [
        "recipe=toy",
        "plugins=[tests.support.toy]",
        "launcher=inline",
        "strategy=dp",
        "strategy.replicas=2",
        "strategy.reduce=all",
    ]
    words += ["step.batch_size=24", "train.eval_every=0", "train.guard_every=4", "checkpoint.every_steps=3"]
    words += ["checkpoint.keep_last=1", "checkpoint.keep_best=0", "train.steps=20"]
    first = run_dtf(*words, "train.until=6")
    assert first.code == 0, first.err
    said = first.out.splitlines()
    assert 'guard="replicas are compared every 4 steps, before saves and at the end"' in said[0], said[0]
    assert 'guard="2 guarded steps, nothing differed"' in said[-1], said[-1]
    again = run_dtf(*words, "train.until=7", folder=first.folder)
    assert again.code == 0, again.err
    left = sorted(path.name for path in (first.folder / "checkpoints").glob("step_*"))
    assert left == ["step_000003", "step_000007"], "step 4 was the last clean one"
