"""Cores that ranks are pinned to are theirs alone: two runs pinned to the same ones would halve each other's speed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from dtf.core.errors import ConfigError

_NAME = "dtf-core"
_held: dict[int, socket.socket] = {}


def reserve_cores(cores: Iterable[int]) -> None:
    """Hold these cores for ranks of this process, until it ends. ConfigError where another process has one of them.

    A name in the kernel stands for a core, which goes with its process whatever happens to it. Processes in another
    network namespace, as in most containers, have other names: they are not seen.
    """
    for core in cores:
        if core in _held:
            continue
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0{_NAME}-{core}")
        except OSError as error:
            name.close()
            if error.errno != errno.EADDRINUSE:
                raise
            raise ConfigError(
                f"launcher.pin=true: ranks of another run on this host are pinned to core {core}; give each run cores "
                "of its own (taskset --cpu-list), or use launcher.pin=false"
            ) from error
        _held[core] = name
