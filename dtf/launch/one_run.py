"""For launchers of which a process can have one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dtf.core.errors import BusyError


@contextmanager
def one_run(lock: threading.Lock, remedy: str) -> Iterator[None]:
    """A block that one thread at a time may enter; BusyError in another one."""
    if not lock.acquire(blocking=False):
        raise BusyError(f"another run goes on in this process; wait for it, or {remedy}")
    try:
        yield
    finally:
        lock.release()
