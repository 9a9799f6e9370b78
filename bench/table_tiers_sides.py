"""The contestants of `bench.table_tiers`, each a process that does steps of a sparse table when it is told to.

    python -m bench.table_tiers_sides WHO FOLDER CGROUP ROWS EXPONENT BATCH STEPS MEMORY

All keep rows of `WIDTH` float32 and one number of state, drawn by dtf, and step with the same compiled loop, so that
all must end with the same bits.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.sparse import FIELDS, draw_batches
from bench.turns import Turns, contestant
from dtf.core.seeding import mix
from dtf.sparse.id_arrays import gather, segment_sum, unique
from dtf.sparse.row_kernels import rowwise_adagrad

WIDTH = 8
SLACK = 48 << 20
"""Bytes over the bound that a contestant may take for buffers, stacks and the like."""
_REAL = np.float32
_BUILD = 1 << 10  # rows that are written at a time


class Side(Protocol):
    """A table with rows for ids below a count."""

    def build(self, ids: np.ndarray, records: np.ndarray) -> None: ...
    def ready(self) -> None: ...
    def lookup(self, ids: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray: ...
    def update(self, ids: np.ndarray, gradients: np.ndarray, step: int) -> None: ...
    def facts(self) -> dict[str, float]: ...


def step_on(records: np.ndarray, positions: np.ndarray, gradients: np.ndarray) -> None:
    rowwise_adagrad(records, positions, gradients, _REAL(1.0), _REAL(0.05), _REAL(1e-8), _REAL(0.0))


class Tiered:
    """dtf's table on disk."""

    def __init__(self, folder: Path, rows: int, memory: int) -> None:
        from dtf.sparse.disk.record_format import RecordFormat
        from dtf.sparse.disk.tiered_records import TieredRecords

        self.table = TieredRecords(folder, RecordFormat(WIDTH, 1), memory)
        self._step, self._pages = 1, 0

    def build(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.table.records[self.table.make(ids)] = records

    def ready(self) -> None:  # as many rows are dirty as in the midst of training
        self.table.finish_sweep()

    def lookup(self, ids: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        self._step += 1
        positions = self.table.place(ids, self._step)
        if len(coming):
            self.table.prefetch(coming, self._step + 1)
        return self.table.records[positions, :WIDTH]

    def update(self, ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        positions = self.table.place(ids, self._step)
        step_on(self.table.records, positions, gradients)
        self.table.changed(positions)

    def facts(self) -> dict[str, float]:
        """Of the turn: the share of rows that were in memory, and the seconds that this disk needs to read as many
        pages of the same files at random, with as many reads at a time.
        """
        table, pages = self.table, self.table.pages_read - self._pages
        asked = max(1, table.hits + table.misses)
        found = {"hits": table.hits / asked, "pages": pages, "swept_mb": table.bytes_swept / 1e6, "floor_s": 0.0}
        if pages:
            found["floor_s"] = floor_seconds(table, pages)
        self._pages, table.hits, table.misses, table.bytes_swept = table.pages_read, 0, 0, 0
        return found


def floor_seconds(table: Any, pages: int) -> float:
    """For random reads of as many pages, and nothing else."""
    from dtf.sparse.disk.page_kernels import read_blindly
    from dtf.sparse.row_index import reserve

    table.finish_sweep()
    form, random, segments = table.form, np.random.default_rng(pages), table.run.files
    chosen = random.integers(0, len(segments), pages)
    files = np.array([s.file for s in segments])[chosen]
    counts = np.array([len(s.firsts) for s in segments])[chosen]
    places = form.head_bytes + (random.random(pages) * counts).astype(np.int64) * form.page_bytes
    buffers = reserve(table._depth, form.page_bytes // 8, np.dtype(np.uint64))
    read_blindly(files[:1], places[:1], 0, 1, buffers[0])  # compiled
    began = time.perf_counter()
    list(table._readers.map(lambda k: read_blindly(files, places, k, table._depth, buffers[k]), range(table._depth)))
    return time.perf_counter() - began


class InMemory:
    """dtf's table in memory."""

    def __init__(self, folder: Path, rows: int, memory: int) -> None:
        from dtf.api.sparse_table import Table
        from dtf.sparse.row_optimizers import RowwiseAdagrad
        from dtf.sparse.store import SparseTable

        self.store = SparseTable(Table(WIDTH, 0, rows, 0.01), RowwiseAdagrad(), 0, "bench")

    def build(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.store.keep(ids, records)

    def ready(self) -> None: ...

    def lookup(self, ids: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        return self.store.lookup(ids, create=True)

    def update(self, ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        self.store.update(ids, gradients, 0.05, 1.0, step)

    def facts(self) -> dict[str, float]:
        return {}


class Mapped:
    """A memory-mapped file, in which the place of a row is its id: it needs no index."""

    def __init__(self, folder: Path, rows: int, memory: int) -> None:
        self.records = np.memmap(folder / "rows.bin", _REAL, "w+", shape=(rows, WIDTH + 1))

    def build(self, ids: np.ndarray, records: np.ndarray) -> None:
        self.records[ids] = records

    def ready(self) -> None:
        import mmap

        self.records.flush()
        self.records._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]

    def lookup(self, ids: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        return np.asarray(self.records)[ids, :WIDTH]

    def update(self, ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        step_on(np.asarray(self.records), ids, gradients)

    def facts(self) -> dict[str, float]:
        return {}


class Rocks:
    """rocksdict: keys and values of bytes, no log, no compression, Bloom filters, direct reads, its memory for blocks,
    filters and writes as large as the bound. A cgroup of that size ends it: it takes more than it is told to.
    """

    def __init__(self, folder: Path, rows: int, memory: int) -> None:
        import rocksdict as r  # pyright: ignore[reportMissingImports]

        options, blocks = r.Options(raw_mode=True), r.BlockBasedOptions()
        blocks.set_block_cache(r.Cache(memory * 3 // 4))
        blocks.set_block_size(4096)
        blocks.set_cache_index_and_filter_blocks(True)
        blocks.set_bloom_filter(10.0, False)
        options.set_block_based_table_factory(blocks)
        options.set_compression_type(r.DBCompressionType.none())
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_write_buffer_size(memory // 8)
        options.set_max_write_buffer_number(2)
        options.increase_parallelism(2)
        self._r, self._db = r, r.Rdict(str(folder / "db"), options)
        self._write = r.WriteOptions()
        self._write.disable_wal = True
        self._held = np.empty(0)

    def build(self, ids: np.ndarray, records: np.ndarray) -> None:
        self._put(ids, records)

    def _put(self, ids: np.ndarray, records: np.ndarray) -> None:
        batch, keys, values = self._r.WriteBatch(raw_mode=True), ids.astype(">i8").tobytes(), records.tobytes()
        size = 4 * (WIDTH + 1)
        for i in range(len(ids)):
            batch.put(keys[8 * i : 8 * i + 8], values[size * i : size * i + size])
        self._db.write(batch, self._write)

    def ready(self) -> None:
        self._db.flush()
        self._db.compact_range(None, None)

    def lookup(self, ids: np.ndarray, coming: np.ndarray, step: int) -> np.ndarray:
        keys = ids.astype(">i8").tobytes()
        values: Any = self._db.get([keys[at : at + 8] for at in range(0, len(keys), 8)])
        self._held = np.frombuffer(b"".join(values), _REAL).reshape(-1, WIDTH + 1).copy()
        return self._held[:, :WIDTH]

    def update(self, ids: np.ndarray, gradients: np.ndarray, step: int) -> None:
        step_on(self._held, np.arange(len(ids)), gradients)
        self._put(ids, self._held)

    def facts(self) -> dict[str, float]:
        return {}


SIDES: dict[str, Callable[[Path, int, int], Side]] = {
    "dtf": Tiered, "in memory": InMemory, "mapped file": Mapped, "rocksdict": Rocks,
}  # fmt: skip


BOUNDED = ("dtf", "mapped file")
"""By a cgroup. The others are in memory, or bound themselves."""


class Bound:
    """A cgroup of this process alone, where one can be made (`folder`; empty: none)."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder) if folder else None
        if self._folder:
            (self._folder / "cgroup.procs").write_text("0")

    def anonymous(self) -> int:
        """Bytes that are no page cache."""
        if not self._folder:
            return 0
        lines = dict(line.split() for line in (self._folder / "memory.stat").read_text().splitlines())
        return int(lines["rss"])

    def close(self, limit: int) -> float:
        """From now on at most `limit` bytes, or as few more as there must be; returns it in MB, 0 without a cgroup."""
        if not self._folder:
            return 0.0
        for more in range(0, 1 << 30, 8 << 20):
            with suppress(OSError):
                (self._folder / "memory.limit_in_bytes").write_text(str(limit + more))
                return (limit + more) / 1e6
        return 0.0


def build(who: str, folder: Path, rows: int, memory: int) -> Side:
    """The table, whole."""
    from dtf.sparse.id_kernels import draw

    side, order = SIDES[who](folder, rows, memory), np.arange(rows)
    if who == "dtf":  # so that each segment is written once
        order = order[np.argsort(mix(order.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)))]
    for first in range(0, rows, _BUILD):
        ids = order[first : first + _BUILD]
        records, drawn = np.zeros((len(ids), WIDTH + 1), _REAL), np.empty((len(ids), WIDTH), _REAL)
        draw(np.uint64(7), ids, 0.01, drawn)
        records[:, :WIDTH] = drawn
        side.build(ids, records)
    side.ready()
    return side


def main(turns: Turns) -> None:
    who, folder, cgroup, rows, exponent, batch, steps, memory = sys.argv[1:]
    bound, count, size = Bound(cgroup), int(rows), int(rows) // FIELDS
    batches = [b.astype(np.int32) for b in draw_batches(int(steps), int(batch), size, float(exponent))]
    gradients = np.random.default_rng(1).normal(size=(int(batch) * FIELDS, WIDTH)).astype(_REAL)
    trial = Path(folder) / "trial"
    trial.mkdir()
    rehearsed = build(who, trial, 20_000, 100_000)
    for number in range(4):  # all code is loaded, and all threads run, before memory is counted
        some = np.arange(number * 500, number * 500 + 600)
        unique(some)
        rehearsed.lookup(some, some + 5000, number)
        rehearsed.update(some, gradients[:600], number)
    rehearsed.facts()
    base = bound.anonymous()
    side = build(who, Path(folder), count, int(memory))
    limit = bound.close(base + int(memory) + SLACK) if who in BOUNDED else 0.0
    turns.ready(limit_mb=limit, over_mb=limit - (base + int(memory)) / 1e6 if limit else 0.0)
    done, out = 0, np.empty((int(batch) * FIELDS, WIDTH), _REAL)
    told = [unique(batches[0].reshape(-1).astype(np.int64))]
    while wanted := turns.begin():
        for number in range(done, done + wanted):
            distinct, inverse = told.pop()
            coming = batches[number + 1].reshape(-1).astype(np.int64) if number + 1 < len(batches) else np.empty(0, int)
            told.append(unique(coming))
            rows_of_step = side.lookup(distinct, told[0][0], number)
            gather(np.ascontiguousarray(rows_of_step), inverse, out)
            side.update(distinct, segment_sum(gradients, inverse, len(distinct)), number)
        seconds = time.perf_counter() - turns._began
        done += wanted
        facts = side.facts() | {"grown_mb": (bound.anonymous() - base) / 1e6}
        digest = hashlib.sha256(out.tobytes()).hexdigest()[:16]
        turns._say({"seconds": seconds, "cpu": time.process_time() - turns._cpu, "digest": digest, **facts})


if __name__ == "__main__":
    contestant(main)
