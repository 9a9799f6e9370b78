"""How much memory this process may still take. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def available_bytes() -> int | None:
    """Bytes that can be taken without taking them from others: what the host has, or a control group leaves of its
    limit. None where neither is known.
    """
    limits = [free for free in (_host(), *_groups()) if free is not None]
    return min(limits, default=None)


def _host() -> int | None:
    try:
        lines = (_ROOT / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


def _groups() -> Iterator[int]:
    """What the control groups of this process, and those around them, leave. Version 2, then version 1."""
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _left(_ROOT / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mounted = _ROOT / "sys/fs/cgroup/memory"
            yield from _left(mounted, path, "memory.limit_in_bytes", "memory.usage_in_bytes")


def _left(mounted: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    """Of the group and all above it. In a container the mounted folder may be the group itself."""
    group = Path(path.lstrip("/"))
    for folder in {mounted, *(mounted / part for part in (group, *group.parents))}:
        try:
            most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no such group, or without a limit
            continue
        yield max(0, most - used + int(statistics.get("inactive_file", 0)))  # files in memory give way
