"""dtf commands, each a process of its own that starts one process of a run, as an operator would type them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtf.core.endpoint_file import find
from dtf.core.errors import DtfError
from dtf.jobs.status import ask

ROOT = Path(__file__).parents[2]
TOKEN = "a secret that all of them know"
SOON_S = 60.0


def endpoints(count: int) -> list[str]:
    """Endpoints on loopback whose ports are free now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    endpoints = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in held]
    for listener in held:
        listener.close()
    return endpoints


def words(where: list[str], role: str, number: int, *more: str, slow: bool = False) -> list[str]:
    """Arguments of the command for one process. `slow`: of a run that leaves time to others."""
    own = ["launcher=manual", f"launcher.endpoints=[{','.join(where)}]", f"launcher.role={role}"]
    own += [f"launcher.id={number}", f"strategy.servers={len(where)}"]
    task = [
        f"plugins=[tests.support.{'kill_trigger' if slow else 'toy'}]",
        "recipe=slow_toy" if slow else "recipe=toy",
        "strategy=pserver",
        "step.batch_size=24",
        "train.log_every=1",
        "train.eval_every=0",
        "lr.warmup=0",
    ]
    return [*task, "launcher.threads=1", "launcher.devices=cpu", "observer=[console,jsonl]", *own, *more]


class Command:
    """A dtf command that runs; what it prints is in `file`."""

    def __init__(self, file: Path, arguments: list[str], token: str = TOKEN) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DTF_TOKEN": token}
        self.file = file
        with file.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dtf", *arguments],
                cwd=file.parent,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def output(self) -> str:
        return self.file.read_text()

    def end(self) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(SOON_S)

    def rank(self) -> int:
        """The process of its rank: a child of its fork server, which is a child of its own."""
        children = dict[int, int]()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                children[int(path.name)] = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
        servers = [pid for pid, parent in children.items() if parent == self.process.pid]
        return next(pid for pid, parent in children.items() if parent in servers)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def kill(self) -> None:
        """Kill it and its ranks, as when its host is lost."""
        self.process.kill()
        self.process.wait()


@contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Command]]:
    """`start(name, arguments)`: a Command; whatever still runs at the end is killed."""
    started: list[Command] = []

    def start(name: str, arguments: list[str], **options: Any) -> Command:
        started.append(Command(folder / f"{name}.out", arguments, **options))
        return started[-1]

    try:
        yield start
    finally:
        for command in started:
            if command.process.poll() is None:
                command.kill()


def until(seen: Callable[[], Any], *watched: Command) -> Any:
    """Wait until `seen` returns a true value, and return it; the commands must not end before."""
    start = time.monotonic()
    while not (found := seen()):
        for command in watched:
            assert command.process.poll() is None, command.output()
        assert time.monotonic() - start < SOON_S, [command.output() for command in watched]
        time.sleep(0.05)
    return found


def status(folder: Path) -> list[dict[str, Any]]:
    """What the servers of the run in `folder` say; nothing while they do not answer."""
    try:
        return ask(find(folder))
    except DtfError:
        return []


def members(folder: Path) -> list[int]:
    """Numbers of the trainers of the run."""
    return [trainer["trainer"] for trainer in status(folder)[0]["trainers"]] if status(folder) else []
