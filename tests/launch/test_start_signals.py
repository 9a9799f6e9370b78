"""A signal to stop while a command starts: exit code 75 with its line, from the first lines of Python on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from dtf.core.errors import Exit
from dtf.engine.rank import stop_signals
from dtf.host.signals import Stop
from tests.support.launching import HANG_S

ROOT = Path(__file__).parents[2]
TOY = [
    "recipe=toy",
    "launcher.devices=cpu",
    "launcher.threads=1",
    "step.batch_size=16",
    "train.steps=1000000",
    "train.eval_every=0",
    "observer=[]",
]
TRIALS = 60

Begin = Callable[..., list[subprocess.Popen]]


@pytest.fixture
def begin(tmp_path: Path, port: int) -> Iterator[Begin]:
    """`begin("env", ranks=[0, 1])`: the processes of a command. None is left."""
    begun: list[subprocess.Popen] = []

    def start(
        launcher: str, ranks: list[int] | None = None, folder: str = "run", plugin: str = "tests.support.toy"
    ) -> list[subprocess.Popen]:
        command = [sys.executable, "-m", "dtf", *TOY, f"launcher={launcher}", f"run.dir={tmp_path / folder}"]
        command.append(f"plugins=[{plugin}]")
        if launcher == "local":
            command.append("launcher.processes=2")
        new = []
        for rank in ranks or [0]:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
            environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", **{k: str(v) for k, v in place.items()}}
            new.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
        begun.extend(new)
        return new

    yield start
    for process in begun:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> Iterator[int]:
    """A port for the store of rank 0, which may bind it too."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]


def until(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + HANG_S
    while not reached():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.001)


def handles_it(process: subprocess.Popen) -> bool:
    """Whether a handler for SIGTERM is set."""
    caught = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)


def loads_torch(process: subprocess.Popen) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{process.pid}/maps").read_text()


def ended(process: subprocess.Popen) -> str:
    """The error line of a process that was told to stop."""
    text = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == Exit.PREEMPTED, (process.returncode, text)
    lines = [line for line in text.splitlines() if "error[" in line]
    assert len(lines) == 1 and "E_PREEMPTED" in lines[0], text
    return lines[0]


@pytest.mark.parametrize("moment", ["first", pytest.param("torch", marks=pytest.mark.slow), "wait"])
def test_a_rank_that_somebody_else_started(begin: Begin, port: int, moment: str) -> None:
    """Rank 0 of two, and rank 1 never comes: at its first lines, while it imports torch, while it waits in C code."""
    [process] = begin("env")

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    until(
        {"first": lambda: handles_it(process), "torch": lambda: loads_torch(process), "wait": listens}[moment], process
    )
    process.terminate()
    assert "before any work began" in ended(process)


@pytest.mark.slow
def test_a_rank_whose_peer_has_left_already(begin: Begin, port: int) -> None:
    """The first signal ended rank 1; rank 0, which has its own handler by now, waits for it in C code."""
    [process, peer] = begin("env", ranks=[0, 1], plugin="tests.support.left_alone")
    peer.wait(HANG_S)
    store = TCPStore("127.0.0.1", port, timeout=timedelta(seconds=HANG_S))
    store.wait(["waits"])
    process.terminate()
    assert "before any work began" in ended(process)


@pytest.mark.parametrize("moment", ["first", "folder"])
def test_a_command_that_starts_ranks(begin: Begin, tmp_path: Path, moment: str) -> None:
    """At its first lines, and as soon as there is a run folder, which then says how the run ended."""
    [process] = begin("local")
    record = tmp_path / "run" / "run.json"
    until(record.exists if moment == "folder" else lambda: handles_it(process), process)
    process.terminate()
    process.terminate()
    line = ended(process)
    if moment == "folder":
        assert "while ranks were starting; nothing is lost" in line
        assert json.loads(record.read_text())["exit"] == Exit.PREEMPTED
    else:
        assert "before any work began" in line and not record.exists()


def _trained(process: subprocess.Popen) -> bool:
    """Whether the second signal came while a launcher's ranks trained: it kills them at once."""
    process.wait(HANG_S)
    return process.returncode == Exit.PEER


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "seconds"), [("local", 4.0), ("env", 9.0)])
@pytest.mark.parametrize("times", [1, 2])
def test_at_any_moment_of_a_start(begin: Begin, launcher: str, seconds: float, times: int) -> None:
    for seed in range(TRIALS):
        moment = random.Random(f"{launcher} {times} {seed}").uniform(0, seconds)
        print(f"{launcher}: trial {seed}, {moment:.3f} s after the start, {times} signals")
        processes = begin(launcher, [0, 1] if launcher == "env" else None, f"run{seed}")
        for process in processes:
            until(lambda process=process: handles_it(process), process)
        for _ in range(times):
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(moment)
            for process in processes:
                process.terminate()
            moment = 0.3  # farther apart than one request that comes twice
        for process in processes:
            if times == 1 or not _trained(process):
                ended(process)


def test_who_listens_next_knows_what_was_heard() -> None:
    """Between the handlers of the launching process and those of its ranks no signal is lost."""
    before = signal.getsignal(signal.SIGTERM)
    with Stop() as outer:
        os.kill(os.getpid(), signal.SIGTERM)
        with Stop() as inner:
            assert (outer.count, inner.count) == (1, 1)
            assert inner.socket.recv(1, socket.MSG_DONTWAIT)
        with stop_signals() as received:
            assert received
    with Stop() as fresh, stop_signals() as received:
        assert not fresh.count and not received
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_forked_process_stops_by_default() -> None:
    """What a command forks has no thread that answers."""
    code = (
        "import os, signal\n"
        "from dtf.host import starting\n"
        "starting.listen()\n"
        "starting.listen()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    signal.pause()\n"
        "os.kill(pid, signal.SIGTERM)\n"
        "print(os.waitpid(pid, 0)[1] == signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_a_command_that_ends_by_a_signal_has_its_own_exit_code() -> None:
    """A second one while it ends changes nothing, and tells nothing wrong."""
    code = (
        "import os, signal, sys, time\n"
        "from dtf.host import starting\n"
        "starting.listen()\n"
        "from dtf.host.signals import Stop\n"
        "with Stop() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "for number in (signal.SIGTERM, signal.SIGHUP):\n"
        "    os.kill(os.getpid(), number)\n"
        "time.sleep(0.3)\n"  # in which the thread would end it
        "sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (7, "")


def test_an_ignored_hangup_stays_ignored() -> None:
    code = (
        "import os, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from dtf.host import starting\n"
        "starting.listen()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print('goes on')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "goes on\n"), done.stderr
