"""A click log: rows by number, parsed from files. Encodes nothing."""

from __future__ import annotations

import bisect
import gzip
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtf.core.errors import DataError
from dtf.recipes.ctr import avazu, criteo, libsvm, lines
from dtf.recipes.ctr.cache import cached, stamp
from dtf.recipes.ctr.files import CHUNK, Plain, Source, opened, zipped
from dtf.recipes.ctr.hashing import MISSING

PIECE = 1 << 16
"""Bytes of text whose newlines are counted together."""

_FARTHEST = 64 << 20
"""Bytes between two newlines: beyond, the file is taken for something else than a log."""

Parser = Callable[[np.ndarray, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray], int]


BagParser = Callable[..., tuple[int, int]]
"""As Parser, with lengths (B, 1) and room for values after the others; returns rows and values."""


class BagKeys(NamedTuple):
    """Keys of fields that have any number of values."""

    values: np.ndarray  # (n,) int64: row after row, within it field after field
    lengths: np.ndarray  # (B, G) int64: how many of them each field of a row has

    def by_field(self) -> list[np.ndarray]:
        """Which of the values belong to each field, bool (n,)."""
        rows, fields = self.lengths.shape
        field = np.repeat(np.tile(np.arange(fields), rows), self.lengths.reshape(-1))
        return [field == each for each in range(fields)]


