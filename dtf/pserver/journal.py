"""What a server was pushed since the last checkpoints, on disk before it is acknowledged: after a crash nothing acknowledged is computed again."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

KEPT = 3
"""Segments that are kept beside the newest: as many checkpoints back as there may be one to go on from."""

_NAME = re.compile(r"from_(\d+)\.journal")
_HEAD = struct.Struct("<QI")  # bytes of what follows, crc32 of it


class Journal:
    """Segments, each from a checkpoint's step on; in `folder`, which is one server's. `kind`: text that differs when pushes of then mean nothing now.

    A crash of the process loses nothing that `append` took; one of the host may lose what its system had not written yet.
    """

    def __init__(self, folder: Path, start: int, kind: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._kind = folder, kind.encode()
        self.found: list[bytes] = []
        for step, path in self._segments():
            if step >= start:
                self.found += self._read(path)
        self._file = self._open(max((step for step, _ in self._segments() if step >= start), default=start))

    def append(self, message: bytes) -> None:
        """Keep a push; it may be acknowledged then."""
        self._file.write(_HEAD.pack(len(message), zlib.crc32(message)))
        self._file.write(message)
        self._file.flush()

    def cut(self, step: int) -> None:
        """A checkpoint is about to be written, of a state in which all pushes so far are; what comes next is another segment."""
        if not self._path(step).exists():  # else this was done before a crash, and what followed it is being done again
            self._file.close()
            self._file = self._open(step)
        for _, path in self._segments()[: -KEPT - 1]:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        self._file.close()

    def _open(self, step: int):
        path = self._path(step)
        fresh = not path.exists()
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=1 << 20)
        if fresh:
            file.write(_HEAD.pack(len(self._kind), zlib.crc32(self._kind)) + self._kind)
            file.flush()
        return file

    def _read(self, path: Path) -> list[bytes]:
        """The pushes of a segment; what a crash left half written at its end is cut off. Of another kind: none, and the segment goes."""
        with path.open("r+b") as file:
            records = _records(file)
            kind, _ = next(records, (b"", 0))
            if kind != self._kind:
                path.unlink()
                return []
            found, end = [], file.tell()
            for record, after in records:
                found.append(record)
                end = after
            file.truncate(end)
        return found

    def _segments(self) -> list[tuple[int, Path]]:
        named = ((_NAME.fullmatch(path.name), path) for path in self._folder.iterdir())
        return sorted((int(found[1]), path) for found, path in named if found)

    def _path(self, step: int) -> Path:
        return self._folder / f"from_{step}.journal"


def _records(file) -> Iterator[tuple[bytes, int]]:
    """Whole records, with the place where each ends."""
    size = os.fstat(file.fileno()).st_size
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        length, crc = _HEAD.unpack(head)
        if length > size - file.tell() or zlib.crc32(record := file.read(length)) != crc:
            return
        yield record, file.tell()
