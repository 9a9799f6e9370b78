"""How fast dtf trains a click-through model, against loops written by hand and other frameworks, on the same rows in
memory.

    python -m bench.ctr [--ids 10000000] [--only 64-32]

13 numbers and 26 fields, whose ids follow Zipf's law; rows of 16 numbers; Adagrad on all. Contestants are processes
that take turns. The first steps warm up; then dtf's table is given the rest of its rows, so that nobody makes rows in
what is timed. A loop by hand that does not come to dtf's loss on rows that they had not seen is a row that says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bench.contest import Contestant, apart, contest
from bench.ctr_rivals import DIM, FIELDS, LR, NUMBERS, SCALE, Case, Run, draw, opened
from bench.ctr_rivals import Log as Rows
from bench.endless import Endless
from bench.rows import Row, table, with_ratios
from bench.turns import Turns, contestant
from dtf.api.optimizer import Optimizer
from dtf.api.options import StepOptions
from dtf.api.precision import Cast, Format, Precision
from dtf.api.recipe import Dataset, Recipe
from dtf.api.row_optimizer import RowOptimizer
from dtf.api.sparse_table import Table
from dtf.api.task import Task
from dtf.core.types import Event, Measured, Place
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.engine.loop import Loop, fit
from dtf.model.metrics import weighted_sums
from dtf.optim.optimizers import Adagrad
from dtf.recipes.ctr.model import DNN, Inputs, Tower
from dtf.sparse.row_optimizers import RowAdagrad
from dtf.strategies.ddp import Ddp

if TYPE_CHECKING:
    from dtf.core.types import Batch

CASES = {
    "400-400-400": ((400, 400, 400), False),
    "400-400-400 bf16": ((400, 400, 400), True),
    "64-32": ((64, 32), False),
}


class Clicks(Dataset):
    """The log with ids of one table."""

    prefetch = 0

    def __init__(self, rows: Rows) -> None:
        starts = np.cumsum([0, *rows.sizes[:-1]])
        self.ids, self.dense, self.clicks = (
            torch.from_numpy(part) for part in (rows.ids + starts, rows.dense, rows.clicks)
        )

    def __len__(self) -> int:
        return len(self.clicks)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[dict[str, Tensor], Tensor]:
        rows = torch.from_numpy(ids)
        return {"ids": self.ids[rows], "dense": self.dense[rows]}, self.clicks[rows]


class Deep(Recipe):
    """A multilayer perceptron over numbers and rows of a sparse table."""

    def __init__(self, rows: Rows, hidden: Sequence[int]) -> None:
        self.data, self.hidden, self.size = Clicks(rows), hidden, sum(rows.sizes)

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "predicted", "observed")

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def check(self) -> None:
        """Nothing can be wrong."""

    def tables(self) -> dict[str, Table]:
        return {"ids": Table(DIM, self.size, self.size, SCALE)}

    def build_model(self) -> nn.Module:
        return DNN(Inputs(FIELDS, NUMBERS, 0), DIM, Tower(self.hidden, batch_norm=False, dropout=0.0))

    def open_data(self, split: str, seed: int) -> Dataset:
        return self.data

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, outputs.sigmoid(), batch.targets)


class Optimizers(NamedTuple):
    """Of the perceptron, of rows of tables, and the learning rate of both."""

    parameters: Optimizer
    rows: RowOptimizer
    lr: float


ADAGRAD = Optimizers(Adagrad(), RowAdagrad(), LR)


def engine(rows: Rows, case: Case, by: Optimizers = ADAGRAD) -> tuple[Run, Any]:
    """dtf's engine, program and loader, in one process; and the sparse table."""
    recipe, world = Deep(rows, case.hidden), World(Place(rank=0, size=1))
    precision = Precision(compute=Format.bf16, cast=Cast.autocast) if case.bf16 else Precision()
    task = Task(recipe, by.parameters, precision, StepOptions(batch_size=rows.batch), 0, rows=by.rows)
    program = Ddp().setup(task, world)
    epochs = Epochs(Sequential(), len(recipe.data), rows.batch, 0)
    clock, loader, heard = (
        Endless(epochs, by.lr, logs=True),
        Loader(recipe.data, epochs, program.shard, program.micro_batch_rows),
        [],
    )

    def see(event: Event) -> None:
        if isinstance(event, Measured):
            heard.append(event.values["loss"])

    loop = Loop(program, clock, loader, loader, 0, recipe, world, None, see, {}, epochs.batches)

    def run(steps: int) -> float:
        clock.turn(steps)
        fit(loop)
        return heard[-1]

    return run, program._tables._tables["ids"].store  # type: ignore[attr-defined]


