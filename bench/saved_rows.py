"""What a save of the rows that changed costs beside one of all rows.

    python -m bench.saved_rows [--rows 4000000] [--share 0.01] [--rounds 7]

One process has a table of so many rows of 16 numbers with the state of Adagrad. Before each save a share of them is
updated, drawn evenly over all. The ways take turns: all rows (`checkpoint.every_steps`), and those that changed since
the save before (`checkpoint.delta_every`). Training stands still while the rows are collected and copied; then a thread
writes. Files are synced.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.rows import Row, table, with_ratios

if TYPE_CHECKING:
    from dtf.sparse.sharded_tables import ShardedTables

WAYS = ("all rows", "changed rows")
WIDTH = 16


class Alone:
    """A world of one rank."""

    rank, size = 0, 1

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value


def tables_of(rows: int) -> ShardedTables:
    import numpy as np

    from dtf.api.sparse_table import Table
    from dtf.core.types import Place
    from dtf.distributed.world import World
    from dtf.sparse.row_optimizers import RowAdagrad
    from dtf.sparse.sharded_tables import ShardedTables
    from dtf.sparse.store import SparseTable
    from dtf.sparse.table_layouts import DataParallelTable

    world = World(Place(rank=0, size=1))
    store = SparseTable(Table(WIDTH, 0, rows, 0.1), RowAdagrad(), 1, "ids", np.float32)
    made = ShardedTables({"ids": DataParallelTable(store, world, [True])}, world, 1.0)
    for first in range(0, rows, 1 << 18):
        change(made, np.arange(first, min(first + (1 << 18), rows)))
    return made


def change(tables: ShardedTables, ids: Any) -> None:
    """A step on these rows."""
    import numpy as np

    store = tables._tables["ids"].store
    store.lookup(ids, True)
    store.update(ids, np.ones((len(ids), WIDTH), np.float32), 0.01, 1.0, 1)


def compare(rows: int, share: float, rounds: int) -> list[Row]:
    import numpy as np

    from dtf.checkpoint.checkpointer import Checkpointer
    from dtf.checkpoint.options import Every
    from dtf.checkpoint.saves import Saves
    from dtf.checkpoint.storage import read_manifest
    from dtf.core.types import State

    tables, random = tables_of(rows), np.random.default_rng(0)
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="dtf-bench-saved-rows-") as folder:
        options = Every(delta_every=1, keep_last=1)
        saves = Saves(
            Checkpointer(Path(folder), options, Alone(), "bench", ("loss", "min"), "ddp"), print, lambda: None
        )
        saves.reserve(tables.boxes())

        def save(step: int, way: str) -> None:
            def told(path: str, seconds: float, held: float) -> None:
                before = held + collected
                base = read_manifest(Path(path)).base
                size = sum(
                    file.stat().st_size for file in Path(path).iterdir() if base is None or file.name not in base.files
                )
                for key, value in (
                    ("held", 1e3 * before),
                    ("written", 1e3 * (seconds + collected)),
                    ("bytes", size / 1e6),
                ):
                    found.setdefault((way, key), []).append(value)

            began = time.perf_counter()
            layer = saves.layer(way == WAYS[0])
            assert layer is not None and (layer > 0) == (way == WAYS[1])
            tables.keep_changes(layer)
            state = State([box for box in tables.boxes() if box.tensor.numel()], {}, private=True)
            collected = time.perf_counter() - began
            saves.save(step, state, {}, None, told, lambda: None)
            saves.finish()

        for number in range(rounds + 1):  # the first one finds no memory that was used before
            for turn, way in enumerate(WAYS):
                change(tables, np.unique(random.integers(0, rows, int(rows * share))))
                save(1 + 2 * number + turn, way)
        saves.close()
    work = f"{rows / 1e6:g} million rows of {2 * WIDTH} numbers, {share:.0%} of them changed: "
    titles = {"held": ("training stands still", "ms"), "written": ("written", "ms"), "bytes": ("written anew", "MB")}
    return with_ratios(
        [Row(work + title, way, unit, found[way, key][1:]) for key, (title, unit) in titles.items() for way in WAYS]
    )


def measure(quick: bool) -> list[Row]:
    return compare(20_000, 0.01, 2) if quick else compare(4_000_000, 0.01, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--share", type=float, default=0.01, help="of the rows that change between two saves")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(table(compare(options.rows, options.share, options.rounds)))


if __name__ == "__main__":
    main()
