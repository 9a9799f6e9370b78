"""How fast dtf trains a click-through model, against a loop written by hand and against other frameworks, on the same
rows in memory.

    python -m bench.ctr                     # dtf and the loop written by hand
    python -m bench.ctr --rivals PYTHON     # and what is installed beside the interpreter PYTHON

The other frameworks need an environment of their own, with the torch for CPUs that FBGEMM was built for (2.13 for 1.8):

    python -m venv rivals
    rivals/bin/pip install fbgemm-gpu-cpu==1.8.0 fuxictr deepctr-torch requests
    rivals/bin/pip install tensordict torchmetrics==1.0.3 pyre-extensions
    rivals/bin/pip install --no-deps torchrec==1.8.0

A framework that cannot run is named with its error and left out.

13 numbers and 26 fields, whose ids follow Zipf's law; rows of 16 numbers; Adagrad on all. Contestants take turns, in
each round in the other direction. The first steps warm up; then dtf's table is given the rest of its rows, so that
nobody makes rows in what is timed. dtf and the loop by hand see every row of the log once, and it fails when they do
not come to the same loss on rows that they had not seen before.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.ctr_rivals import DIM, FIELDS, LR, NUMBERS, RIVALS, SCALE, Case, Run, draw, hand, timed
from bench.ctr_rivals import Log as Rows
from bench.endless import Endless
from dtf.api.options import StepOptions
from dtf.api.precision import Cast, Format, Precision
from dtf.api.recipe import Dataset, Recipe
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
TURN_S = 3.0
"""A turn of another framework takes about so long, or less."""


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


def engine(rows: Rows, case: Case) -> tuple[Run, Any]:
    """dtf's engine, program and loader, in one process; and the sparse table."""
    recipe, world = Deep(rows, case.hidden), World(Place(rank=0, size=1))
    precision = Precision(compute=Format.bf16, cast=Cast.autocast) if case.bf16 else Precision()
    task = Task(recipe, Adagrad(), precision, StepOptions(batch_size=rows.batch), 0, rows=RowAdagrad())
    program = Ddp().setup(task, world)
    epochs = Epochs(Sequential(), len(recipe.data), rows.batch, 0)
    clock, loader, heard = (
        Endless(epochs, LR, logs=True),
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


class Rival:
    """A contestant in a process of its own."""

    def __init__(self, python: str, name: str, case: Case, log: Path) -> None:
        command = [python, str(Path(__file__).with_name("ctr_rivals.py")), name, json.dumps(case), str(log)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.steps = 2
        self.torch = self._answer()["torch"]

    def turn(self, steps: int) -> tuple[float, float]:
        """Seconds and mean loss of so many steps."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        answer = self._answer()
        return answer["seconds"], answer["loss"]

    def warm(self, steps: int, seconds: float, most: int) -> None:
        """That many steps, but no longer than that; then turns are of about TURN_S, and of so many steps at most."""
        done, spent, took = 0, 0.0, 0.0
        while done < steps and spent < seconds:
            took, _ = self.turn(self.steps)
            done, spent = done + self.steps, spent + took
        self.steps = min(most, max(2, round(TURN_S * self.steps / took)))

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process ended without a word"}')
        if "error" in answer:
            self._process.wait()
            raise RuntimeError(answer["error"])
        return answer


def rivals(python: str, case: Case, log: Path, warm: int, most: int) -> dict[str, Rival]:
    """Those that run."""
    found = {}
    for name in RIVALS:
        try:
            rival = Rival(python, name, case, log)
            rival.warm(warm, 10 * TURN_S, most)
        except RuntimeError as error:
            print(f"{name} is left out: {error}", flush=True)
        else:
            found[f"by hand, torch {rival.torch}" if RIVALS[name] is hand else name] = rival
    return found


def fill(store: Any) -> None:
    """Let the table have all rows that it can have."""
    for ids in np.array_split(np.arange(store.spec.size), 64):
        store.lookup(ids, create=True)


def compare(name: str, log: Rows, saved: Path, given: argparse.Namespace) -> None:
    hidden, bf16 = CASES[name]
    case = Case(hidden, bf16, given.threads)
    torch.manual_seed(0)
    (by_dtf, store), by_hand = engine(log, case), hand(log, case)
    for run in (by_dtf, by_hand):
        run(given.warm)
    fill(store)
    others = rivals(given.rivals, case, saved, given.warm, given.steps) if given.rivals else {}
    turns = {"dtf": (by_dtf, given.steps), "by hand": (by_hand, given.steps)}
    rates: dict[str, list[float]] = {key: [] for key in (*turns, *others)}
    losses: dict[str, list[float]] = {key: [] for key in rates}
    for number in range(given.rounds):
        for key in rates if number % 2 else reversed(rates):
            time.sleep(0.5)  # threads of the one before may still spin
            steps = turns[key][1] if key in turns else others[key].steps
            seconds, loss = timed(*turns[key]) if key in turns else others[key].turn(steps)
            rates[key].append(steps * log.batch / seconds)
            losses[key].append(loss)
    for rival in others.values():
        rival.close()
    say(name, rates, losses)
    apart = abs(losses["dtf"][-1] - losses["by hand"][-1])
    if not apart < 0.01:
        raise SystemExit(f"{name}: dtf and the loop by hand must reach the same loss, they are {apart:.4f} apart")


def say(name: str, rates: dict[str, list[float]], losses: dict[str, list[float]]) -> None:
    """A table of medians and ranges, and the ratios of dtf's rate to the others', round by round."""
    print(f"\n{name:28}{'rows/s':>10} {'least to most':>20} {'dtf / it':>10} {'least to most':>16} {'loss':>8}")
    for key, values in rates.items():
        ratios = sorted(a / b for a, b in zip(rates["dtf"], values, strict=True))
        spread, ratio_spread = f"{min(values):,.0f} to {max(values):,.0f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        print(
            f"{key:28}{statistics.median(values):10,.0f} {spread:>20} {statistics.median(ratios):10.3f} "
            f"{ratio_spread:>16} {losses[key][-1]:8.4f}"
        )
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", metavar="PYTHON", help="interpreter of an environment that has the others")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=50, help="of a turn of dtf and of the loop by hand")
    parser.add_argument("--ids", type=int, default=10_000_000, help="distinct ids of all fields")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=100, help="steps before the first turn")
    given = parser.parse_args()
    if given.rivals and not shutil.which(given.rivals):
        parser.error(
            f"--rivals={given.rivals} is no program; give the interpreter of an environment that has the others"
        )
    warnings.filterwarnings("ignore", message="Sparse invariant checks")
    torch.set_num_threads(given.threads)
    log = draw(given.ids, given.batch, given.warm + given.rounds * given.steps)
    seen = sum(len(np.unique(ids)) for ids in log.ids.T)
    print(
        f"{processor()}, {given.threads} threads, torch {torch.__version__}; {sum(log.sizes):,} ids in "
        f"{len(log.sizes)} fields, {seen:,} of them in the {len(log.clicks):,} rows of the log; batches of {log.batch}",
        flush=True,
    )
    with TemporaryDirectory() as folder:
        saved = Path(folder, "log.npz")
        log.save(saved)
        for name in [given.only] if given.only else CASES:
            compare(name, log, saved, given)


def processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