def fill(store: Any) -> None:
    """Let the table have all rows that it can have."""
    for ids in np.array_split(np.arange(store.spec.size), 64):
        store.lookup(ids, create=True)


def dtf(turns: Turns, case: Case, log: Path) -> None:
    """The contestant. The turn of warming up ends before the table gets the rest of its rows."""
    torch.set_num_threads(case.threads)
    run, store = engine(opened(log), case)
    turns.ready()
    steps = turns.begin()
    turns.end(run(steps))
    fill(store)
    turns.serve(run)


def contestants(case: Case, saved: Path) -> list[Contestant]:
    text, path = json.dumps(case), str(saved)

    def rival(who: str, name: str, peer: str, settings: str) -> Contestant:
        return Contestant(who, "bench.ctr_rivals", [name, text, path], peer, threads=case.threads, settings=settings)

    own = ["--contestant", text, path]
    return [
        Contestant("dtf", "bench.ctr", own, threads=case.threads, settings="one sparse table, adagrad, one process"),
        rival("by hand, 26 tables", "hand", "", "nn.Embedding(sparse=True), Adagrad, fused for the perceptron"),
        rival("by hand, one table", "one_table", "", "nn.Embedding(sparse=True) with offsets, Adagrad, fused likewise"),
        rival("torchrec", "torchrec", "torchrec", "FusedEmbeddingBagCollection, Adagrad in the backward pass"),
        rival("FBGEMM alone", "fbgemm", "torchrec", "SplitTableBatchedEmbeddingBagsCodegen, EXACT_ADAGRAD"),
        rival("FuxiCTR", "fuxictr", "fuxictr", "BaseModel.train_step, dense gradients of tables, as it comes"),
    ]


def compare(name: str, log: Rows, saved: Path, rounds: int, steps: int, warm: int, threads: int) -> list[Row]:
    hidden, bf16 = CASES[name]
    those = contestants(Case(hidden, bf16, threads), saved)
    sizes = f"{sum(log.sizes):,} ids, batches of {log.batch:,}, {threads} threads, turns of {steps} steps"
    work = f"perceptron {name}, {sizes}"
    turns, absent = contest(work, those, rounds, steps, warm)
    absent += apart(work, turns, those[:3], 0.02)
    rows = [
        Row(
            work, one.who, "rows/s", [steps * log.batch / turn.seconds for turn in turns[one.who]], True,
            [turn.cpu / steps * 1e3 for turn in turns[one.who]], "ms a step",
            loss=turns[one.who][-1].loss, settings=one.settings,
        )
        for one in those if one.who in turns
    ]  # fmt: skip
    return with_ratios([*rows, *absent])


def measure(quick: bool, only: str = "", ids: int = 1_000_000, threads: int = 2) -> list[Row]:
    rounds, steps, warm, ids, batch = (2, 2, 2, 200_000, 256) if quick else (20, 10, 40, ids, 2048)
    log, found = draw(ids, batch, warm + rounds * steps), []
    with TemporaryDirectory(prefix="dtf-bench-ctr-") as folder:
        saved = Path(folder, "log.npz")
        log.save(saved)
        for name in [only] if only else list(CASES)[-1:] if quick else CASES:
            found += compare(name, log, saved, rounds, steps, warm, threads)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, default="")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ids", type=int, default=1_000_000, help="distinct ids of all fields")
    parser.add_argument("--contestant", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.contestant:
        case, log = given.contestant
        contestant(lambda turns: dtf(turns, Case(*json.loads(case)), Path(log)))
    print(table(measure(False, given.only, given.ids, given.threads)))


if __name__ == "__main__":
    main()
