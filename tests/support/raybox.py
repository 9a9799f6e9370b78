"""A real Ray cluster on this host: a head without cores, and nodes of two, each `ray start --block` at an address of
the loopback interface.

Nothing of it survives this process, nor listens beyond this host but what Ray opens itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

WAIT_S = 150


def until(what: Callable[[], object], why: str, seconds: float = WAIT_S) -> None:
    """Wait until something is so; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


class RayBox:
    """`nodes`: address -> process of `ray start`. The head is none of them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 1
        self.environment = os.environ | {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_health_check_period_ms": "300",  # a dead node is missed after a second and a half
            "RAY_health_check_timeout_ms": "1000",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60",
        }
        log = self._start("head", "--head", "--port=0", "--num-cpus=0", "--include-dashboard=false")
        text = log.read_text()
        self.address = text.split("--address='")[1].split("'")[0]
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def _start(self, name: str, *words: str, within: Sequence[str] = ()) -> Path:
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--object-store-memory=80000000"]
        if name == "head":
            words = (*words, f"--temp-dir={self._folder}")
        with log.open("wb") as file:
            self._last = subprocess.Popen(
                [*within, *command, *words], env=self.environment, stdout=file, stderr=file, start_new_session=True
            )
        if name == "head":
            self._head = self._last

        def started() -> bool:
            assert self._last.poll() is None, log.read_text()
            return "Ray runtime started" in log.read_text()

        until(started, f"{name} does not start")
        return log

    def add(self, hidden: Path | None = None) -> str:
        """Start a node of two cores, that sees an empty folder in the place of `hidden`; returns its address."""
        self._count += 1
        address = f"127.0.0.{self._count}"
        words = f"--address={self.address}", f"--node-ip-address={address}", "--num-cpus=2"
        mounted = "unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$@"', "sh"
        self._start(address, *words, within=mounted if hidden else ())
        self.nodes[address] = self._last
        return address

    def drain(self, address: str, seconds: int = 60) -> None:
        """Tell Ray that the node will be taken away."""
        words = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={self.address}"]
        subprocess.run(
            [*command, f"--node-id={self.ids()[address]}", *words, f"--deadline-remaining-seconds={seconds}"],
            env=self.environment,
            check=True,
            capture_output=True,
            timeout=60,
        )

    def kill(self, address: str) -> None:
        """As if the power failed: all processes of the node at once."""
        node = self.nodes.pop(address)
        every = [node.pid, *descendants(node.pid)]
        for pid in every:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in {*every, *descendants(node.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def ids(self) -> dict[str, str]:
        """Address -> Ray's id, of nodes that live."""
        code = (
            f"import ray; ray.init({self.address!r}, logging_level='ERROR', log_to_driver=False)\n"
            "for node in ray.nodes():\n"
            "    if node['Alive']: print(node['NodeManagerAddress'], node['NodeID'])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, check=True, capture_output=True, text=True, timeout=60
        )
        return dict(line.split() for line in done.stdout.splitlines())

    def close(self) -> None:
        for process in [*self.nodes.values(), self._head]:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


def descendants(pid: int) -> list[int]:
    """Of a process, the nearest first."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def supervisors(bundle: Path) -> list[int]:
    """Process ids of the job's processes: those whose command line names its bundle."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if f"--bundle={bundle}".encode() in words and b"-c" not in words:
                found.append(int(folder.name))
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