class Parsed(NamedTuple):
    """Rows as a log holds them. A bad row has label 0 and no values."""

    labels: np.ndarray  # (B,) float32, 0 or 1
    numbers: np.ndarray  # (B, D) int64, `lines.NONE` where there is none
    keys: np.ndarray  # (B, F) int64, MISSING where there is none
    why: np.ndarray  # (B,) uint8, `lines.GOOD`, or the index of the reason in `lines.REASONS`
    bags: BagKeys | None = None  # None: no field has several values

    @staticmethod
    def empty(rows: int, integers: int, fields: int) -> Parsed:
        numbers, keys = np.empty((rows, integers), np.int64), np.empty((rows, fields), np.int64)
        return Parsed(np.empty(rows, np.float32), numbers, keys, np.zeros(rows, np.uint8))

    def blanked(self) -> Parsed:
        """Clear the bad rows in place; returns all rows."""
        bad = np.flatnonzero(self.why)
        if len(bad):
            self.labels[bad], self.numbers[bad], self.keys[bad] = 0, lines.NONE, MISSING
            if self.bags is not None:
                good = np.repeat(self.why == lines.GOOD, self.bags.lengths.sum(1))
                self.bags.lengths[bad] = 0
                return self._replace(bags=self.bags._replace(values=self.bags.values[good]))
        return self

    def part(self, first: int, last: int) -> Parsed:
        """Rows [first, last)."""
        bags = self.bags
        if bags is not None:
            lengths = bags.lengths[first:last]
            before = int(bags.lengths[:first].sum())
            bags = BagKeys(bags.values[before : before + int(lengths.sum())], lengths)
        some = slice(first, last)
        return Parsed(self.labels[some], self.numbers[some], self.keys[some], self.why[some], bags)

    @staticmethod
    def joined(parts: Sequence[Parsed]) -> Parsed:
        """The rows of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        bags = [part.bags for part in parts if part.bags is not None]
        return Parsed(
            np.concatenate([part.labels for part in parts]),
            np.concatenate([part.numbers for part in parts]),
            np.concatenate([part.keys for part in parts]),
            np.concatenate([part.why for part in parts]),
            BagKeys(np.concatenate([each.values for each in bags]), np.concatenate([each.lengths for each in bags]))
            if bags
            else None,
        )


@dataclass(frozen=True)
class RowLocations:
    """The file and the line of each row, for messages."""

    paths: list[str]
    starts: list[int]  # the first row of each file, and the number of all rows
    first: int  # the number of a file's first row, as messages count
    unit: str = ":"  # between the file's name and the number

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, row: int, /) -> str:
        number = bisect.bisect_right(self.starts, row) - 1
        return f"{self.paths[number]}{self.unit}{row - self.starts[number] + self.first}"


class Log(ABC):
    """A click log. Several threads may parse at once."""

    digest: str
    """Text that differs when the content of the files does."""

    places: RowLocations

    @property
    def rows(self) -> int:
        return self.places.starts[-1]

    @abstractmethod
    def parse(self, first: int, last: int) -> Parsed:
        """Rows [first, last), 0 <= first < last <= rows."""

    @abstractmethod
    def blocks(self, rows: int) -> np.ndarray:
        """Bounds, int64, from 0 to the number of rows, of blocks of about `rows` rows that are best read as a whole."""


@dataclass(frozen=True)
class Text:
    """How the lines of a text format are read. `header`: the first line of each file, if it has one."""

    parse: Parser
    integers: int
    fields: int
    header: str = ""
    bags: BagParser | None = None  # in place of `parse`, where the last field has any number of values


def criteo_text(labelled: bool = True) -> Text:
    return Text(lambda *buffers: criteo.parse(*buffers, labelled=labelled), criteo.INTEGERS, criteo.CATEGORIES)


def avazu_text(labelled: bool = True) -> Text:
    return Text(
        lambda *buffers: avazu.parse(*buffers, labelled=labelled),
        0,
        avazu.CATEGORIES,
        avazu.HEADER if labelled else avazu.UNLABELLED,
    )


def libsvm_text(fields: int, limit: int, labelled: bool = True, more: bool = False) -> Text:
    """The ids as they are where they are below `limit`, those beyond are bad; limit 0: their hashes.

    `more`: pairs after those of the fields are one more field, which has any number of values.
    """

    def parse(*buffers: Any) -> int:
        given: tuple[Any, ...] = (*buffers, np.empty((len(buffers[-1]), 0), np.int64), np.empty(0, np.int64))  # no bags
        rows, _ = libsvm.parse(*given, labelled=labelled)
        libsvm.finish(buffers[-2], buffers[-1], limit)
        return rows

    def parse_bags(*buffers: Any) -> tuple[int, int]:
        rows, count = libsvm.parse(*buffers, labelled=labelled)
        keys, why, lengths, values = buffers[-4:]
        libsvm.finish(keys, why, limit)
        libsvm.finish_bags(values, lengths, why, fields, limit)
        return rows, count

    return Text(parse, 0, fields, bags=parse_bags if more else None)


def first_line(paths: Sequence[Path]) -> bytes:
    """The first line of the first file that is not empty, without its line end, cut at `lines.LONGEST` bytes."""
    for path in paths:
        try:
            with gzip.open(path) if zipped(path) else path.open("rb") as file:
                if line := file.readline(lines.LONGEST):
                    return line.rstrip(b"\r\n")
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
    return b""


class TextLog(Log):
    """Lines of text files, in the order of the files. Only the numbers of newlines in their pieces stay in memory.

    Plain files are counted in `threads` threads when they are first opened, and the counts are kept in `cache`.
    Compressed files are read whole each time they are opened.
    """

    def __init__(self, paths: Sequence[Path], text: Text, cache: Path, threads: int) -> None:
        self._text, self._sources = text, opened(paths)
        if all(isinstance(source, Plain) for source in self._sources):
            folder, totals = cached(cache, ["newlines", stamp(paths)], lambda folder: self._keep(folder, threads))
            counts = np.split(
                np.load(folder / "newlines.npy", allow_pickle=False),
                np.cumsum([-(-size // PIECE) for size in totals["sizes"]])[:-1],
            )
        else:
            counts, totals = self._count(threads)
        # before each piece
        self._newlines = [np.concatenate([[0], np.cumsum(count, dtype=np.int64)]) for count in counts]
        self._head = bool(text.header)
        for source, newlines in zip(self._sources, self._newlines, strict=True):
            self._look_over(source, newlines)
        lengths = [
            max(0, int(newlines[-1]) + rest - self._head)
            for newlines, rest in zip(self._newlines, totals["rests"], strict=True)
        ]
        self._starts = [0, *itertools.accumulate(lengths)]
        self.places = RowLocations([str(path) for path in paths], self._starts, 1 + self._head)
        self.digest = f"{zlib.crc32(str([totals['digests'], totals['sizes']]).encode()):08x}"

    def parse(self, first: int, last: int) -> Parsed:
        out = Parsed.empty(last - first, self._text.integers, self._text.fields)
        lengths, values = np.zeros((last - first, 1), np.int64), list[np.ndarray]()
        number, done = bisect.bisect_right(self._starts, first) - 1, 0
        while done < last - first:
            start, end = self._starts[number], self._starts[number + 1]
            rows = min(last, end) - first - done
            if rows:
                columns = [part[done : done + rows] for part in (*out[:4], lengths)]
                values.append(self._parse(number, first + done - start, rows, columns))
            done, number = done + rows, number + 1
        return out._replace(bags=BagKeys(np.concatenate(values), lengths) if self._text.bags else None).blanked()

    def blocks(self, rows: int) -> np.ndarray:
        bounds = [np.zeros(1, np.int64)]
        for number, source in enumerate(self._sources):
            start, end = self._starts[number], self._starts[number + 1]
            if points := source.starts():  # a segment's rows are those whose line begins in it
                inside = (
                    np.array([self._newlines_before(source, number, point) for point in points[1:]], np.int64)
                    + 1
                    - self._head
                )
                bounds.append(start + inside[(inside > 0) & (inside < end - start)])
            else:
                bounds.append(np.arange(start, end, rows))
            bounds.append(np.array([end]))
        return np.unique(np.concatenate(bounds))

    def _parse(self, number: int, first: int, rows: int, out: list[np.ndarray]) -> np.ndarray:
        """Rows of one file into views of the output, the last being lengths of bags; returns the values of these."""
        source, newlines = self._sources[number], self._newlines[number]
        # newlines in front of the first row, and up to the end of the last
        before, after = first + self._head, first + rows + self._head
        piece = max(0, int(np.searchsorted(newlines, before)) - 1)
        buffer = source.read(piece * PIECE, int(np.searchsorted(newlines, after)) * PIECE)
        start, values = lines.after_newlines(buffer, before - newlines[piece]), np.empty(0, np.int64)
        if self._text.bags is None:
            parsed_rows = self._text.parse(buffer, start, *out[:4])
        else:
            values = np.empty(len(buffer) // 3 + 1, np.int64)  # `1:1` and a space are the least
            parsed_rows, count = self._text.bags(buffer, start, *out, values)
            values = values[:count].copy()
        if parsed_rows != rows:
            raise DataError(f"{source.path} is not the file it was when the run began; leave it alone while it is read")
        return values

    def _newlines_before(self, source: Source, number: int, position: int) -> int:
        piece = position // PIECE
        return int(self._newlines[number][piece]) + int(lines.count_newlines(source.read(piece * PIECE, position)))

    def _look_over(self, source: Source, newlines: np.ndarray) -> None:
        """Raise DataError for a file that is no log of this format at all."""
        changes = np.concatenate([[0], np.flatnonzero(np.diff(newlines)), [len(newlines) - 1]])
        if np.diff(changes).max() * PIECE > _FARTHEST:
            raise DataError(
                f"{source.path} has a line of more than {_FARTHEST >> 20} MiB; it is no log of one click a line"
            )
        if self._text.header and len(newlines) > 1:
            first_line = bytes(source.read(0, len(self._text.header) + 2)).split(b"\n")[0].rstrip(b"\r")
            if first_line != self._text.header.encode():
                raise DataError(f"{source.path}:1: the first line must be {self._text.header}")

    def _keep(self, folder: Path, threads: int) -> dict[str, Any]:
        counts, totals = self._count(threads)
        np.save(folder / "newlines.npy", np.concatenate(counts))
        return totals

    def _count(self, threads: int) -> tuple[list[np.ndarray], dict[str, Any]]:
        """Newlines of each piece of each file, and for each file its size, its digest and whether it ends without a
        newline.
        """

        def look(chunk: np.ndarray) -> tuple[np.ndarray, int, int, int]:
            counts = np.array(
                [lines.count_newlines(chunk[at : at + PIECE]) for at in range(0, len(chunk), PIECE)], np.uint32
            )
            return counts, len(chunk), zlib.crc32(chunk.data), int(chunk[-1] != lines.NEWLINE)

        counts, totals = [], {"sizes": [], "digests": [], "rests": []}
        with ThreadPoolExecutor(threads, "count") as pool:
            for futures in [source.scan(look, pool) for source in self._sources]:
                looked = [piece for future in futures for piece in future.result()]
                counts.append(np.concatenate([np.zeros(0, np.uint32), *(piece[0] for piece in looked)]))
                totals["sizes"].append(sum(piece[1] for piece in looked))
                totals["digests"].append(zlib.crc32(np.array([piece[2] for piece in looked], np.uint32).data))
                totals["rests"].append(looked[-1][3] if looked else 0)
        return counts, totals


assert CHUNK % PIECE == 0
