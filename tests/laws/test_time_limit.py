"""The time limit of an allocation: a run saves before it, by the saves that it has made, and goes on in the next."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtf.api.lr import Constant
from dtf.api.registry import registered
from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError, Exit, NoProgressError, OutOfTime
from dtf.core.run_record import SAVE_TIMES, longest_save_s, time_to_save_s
from dtf.core.types import Evaluate, Poll, Save, Stop, Ticket, Train
from dtf.data.batches import Epochs
from dtf.data.samplers import Sequential
from dtf.engine import time_limit
from dtf.engine.clock import POLL_S, Plan, PlannedClock
from dtf.engine.time_limit import END_S, TimeLimit
from dtf.host.deadline import deadline
from dtf.runs.compare import RecordedRun
from dtf.runs.time_left import refuse_short
from tests.conftest import Result

RUN = [
    "plugins=[tests.support.broken_strategies,tests.support.time_is_up]", "recipe=mortal", "recipe.rows=100",
    "step.batch_size=24", "step.micro_batch_rows=6", "train.steps=17", "train.log_every=4", "train.eval_every=6",
    "checkpoint.every_steps=3", "train.record=true", "lr=time_is_up", "lr.at=8", "launcher.devices=cpu",
    "launcher.threads=1",
]  # fmt: skip
LONG_S = 10_000
load_parts([])


def followed(clock: PlannedClock, ends_s: float, step_s: float, evaluation_s: float = 0.0) -> list[Ticket]:
    """The tickets of a run that has `ends_s` seconds until its save must begin, by a clock that stands still but for
    steps and evaluations.
    """
    tickets, now, polled = list[Ticket](), 0.0, 0
    for ticket in clock:
        tickets.append(ticket)
        values = {"loss": 1.0, "stop_requests": 0.0, "over_budget": 0.0, "evaluation_seconds": evaluation_s}
        match ticket:
            case Poll(step):
                values |= {"step_seconds": step_s if step > polled else math.inf, "spare_seconds": ends_s - now}
                polled = step
            case Evaluate():
                now += evaluation_s
            case Save() | Stop():
                assert now <= ends_s, f"{ticket} comes {now - ends_s:g} s late"
            case Train():
                now += step_s
        clock.done(ticket, values)
    return tickets


@pytest.mark.parametrize("step_s", [0.01, 0.3, 7.0])
@pytest.mark.parametrize("ends_s", [9.0, 20.0, 33.0])
@pytest.mark.parametrize("eval_every", [0, 3, 40])
def test_a_save_begins_in_time_whatever_the_pace(step_s: float, ends_s: float, eval_every: int) -> None:
    plan = Plan(1_000_000, 0, eval_every, 1000)
    tickets = followed(PlannedClock(plan, Epochs(Sequential(), 7, 2, 0), Constant()), ends_s, step_s, evaluation_s=4.0)
    stop = tickets[-1]
    assert isinstance(stop, Stop) and stop.reason == "time_limit" and tickets[-2] == Save(stop.step), tickets[-3:]
    evaluations = 1 + (stop.step // eval_every if eval_every else 0)
    assert stop.step * step_s > ends_s - 2 * step_s - POLL_S - 4.0 * evaluations, "far too early"


def test_where_no_time_is_left_no_step_is_made() -> None:
    clock = PlannedClock(Plan(100, 0, 0, 10), Epochs(Sequential(), 7, 2, 0), Constant())
    assert [next(clock)] == [Poll(0)]
    values = {"stop_requests": 0.0, "over_budget": 0.0, "step_seconds": math.inf, "evaluation_seconds": 0.0}
    clock.done(Poll(0), values | {"spare_seconds": -1.0})
    assert [*clock] == [Stop(0, "time_limit")]


class Ranks:
    """The ranks of a world, whose values are these."""

    def __init__(self, *values: float) -> None:
        self._others = values

    def gather(self, value: float) -> list[float]:
        return [value, *self._others]


def test_a_save_is_given_three_times_the_longest_so_far() -> None:
    limit = TimeLimit(time.time() + 1000, guess_s=25)
    limit.agree(Ranks(), saves=True, longest_s=None)
    assert limit.spare_s() == pytest.approx(1000 - 25 - END_S, abs=5), "none was measured"
    limit.agree(Ranks(600.0, math.inf), saves=True, longest_s=40.0)
    assert limit.spare_s() == pytest.approx(600 - SAVE_TIMES * 40 - END_S, abs=5), "an earlier launch, an earlier limit"
    limit.saved(10.0)
    assert limit.spare_s(mirror_s=20) == pytest.approx(600 - SAVE_TIMES * (40 + 20) - END_S, abs=5)
    limit.saved(100.0)
    assert limit.spare_s() == pytest.approx(600 - SAVE_TIMES * 100 - END_S, abs=5)
    assert limit.until_killed_s() == math.inf and not limit.is_over
    assert limit.stop().endswith("before the time limit of this allocation; the longest save took 100.00 s")
    assert limit.until_killed_s() == pytest.approx(600 - END_S, abs=5)


def test_where_nothing_is_saved_nothing_is_waited_for() -> None:
    limit = TimeLimit(time.time() + 1000, guess_s=25)
    limit.agree(Ranks(), saves=False, longest_s=40.0)
    assert limit.spare_s() == pytest.approx(1000 - END_S, abs=5)
    without = TimeLimit()
    without.agree(Ranks(math.inf), saves=True, longest_s=40.0)
    assert without.spare_s() == math.inf and without.row() == {}


def test_a_clock_that_is_set_does_not_move_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = TimeLimit(time.time() + 1000)
    monkeypatch.setattr(time_limit.time, "time", lambda: 0.0)
    assert limit.spare_s() == pytest.approx(1000 - END_S, abs=5)


@pytest.mark.parametrize("text", ["600", "1700000000000", "soon", "nan", "-1", "inf", "12:30"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"DTF_DEADLINE={text} must be the end of the allocation in seconds since"):
        deadline({"DTF_DEADLINE": text})
    assert deadline({"DTF_DEADLINE": "1700000000.5"}) == 1700000000.5
    assert deadline({}) == deadline({"DTF_DEADLINE": ""}) == math.inf


def launch(had_s: float, lasted_s: int = 1, **more: Any) -> dict[str, Any]:
    times = {"started": "2026-01-01T00:00:00+00:00", "ended": f"2026-01-01T00:00:{lasted_s:02}+00:00"}
    return {"time_left_s": had_s, **times, "results": False, "error": "OutOfTime"} | more


@pytest.mark.parametrize(
    ("earlier", "refused"),
    [
        ([launch(60), launch(60)], True),
        ([launch(60)], False),
        ([launch(60), launch(30)], False),
        ([launch(60, results=True, error=""), launch(60)], False),
        ([launch(60, results=True), launch(60, results=True)], True),  # gone on from a save, and not a step further
        ([launch(60, 58, error="Preempted"), launch(60, 59, error="Preempted")], True),
        ([launch(60, 20, error="Preempted"), launch(60)], False),
        ([launch(60, ended=None, error=""), launch(60)], False),
        ([launch(60) | {"time_left_s": None}, launch(60)], False),
    ],
)
def test_allocations_too_short_for_a_step_do_not_go_on_for_ever(earlier: list[dict], refused: bool) -> None:
    """A scheduler starts a job again that ends with 75."""
    if refused:
        with pytest.raises(NoProgressError, match="the last 2 launches .* and this one has no more time, 01:00; give"):
            refuse_short(60, earlier)
    else:
        refuse_short(60, earlier)
    refuse_short(600, earlier)


def test_a_time_limit_that_is_past_does_not_go_on_for_ever() -> None:
    with pytest.raises(OutOfTime, match="was 00:02 ago"):
        refuse_short(-2, [launch(-1)])
    with pytest.raises(NoProgressError, match="the last 2 launches .* was over 00:02 ago; give the allocation more"):
        refuse_short(-2, [launch(-300), launch(-1)])


def test_a_notice_of_the_scheduler_that_comes_before_each_first_step_does_not_either() -> None:
    told = [launch(100, 20, error="Preempted"), launch(100, 30, error="Preempted")]
    refuse_short(100, told)
    with pytest.raises(NoProgressError):
        refuse_short(100, told, notice_s=85)


def test_the_longest_save_of_all_launches_counts(tmp_path: Path) -> None:
    assert longest_save_s(tmp_path) is None
    record = {"earlier": [{"longest_save_s": 9.5}, {}], "longest_save_s": 2.0}
    for text, known in (
        (json.dumps(record), 9.5),
        (json.dumps(record | {"longest_save_s": 12}), 12.0),
        (json.dumps({"id": "x"}), None),
        ('{"longest_save_s": "x"}', None),
        ("{", None),
    ):
        (tmp_path / "run.json").write_text(text)
        assert longest_save_s(tmp_path) == known
        assert time_to_save_s(tmp_path, 25.0) == max(25.0, 3 * (known or 0))


def cut_short(run_dtf: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """A run whose time is over at step 8."""
    monkeypatch.setenv("DTF_DEADLINE", str(time.time() + LONG_S))
    monkeypatch.setattr(time_limit, "END_S", END_S)  # and set back, where ranks are in this process
    cut = run_dtf(*RUN, *words)
    monkeypatch.setattr(time_limit, "END_S", END_S)
    assert cut.code == Exit.PREEMPTED, cut.err
    (line,) = [line for line in cut.err.splitlines() if "error[" in line]
    assert "the time limit of the allocation is near after step" in line and "the state is saved" in line
    assert not (cut.folder / "checkpoints/step_000017").exists() and cut.out.count(" time_limit=") == 1
    record = json.loads((cut.folder / "run.json").read_text())
    assert record["time_left_s"] == pytest.approx(LONG_S, abs=60)
    assert longest_save_s(cut.folder) == record["longest_save_s"] > 0
    return cut


def test_a_run_saves_before_its_time_limit_and_says_so(
    run_dtf: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cut_short(run_dtf, monkeypatch, "launcher=inline", f"lr.marker={tmp_path}/mine")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, cls in registered("strategy").items() if cls.__module__[:4] == "dtf."])
def test_every_strategy_does_and_goes_on_bit_for_bit(
    name: str, run_dtf: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spread = [f"strategy={name}", "launcher.processes=2"]
    (tmp_path / "made").touch()
    whole = run_dtf(*RUN, *spread, f"lr.marker={tmp_path}/made")
    cut = cut_short(run_dtf, monkeypatch, *spread, f"lr.marker={tmp_path}/mine")
    again = run_dtf(*RUN, *spread, f"lr.marker={tmp_path}/mine", folder=cut.folder)
    assert whole.code == again.code == Exit.OK, again.err
    assert longest_save_s(cut.folder)
    a, b = RecordedRun.read(whole.folder), RecordedRun.read(cut.folder)
    assert {name: t.tobytes() for name, t in a.tensors.items()} == {name: t.tobytes() for name, t in b.tensors.items()}
    assert a.ids == b.ids
