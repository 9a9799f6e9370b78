"""What a sparse table costs by its rows: memory, disk, a step.

    python -m bench.table_sizes --rows 1000000 10000000

In one process: a table in memory, and one of which a tenth lies in memory and the others on disk. Both get all rows,
then steps of 53,248 ids (2,048 rows of 26 fields) by popularity, rank ** -1.05, of which each distinct one is looked up
and updated once. `folder` is what the table has on disk after them, `checkpoint` what one of it holds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np

from dtf.api.row_optimizer import RowOptimizer
from dtf.api.row_storage import Values
from dtf.api.sparse_table import Table
from dtf.sparse.id_arrays import unique
from dtf.sparse.row_optimizers import RowAdagrad, RowwiseAdagrad
from dtf.sparse.store import SparseTable
from dtf.sparse.tiered_table import TieredTable

IDS, EXPONENT, STEPS, SOME = 2048 * 26, 1.05, 60, 1 << 16
KINDS = {
    "16 numbers, adagrad": (16, lambda **more: RowAdagrad(**more)),
    "8 numbers in bf16, rowwise_adagrad": (8, lambda **more: RowwiseAdagrad(values=Values.bf16, **more)),
}


def batches(rows: int) -> Iterator[np.ndarray]:
    """Distinct ids of each step."""
    random = np.random.default_rng(0)
    power = 1 - EXPONENT
    for _ in range(STEPS):
        # the inverse of the integral of rank ** -exponent
        ranks = (1 + random.random(IDS) * (rows**power - 1)) ** (1 / power)
        yield unique(np.minimum(ranks.astype(np.int64), rows - 1) * 0x9E3779B97F4A7C1)[0]


def fill(table: SparseTable, rows: int) -> None:
    for first in range(0, rows, SOME):
        table.lookup(np.arange(first, min(first + SOME, rows)) * 0x9E3779B97F4A7C1, create=True)


def step_ms(table: SparseTable, rows: int) -> float:
    """Of the second half of the steps; each knows the ids of the next one."""
    times, coming = [], list(batches(rows))
    for number, ids in enumerate(coming):
        gradients = np.full((len(ids), table.width), 0.01, table.dtype)
        began = time.perf_counter()
        table.lookup(ids, create=True)
        if number + 1 < len(coming):
            table.read_ahead(coming[number + 1])
        table.update(ids, gradients, 0.1, 1.0, number)
        times.append(time.perf_counter() - began)
    return 1e3 * median(times[len(times) // 2 :])


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(kind: str, rows: int, folder: Path) -> str:
    width, rule = KINDS[kind]
    spec = Table(width, 0, rows, 0.1)
    plain = SparseTable(spec, rule(), 0, "t")
    fill(plain, rows)
    in_memory, plain_ms = plain.byte_count(), step_ms(plain, rows)
    del plain
    by_disk: RowOptimizer = rule(disk=str(folder), memory_gb=1)
    tiered = TieredTable(spec, by_disk, 0, "t", np.float32, in_memory // 10, (0, 2**64 - 1))
    fill(tiered, rows)
    tiered_ms, used = step_ms(tiered, rows), bytes_in(folder)
    aside, saved = tiered.set_aside(), folder / "saved"
    saved.mkdir()
    aside.write(saved, "rank_0.t", "table/t/disk_0")
    on_disk, kept = used / rows, bytes_in(saved) / rows
    tiered.clear()
    return (
        f"| {kind} | {rows:,} | {in_memory / 1e6:,.0f} MB | {plain_ms:.0f} ms | {in_memory / 1e7:,.0f} MB | "
        f"{on_disk:.1f} B a row | {kept:.1f} B a row | {tiered_ms:.0f} ms |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--folder", default=None, help="on the disk that is measured; default: the system's for such")
    given = parser.parse_args()
    print("| rows of | rows | all in memory | a step | memory, a tenth | folder | checkpoint | a step |", flush=True)
    for kind in KINDS:
        for rows in given.rows:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                print(measure(kind, rows, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
