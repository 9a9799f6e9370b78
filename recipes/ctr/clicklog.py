"""Data sets of click logs: `Queued` reads the rows of a batch from the log, `Columns` has parsed the whole log before.

Neither knows a file format or a model.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.core.errors import DataError
from dtf.recipes.ctr.encode import Encoder
from dtf.recipes.ctr.lines import REASONS
from dtf.recipes.ctr.log import Log, RowLocations

CHUNK_ROWS = 1 << 14
"""Rows that a thread parses at once where a whole log is read."""

_log = logging.getLogger(__name__)


class Clicks(Dataset):
    """Rows as `{"ids": (B, F) int64[, "dense": (B, D) float32]}` and targets (B,) float32, 0 or 1.

    `allowed`: bad lines that a run may meet, over all ranks; 0: the first one is an error. A bad row has target 0, no
    ids, and counts for nothing.
    """

    def __init__(self, places: RowLocations, allowed: int, queue_rows: int, threads: int) -> None:
        self.places, self.allowed, self.queue_rows, self.threads = places, allowed, queue_rows, threads
        self.bad: dict[int, str] = {}

    def __len__(self) -> int:
        return self.places.starts[-1]

    def _note(self, row: int, why: int) -> None:
        """Record a bad row. DataError where none is allowed."""
        text = f"{self.places[row]}: {REASONS[why]}"
        if not self.allowed:
            raise DataError(
                f"{text}; repair or remove it; training and evaluation can do without such lines: "
                "recipe.data.bad_records=skip"
            )
        if row not in self.bad:
            _log.warning("%s; skipped", text)
        self.bad[row] = text


class Queued(Clicks):
    """Reads and parses the rows of a batch in the thread that fetches it. No other rows are in memory."""

    def __init__(
        self, log: Log, encoder: Encoder, allowed: int, queue_rows: int, threads: int, block_rows: int
    ) -> None:
        super().__init__(log.places, allowed, queue_rows, threads)
        self._source, self._encoder, self._bounds = log, encoder, log.blocks(block_rows)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        # stretches of rows that follow each other
        edges = np.flatnonzero(np.diff(ids, prepend=ids[0] - 2, append=ids[-1] + 2) != 1)
        labels, denses, tables = [], [], []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            start = int(ids[first])
            parsed = self._source.parse(start, start + last - first)
            for offset in np.flatnonzero(parsed.why).tolist():
                self._note(start + offset, int(parsed.why[offset]))
            dense, table = self._encoder.encode(parsed)
            labels.append(parsed.labels)
            tables.append(table)
            denses.append(dense)
        inputs = {"ids": _joined(tables)}
        if denses[0] is not None:
            inputs["dense"] = _joined(denses)
        return inputs, _joined(labels)

    def runs(self) -> np.ndarray:
        return self._bounds

    def fingerprint(self) -> str:
        blocks = f"{len(self._bounds) - 1} blocks {zlib.crc32(self._bounds.data):08x}"
        return f"{len(self)} clicks {self._source.digest} in {blocks}, {self._encoder.about()}"


class Columns(Clicks):
    """All rows, parsed and encoded before, in files that all ranks of a host map, so that they are in memory once."""

    def __init__(self, folder: Path, made: dict[str, Any], allowed: int, queue_rows: int) -> None:
        super().__init__(RowLocations(**made["places"]), allowed, queue_rows, 1)
        self._about = made["about"]
        self._labels, self._ids = (
            np.load(folder / f"{name}.npy", "r", allow_pickle=False) for name in ("labels", "ids")
        )
        self._dense = (
            np.load(folder / "dense.npy", "r", allow_pickle=False) if (folder / "dense.npy").exists() else None
        )
        rows, why = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("bad", "why"))
        for row, reason in zip(rows[: allowed + 1].tolist(), why.tolist(), strict=False):
            self._note(row, reason)
        if len(rows) > allowed:
            raise DataError(
                f"{len(rows)} of {len(self)} rows are bad, recipe.data.bad_share allows {allowed}; the first: "
                f"{next(iter(self.bad.values()))}"
            )

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        inputs = {"ids": torch.from_numpy(self._ids[ids].astype(np.int64, copy=False))}
        if self._dense is not None:
            inputs["dense"] = torch.from_numpy(self._dense[ids])
        return inputs, torch.from_numpy(self._labels[ids])

    def fingerprint(self) -> str:
        return f"{len(self)} clicks {self._about}"

    @staticmethod
    def make(folder: Path, log: Log, encoder: Encoder, small: bool, threads: int) -> dict[str, Any]:
        """Parse and encode a whole log into files; returns the JSON that the constructor takes as `made`.

        `small`: ids fit into 32 bits.
        """
        if not log.rows:
            raise DataError(f"{', '.join(log.places.paths[:3])}: there are no rows")

        def column(name: str, width: int | None, dtype: type) -> np.ndarray:
            return np.lib.format.open_memmap(
                folder / f"{name}.npy", "w+", dtype, (log.rows,) if width is None else (log.rows, width)
            )

        dense, table = encoder.encode(log.parse(0, 1))
        labels, ids = column("labels", None, np.float32), column("ids", table.shape[1], np.int32 if small else np.int64)
        numbers = column("dense", dense.shape[1], np.float32) if dense is not None else None

        def read(first: int) -> tuple[np.ndarray, np.ndarray]:
            last = min(first + CHUNK_ROWS, log.rows)
            parsed = log.parse(first, last)
            chunk, ids[first:last] = encoder.encode(parsed)
            labels[first:last] = parsed.labels
            if numbers is not None:
                numbers[first:last] = chunk
            bad = np.flatnonzero(parsed.why)
            return bad + first, parsed.why[bad]

        with ThreadPoolExecutor(threads, "parse") as pool:
            bad, why = zip(*pool.map(read, range(0, log.rows, CHUNK_ROWS)), strict=True)
        np.save(folder / "bad.npy", np.concatenate(bad))
        np.save(folder / "why.npy", np.concatenate(why))
        return {"places": asdict(log.places), "about": f"{log.digest}, {encoder.about()}"}


def keys_of(log: Log, encoder: Encoder, threads: int) -> Iterator[np.ndarray]:
    """The keys of all rows, (B, F) at a time; a few blocks of them are in memory."""
    with ThreadPoolExecutor(threads, "parse") as pool:
        starts = range(0, log.rows, CHUNK_ROWS)
        for some in range(0, len(starts), 4 * threads):
            yield from pool.map(
                lambda first: encoder.keys(log.parse(first, min(first + CHUNK_ROWS, log.rows))),
                starts[some : some + 4 * threads],
            )


def cores() -> int:
    """Cores that this process may use: all of them, as the other ranks of the host wait while it reads a log."""
    return len(os.sched_getaffinity(0))


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
