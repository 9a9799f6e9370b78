"""Bytes of log files by position, plain or compressed with gzip. Knows nothing of lines."""

from __future__ import annotations

import bisect
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from dtf.core.errors import DataError

T = TypeVar("T")

CHUNK = 1 << 22
"""Bytes of text that are looked at together."""

SEGMENT = 1 << 22
"""Bytes of text, about, between the places where reading a compressed file can begin."""

MARGIN = 1 << 16
"""Bytes that a segment holds before its first line and after its last, so that reading around them needs no other."""

STATES = 4096
"""Saved states of the decompressor, over all files of a log. Each takes 40 kB of memory, so a longer log has fewer per
MiB.
"""

SEGMENTS_BYTES = 64 << 20
"""Bytes of the segments that stay in memory, over all files of a log, the last read ones; two segments at least."""

_INPUT = 1 << 14


class Source(ABC):
    """The text of one file. Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        """`look` at the whole text, CHUNK bytes (uint8) at a time, the last shorter; the results in order.

        DataError where it cannot be read.
        """

    @abstractmethod
    def read(self, first: int, last: int) -> np.ndarray:
        """Bytes [first, last) of the text, fewer at its end, uint8. A compressed file must have been scanned."""

    def starts(self) -> list[int]:
        """Positions in a scanned text where reading may begin; empty: any."""
        return []

    def close(self) -> None:
        """Close the file."""


class Plain(Source):
    """A file as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: int | None = None
        self._lock = threading.Lock()

    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        size = status(self.path).st_size
        return [pool.submit(lambda at: [look(self.read(at, at + CHUNK))], at) for at in range(0, size, CHUNK)]

    def read(self, first: int, last: int) -> np.ndarray:
        out = np.empty(last - first, np.uint8)
        try:
            with self._lock:
                if self._file is None:
                    self._file = os.open(self.path, os.O_RDONLY)
            done = 0
            while done < len(out):
                more = os.preadv(self._file, [out.data[done:]], first + done)
                if not more:
                    break
                done += more
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        return out[:done]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Segments:
    """The segments read last, of all files of a log."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[Path, int], np.ndarray] = OrderedDict()
        self._lock, self._locks = threading.Lock(), dict[tuple[Path, int], threading.Lock]()

    def get(self, path: Path, number: int, make: Callable[[], np.ndarray]) -> np.ndarray:
        """A segment. One thread makes it, while others that want it wait."""
        key = path, number
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            with self._lock:
                if key in self._found:
                    self._found.move_to_end(key)
                    return self._found[key]
            made = make()
            with self._lock:
                self._found[key] = made
                while len(self._found) > 2 and sum(map(len, self._found.values())) > SEGMENTS_BYTES:
                    self._found.popitem(last=False)
            return made


class Zipped(Source):
    """A .gz file, of one member or several.

    `scan` saves the state of the decompressor once a segment, so that `read` can start there.
    """

    def __init__(self, path: Path, states: int, segments: Segments) -> None:
        """`states`: the number of states of the decompressor that it may save."""
        super().__init__(path)
        self._points: list[tuple[int, int, zlib._Decompress]] = []  # position in the text, position in the file, state
        self._size, self._states, self._segments = 0, states, segments

    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        return [pool.submit(lambda: [look(chunk) for chunk in self._chunks()])]

    def _chunks(self) -> Iterator[np.ndarray]:
        every, points, position, left = SEGMENT, [], 0, bytearray()
        for data, at, before in self._inflate(0, zlib.decompressobj(31)):
            if not points or position - points[-1][0] >= every:
                if len(points) == self._states:  # how long the text is shows at its end only
                    del points[1::2]
                    every *= 2
                points.append((position, at, before))
            position += len(data)
            left += data
            whole = len(left) // CHUNK * CHUNK
            for first in range(0, whole, CHUNK):
                yield np.frombuffer(left[first : first + CHUNK], np.uint8)
            if whole:
                left = left[whole:]
        if left:
            yield np.frombuffer(left, np.uint8)
        self._points, self._size = points, position

    def read(self, first: int, last: int) -> np.ndarray:
        parts = []
        while first < (last := min(last, self._size)):
            number = bisect.bisect_right(self._points, first, key=lambda point: point[0]) - 1
            start, segment = (
                self._points[number][0],
                self._segments.get(self.path, number, lambda number=number: self._unpacked(number)),
            )
            parts.append(segment[first - start : last - start])
            first = start + len(segment)
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def starts(self) -> list[int]:
        return [0, *(point[0] + MARGIN for point in self._points[1:] if point[0] + MARGIN < self._size)]

    def _unpacked(self, number: int) -> np.ndarray:
        """The text from a saved state to somewhat beyond the next one."""
        start, at, state = self._points[number]
        end = self._points[number + 1][0] + 3 * MARGIN if number + 1 < len(self._points) else self._size
        text, done = np.empty(min(end, self._size) - start, np.uint8), 0
        for data, _, _ in self._inflate(at, state.copy()):
            some = np.frombuffer(data, np.uint8)[: len(text) - done]
            text[done : done + len(some)] = some
            done += len(some)
            if done == len(text):
                return text
        raise DataError(f"{self.path} is not the file it was when the run began; leave it alone while it is read")

    def _inflate(self, at: int, state: zlib._Decompress) -> Iterator[tuple[bytes, int, zlib._Decompress]]:
        """Text from position `at` of the file on, and for each part the position and the state before it."""
        try:
            with open(self.path, "rb") as file:
                file.seek(at)
                while block := file.read(_INPUT):
                    before = state.copy()
                    data = state.decompress(block)
                    while state.eof and state.unused_data.strip(b"\0"):  # another member; zeros may fill up the end
                        rest, state = state.unused_data.lstrip(b"\0"), zlib.decompressobj(31)
                        data += state.decompress(rest)
                    yield data, at, before
                    at += len(block)
                if not state.eof:
                    raise EOFError("it breaks off")
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{self.path} is no intact gzip file: {error}; replace it, or unpack it") from error


def opened(paths: Sequence[Path]) -> list[Source]:
    """The files of a log. Their memory does not depend on their number."""
    packed = sum(status(path).st_size for path in paths if zipped(path))
    segments = Segments()
    return [
        Zipped(path, max(2, STATES * status(path).st_size // max(1, packed)), segments) if zipped(path) else Plain(path)
        for path in paths
    ]


def status(path: Path) -> os.stat_result:
    """The status of a file. DataError where it is gone."""
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def zipped(path: Path) -> bool:
    return path.name.endswith(".gz")
