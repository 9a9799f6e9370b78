"""What a run has open while it is at work, as others on its host find it: sockets, files and their modes.

SECURITY.md lists them, and is compared with what is found.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from dtf.api.registry import registered
from dtf.config.settings import load_parts
from dtf.core.errors import Exit
from tests.launch.test_train import tensors
from tests.support import open_doors
from tests.support.open_doors import Seen

load_parts([])

PAGE = Path(__file__).parents[2] / "SECURITY.md"
MEMORY = {f"/memfd:dtf-{name}" for name in ("heartbeat", "messages", "order", "store")}
"""What processes share, without a name that others could open."""

EXPECTED = {
    "dp": set[tuple[str, str]](),
    "ddp": {("rank", "gloo")},
    "pserver": {("server", "parameter server"), ("server", "gloo")},
}
RUN = [
    "plugins=[tests.support.toy,tests.support.open_doors]", "recipe=held", "recipe.rows=96", "step.batch_size=16",
    "train.steps=12", "train.log_every=1", "train.eval_every=0", "checkpoint.every_steps=6",
    "launcher.devices=cpu", "launcher.processes=2", "observer=[jsonl,open_doors]",
]  # fmt: skip

slow = pytest.mark.slow


def strategies() -> list[Any]:
    """Those of the project; by default one of ranks that are alike, and one that has roles."""
    own = [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]
    return [name if name in ("ddp", "pserver") else pytest.param(name, marks=slow) for name in own]


@cache
def table(head: str) -> list[list[str]]:
    """The cells of the table of SECURITY.md whose first column has this name, without its head."""
    lines = iter(PAGE.read_text().splitlines())
    next(line for line in lines if line.startswith(f"| {head} |"))
    next(lines)
    return [line.strip("| ").split(" | ") for line in takewhile(lambda line: line.startswith("|"), lines)]


def listed_sockets() -> list[tuple[str, str]]:
    """(process, what it serves)."""
    return [(process.strip("`"), serves) for process, serves, *_ in table("process")]


def listed_files() -> dict[str, str]:
    """Pattern of a path in the run folder -> its mode."""
    return {name: mode for names, mode, *_ in table("file") for name in re.findall(r"`([^`]+)`", names)}


def in_words(path: Path) -> str:
    """A path with `N` for its numbers, as the page has it."""
    return re.sub(r"\d+", "N", str(path))


@dataclass(frozen=True)
class Watched:
    """A run that was looked at. `left`: folder -> paths of what it left there."""

    result: Any
    seen: Seen
    left: dict[str, list[Path]]
    sockets: set[tuple[str, str]]  # (process, what it serves)


@pytest.fixture
def watched(run_dtf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    """`watched("ddp")`: a run of a strategy."""
    elsewhere = {name: tmp_path / name for name in ("TMPDIR", "XDG_CACHE_HOME", "HOME")}
    for name, folder in elsewhere.items():
        folder.mkdir()
        monkeypatch.setenv(name, str(folder))
    before = set(os.listdir("/dev/shm"))
    marker = tmp_path / "looked"

    def run(strategy: str, *words: str) -> Watched:
        open_doors.SEEN.clear()
        marker.unlink(missing_ok=True)
        words = (f"strategy={strategy}", f"recipe.marker={marker}", f"observer.open_doors.marker={marker}", *words)
        done = run_dtf(*RUN, *words)
        assert done.code == Exit.OK, done.err
        (seen,) = open_doors.SEEN
        left = {name: [path.relative_to(folder) for path in folder.rglob("*")] for name, folder in elsewhere.items()}
        left["/dev/shm"] = [Path(name) for name in set(os.listdir("/dev/shm")) - before if "dtf" in name]
        cache = elsewhere["XDG_CACHE_HOME"] / "dtf" / "start_checks"
        assert all(path.parts[:2] in (("dtf",), ("dtf", "start_checks")) for path in left["XDG_CACHE_HOME"])
        if cache.exists():  # not all strategies have what is remembered
            assert mode(cache) == "0700" and {mode(path) for path in cache.iterdir()} <= {"0600"}
        return Watched(done, seen, left, {(role(strategy, door.process, words), door.serves) for door in seen.doors})

    return run


def role(strategy: str, process: str, words: Sequence[str]) -> str:
    """What the page calls a process."""
    number = process.removeprefix("rank ")
    servers = next((int(word.partition("=")[2]) for word in words if word.startswith("strategy.servers=")), 1)
    if not number.isdecimal():
        return process
    return ("server" if int(number) < servers else "trainer") if strategy == "pserver" else "rank"


def mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


@pytest.mark.parametrize("strategy", strategies())
def test_what_a_run_has_open_is_what_the_page_says(watched: Callable[..., Watched], strategy: str) -> None:
    found = watched(strategy, *(["strategy.servers=2", "strategy.min_block=1"] if strategy == "pserver" else []))
    seen, folder = found.seen, found.result.folder
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for door in seen.doors:
        address = ip_address(door.address.removeprefix("::ffff:"))
        assert door.kind == "tcp" and address.is_loopback and low <= door.port <= high and not door.shared, door
    assert found.sockets <= set(listed_sockets()), "SECURITY.md does not list it"
    if strategy in EXPECTED:
        assert found.sockets == EXPECTED[strategy]
    for name, threads in seen.threads.items():
        loops = threads.count("gloo_tcp_loop")
        assert loops == sum(door.process == name and door.serves == "gloo" for door in seen.doors), "another listens"
        assert not any("tcpstore" in thread for thread in threads)
    assert {name for files in seen.files.values() for name in files} <= MEMORY
    assert {name: others for name, others in seen.opened.items() if others} == {}
    # as at the end, and while it was at work
    modes = {in_words(path.relative_to(folder)): mode(path) for path in folder.rglob("*")} | {
        in_words(Path(path)): text for path, text in seen.modes.items()
    }
    unlisted = set(modes) - set(listed_files())
    assert not unlisted, "SECURITY.md does not list it"
    assert modes == {name: listed_files()[name] for name in modes} and mode(folder) == "0700"
    assert not found.left["HOME"] and not found.left["/dev/shm"]
    assert all(path.parts[0].startswith("torchinductor_") for path in found.left["TMPDIR"])


def test_strangers_who_talk_to_every_socket_change_no_number(
    watched: Callable[..., Watched], run_dtf: Any, tmp_path: Path
) -> None:
    marker = tmp_path / "nobody"
    marker.touch()
    calm = run_dtf(*RUN, "strategy=ddp", f"recipe.marker={marker}", "observer=[jsonl]")
    assert calm.code == Exit.OK, calm.err
    visited = watched("ddp")
    assert visited.seen.strangers
    assert tensors(visited.result.folder, 12) == tensors(calm.folder, 12) != {}


@slow
def test_the_page_lists_nothing_that_no_run_has(watched: Callable[..., Watched]) -> None:
    servers, team = ["strategy.servers=2", "strategy.min_block=1"], ["strategy.team=2"]
    runs = [watched("ddp"), watched("pserver", *servers), watched("pserver", *team)]
    assert set().union(*(run.sockets for run in runs)) == set(listed_sockets())
    files = {in_words(path.relative_to(run.result.folder)) for run in runs for path in run.result.folder.rglob("*")} | {
        in_words(Path(path)) for run in runs for path in run.seen.modes
    }
    assert files == set(listed_files())
