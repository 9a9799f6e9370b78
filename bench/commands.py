"""Commands that train, timed by what they print: those of dtf, and of other launchers with `bench.plain_script`."""

from __future__ import annotations

import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import keeper
from bench.contest import KEPT
from bench.peers import Absent, python_of
from bench.plain_rows import rows_file
from bench.processes import PATIENCE_S, Process
from dtf.host.devices import cores

STEP = re.compile(rb"^(?:\[\S+\]: ?)?step=(\d+)/")
DTF = [sys.executable, "-m", "dtf"]
PEERS = {"accelerate launch": "trainers", "Lightning": "trainers"}
"""Launchers that have an environment of their own."""


class Seen(NamedTuple):
    """A line that says that a step was made."""

    seconds: float  # on the clock of time.perf_counter
    step: int


def dtf_run(processes: int, steps: int, *more: str) -> list[str]:
    """The default recipe, one line a step."""
    return [
        *DTF, "strategy=ddp", f"launcher.processes={processes}", f"train.until={steps}", "train.log_every=1",
        "train.eval_every=0", "observer=[console]", *more,
    ]  # fmt: skip


def script(launcher: str, processes: int, steps: int, *more: str) -> list[str]:
    """`bench.plain_script` by another launcher. Absent where its environment cannot be made.

    Its ranks have the threads that dtf's launcher gives to as many ranks, and keep freed memory as these do.
    """
    python = python_of(PEERS[launcher]) if launcher in PEERS else sys.executable
    threads = str(max(1, cores() // processes))
    given = ["env", f"OMP_NUM_THREADS={threads}", *(f"{name}={value}" for name, value in KEPT.items()), python]
    rest = ["--rows", str(rows_file()), "--steps", str(steps), *more]
    if launcher == "torchrun":
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        return [*given, *agent, "--max-restarts", "3", "-m", "bench.plain_script", "torch", *rest]
    if launcher == "accelerate launch":
        agent = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", str(processes), "--num_machines", "1"]
        agent += ["--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", threads]
        return [*given, *agent, "-m", "bench.plain_script", "accelerate", *rest]
    return [*given, "-m", "bench.plain_script", "lightning", "--ranks", str(processes), *rest]


class Command(Process):
    """A command under way."""

    def __init__(self, command: list[str], folder: Path, variables: Mapping[str, str | None] | None = None) -> None:
        given = {
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": None,  # dtf's launcher chooses
            "PYTHONDONTWRITEBYTECODE": None,  # modules are compiled once, as those of an installation
        }
        keeper.keep()  # not in what is timed
        self.began = time.perf_counter()
        super().__init__(command, given | dict(variables or {}), folder)

    def steps(self, patience_s: float = PATIENCE_S) -> Iterator[Seen]:
        """As they are printed, until the caller has seen enough. Absent where the command ends, or is silent for so
        long.
        """
        rest = b""
        while select.select([self.stdout], [], [], patience_s)[0]:
            if not (data := os.read(self.stdout, 1 << 16)):
                raise self.ended()
            *lines, rest = (rest + data).split(b"\n")
            at = time.perf_counter()
            yield from (Seen(at, int(found[1])) for line in lines if (found := STEP.match(line)))
        raise Absent(f"no step in {patience_s:.0f} s")

    def tree(self) -> dict[int, int]:
        """The processes that it started, itself included, and their parents."""
        parents = {pid: int(words[1]) for pid in _processes() if (words := _stat(pid))}
        found, more = {}, {self.pid: parents.get(self.pid, 0)}
        while more:
            found |= more
            more = {pid: parent for pid, parent in parents.items() if parent in more and pid not in found}
        return found

    def ranks(self) -> list[int]:
        """Processes below it that have no children themselves, and torch in memory, the oldest first. Absent where
        there is none.
        """
        tree = self.tree()
        leaves = set(tree) - set(tree.values()) - {self.pid}
        if not (found := sorted(pid for pid in leaves if memory_mb(pid) > 50)):
            raise Absent("it has no ranks")
        return found

    def cpu_s(self) -> float:
        """Processor seconds of its processes that are alive, and of those that they have waited for."""
        tick = os.sysconf("SC_CLK_TCK")
        return sum(sum(map(int, words[11:15])) for pid in self.tree() if (words := _stat(pid))) / tick


@contextmanager
def started(command: list[str], folder: Path, variables: Mapping[str, str | None] | None = None) -> Iterator[Command]:
    """The command; at the end all that it has started is gone. `variables`: see `Process`."""
    one = Command(command, folder, variables)
    try:
        yield one
    finally:
        one.end()


FILES = {"VmRSS": "status", "Pss": "smaps_rollup"}


def memory_mb(pid: int, key: str = "VmRSS") -> float:
    """Of a process, 0 where it is gone. VmRSS: what it has in memory. Pss: what it shares with no other, and its part
    of what it shares.
    """
    try:
        text = Path(f"/proc/{pid}/{FILES[key]}").read_text()
    except OSError:
        return 0.0
    found = re.search(rf"^{key}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1000 if found else 0.0


def _stat(pid: int) -> list[str]:
    """The words of /proc/PID/stat behind the name: state, parent, group, session, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
