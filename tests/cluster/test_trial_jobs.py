"""Trials as jobs of a scheduler, whose answers are scripted: what their ends come to, and what a silent one changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from dtf.api.trials import TrialEnd, TrialOrder
from dtf.cluster import record, trial_jobs
from dtf.cluster.platform import JobRequest, JobState, State
from dtf.cluster.trial_jobs import TrialJobs
from dtf.core.errors import Exit, PeerError


@dataclass
class Scheduler:
    """A platform. `answers`: for each job, what `state` says, the last one for good; an error is raised."""

    answers: dict[str, list[State | PeerError]] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    silent_to_cancel: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    submitted: int = 0
    sees_folder = True

    def render(self, request: JobRequest) -> dict[str, str]:
        return {}

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        if request.folder.name in self.refuses:
            raise PeerError("the quota is used up")
        self.submitted += 1
        return {"job": request.folder.name}

    def state(self, handle: dict[str, str]) -> JobState:
        answers = self.answers[handle["job"]]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, PeerError):
            raise answer
        return JobState(answer)

    def cancel(self, handle: dict[str, str]) -> None:
        if handle["job"] in self.silent_to_cancel:
            self.silent_to_cancel.remove(handle["job"])
            raise PeerError("no answer")
        self.cancelled.append(handle["job"])


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    def request_of(platform: Any, composed: Any, folder: Path, run_dir: str, name: str) -> JobRequest:
        nothing: dict[str, Any] = {"digest": "", "content": b"", "roles": {}, "nodes": 1, "grace_s": 1.0}
        return JobRequest(
            name=name, folder=folder, run_dir=run_dir, configs=({"launcher": {"name": "test"}},), **nothing
        )

    made = Scheduler()
    monkeypatch.setattr(trial_jobs, "request_of", request_of)
    monkeypatch.setattr(trial_jobs, "_LOOK_S", 0.0)
    monkeypatch.setattr(trial_jobs, "_ASK_S", 0.0)
    monkeypatch.setattr(record.JobRecord, "platform", made)
    return made


def jobs_of(scheduler: Scheduler, requested: Callable[[], bool] = lambda: False) -> TrialJobs:
    return TrialJobs(cast(Any, scheduler), 4, requested)


def order(home: Path, number: int) -> TrialOrder:
    return TrialOrder(number, "", cast(Any, None), home / str(number))


def write_run(folder: Path, id: str, exit: Exit | None, cause: str = "stopped") -> None:
    folder.mkdir(exist_ok=True)
    ended = None if exit is None else "now"
    run = {"id": id, "started": "then", "ended": ended, "exit": exit, "cause": cause}
    (folder / "run.json").write_text(json.dumps(run))


@pytest.mark.parametrize("before", [None, Exit.OK, Exit.PREEMPTED, Exit.DIVERGED])
@pytest.mark.parametrize("state", [State.failed, State.cancelled, State.finished, State.unknown])
def test_a_job_that_ended_before_its_run_began_is_lost_whatever_an_earlier_one_said(
    before: Exit | None, state: State, scheduler: Scheduler, tmp_path: Path
) -> None:
    if before is not None:
        write_run(tmp_path / "1", "earlier", before)
    scheduler.answers["1"] = [State.queued, state]
    jobs = jobs_of(scheduler)
    jobs.start(order(tmp_path, 1))
    assert jobs.wait() == TrialEnd(1, Exit.PEER)


@pytest.mark.parametrize(
    ("exit", "state", "code"),
    [
        (Exit.OK, State.finished, Exit.OK),
        (Exit.DIVERGED, State.failed, Exit.DIVERGED),
        (Exit.PREEMPTED, State.cancelled, Exit.PREEMPTED),  # somebody asked this trial to stop, which ends the sweep
        (Exit.PREEMPTED, State.failed, Exit.PEER),  # its next start was lost: nobody asked
        (None, State.failed, Exit.PEER),
    ],
)
def test_the_exit_code_is_that_of_the_run(
    exit: Exit | None, state: State, code: Exit, scheduler: Scheduler, tmp_path: Path
) -> None:
    write_run(tmp_path / "1", "earlier", Exit.OK)
    scheduler.answers["1"] = [state]
    jobs = jobs_of(scheduler)
    jobs.start(order(tmp_path, 1))
    write_run(tmp_path / "1", "own", exit)
    assert jobs.wait() == TrialEnd(1, code)


def test_a_job_goes_on_to_be_watched_and_is_known_from_the_launch_before_it(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    write_run(tmp_path / "1", "earlier", Exit.OK)
    scheduler.answers["1"] = [State.running]
    jobs_of(scheduler).start(order(tmp_path, 1))  # that process is killed
    jobs = jobs_of(scheduler)
    jobs.start(order(tmp_path, 1))
    assert scheduler.submitted == 1
    scheduler.answers["1"] = [State.failed]
    assert jobs.wait() == TrialEnd(1, Exit.PEER)


def test_a_scheduler_that_does_not_answer_is_asked_again(
    scheduler: Scheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.answers["1"] = [PeerError("no answer"), PeerError("no answer"), State.running, State.finished]
    jobs = jobs_of(scheduler)
    jobs.start(order(tmp_path, 1))
    write_run(tmp_path / "1", "own", Exit.OK)
    assert jobs.wait() == TrialEnd(1, Exit.OK)
    assert capsys.readouterr().err.count("no answer") == 1


def test_a_trial_that_the_scheduler_does_not_take_has_failed_and_the_others_go_on(
    scheduler: Scheduler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler.refuses, scheduler.answers["2"] = {"1"}, [State.finished]
    jobs = jobs_of(scheduler)
    for number in (1, 2):
        jobs.start(order(tmp_path, number))
    write_run(tmp_path / "2", "own", Exit.OK)
    assert [jobs.wait(), jobs.wait()] == [TrialEnd(1, Exit.PEER), TrialEnd(2, Exit.OK)]
    assert "trial 1: the quota is used up" in capsys.readouterr().err


def test_a_sweep_that_is_told_to_stop_cancels_all_its_trials(scheduler: Scheduler, tmp_path: Path) -> None:
    """Also one that has not begun, and one whose scheduler did not answer at first. What never answers is left."""
    jobs = jobs_of(scheduler, lambda: True)
    scheduler.silent_to_cancel = ["1", "3", "3"]
    for number in (1, 2, 3):
        scheduler.answers[str(number)] = [State.cancelled] if number < 3 else [PeerError("no answer")]
        jobs.start(order(tmp_path, number))
    ends = sorted(jobs.wait() for _ in range(3))
    assert ends == [TrialEnd(number, Exit.PREEMPTED) for number in (1, 2, 3)]
    assert sorted(scheduler.cancelled) == ["1", "2"]
