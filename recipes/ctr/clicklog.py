"""Data sets of click logs: `Queued` reads the rows of a batch from the log, `Columns` has parsed the whole log before.

Neither knows a file format or a model.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Dataset
from dtf.core.errors import DataError
from dtf.core.nest import Bags
from dtf.recipes.ctr.encode import Encoder
from dtf.recipes.ctr.lines import REASONS
from dtf.recipes.ctr.log import Log, RowLocations

CHUNK_ROWS = 1 << 14
"""Rows that a thread parses at once where a whole log is read."""

_log = logging.getLogger(__name__)


class Clicks(Dataset):
    """Rows as `{["ids": (B, F) int64][, "bags": Bags with lengths (B, G)][, "dense": (B, D) float32]}` and targets (B,)
    float32, 0 or 1.

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
        labels, denses, tables, bags = [], [], [], []
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            start = int(ids[first])
            parsed = self._source.parse(start, start + last - first)
            for offset in np.flatnonzero(parsed.why).tolist():
                self._note(start + offset, int(parsed.why[offset]))
            dense, table = self._encoder.encode(parsed)
            labels.append(parsed.labels)
            tables.append(table)
            denses.append(dense)
            bags.append(self._encoder.bags(parsed))
        inputs: dict[str, Any] = {"ids": _joined(tables)} if tables[0].shape[1] else {}
        if bags[0] is not None:
            inputs["bags"] = Bags(*(_joined(list(parts)) for parts in zip(*bags, strict=True)))
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
        self._bags = _KeptBags(folder, made["bags"]) if "bags" in made else None
        rows, why = (np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("bad", "why"))
        for row, reason in zip(rows[: allowed + 1].tolist(), why.tolist(), strict=False):
            self._note(row, reason)
        if len(rows) > allowed:
            raise DataError(
                f"{len(rows)} of {len(self)} rows are bad, recipe.data.bad_share allows {allowed}; the first: "
                f"{next(iter(self.bad.values()))}"
            )

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        inputs: dict[str, Any] = {}
        if self._ids.shape[1]:
            inputs["ids"] = torch.from_numpy(self._ids[ids].astype(np.int64, copy=False))
        if self._bags is not None:
            inputs["bags"] = self._bags.rows(ids)
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

        first_row = log.parse(0, 1)
        dense, table = encoder.encode(first_row)
        labels, ids = column("labels", None, np.float32), column("ids", table.shape[1], np.int32 if small else np.int64)
        numbers = column("dense", dense.shape[1], np.float32) if dense is not None else None

        lengths = None if first_row.bags is None else column("lengths", first_row.bags.lengths.shape[1], np.int32)

        def read(first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
            last = min(first + CHUNK_ROWS, log.rows)
            parsed = log.parse(first, last)
            chunk, ids[first:last] = encoder.encode(parsed)
            labels[first:last] = parsed.labels
            if numbers is not None:
                numbers[first:last] = chunk
            bags = encoder.bags(parsed)
            if bags is not None and lengths is not None:
                lengths[first:last] = bags.lengths
            bad = np.flatnonzero(parsed.why)
            return bad + first, parsed.why[bad], None if bags is None else bags.values

        bad, why = [], []
        kept = nullcontext() if lengths is None else open(folder / _KeptBags.VALUES, "wb")  # noqa: SIM115 - closed below
        with ThreadPoolExecutor(threads, "parse") as pool, kept as file:
            for bad_rows, reasons, values in pool.map(read, range(0, log.rows, CHUNK_ROWS)):
                bad.append(bad_rows)
                why.append(reasons)
                if values is not None and file is not None:
                    file.write(np.ascontiguousarray(values, np.int32 if small else np.int64).data)
        np.save(folder / "bad.npy", np.concatenate(bad))
        np.save(folder / "why.npy", np.concatenate(why))
        made = {"places": asdict(log.places), "about": f"{log.digest}, {encoder.about()}"}
        if lengths is None:
            return made
        np.save(folder / "starts.npy", np.concatenate([[0], np.cumsum(lengths.sum(1, dtype=np.int64))]))
        return made | {"bags": "int32" if small else "int64"}


class _KeptBags:
    """Bags of all rows, in files that all ranks of a host map."""

    VALUES = "values.bin"

    def __init__(self, folder: Path, dtype: str) -> None:
        self._starts, self._lengths = (
            np.load(folder / f"{name}.npy", "r", allow_pickle=False) for name in ("starts", "lengths")
        )
        values = np.dtype(dtype)
        self._values = np.memmap(folder / self.VALUES, values, "r") if self._starts[-1] else np.empty(0, values)

    def rows(self, ids: np.ndarray) -> Bags:
        lengths = self._lengths[ids].astype(np.int64)
        counts = lengths.sum(1)
        ends = np.cumsum(counts)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self._starts[ids] - ends + counts, counts)
        return Bags(torch.from_numpy(self._values[at].astype(np.int64)), torch.from_numpy(lengths))


def keys_of(log: Log, encoder: Encoder, threads: int) -> Iterator[list[np.ndarray]]:
    """The keys of all rows by field, of some rows at a time; a few blocks of them are in memory."""
    with ThreadPoolExecutor(threads, "parse") as pool:
        starts = range(0, log.rows, CHUNK_ROWS)
        for some in range(0, len(starts), 4 * threads):
            yield from pool.map(
                lambda first: encoder.by_field(log.parse(first, min(first + CHUNK_ROWS, log.rows))),
                starts[some : some + 4 * threads],
            )


def cores() -> int:
    """Cores that this process may use: all of them, as the other ranks of the host wait while it reads a log."""
    return len(os.sched_getaffinity(0))


def _joined(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts))
