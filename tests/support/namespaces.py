"""Two hosts on one machine: network namespaces joined by a virtual cable, each with a host name that only it knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass
class Host:
    """One of them. `cable`: its end of it."""

    pid: int
    name: str
    cable: str
    within: Sequence[str] = ()  # a command that runs its arguments

    def command(self, *words: str) -> list[str]:
        return [
            "nsenter",
            f"--target={self.pid}",
            "--user",
            "--net",
            "--uts",
            "--preserve-credentials",
            *self.within,
            *words,
        ]

    def call(self, *words: str) -> None:
        subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=30)

    def dtf(self, *overrides: str, cwd: Path, path: str = "") -> subprocess.Popen[str]:
        """A dtf command on this host; `path` comes first on PYTHONPATH."""
        environment = {key: value for key, value in os.environ.items() if not key.endswith("_SOCKET_IFNAME")}
        environment |= {"PYTHONPATH": os.pathsep.join(part for part in (path, str(ROOT)) if part)}
        return subprocess.Popen(
            self.command(sys.executable, "-m", "dtf", *overrides),
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _namespace(*command: str) -> subprocess.Popen[str]:
    """A process that keeps a namespace open until its standard input is closed."""
    keeper = subprocess.Popen(
        [*command, "sh", "-c", "echo made; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout and keeper.stderr
    if keeper.stdout.readline() != "made\n":
        raise OSError(keeper.stderr.read().strip())
    return keeper


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Host a and host b. Skips the test, with the reason, where namespaces are not permitted."""
    keepers = []
    try:
        try:
            keepers.append(_namespace("unshare", "--map-root-user", "--net", "--uts"))
            a = Host(keepers[0].pid, "host-a", "cable-a")
            keepers.append(_namespace(*a.command("unshare", "--net", "--uts")))
            b = Host(keepers[1].pid, "host-b", "cable-b")
            a.call("ip", "link", "add", a.cable, "type", "veth", "peer", "name", b.cable, "netns", str(b.pid))
            for host, address in zip((a, b), ADDRESSES, strict=True):
                host.call("hostname", host.name)
                host.call("ip", "address", "add", f"{address}/24", "dev", host.cable)
                for name in ("lo", host.cable):
                    host.call("ip", "link", "set", name, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error} {getattr(error, 'stderr', '')}")
        yield a, b
    finally:
        for keeper in reversed(keepers):
            keeper.kill()
            keeper.communicate()
