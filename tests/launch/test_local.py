"""launcher=local: ranks on this host, and everything that can happen to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Ended, Failed, Note, Place, Started
from dtf.host import core_reservation
from dtf.host.signals import Stop
from dtf.launch import forkserver_cache, supervised, worker_group
from dtf.launch.forkserver import ForkServer
from dtf.launch.rank_handle import Limits
from dtf.launch.worker_group import WorkerGroup
from tests.support.launching import HANG_S, LONG_S, Launched, launch

Start = Callable[..., Launched]
QUICK = Path(__file__).parents[1] / "support" / "quick_torch"  # for ranks that compute nothing: torch takes seconds


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("add", config={...}, threads=1)`: launch an entry of tests/support/entries.py. No rank may be left."""
    yield lambda name, **options: launch(f"tests.support.entries:{name}", tmp_path, **options)
    assert not children_of(forkserver_cache.fork_server({}).pid)


def children_of(pid: int) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return []


def test_ranks_meet_report_and_log(start: Start) -> None:
    done = start("add", config={"text": "short"})
    assert done.code == Exit.OK
    assert done.events == [Started(0, 10, 5, {"text": "short"}), Ended(10, "finished", {"sum": 3.0})]
    for rank in range(2):
        log = done.folder / f"rank_{rank}.log"
        assert log.read_text() == f"rank {rank} prints\nand writes\n"
        assert log.stat().st_mode & 0o777 == 0o600


