"""What sparse tables cost per step, against `nn.Embedding(sparse=True)` and torch.optim.Adagrad.

    python -m bench.sparse              # 26 fields, 10 million ids, batch 2048, width 16
    python -m bench.sparse --steps 20 --ids 100000

A step finds the rows of a batch, hands them out by field, takes a gradient for each and learns from it; no model. Both
sides run in this process on the same rows and ids, in turn. It fails when the rows that both trained differ by more
than 1e-5.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from bench.rows import Row, table, with_ratios
from dtf.api.sparse_table import Table
from dtf.sparse.id_arrays import gather, segment_sum, unique
from dtf.sparse.row_optimizers import RowAdagrad
from dtf.sparse.store import SparseTable

FIELDS, WIDTH, LR = 26, 16, 0.05
PHASES = ("unique", "lookup", "gather", "segment_sum", "update")
Step = Callable[[np.ndarray, np.ndarray], float]


def draw_batches(count: int, rows: int, size: int, exponent: float = 1.05) -> list[np.ndarray]:
    """Ids (rows, FIELDS) int64 of one fused table: popularity falls as rank ** -exponent, ranks are scattered over each
    field's ids.
    """
    random = np.random.default_rng(0)
    scattered = [random.permutation(size) for _ in range(FIELDS)]
    power = 1 - exponent

    def field(number: int) -> np.ndarray:
        ranks = ((random.random(rows) * ((size + 1) ** power - 1) + 1) ** (1 / power)).astype(np.int64) - 1
        return number * size + scattered[number][np.minimum(ranks, size - 1)]

    return [np.stack([field(number) for number in range(FIELDS)], 1) for _ in range(count)]


def by_table(store: SparseTable, times: dict[str, list[float]]) -> Step:
    out = np.empty((0, WIDTH), np.float32)
    done = 0

    def step(ids: np.ndarray, gradients: np.ndarray) -> float:
        nonlocal out, done
        if len(out) != ids.size:
            out = np.zeros((ids.size, WIDTH), np.float32)
        marks = [time.perf_counter()]
        distinct, inverse = unique(ids.reshape(-1))
        marks.append(time.perf_counter())
        rows = store.lookup(distinct, create=True)
        marks.append(time.perf_counter())
        gather(rows, inverse, out)
        marks.append(time.perf_counter())
        sums = segment_sum(gradients, inverse, len(distinct))
        marks.append(time.perf_counter())
        store.update(distinct, sums, LR, 1.0, done)
        marks.append(time.perf_counter())
        done += 1
        for phase, first, last in zip(PHASES, marks, marks[1:], strict=False):
            times[phase].append(last - first)
        return float(out.sum())

    return step


def by_torch(embeddings: list[nn.Embedding], size: int) -> Step:
    optimizer = torch.optim.Adagrad([each.weight for each in embeddings], lr=LR)
    offsets = np.arange(FIELDS) * size

    def step(ids: np.ndarray, gradients: np.ndarray) -> float:
        columns: Tensor = torch.from_numpy(ids - offsets)
        rows = torch.stack([each(columns[:, number]) for number, each in enumerate(embeddings)], 1)
        rows.backward(torch.from_numpy(gradients).view_as(rows))
        optimizer.step()
        optimizer.zero_grad()
        return float(rows.detach().sum())

    return step


def measure(
    quick: bool, ids: int = 1_000_000, batch: int = 2048, steps: int = 100, threads: int = 2,
    hashed: bool = False, empty: bool = False,
) -> list[Row]:  # fmt: skip
    if quick:
        ids, batch, steps = 26_000, 64, 8
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = ids // FIELDS
    batches = draw_batches(steps, batch, size)
    gradients = np.random.default_rng(1).normal(size=(batch * FIELDS, WIDTH)).astype(np.float32)
    spec = Table(WIDTH, 0 if hashed else FIELDS * size, FIELDS * size, 0.01)
    store, embeddings = SparseTable(spec, RowAdagrad(), 0, "bench"), []
    for number in range(FIELDS):
        rows = store.lookup(np.arange(number * size, (number + 1) * size), create=not empty)
        embeddings.append(nn.Embedding(size, WIDTH, _weight=torch.from_numpy(rows), sparse=True))
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    sides: dict[str, Step] = {"dtf": by_table(store, phases), "torch": by_torch(embeddings, size)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    for number, ids_of_step in enumerate(batches):
        sums = {}
        for name in sides if number % 2 else reversed(sides):
            started, used = time.perf_counter(), time.process_time()
            sums[name] = sides[name](ids_of_step, gradients)
            times[name].append((time.perf_counter() - started) * 1e3)
            cpu[name].append((time.process_time() - used) * 1e3)
        if abs(sums["dtf"] - sums["torch"]) > 1e-3 * max(1.0, abs(sums["torch"])):
            raise SystemExit(f"step {number}: both must see the same rows; their sums are {sums}")
    check_rows(store, embeddings, size)
    torch.set_num_threads(before)
    work = f"rows alone: lookup, backward, update; {FIELDS * size:,} ids, batches of {batch:,}"
    settings = {
        "dtf": "one table, adagrad, " + ("any int64 ids" if hashed else "ids of a range"),
        "torch": f"26 nn.Embedding(sparse=True), torch.optim.Adagrad, {threads} threads",
    }
    sides_rows = [Row(work, name, "ms a step", times[name][3:], False, cpu[name][3:], "ms", settings=settings[name])
                  for name in sides]  # fmt: skip
    parts = [Row("dtf's part of that", name, "ms", [1e3 * one for one in some[3:]]) for name, some in phases.items()]
    return [*with_ratios(sides_rows), *parts]


def check_rows(store: SparseTable, embeddings: list[nn.Embedding], size: int) -> None:
    """SystemExit where the two have not trained the same rows."""
    apart = 0.0
    for number, each in enumerate(embeddings):
        rows = store.lookup(np.arange(number * size, (number + 1) * size), create=False)
        apart = max(apart, float(np.abs(rows - each.weight.detach().numpy()).max()))
    if not apart < 1e-5:
        raise SystemExit(f"both must train the same rows, they are {apart:.1e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=10_000_000, help="of all fields together")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2, help="of torch; a table uses one")
    parser.add_argument("--hashed", action="store_true", help="a table of any int64 ids, not of a range")
    parser.add_argument(
        "--empty", action="store_true", help="the table draws its rows when they first appear, as in training"
    )
    given = parser.parse_args()
    print(table(measure(False, **vars(given))))


if __name__ == "__main__":
    main()
