"""What ended a set of ranks, and whether to start them again: decisions without processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

import pytest

from dtf.core.errors import ConfigError, DtfError, Exit
from dtf.core.types import Event, Failed, Note
from dtf.launch.exit_cause import GroupResult, RankExit, group_result, last_frame, preload_error
from dtf.launch.restart_policy import run_with_restarts


def rank_exit(
    rank: int,
    status: int = 0,
    *,
    killed: bool = False,
    exit: Exit | None = None,
    at: float = 0.0,
    words: str = "it broke",
    starting: bool = False,
) -> RankExit:
    failed = None if exit is None else Failed(rank, 7, int(exit), words, "")
    return RankExit(rank, 7, starting, status, killed, failed, at, "its log")


def exited(rank: int, exit: Exit, at: float = 0.0, words: str = "it broke") -> RankExit:
    return rank_exit(rank, int(exit) << 8, exit=exit, at=at, words=words)


def signalled(rank: int, number: int, **more) -> RankExit:
    return rank_exit(rank, number, **more)


def killed(rank: int, **more) -> RankExit:
    return rank_exit(rank, signal.SIGKILL, killed=True, **more)


def unlike(rank: int) -> RankExit:
    """gloo aborts a process that gets another number of bytes than it waits for."""
    words = "  what():  [enforce fail at pair.cc:464] op.preamble.length <= op.nbytes. 8 vs 4. Received data size"
    return replace(signalled(rank, signal.SIGABRT), log=words)


def replaceable(found: RankExit) -> RankExit:
    return replace(found, replaceable=True)


@pytest.mark.parametrize(
    ("exits", "stop_signals", "exit", "rank", "external"),
    [
        pytest.param(
            [exited(0, Exit.HARDWARE, at=2), exited(1, Exit.PEER, at=1)], 0, Exit.HARDWARE, 0, True, id="bits change"
        ),
        pytest.param([rank_exit(0), rank_exit(1)], 0, Exit.OK, None, False, id="all end well"),
        pytest.param([signalled(0, signal.SIGKILL), killed(1)], 0, Exit.PEER, 0, True, id="a rank is killed"),
        pytest.param(
            [exited(0, Exit.BUG, at=1), signalled(1, signal.SIGKILL)],
            0,
            Exit.PEER,
            1,
            True,
            id="a lost connection is a consequence",
        ),
        pytest.param(
            [exited(0, Exit.BUG, at=1), signalled(1, signal.SIGABRT)],
            0,
            Exit.BUG,
            0,
            False,
            id="an abort may be a consequence",
        ),
        pytest.param([killed(0), signalled(1, signal.SIGABRT)], 0, Exit.PEER, 1, True, id="an abort without words"),
        pytest.param(
            [exited(0, Exit.PEER, at=1), unlike(1)], 0, Exit.CONFIG, 1, False, id="another size than the peer's"
        ),
        pytest.param([signalled(0, signal.SIGKILL), unlike(1)], 0, Exit.PEER, 0, True, id="another was killed"),
        pytest.param([exited(0, Exit.BUG, at=1), unlike(1)], 0, Exit.BUG, 0, False, id="one failed and called another"),
        pytest.param(
            [exited(0, Exit.BUG, at=2), exited(1, Exit.DATA, at=1)],
            0,
            Exit.DATA,
            1,
            False,
            id="the earliest words count",
        ),
        pytest.param([exited(0, Exit.PEER, at=1), killed(1)], 0, Exit.PEER, 0, True, id="a rank says it lost a peer"),
        pytest.param([killed(0), rank_exit(1, 3 << 8)], 0, Exit.PEER, 1, True, id="an exit without words"),
        pytest.param(
            [exited(0, Exit.PEER, at=1), rank_exit(1, 3 << 8)], 0, Exit.PEER, 1, True, id="it lost one without words"
        ),
        pytest.param(
            [exited(0, Exit.PREEMPTED), exited(1, Exit.PREEMPTED)], 1, Exit.PREEMPTED, 0, False, id="asked to stop"
        ),
        pytest.param(
            [exited(0, Exit.PREEMPTED), exited(1, Exit.PREEMPTED)],
            0,
            Exit.PREEMPTED,
            0,
            False,
            id="one rank was asked to stop",
        ),
        pytest.param(
            [exited(0, Exit.BUDGET), exited(1, Exit.BUDGET)], 0, Exit.BUDGET, 0, False, id="the budget is spent"
        ),
        pytest.param(
            [killed(0), signalled(1, signal.SIGTERM)], 1, Exit.PREEMPTED, 1, False, id="asked to stop before training"
        ),
        pytest.param(
            [killed(0, starting=True), killed(1, starting=True)],
            2,
            Exit.PREEMPTED,
            0,
            False,
            id="killed while starting",
        ),
        pytest.param([killed(0, starting=True), killed(1)], 1, Exit.PEER, 0, False, id="one of them had begun"),
        pytest.param(
            [killed(0, starting=True), rank_exit(1, 2 << 8, exit=Exit.CONFIG, starting=True)],
            1,
            Exit.CONFIG,
            1,
            False,
            id="a mistake found meanwhile",
        ),
        pytest.param(
            [killed(0), signalled(1, signal.SIGTERM)], 0, Exit.PEER, 1, True, id="SIGTERM from outside before training"
        ),
        pytest.param([exited(0, Exit.PREEMPTED), killed(1)], 1, Exit.PEER, 0, False, id="not in time"),
        pytest.param([killed(0), killed(1)], 2, Exit.PEER, 0, False, id="second signal"),
        pytest.param([exited(0, Exit.IO, at=1), killed(1)], 1, Exit.IO, 0, False, id="a failed save while stopping"),
        pytest.param(
            [rank_exit(0), replaceable(signalled(1, signal.SIGKILL))],
            0,
            Exit.OK,
            None,
            False,
            id="a replaceable rank is lost after the others' end",
        ),
        pytest.param(
            [exited(0, Exit.PREEMPTED), replaceable(killed(1))],
            1,
            Exit.PREEMPTED,
            0,
            False,
            id="a replaceable rank did not stop",
        ),
        pytest.param(
            [rank_exit(0), replaceable(exited(1, Exit.PEER))],
            0,
            Exit.OK,
            None,
            False,
            id="a replaceable rank lost the others",
        ),
        pytest.param(
            [rank_exit(0), replaceable(exited(1, Exit.BUG))],
            0,
            Exit.BUG,
            1,
            False,
            id="a replaceable rank fails after the others' end",
        ),
        pytest.param(
            [killed(0), replaceable(signalled(1, signal.SIGKILL))],
            0,
            Exit.PEER,
            1,
            True,
            id="a replaceable rank is lost too often",
        ),
    ],
)
def test_a_cause_is_told_from_its_consequences(
    exits: list[RankExit], stop_signals: int, exit: Exit, rank: int | None, external: bool
) -> None:
    found = group_result(exits, None, stop_signals)
    assert (found.exit, found.cause.rank if found.cause else None, found.external) == (exit, rank, external)
    assert found.cause is None or found.cause.exit == exit


def test_a_hang_is_the_cause_when_ranks_were_killed_for_it() -> None:
    hang = Failed(1, 7, int(Exit.PEER), "silent", "")
    assert group_result([killed(0), killed(1)], hang, 0) == GroupResult(Exit.PEER, hang, external=True)


@pytest.mark.parametrize(
    ("status", "how"), [(signal.SIGSEGV, "killed by SIGSEGV"), (3 << 8, "ended with exit status 3 without saying why")]
)
def test_a_log_is_promised_only_where_there_is_one(status: int, how: str) -> None:
    found = [
        group_result([replace(rank_exit(1, status), log=log)], None, 0).cause for log in (" \n", "first\nlast\n\n")
    ]
    assert found[0] and (found[0].message, found[0].traceback) == (f"{how}; it printed nothing", "")
    assert found[1] and (found[1].message, found[1].traceback) == (
        f"{how}; what it printed is in rank_1.log",
        "first\nlast",
    )


@dataclass
class Script:
    """Attempts that end as told: each (result, saved)."""

    ends: list[tuple[GroupResult, bool]]
    count: int = 0
    resumed: bool = False
    saved: bool = False

    def __call__(self, number: int) -> Script:
        assert number == self.count
        return self

    def run(self) -> GroupResult:
        end, self.saved = self.ends[self.count]
        self.count += 1
        return end


LOST = GroupResult(Exit.PEER, Failed(1, 7, int(Exit.PEER), "killed", ""), external=True)
BUG = GroupResult(Exit.BUG, Failed(1, 7, int(Exit.BUG), "it broke", "trace"))
OTHER_BUG = GroupResult(Exit.BUG, Failed(1, 9, int(Exit.BUG), "it broke elsewhere", "trace"))
DONE = GroupResult(Exit.OK)


@pytest.mark.parametrize(
    ("ends", "max_restarts", "exit"),
    [
        pytest.param([(LOST, False), (DONE, False)], 3, Exit.OK, id="a lost rank"),
        pytest.param([(LOST, False)] * 4, 3, Exit.NO_PROGRESS, id="three restarts without a checkpoint"),
        pytest.param([(LOST, False)] * 3, 2, Exit.PEER, id="restarts used up"),
        pytest.param([(LOST, False)], 0, Exit.PEER, id="no restarts"),
        pytest.param(
            [(LOST, False)] * 3 + [(LOST, True)] * 5 + [(DONE, False)],
            3,
            Exit.OK,
            id="a checkpoint starts the count anew",
        ),
        pytest.param([(BUG, False)], 3, Exit.BUG, id="a bug from the start repeats itself"),
        pytest.param([(BUG, True), (BUG, False)], 3, Exit.BUG, id="the same bug twice"),
        pytest.param([(BUG, True), (OTHER_BUG, True), (DONE, False)], 3, Exit.OK, id="two bugs after checkpoints"),
        *(
            pytest.param(
                [(GroupResult(exit, Failed(0, 7, int(exit), "no", "")), True)], 3, exit, id=f"{exit.name} is final"
            )
            for exit in (Exit.CONFIG, Exit.DATA, Exit.DIVERGED, Exit.IO, Exit.PREEMPTED, Exit.AUTH, Exit.BUSY)
        ),
    ],
)
def test_restarts_are_for_what_they_may_help(
    ends: list[tuple[GroupResult, bool]], max_restarts: int, exit: Exit
) -> None:
    script, seen = Script(ends), []
    found = run_with_restarts(script, max_restarts, lambda: False, seen.append)
    assert found.exit == exit
    assert script.count == len(ends)
    assert len(seen) == len(ends) - 1
    assert all(isinstance(event, Note) and "restart" in event.text for event in seen)


@pytest.mark.parametrize(
    ("rank", "restarts", "told", "end"),
    [
        (None, 0, [], "they differ; start again with the same run.dir"),
        (2, 0, [], "they differ; start again with the same run.dir, without that machine"),
        (
            None,
            1,
            ["at step 7: they differ; restart 1 of 1"],
            "they differ; launcher.max_restarts=1 is used up; start again with the same run.dir",
        ),
        (
            2,
            1,
            ["rank 2 at step 7: they differ; restart 1 of 1"],
            "they differ; launcher.max_restarts=1 is used up; start again with the same run.dir, without that machine",
        ),
    ],
)
def test_no_rank_is_blamed_for_a_difference_where_none_is_known_to_be_wrong(
    rank: int | None, restarts: int, told: list[str], end: str
) -> None:
    wrong = GroupResult(Exit.HARDWARE, Failed(rank, 7, int(Exit.HARDWARE), "they differ", ""), external=True)
    seen: list[Event] = []
    found = run_with_restarts(Script([(wrong, False)] * (restarts + 1)), restarts, lambda: False, seen.append)
    assert found.cause and (found.exit, found.cause.rank, found.cause.message) == (Exit.HARDWARE, rank, end)
    assert [event.text for event in seen if isinstance(event, Note)] == told


def test_nothing_restarts_after_a_request_to_stop() -> None:
    script = Script([(LOST, False)])
    assert run_with_restarts(script, 3, lambda: True, lambda event: None).exit is Exit.PEER


def test_a_mismatched_torchvision_is_named() -> None:
    error = preload_error("RuntimeError: operator torchvision::nms does not exist", "trace")
    assert isinstance(error, ConfigError)
    assert "install both together" in str(error)
    assert isinstance(preload_error("ModuleNotFoundError: No module named 'torch'", ""), ConfigError)
    other = preload_error("ValueError: 3", "trace")
    assert type(other) is DtfError
    assert "trace" in str(other)


def test_the_last_frame_is_of_the_main_thread_and_of_the_last_dump() -> None:
    old = 'Current thread 0x1 (most recent call first):\n  File "old.py", line 1 in old\n'
    other = 'Thread 0x2 (most recent call first):\n  File "loader.py", line 5 in wait\n'
    new = (
        f'{other}\nCurrent thread 0x1 (most recent call first):\n  File "a.py", line 9 in f\n  File "b.py", line 2 '
        "in g\n"
    )
    assert last_frame(f"hello\n{old}\n{new}") == "a.py:9 in f"
    assert last_frame("no dump here") == ""
