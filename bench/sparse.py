"""What sparse tables cost per step, against `nn.Embedding(sparse=True)` and torch.optim.Adagrad.

    python bench/sparse.py              # 26 fields, 10 million ids, batch 2048, width 16
    python bench/sparse.py --steps 20 --ids 100000

A step finds the rows of a batch, hands them out by field, takes a gradient for each and learns from it; no model. Both
sides run in this process on the same rows and ids, in turn. It fails when the rows that both trained differ by more
than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from dtf.api.sparse_table import Table
from dtf.sparse.row_optimizers import RowAdagrad
from dtf.sparse.store import SparseTable, gather, segment_sum, unique

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


def by_table(table: SparseTable, times: dict[str, list[float]]) -> Step:
    out = np.empty((0, WIDTH), np.float32)
    done = 0

    def step(ids: np.ndarray, gradients: np.ndarray) -> float:
        nonlocal out, done
        if len(out) != ids.size:
            out = np.zeros((ids.size, WIDTH), np.float32)
        marks = [time.perf_counter()]
        distinct, inverse = unique(ids.reshape(-1))
        marks.append(time.perf_counter())
        rows = table.lookup(distinct, create=True)
        marks.append(time.perf_counter())
        gather(rows, inverse, out)
        marks.append(time.perf_counter())
        sums = segment_sum(gradients, inverse, len(distinct))
        marks.append(time.perf_counter())
        table.update(distinct, sums, LR, 1.0, done)
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
    warnings.filterwarnings("ignore", "Sparse invariant checks")
    torch.set_num_threads(given.threads)
    size = given.ids // FIELDS
    batches = draw_batches(given.steps, given.batch, size)
    gradients = np.random.default_rng(1).normal(size=(given.batch * FIELDS, WIDTH)).astype(np.float32)

    table = SparseTable(
        Table(WIDTH, 0 if given.hashed else FIELDS * size, FIELDS * size, 0.01), RowAdagrad(), 0, "bench"
    )
    embeddings = []
    for number in range(FIELDS):
        rows = table.lookup(np.arange(number * size, (number + 1) * size), create=not given.empty)
        embeddings.append(nn.Embedding(size, WIDTH, _weight=torch.from_numpy(rows), sparse=True))
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    sides: dict[str, Step] = {"table": by_table(table, phases), "torch": by_torch(embeddings, size)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    distinct = [len(np.unique(batch)) for batch in batches[:5]]
    for number, batch in enumerate(batches):
        sums = {}
        for name in sides if number % 2 else reversed(sides):
            started = time.perf_counter()
            sums[name] = sides[name](batch, gradients)
            times[name].append((time.perf_counter() - started) * 1e3)
        if abs(sums["table"] - sums["torch"]) > 1e-3 * max(1.0, abs(sums["torch"])):
            raise SystemExit(f"step {number}: both must see the same rows; their sums are {sums}")
    apart = 0.0
    for number, each in enumerate(embeddings):
        rows = table.lookup(np.arange(number * size, (number + 1) * size), create=False)
        apart = max(apart, float(np.abs(rows - each.weight.detach().numpy()).max()))
    if not apart < 1e-5:
        raise SystemExit(f"both must train the same rows, they are {apart:.1e} apart")
    median = {name: statistics.median(values[3:]) for name, values in times.items()}
    ratios = sorted(slow / fast for fast, slow in zip(times["table"][3:], times["torch"][3:], strict=True))
    tenth = len(ratios) // 10
    print(f"torch {torch.__version__} on {given.threads} threads, numpy {np.__version__}, {platform.machine()}")
    report = {
        "ids": FIELDS * size, "batch": given.batch, "distinct": round(statistics.mean(distinct)),
        "table_rows": len(table), "table_mb": table.byte_count() >> 20,
        "table_ms": round(median["table"], 2), "torch_ms": round(median["torch"], 2),
        "ratio": round(statistics.median(ratios), 2),
        "ratio_10_90": [round(ratios[tenth], 2), round(ratios[-1 - tenth], 2)],
        "phases_ms": {phase: round(statistics.median(values[3:]) * 1e3, 3) for phase, values in phases.items()},
        "rows_apart": apart,
    }  # fmt: skip
    print(json.dumps(report))


if __name__ == "__main__":
    main()
