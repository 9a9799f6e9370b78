"""Bytes of log files by position, plain or compressed with gzip. Knows nothing of lines."""

from __future__ import annotations

import bisect
import os
import threading
import zlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TypeVar

import numpy as np

from dtf.errors import DataError

T = TypeVar("T")

CHUNK = 1 << 22
"""Bytes of text that are looked at together."""

SEGMENT = 1 << 22
"""Bytes of text, about, between the places where reading a compressed file can begin."""

MARGIN = 1 << 16
"""Bytes that a segment is begun before and kept beyond, so that who reads somewhat around its lines needs no other."""

SEGMENTS = 1024
"""Such places in a file, at most about: each costs 50 kB of memory, so a larger file has fewer per MiB."""

_INPUT = 1 << 14


class Source(ABC):
    """The text of one file. Several threads may read at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        """`look` at the whole text, CHUNK bytes (uint8) at a time, the last shorter; the results in order. DataError where it cannot be read."""

    @abstractmethod
    def read(self, first: int, last: int) -> np.ndarray:
        """Bytes [first, last) of the text, fewer at its end, uint8. A compressed file must have been scanned."""

    def starts(self) -> list[int]:
        """Positions in a scanned text where reading may begin; empty: any."""
        return []

    def close(self) -> None:
        """Let go of the file."""


class Plain(Source):
    """A file as it is."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: int | None = None
        self._lock = threading.Lock()

    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        size = self.path.stat().st_size
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


class Zipped(Source):
    """A .gz file, of one member or several. `scan` remembers the decompressor's state once a segment, so that `read` can go on from there."""

    def __init__(self, path: Path, kept: int) -> None:
        super().__init__(path)
        self._points: list[tuple[int, int, zlib._Decompress]] = []  # position in the text, position in the file, state
        self._cached: OrderedDict[int, np.ndarray] = OrderedDict()  # the last segments read
        self._size, self._kept = 0, kept
        self._lock, self._locks = threading.Lock(), dict[int, threading.Lock]()

    def scan(self, look: Callable[[np.ndarray], T], pool: Executor) -> list[Future[list[T]]]:
        return [pool.submit(lambda: [look(chunk) for chunk in self._chunks()])]

    def _chunks(self) -> Iterator[np.ndarray]:
        every = max(SEGMENT, 8 * self.path.stat().st_size // SEGMENTS)  # text is seldom more than 8 times as long
        points, position, left = [], 0, bytearray()
        for data, at, before in self._inflate(0, zlib.decompressobj(31)):
            if not points or position - points[-1][0] >= every:
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
            start, segment = self._points[number][0], self._segment(number)
            parts.append(segment[first - start : last - start])
            first = start + len(segment)
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def starts(self) -> list[int]:
        return [0, *(point[0] + MARGIN for point in self._points[1:] if point[0] + MARGIN < self._size)]

    def _segment(self, number: int) -> np.ndarray:
        """The text from a point to beyond the next; decompressed by one thread, while others that want it wait."""
        with self._lock:
            lock = self._locks.setdefault(number, threading.Lock())
        with lock:
            with self._lock:
                if number in self._cached:
                    self._cached.move_to_end(number)
                    return self._cached[number]
            start, at, state = self._points[number]
            end = self._points[number + 1][0] + 3 * MARGIN if number + 1 < len(self._points) else self._size
            size = min(end, self._size) - start
            text = bytearray()
            for data, _, _ in self._inflate(at, state.copy()):
                text += data
                if len(text) >= size:
                    break
            if len(text) < size:
                raise DataError(f"{self.path} is not the file it was when the run began; leave it alone while it is read")
            with self._lock:
                self._cached[number] = found = np.frombuffer(text, np.uint8)[:size]
                while len(self._cached) > self._kept:
                    self._cached.popitem(last=False)
            return found

    def _inflate(self, at: int, state: zlib._Decompress) -> Iterator[tuple[bytes, int, zlib._Decompress]]:
        """From position `at` of the file on: text, and from which position and state it was made."""
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


def opened(path: Path, kept: int) -> Source:
    """`kept`: segments of a compressed file that are worth keeping, one for each thread that reads."""
    return Zipped(path, kept) if path.name.endswith(".gz") else Plain(path)
