"""How fast `dtf.RowReader` answers: rows in mapped files against rows in memory, with layers of changes, and of a table
that lay on disk, whose pages are in the page cache.

    python -m bench.row_reader [--rows 5e6] [--width 16] [--rounds 20]

Ids are uniform over the table, the worst case for caches. One thread. The ways take turns; medians and ranges.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

from dtf import RowReader
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import write_boxes
from dtf.checkpoint.checkpointer import _merge
from dtf.checkpoint.manifest import Manifest
from dtf.core.types import Box
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.saved_rows import RowsSetAside
from dtf.sparse.disk.tiered_records import TieredRecords

REQUESTS = (26, 2048, 2048 * 26)
LAYERS = (0, 10)
MEMORY_BYTES = 100 << 20  # of a table on disk while it is trained


def save(parent: Path, ids: np.ndarray, width: int, layers: int) -> Path:
    """A checkpoint of a table, and of layers with one row in a hundred each."""
    draft = storage.begin(parent, layers, "bench", print)
    assert draft is not None
    numbers = np.random.default_rng(1)
    boxes = [Box("table/t/count", torch.tensor(len(ids)), (), ())]
    for layer in range(layers + 1):
        some = np.sort(numbers.choice(ids, len(ids) // 100, replace=False)) if layer else ids
        rows = torch.from_numpy(numbers.standard_normal((len(some), width), np.float32))
        at = f"table/t/delta_{layer}/" if layer else "table/t/"
        named = {f"{at}ids": torch.from_numpy(some), f"{at}rows": rows}
        boxes += [Box(name, part, tuple(part.shape), (0,) * part.dim()) for name, part in named.items()]
    files, tensors = _merge([write_boxes(draft / "rank_0.safetensors", boxes)])
    return storage.commit(draft, Manifest(layers, "bench", "ddp", 1, None, files, tensors))


def save_on_disk(parent: Path, ids: np.ndarray, width: int) -> Path:
    """The same table as it lies on `sparse.disk`, of which a tenth has changed since."""
    parent.mkdir()
    draft, numbers = storage.begin(parent, 1, "bench", print), np.random.default_rng(1)
    assert draft is not None
    table = TieredRecords(parent / "rows", RecordFormat(width, 0), MEMORY_BYTES)
    for step, some in enumerate([*np.array_split(ids, 100), *np.array_split(ids[::10], 10)]):
        positions = table.place(some, step)
        positions = table.make(some) if positions[0] < 0 else positions
        table.records[positions] = numbers.standard_normal((len(some), width), np.float32)
        table.changed(positions)
    ends = torch.tensor([0, width])
    boxes = [Box("table/t/count", torch.tensor(len(ids)), (), ()), Box("table/t/columns/rows", ends, (2,), (0,))]
    written = RowsSetAside(table).write(draft, "rank_0.t", "table/t/disk_0")
    files, tensors = _merge([write_boxes(draft / "rank_0.safetensors", boxes), *written])
    return storage.commit(draft, Manifest(1, "bench", "ddp", 1, None, files, tensors))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=5e6)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    numbers = np.random.default_rng(0)
    ids = np.unique(numbers.integers(-(2**62), 2**62, int(args.rows)))
    with TemporaryDirectory() as folder:
        readers: dict[str, RowReader] = {}
        path = save_on_disk(Path(folder) / "disk", ids, args.width)
        print(f"on disk: opened in {seconds(lambda: readers.update({'on disk': RowReader(path)})):.2f} s")
        for layers in LAYERS:
            path = save(Path(folder), ids, args.width, layers)
            for mapped in (True, False):
                name = f"{'mapped' if mapped else 'in memory'}, {layers} layers"
                took = seconds(
                    lambda name=name, path=path, mapped=mapped: readers.update({name: RowReader(path, mapped)})
                )
                print(f"{name}: opened in {took:.2f} s")
        for count in REQUESTS:
            found: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(args.rounds + 1):
                asked = numbers.choice(ids, count)
                for name, reader in readers.items():
                    found[name].append(seconds(lambda reader=reader, asked=asked: reader.lookup("t", asked)))
            for name, times in found.items():
                rates = sorted(count / each / 1e6 for each in times[1:])
                print(f"{count:>6} ids, {name}: {median(rates):.2f} M rows/s ({rates[0]:.2f} to {rates[-1]:.2f})")


if __name__ == "__main__":
    main()
