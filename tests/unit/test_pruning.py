"""Which trials go on: rungs, promotions and the median rule, as pure functions; and a schedule of trials that is killed
at any moment, with an executor that only writes what runs would have written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import Phase as HypothesisPhase
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from dtf.api.lr import Constant, Cosine, Geometric, OneCycle, steps_of_rise
from dtf.api.lr import Schedule as LearningRate
from dtf.api.options import Prune, SweepOptions
from dtf.api.trials import TrialEnd, TrialOrder
from dtf.cli.pruning import Phase, Standing, champion, is_out, next_of, rungs
from dtf.cli.schedule import Batch, Rules, Schedule, SweepStopped
from dtf.cli.trials import Found, left_alone
from dtf.core.errors import Exit
from dtf.runs.sweep_record import SweepRecord

NAN = math.nan


def waiting(*values: float) -> Standing:
    return Standing(Phase.waiting, values)


def finished(*values: float) -> Standing:
    return Standing(Phase.finished, values)


@pytest.mark.parametrize(
    ("evaluations", "factor", "trials", "expected"),
    [
        (9, 3, 9, [1, 3, 9]),
        (10, 3, 9, [1, 3, 10]),
        (100, 3, 9, [11, 33, 100]),  # of 9 trials one is left at the third rung: no need for a fourth
        (100, 3, None, [1, 3, 11, 33, 100]),
        (100, 4, 3, [100]),
        (2, 3, 9, [2]),
        (8, 2, 1000, [1, 2, 4, 8]),
    ],
)
def test_rungs_are_shares_of_the_plan(evaluations: int, factor: int, trials: int | None, expected: list[int]) -> None:
    assert rungs(evaluations, factor, trials) == expected


@pytest.mark.parametrize(
    ("first", "expected"),
    [(1, [1, 3, 9]), (2, [3, 9]), (3, [3, 9]), (4, [4, 9]), (8, [8, 9]), (9, [1, 3, 9]), (10, [1, 3, 9])],
)
def test_no_rung_comes_before_trials_can_be_told_apart(first: int, expected: list[int]) -> None:
    assert rungs(9, 3, 9, first) == expected
    assert rungs(2, 3, 9, first) == [2]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (OneCycle(), 173 - 1),
        (OneCycle(rise=0.1), 57),
        (OneCycle(rise=0.0), 0),
        (Cosine(warmup=64), 63),
        (Cosine(), 0),
        (Constant(warmup=600), 0),  # to the end: no rung would be left
        (Geometric(), 0),
    ],
)
def test_how_long_a_learning_rate_rises(schedule: LearningRate, steps: int) -> None:
    assert steps_of_rise(schedule, 576) == steps


def test_the_first_rung_comes_after_the_rise_of_the_learning_rate(tmp_path: Path) -> None:
    runs = FakeRuns([[0.1 * number] * 9 for number in range(9)], 1, lambda running: 0, maximise=True)
    schedule = schedule_of(tmp_path, Prune.asha, 3, runs, rise=EVERY)
    schedule.run(Batch([[f"seed={number}"] for number in range(9)], 1))
    reached = sorted(trial.step // EVERY for trial in schedule.trials.values())
    assert reached == [3] * 6 + [9] * 3


def test_a_third_of_those_that_came_goes_on_the_highest_rung_first() -> None:
    def chosen(*values: float) -> int | None:
        return next_of(Prune.asha, {n: waiting(v) for n, v in enumerate(values, 1)}, [1, 3, 9], 3, maximise=True)

    assert chosen(0.3, 0.2) is None
    assert chosen(0.3, 0.2, 0.1) == 1
    assert chosen(0.3, 0.2, 0.1, 0.5, 0.6) == 5
    assert chosen(NAN, NAN, 0.1) == 3 and chosen(NAN, NAN, NAN) is None
    trials = {1: waiting(0.3), 2: Standing(Phase.running, (0.9,)), 3: waiting(0.1)}
    assert next_of(Prune.asha, trials, [1, 3, 9], 3, maximise=True) is None, "the one that may go on does"
    trials = {n: waiting(0.1 * n, 0.1 * n, 0.5 - 0.1 * n) for n in (1, 2, 3)} | {4: waiting(0.9), 5: waiting(0.8)}
    assert next_of(Prune.asha, trials, [1, 3, 9], 3, maximise=True) == 1
    assert next_of(Prune.asha, trials, [1, 3, 9], 3, maximise=False) == 3


def test_a_trial_that_failed_counts_as_the_worst_that_came() -> None:
    trials = {1: Standing(Phase.failed), 2: Standing(Phase.failed), 3: waiting(0.1)}
    assert next_of(Prune.asha, trials, [1, 3], 3, maximise=True) == 3
    trials = {1: Standing(Phase.failed, (0.9,)), 2: waiting(0.2), 3: waiting(0.1)}
    assert next_of(Prune.asha, trials, [1, 3], 3, maximise=True) is None, "it was the one to go on"


def test_what_ended_early_and_well_competes_with_its_last_value() -> None:
    trials = {1: finished(0.1, 0.8), 2: waiting(0.2, 0.2, 0.2), 3: waiting(0.3, 0.3, 0.3)}
    assert next_of(Prune.asha, trials, [1, 3, 9], 3, maximise=True) is None
    trials[1] = finished(0.1, 0.25)
    assert next_of(Prune.asha, trials, [1, 3, 9], 3, maximise=True) == 3


def test_the_best_of_the_highest_rung_is_trained_where_nothing_else_has_been() -> None:
    trials = {1: waiting(0.9), 2: waiting(0.1, 0.2, 0.3), 3: waiting(0.1, 0.2, 0.4), 4: Standing(Phase.failed)}
    assert champion(trials, [1, 3, 9], maximise=True) == 3
    assert champion(trials, [1, 3, 9], maximise=False) == 2
    assert champion(trials | {5: finished(0.1)}, [1, 3, 9], maximise=True) is None


def test_the_median_of_running_averages_decides() -> None:
    """Golovin et al. 2017: averages up to the step, of the finished ones alone; the best so far is compared."""
    others = {1: finished(0.0, 0.5, 1.0), 2: finished(0.25, 0.5, 1), 3: finished(0.5, 0.75, 1)}  # .25 .375 .625
    for own, out in (((0.37, 0.1), True), ((0.375, 0.1), False), ((0.38, NAN), False), ((NAN, NAN), True)):
        assert is_out(Prune.median, 9, others | {9: waiting(*own)}, maximise=True) is out, own
    running = {1: Standing(Phase.running, (0.9, 0.9)), 2: waiting(0.9, 0.9), 9: waiting(0.1, 0.1)}
    assert not is_out(Prune.median, 9, running, maximise=True), "none has finished"
    assert is_out(Prune.median, 9, {1: finished(0.2, 0.2), 9: waiting(0.5, 0.3)}, maximise=False)
    assert not is_out(Prune.asha, 9, others | {9: waiting(0.0, 0.0)}, maximise=True)
    assert next_of(Prune.median, others | {8: waiting(0.125), 9: waiting(0.25)}, [1, 3], 3, maximise=True) == 9


# ---------------------------------------------------------------- a schedule that is killed


EVERY = 5  # steps between evaluations


class Killed(BaseException):
    pass


@dataclass(frozen=True)
class FakeConfig:
    """What a schedule needs of a composed config."""

    config: dict[str, Any]


@dataclass
class FakeRuns:
    """An executor. `curves`: the objective after each evaluation; None: the run fails there. `draw(n)`: which of n
    trials ends next; negative: everything is killed.
    """

    curves: list[list[float | None]]
    places: int
    draw: Any
    maximise: bool
    every: int | None = None  # train.eval_every
    running: dict[int, TrialOrder] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    starts: int = 0

    def start(self, order: TrialOrder) -> None:
        assert len(self.running) < self.places and order.number not in self.running
        self.running[order.number] = order
        self.starts += 1

    def wait(self) -> TrialEnd:
        chosen = self.draw(len(self.running))
        for number in [*self.running] if chosen < 0 else [[*self.running][chosen]]:
            order = self.running.pop(number)
            code = self._train(order, cut=chosen < 0)
        if chosen < 0:
            raise Killed
        return TrialEnd(number, code)

    def stop(self) -> None:
        """They end when they are waited for."""

    def until(self, order: TrialOrder) -> int | None:
        """Where its last launch was to stop."""
        assert order.folder is not None
        return yaml.safe_load((order.folder / "config.yaml").read_text())["train"]["until"]

    def _train(self, order: TrialOrder, cut: bool) -> int:
        assert order.folder is not None
        config = order.composed.config
        curve, until = self.curves[order.number - 1], config["train"]["until"]
        total = EVERY * len(curve)
        end = min(total, until or total)
        before = self.steps.get(order.number, 0)
        assert before < end, "it is run only where something is left of it"
        if cut:
            end = (before + end) // 2
        fine = end if None not in curve else min(end, EVERY * curve.index(None))  # it fails at its next evaluation
        values = {step: curve[step // EVERY - 1] for step in range(EVERY, fine + 1, EVERY)}
        code = Exit.DIVERGED if fine < end and not cut else Exit.OK
        self.steps[order.number] = fine
        order.folder.mkdir(exist_ok=True)
        (order.folder / "config.yaml").write_text(yaml.safe_dump(config))
        record = {
            "identity": {},
            "results": True,
            "exit": None if cut else int(code),
            "cause": "finished" if end == total else "stopped",
            "objective": "score",
            "evaluations": {
                str(step): None if value is None or math.isnan(value) else value for step, value in values.items()
            },
            "plan": {"steps": total, "steps_per_epoch": EVERY},
        }
        (order.folder / "run.json").write_text(json.dumps(record))
        return code


def schedule_of(
    home: Path, rule: Prune, factor: int, runs: FakeRuns, requested: Callable[[], bool] = lambda: False, rise: int = 0
) -> Schedule:
    def compose(number: int, words: list[str]) -> Any:
        nodes = {"train": {"until": None, "eval_every": runs.every, "epochs": len(runs.curves[0])}, "budget": {}}
        return FakeConfig(
            {**nodes, "seed": number, "budget": {"cost_per_hour": None}, "checkpoint": {"mirror": ""}, "run": {}}
        )

    rules = Rules(
        SweepOptions(parallel=runs.places, prune=rule, factor=factor),
        ("score", "max" if runs.maximise else "min"),
        len(runs.curves),
        "",
        " ".join,
        lambda words: home / words[0],
        lambda total: rise,
    )
    record = SweepRecord(home, {})
    return Schedule(rules, cast(Any, runs), compose, lambda action: action(), requested, record)


def check_start(home: Path, runs: FakeRuns, schedule: Schedule, factor: int) -> None:
    """Have each promotion checked against what has come to the rung by then, counted here once more."""
    start = runs.start

    def checked(order: TrialOrder) -> None:
        done = runs.steps.get(order.number, 0) // EVERY
        places = rungs(len(runs.curves[0]), factor, len(runs.curves))
        if done in places[:-1] and runs.until(order) == EVERY * done:  # else it was cut on its way
            come = []
            for number, trial in schedule.trials.items():
                values = trial.standing.values
                lost = trial.phase is Phase.failed and len(values) < done
                come += (
                    [(values[done - 1] if len(values) >= done else NAN, number)] if len(values) >= done or lost else []
                )
            sign = -1 if runs.maximise else 1
            come.sort(key=lambda pair: (math.isnan(pair[0]), 0 if math.isnan(pair[0]) else sign * pair[0], pair[1]))
            best = [number for _, number in come[: len(come) // factor]]
            crowned = not runs.running and all(trial.phase is not Phase.finished for trial in schedule.trials.values())
            assert order.number in best or crowned, (done, come)
        start(order)

    runs.start = checked  # type: ignore[method-assign]


VALUES = st.one_of(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.just(NAN), st.none())


@examples(max_examples=12, phases=[HypothesisPhase.generate])
@given(data=st.data())
def test_a_sweep_killed_anywhere_goes_on_by_what_its_folders_say(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rule = data.draw(st.sampled_from([Prune.asha, Prune.median]), "rule")
    factor = data.draw(st.integers(2, 4), "factor")
    length = data.draw(st.integers(factor, 20), "evaluations")
    count = data.draw(st.integers(factor, 10), "trials")
    curves = data.draw(st.lists(st.lists(VALUES, min_size=length, max_size=length), min_size=count, max_size=count))
    home = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # it takes most of the time
        check_sweep(data, home, rule, factor, curves)


def check_sweep(data: st.DataObject, home: Path, rule: Prune, factor: int, curves: list[list[float | None]]) -> None:
    count, kills = len(curves), [3]

    def draw(running: int) -> int:
        end = data.draw(st.integers(-1 if kills[0] else 0, running - 1))
        kills[0] -= end < 0
        return end

    runs = FakeRuns(curves, data.draw(st.integers(1, 3), "places"), draw, data.draw(st.booleans(), "maximise"))
    runs.every = data.draw(st.sampled_from([None, EVERY]), "eval_every")
    start, words = runs.start, [[f"seed={number}"] for number in range(1, count + 1)]
    while True:
        schedule = schedule_of(home, rule, factor, runs)
        runs.running.clear()
        runs.start = start  # type: ignore[method-assign]
        if rule is Prune.asha:
            check_start(home, runs, schedule, factor)
        try:
            schedule.run(Batch(words, 1))
            break
        except Killed:
            continue
    schedule.close()
    phases = [trial.phase for trial in schedule.trials.values()]
    assert len(phases) == count and set(phases) <= {Phase.finished, Phase.pruned, Phase.failed}
    places = rungs(len(curves[0]), factor, count if rule is Prune.asha else None)
    stopped = [trial for trial in schedule.trials.values() if trial.phase is Phase.pruned]
    assert all(len(trial.standing.values) in places[:-1] for trial in stopped), "each at a rung"
    assert Phase.finished in phases or all(
        trial.phase is Phase.failed or not any(map(math.isfinite, trial.standing.values))
        for trial in schedule.trials.values()
    )
    # once more: what failed is tried again, nothing else
    before = runs.starts
    again = schedule_of(home, rule, factor, runs)
    runs.start = start  # type: ignore[method-assign]
    kills[0] = 0
    again.run(Batch(words, 1))
    again.close()
    if Phase.failed not in phases:
        assert runs.starts == before
        assert [trial.phase for trial in again.trials.values()] == phases


def test_a_sweep_that_is_stopped_says_which_trials_wait_and_which_have_not_begun(tmp_path: Path) -> None:
    runs = FakeRuns([[0.1 * number] * 9 for number in range(6)], 1, lambda running: 0, maximise=True)
    stops: list[bool] = []
    schedule = schedule_of(tmp_path, Prune.asha, 3, runs, lambda: len(stops) == 4)
    wait = runs.wait
    runs.wait = lambda: (stops.append(True), wait())[1]  # type: ignore[method-assign]
    with pytest.raises(SweepStopped):
        schedule.run(Batch([[f"seed={number}"] for number in range(6)], 1))
    schedule.close()
    assert [trial.shown.outcome for trial in schedule.trials.values()] == ["waits at step 15", "waits at step 15"]


def test_the_table_of_a_stopped_sweep_says_what_each_trial_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(stop: Callable[[FakeRuns], bool], rule: Prune) -> list[str]:
        runs = FakeRuns([[0.1 * number] * 9 for number in range(3)], 1, lambda running: 0, maximise=True)
        schedule = schedule_of(tmp_path, rule, 3, runs, lambda: stop(runs))
        with pytest.raises(SweepStopped):
            schedule.run(Batch([[f"seed={number}"] for number in range(3)], 1))
        schedule.close()
        return [trial.shown.outcome for trial in schedule.trials.values()]

    assert outcomes(lambda runs: runs.starts == 1, Prune.asha) == ["stopped, goes on"], "it knows its length, no more"
    assert outcomes(lambda runs: runs.starts == 0, Prune.asha) == ["stopped, goes on"], "of an earlier sweep"
    assert outcomes(lambda runs: runs.starts == 1, Prune.none) == ["finished"]
    assert "dtf: trial 1: finished\n" in capsys.readouterr().out
    kept = yaml.safe_load((tmp_path / "seed=0" / "config.yaml").read_text())
    assert left_alone("", tmp_path / "seed=0", kept).outcome == "finished before"
    longer = kept | {"train": kept["train"] | {"epochs": 99}}
    assert left_alone("", tmp_path / "seed=0", longer).outcome == "stopped, goes on"
    assert left_alone("", tmp_path / "seed=1", kept).outcome == "not begun"
    assert Found({"exit": Exit.DIVERGED}, None, finished=False, same_plan=True).code == Exit.DIVERGED


def test_ranks_that_somebody_insisted_on_killing_were_stopped_and_did_not_fail(tmp_path: Path) -> None:
    runs = FakeRuns([[0.1]], 1, lambda running: 0, maximise=True)
    schedule = schedule_of(tmp_path, Prune.none, 3, runs, lambda: runs.starts == 1)
    runs.wait = lambda: TrialEnd(1, Exit.PEER)  # type: ignore[method-assign]
    with pytest.raises(SweepStopped):
        schedule.run(Batch([["seed=0"]], 1))
    assert schedule.trials[1].shown.outcome == "stopped, goes on" and schedule.stopped == Exit.PREEMPTED


@pytest.mark.parametrize(("every", "first"), [(None, 1), (EVERY, EVERY)])
def test_a_trial_goes_on_at_once_from_where_it_learnt_how_long_it_is(
    tmp_path: Path, every: int | None, first: int
) -> None:
    runs = FakeRuns([[0.01 * number] * 18 for number in range(9)], 1, lambda running: 0, maximise=True, every=every)
    orders, start = [], runs.start

    def noted(order: TrialOrder) -> None:
        orders.append((order.number, order.composed.config["train"]["until"]))
        start(order)

    runs.start = noted  # type: ignore[method-assign]
    schedule_of(tmp_path, Prune.asha, 3, runs).run(Batch([[f"seed={number}"] for number in range(9)], 1))
    assert orders[:4] == [(1, first), (1, 2 * EVERY), (2, first), (2, 2 * EVERY)]
    assert orders[18:] == [(9, 6 * EVERY), (8, 6 * EVERY), (7, 6 * EVERY), (9, None)]
