"""A plugin for tests: a look at what the processes of a run have open while it is at work.

The recipe `held` stops at its rows until somebody has looked; the observer `open_doors` looks, once, and lets it go on.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.observer import Observer
from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.core.endpoint_file import EndpointFile, find
from dtf.core.errors import PeerError
from dtf.core.types import Event, Measured
from dtf.launch import forkserver_cache
from tests.support.launching import HANG_S
from tests.support.toy import Rows, Toy

if TYPE_CHECKING:
    import numpy as np
    import torch

_LISTENS, _UNCONNECTED, _ACCEPTS = "0A", "07", 0x10000
_AHEAD = 8
"""Times that rows are fetched before the wait: more than the checks of a start and the first step take."""
NOBODY = 65534


class HeldRows(Rows):
    """Rows that wait for a file."""

    def __init__(self, rows: int, split: str, marker: Path) -> None:
        super().__init__(rows, split, -1)
        self._fetched, self._marker = 0, marker

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._fetched += 1
        until = time.monotonic() + HANG_S
        while self._fetched > _AHEAD and not self._marker.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return super().fetch(ids, epoch)


@register("recipe", "held")
class Held(Toy):
    marker: str = option(doc="the file that is waited for")

    def open_data(self, split: str, seed: int) -> Dataset:
        return HeldRows(self.rows, split, Path(self.marker)) if split == "train" else super().open_data(split, seed)


@dataclass(frozen=True)
class Door:
    """A socket that others may come to."""

    process: str  # "rank 0", or what the process is besides
    kind: str  # "tcp", "udp", "unix"
    address: str
    port: int
    serves: str  # "parameter server", or "gloo" for whatever else a rank has
    shared: bool  # another socket of this user may listen there too


@dataclass
class Seen:
    """What was found."""

    doors: list[Door] = field(default_factory=list)
    files: dict[str, set[str]] = field(default_factory=dict)  # open for writing beyond the run folder, by process
    threads: dict[str, list[str]] = field(default_factory=dict)  # names of threads, by rank
    opened: dict[str, bool] = field(default_factory=dict)  # memory of the ranks -> whether another user could open it
    modes: dict[str, str] = field(default_factory=dict)  # of what was in the run folder
    strangers: list[socket.socket] = field(default_factory=list)


SEEN: list[Seen] = []
"""What the observers of this process have found."""


@register("observer", "open_doors")
class OpenDoors(Observer):
    """Look at the processes of this run; then talk nonsense to whatever listens, and let the run go on."""

    marker: str = option(doc="the file that the ranks wait for")

    def open(self, folder: Path, config: dict) -> None:
        self._folder, self._looked = folder, False

    def see(self, event: Event) -> None:
        if isinstance(event, Measured) and not self._looked:
            self._looked = True
            try:
                SEEN.append(_look(self._folder))
            finally:
                Path(self.marker).touch()

    def close(self) -> None:
        for stranger in SEEN[-1].strangers if self._looked and SEEN else ():
            stranger.close()


def _look(folder: Path) -> Seen:
    seen = Seen()
    try:
        live: EndpointFile | None = find(folder)
    except PeerError:
        live = None
    served = {int(endpoint.rpartition(":")[2]) for endpoint in live.endpoints} if live else set()
    server = forkserver_cache.fork_server({}).pid
    ranks = _ranks(server, folder)
    for pid, name in {**ranks, server: "fork server", os.getpid(): "launching process"}.items():
        for door in _doors(pid, name, served):
            seen.doors.append(door)
            if door.kind == "tcp":
                seen.strangers.append(_talk_nonsense(door))
    for pid, name in ranks.items():
        seen.threads[name] = [path.read_text().strip() for path in Path(f"/proc/{pid}/task").glob("*/comm")]
        seen.files[name] = _written(pid, folder)
        if os.geteuid() == 0:
            seen.opened |= {f"{name}: {os.readlink(fd)}": _opens_to_others(fd) for fd in _memory(pid)}
    seen.modes = {
        str(path.relative_to(folder)): f"{stat.S_IMODE(path.stat().st_mode):04o}" for path in folder.rglob("*")
    }
    return seen


def _ranks(server: int, folder: Path) -> dict[int, str]:
    """Process id -> name, of those whose output goes to a log of this run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            log = re.fullmatch(rf"{re.escape(str(folder))}/rank_(\d+)\.log", os.readlink(path))
        except OSError:  # of another user, or it has ended
            continue
        if log:
            found[int(path.parts[2])] = f"rank {log[1]}"
    return found


def _doors(pid: int, name: str, served: set[int]) -> list[Door]:
    targets = [re.match(r"socket:\[(\d+)\]", _target(path)) for path in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {match[1] for match in targets if match}
    doors = []
    for kind, table in (("tcp", "tcp"), ("tcp", "tcp6"), ("udp", "udp"), ("udp", "udp6")):
        for line in _lines(Path(f"/proc/{pid}/net/{table}")):
            if line[9] in inodes and line[3] == (_LISTENS if kind == "tcp" else _UNCONNECTED):
                host, port = _address(line[1])
                serves = "parameter server" if port in served else "gloo"
                doors.append(Door(name, kind, host, port, serves, kind == "tcp" and _can_be_shared(host, port)))
    return doors + [
        Door(name, "unix", "".join(line[7:]), 0, "", False)
        for line in _lines(Path(f"/proc/{pid}/net/unix"))
        if line[6] in inodes and (line[7:] or int(line[3], 16) & _ACCEPTS)  # it has a name, or listens
    ]


def _lines(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:  # closed meanwhile
        return ""


def _address(text: str) -> tuple[str, int]:
    """Of /proc/net/tcp: 32-bit words in the order of bytes of this machine."""
    words, _, port = text.partition(":")
    packed = b"".join(struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed), int(port, 16)


def _can_be_shared(host: str, port: int) -> bool:
    """Whether this user could listen at the same port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.bind((host, port))
            other.listen()
        except OSError:
            return False
        return True


def _talk_nonsense(door: Door) -> socket.socket:
    """A connection to a listening socket, after words that nobody expects there. It stays open."""
    stranger = socket.create_connection((door.address, door.port), timeout=HANG_S)
    stranger.sendall(bytes(range(64)))
    return stranger


def _written(pid: int, folder: Path) -> set[str]:
    """Files beyond the run folder that a process has open for writing, or mapped so that others see what it writes."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        target = _target(path)
        if target.startswith("/") and not target.startswith(("/dev/null", "/proc/", str(folder))):
            flags = re.search(r"flags:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{path.name}").read_text())
            if flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR):
                found.add(target)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        part = line.split(maxsplit=5)
        if len(part) == 6 and re.match("rw.s", part[1]) and not part[5].startswith(str(folder)):
            found.add(part[5])
    return {re.sub(r" \(deleted\)$", "", name) for name in found}


def _memory(pid: int) -> list[str]:
    """Descriptors of anonymous files in memory."""
    return [str(path) for path in Path(f"/proc/{pid}/fd").iterdir() if _target(path).startswith("/memfd:")]


def _opens_to_others(path: str) -> bool:
    """Whether a user without rights can open a file; this process, which is root's, shows that it can be opened."""
    assert Path(path).exists()
    look = ["/usr/bin/head", "-c0", path]
    return not subprocess.run(look, user=NOBODY, group=NOBODY, extra_groups=[], stderr=subprocess.PIPE).returncode
