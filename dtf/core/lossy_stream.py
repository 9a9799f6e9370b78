"""A text stream whose writes never fail: for what is said of a run, beside what the run does."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class _LossyFile(io.FileIO):
    """Drops what cannot be written, and tells of the first time. Never closes its descriptor."""

    def __init__(self, fd: int, lost: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._lost: Callable[[OSError], None] | None = lost

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            lost, self._lost = self._lost, None
            if lost is not None:
                lost(error)
            return len(data)


def lossy_stream(fd: int, encoding: str, lost: Callable[[OSError], None] = lambda error: None) -> io.TextIOWrapper:
    """A stream on a file descriptor that drops what cannot be written: a full disk, a reader that is gone.

    `lost` gets the first error. It must not write to the stream.
    """
    file = _LossyFile(fd, lost)
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, errors="backslashreplace", line_buffering=True)