def test_the_launching_process_has_no_torch_of_its_own() -> None:
    names = (
        "dtf.launch.local, dtf.launch.static, dtf.launch.torchrun, dtf.launch.inline, dtf.launch.env, "
        "dtf.runs.run_folder"
    )
    code = f"import sys, {names}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_a_rank_finds_the_world_as_it_is_now(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The server may be older than the directory, the environment and the config it forks for."""
    monkeypatch.setenv("DTF_TEST_NOW", "yes")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core_reservation, "_NAME", f"dtf-test-{os.getpid()}")  # other tests may run on this host
    done = start("add", config={"filler": "x" * 500_000}, threads=3, pin=len(os.sched_getaffinity(0)) > 1)
    places = [json.loads((done.folder / f"{rank}.json").read_text()) for rank in range(2)]
    for place in places:
        assert place["directory"] == str(tmp_path)
        assert place["environment"] == {"DTF_TEST_NOW": "yes", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
        assert place["threads"] == 3
        assert place["files"] <= forkserver_cache.files(2)
        assert place["listening"] and set(place["listening"]) == {"0100007F"}, "nothing listens but on loopback"
    if len(os.sched_getaffinity(0)) > 1:
        assert sorted(core for place in places for core in place["cores"]) == sorted(os.sched_getaffinity(0))
        assert not set(places[0]["cores"]) & set(places[1]["cores"])


@pytest.mark.slow
def test_launcher_env_is_there_from_the_first_import(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forkserver_cache, "_server", None)  # the warm one is for the others
    monkeypatch.setattr(forkserver_cache, "PRELOAD", ["json"])
    done = start("add", env={"DTF_TEST_VALUE": "7"}, interface="lo", processes=1)
    here = json.loads((done.folder / "0.json").read_text())
    assert here["environment"]["DTF_TEST_VALUE"] == "7"
    server = here["server"]
    assert b"DTF_TEST_VALUE=7" in Path(f"/proc/{server}/environ").read_bytes().split(b"\0")
    forkserver_cache.shut_down()
    assert not Path(f"/proc/{server}").exists()


def test_a_killed_rank_is_replaced_and_meets_nothing_old(start: Start) -> None:
    done = start("killed_once")
    assert done.code == Exit.OK
    warnings = [note.text for note in done.of(Note) if note.level == "warning"]
    assert len(warnings) == 1
    assert "rank 1 at step 7: killed by SIGKILL" in warnings[0] and "restart 1 of 3" in warnings[0]
    first, second = (json.loads(note.text) for note in done.of(Note) if note.level == "info")
    assert first[0] != second[0] and first[0].endswith("/0") and second[0].endswith("/1")
    assert second[1] is False, "the second attempt met a key of the first"
    assert "---- attempt 1" in (done.folder / "rank_0.log").read_text()


@pytest.mark.slow
def test_the_fork_server_is_replaced_when_it_dies(start: Start) -> None:
    done = start("server_killed_once")
    assert done.code == Exit.OK
    assert len(done.of(Note)) == 1


def test_a_stopped_fork_server_is_continued(start: Start) -> None:
    done = start("server_stopped_once")
    assert done.code == Exit.OK
    assert not done.of(Note), "nothing restarts"


def test_a_fork_server_that_stops_again_is_continued_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    wake, calls = ForkServer.wake, []

    def late(server: ForkServer) -> None:
        calls.append(server)
        if len(calls) > 4:  # two requests, and the ends of two ranks
            wake(server)

    monkeypatch.setattr(ForkServer, "wake", late)
    done = start("server_stopped_once")
    assert done.code == Exit.OK
    assert not done.of(Note), "nothing restarts"


def test_a_stop_signal_reaches_ranks_whose_server_is_stopped(start: Start) -> None:
    begun = time.monotonic()
    assert start("server_stopped_then_told", processes=1, grace_s=LONG_S).code == Exit.PREEMPTED
    assert time.monotonic() - begun < HANG_S, "within the grace"


@pytest.mark.slow
def test_a_fork_server_that_cannot_be_continued_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_REAP_S", 0.1)
    monkeypatch.setattr(ForkServer, "wake", lambda server: None)
    assert start("server_stopped_once").code == Exit.OK


@pytest.mark.slow
def test_a_fork_server_that_cannot_be_continued_does_not_outlast_the_grace(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_group, "_REAP_S", 0.1)
    monkeypatch.setattr(ForkServer, "wake", lambda server: None)
    begun = time.monotonic()
    done = start("server_stopped_then_told", processes=1, grace_s=0.2)
    assert time.monotonic() - begun < HANG_S
    assert done.code == Exit.PEER
    assert "launcher.grace_s" in done.of(Failed)[0].message


@pytest.mark.parametrize(
    ("error", "exit"), [("config", Exit.CONFIG), ("data", Exit.DATA), ("diverged", Exit.DIVERGED), ("value", Exit.BUG)]
)
def test_an_exception_is_final_and_told_once(
    start: Start, capsys: pytest.CaptureFixture[str], error: str, exit: Exit
) -> None:
    done = start("fails", config={"error": error})
    err = capsys.readouterr().err
    assert done.code == exit
    assert [(event.rank, event.exit) for event in done.of(Failed)] == [(1, exit)]
    assert not done.of(Note)
    assert err.count("Traceback") == (exit is Exit.BUG), "expected failures need no more than their line"
    assert err.splitlines()[-1].startswith(f"dtf: error[E_{exit.name}] rank=1 step=0: ")
    assert "rank one has had enough" in (done.folder / "rank_1.log").read_text()


def test_a_bug_after_a_checkpoint_is_tried_once_more(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    done = start("fails", config={"error": "value", "saved": True})
    assert done.code == Exit.BUG
    assert len(done.of(Note)) == 1
    assert capsys.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(
            "stopped", "rank 1: phase step, step 1, silent for .* s, stopped by a signal", marks=pytest.mark.slow
        ),
        ("python", r"rank 1: phase step, step 1, silent for .* s, at .*entries.py:\d+ in stays_in_python"),
    ],
)
def test_a_hang_is_noticed_and_explained(
    start: Start, capsys: pytest.CaptureFixture[str], how: str, words: str
) -> None:
    done = start("hangs", config={"how": how}, hang_timeout_s=0.3, start_timeout_s=LONG_S, max_restarts=0)
    assert done.code == Exit.PEER
    (failed,) = done.of(Failed)
    assert (failed.rank, failed.step) == (1, 1)
    assert re.search(words, failed.message), failed.message
    assert max(map(float, re.findall(r"silent for ([\d.]+) s", failed.message))) < HANG_S
    assert re.search(r"rank 0: phase step, step 2, silent for .* s, at .*\.py:\d+ in ", failed.message), failed.message
    assert capsys.readouterr().err.count("dtf: error[E_PEER] rank=1 step=1: ") == 1
    assert "most recent call first" in (done.folder / "rank_0.log").read_text()


@pytest.mark.parametrize("phase", ["start", "save"])
def test_a_stopped_rank_is_noticed_in_any_phase(start: Start, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "_STACKS_S", 0.0)  # nobody reads them
    done = start(
        "hangs", config={"how": "stopped", "phase": phase}, hang_timeout_s=0.3, start_timeout_s=LONG_S, max_restarts=0
    )
    (failed,) = done.of(Failed)
    assert failed.rank == 1
    silent = re.search(rf"rank 1: phase {phase}, step 2, silent for (.*) s, stopped by a signal", failed.message)
    assert silent and float(silent[1]) < HANG_S, failed.message


def test_a_long_evaluation_is_no_hang(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 evaluates, which has the time of a start: only that limit ends it."""
    monkeypatch.setattr(worker_group, "_STACKS_S", 0.0)  # nobody reads them
    done = start("hangs", config={"how": "evaluating"}, hang_timeout_s=LONG_S, start_timeout_s=0.6, max_restarts=0)
    assert "rank 1: phase evaluate, step 2" in done.of(Failed)[0].message


def test_a_stop_signal_reaches_ranks_which_save(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    done = start("stoppable", config={"signals": 1, "deaf": False, "twin": True})  # twice at once is one
    assert done.code == Exit.PREEMPTED
    [note] = done.of(Note)
    assert note.text.startswith("asked to stop: ranks finish their step, save and leave, within"), "nothing restarts"
    assert capsys.readouterr().err.startswith("dtf: error[E_PREEMPTED] rank=0 step=5: asked to stop")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("deaf", [False, True])
def test_a_stop_signal_before_training_ends_the_run_at_once(start: Start, deaf: bool) -> None:
    begun = time.monotonic()
    done = start("told_before_it_listens", config={"deaf": deaf}, grace_s=LONG_S)
    assert done.code == Exit.PREEMPTED and "while ranks were starting; nothing is lost" in done.of(Failed)[0].message
    assert time.monotonic() - begun < HANG_S


def test_a_second_signal_stops_at_once(start: Start) -> None:
    begun = time.monotonic()
    done = start("stoppable", config={"signals": 2, "deaf": True}, grace_s=LONG_S)
    assert time.monotonic() - begun < HANG_S
    assert done.code == Exit.PEER
    assert "second signal" in done.of(Failed)[0].message


def test_ranks_that_do_not_stop_are_killed(start: Start) -> None:
    done = start("stoppable", config={"signals": 1, "deaf": True}, grace_s=0.2)
    assert done.code == Exit.PEER
    assert "launcher.grace_s" in done.of(Failed)[0].message


def test_a_crash_shows_what_the_rank_said_last(start: Start) -> None:
    failed = start("crashes", max_restarts=0).of(Failed)[0]
    assert "SIGSEGV" in failed.message
    assert "Fatal Python error: Segmentation fault" in failed.traceback
    failed = start("leaves", max_restarts=0).of(Failed)[0]
    assert "exit status 3" in failed.message
    assert "something is printed" in failed.traceback


def test_a_rank_that_leaves_with_status_0_has_not_trained(start: Start) -> None:
    done = start("leaves", config={"status": 0}, max_restarts=0)
    assert done.code == Exit.PEER
    assert "ended with exit status 0 before its work was done, as by os._exit()" in done.of(Failed)[0].message


def test_a_warning_of_a_rank_is_in_its_log(start: Start) -> None:
    done = start("warns")
    assert {event.text for event in done.of(Note)} == {"rank 0 warns", "rank 1 warns"}
    for rank in range(2):
        assert (done.folder / f"rank_{rank}.log").read_text() == f"dtf: warning: rank {rank} warns\n"


def test_no_event_is_lost(start: Start) -> None:
    done = start("floods", processes=1)
    assert [int(note.text.split()[0]) for note in done.of(Note)] == list(range(2000))


def test_an_exception_in_the_launching_process_leaves_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer(["json"], {})

    def see(event) -> None:
        raise KeyboardInterrupt

    order = {"entry": "tests.support.entries:floods", "config": {}, "folder": str(tmp_path), "run_id": "r"}
    order |= {"environment": dict(os.environ), "directory": os.getcwd(), "path": [str(QUICK), *sys.path]}
    with contextlib.closing(Stop()) as stop, pytest.raises(KeyboardInterrupt):
        WorkerGroup(server, order, [Place(threads=1)], [[]], tmp_path, Limits(60, 60, 1), stop, see).run()
    assert not server.alive


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    server = ForkServer(["no_such_package"], {})
    with contextlib.closing(Stop()) as stop, pytest.raises(ConfigError, match="no_such_package is not installed"):
        WorkerGroup(server, {}, [Place()], [[]], tmp_path, Limits(60, 60, 1), stop, lambda event: None).run()


def test_no_rank_outlives_a_killed_launcher(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        root = Path(__file__).parents[2]
        command = [sys.executable, "-m", "tests.support.entries", str(tmp_path), str(listener.getsockname()[1])]
        with subprocess.Popen(command, cwd=root, env={**os.environ, "PYTHONPATH": str(QUICK)}) as launcher:
            try:
                pids = set()
                channels = [listener.accept()[0] for _ in range(2)]
                for channel in channels:
                    pids |= {int(word) for word in channel.makefile().readline().split()}
                assert len(pids) == 3, "two ranks and their server"
                handles = [os.pidfd_open(pid) for pid in pids]
            finally:
                launcher.kill()
        deadline = time.monotonic() + HANG_S
        for handle in handles:
            ready, _, _ = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "a process of the run outlives its launcher"
            os.close(handle)
        for channel in channels:
            channel.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"processes": 0}, "launcher.processes=0 must be 1 to 1024"),
        ({"processes": "many"}, "launcher.processes=many is not of type int | auto"),
        ({"threads": -1}, "launcher.threads=-1 must be 0 to 1024"),
        ({"max_restarts": 4}, "launcher.max_restarts=4 must be 0 to 3"),
        ({"hang_timeout_s": 0.0}, "launcher.hang_timeout_s=0.0 must be more than 0 and at most 1000000"),
        ({"grace_s": -1.0}, "launcher.grace_s"),
        ({"env": {"A=B": "1"}}, "launcher.env.A=B=1 must be a name without '='"),
        (
            {"env": {"OMP_NUM_THREADS": "2"}},
            "launcher.env.OMP_NUM_THREADS=2: the launcher sets .*; use launcher.threads",
        ),
        ({"env": {"": "1"}}, "launcher.env.=1 must be a name without '='"),
        ({"env": {"A": "\0"}}, r"launcher.env.A=\\x00 must be text without NUL"),
        ({"env": {"A\0": "1"}}, r"launcher.env=A\\x00 must be text without NUL"),
        ({"devices": "tpu"}, "launcher.devices=tpu is no choice"),
        ({"pin": True, "processes": 1000}, "launcher.pin=true needs a core for each"),
        ({"env": {"OMP_PROC_BIND": "close"}}, "OMP_PROC_BIND=close binds the threads of all 2 ranks to the same cores"),
        ({"env": {"OMP_PLACES": "cores"}}, "OMP_PLACES=cores binds the threads of all 2 ranks to the same cores"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        launch("tests.support.entries:add", tmp_path, **options)


def test_a_limit_of_open_files_that_ranks_would_run_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised.devices, "allow_files", lambda count: 20)
    with pytest.raises(
        ConfigError,
        match=r"launcher.processes=2 needs \d+ open files in one process, this shell allows 20; see ulimit -n",
    ):
        launch("tests.support.entries:add", tmp_path)


@pytest.mark.parametrize(
    ("argv", "starts"),
    [
        ([], True),
        (["strategy=dp", "-m"], True),
        (["launcher=local", "job=verify"], True),
        (["experiment=relay"], True),
        (["--config-dir", "conf", "experiment=on_slurm"], False),
        (["--config-dir", "conf", "+experiment=[relay,mine]"], False),
        (["--config-dir", "conf", "experiment=mine", "launcher=local"], True),
        (["--config-name=mine"], False),
        (["launcher=inline"], False),
        (["launcher=env"], False),
        (["job=describe"], False),
        (["--help"], False),
        (["--cfg", "job"], False),
        (["--config-dir", "conf", "recipe=mine"], True),
        (["+launcher.env.X=1"], False),
    ],
)
def test_torch_starts_loading_only_for_runs_of_this_host(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], starts: bool
) -> None:
    made = []
    monkeypatch.setattr(forkserver_cache, "_server", None)
    monkeypatch.setattr(forkserver_cache, "ForkServer", lambda *_: made.append(1))
    forkserver_cache.prestart(argv)
    assert bool(made) == starts
