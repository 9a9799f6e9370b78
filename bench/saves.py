"""How long training stands still for a save, and what a save costs, in the background and while training waits.

    python -m bench.saves [--rounds 3] [--width 4096]

Runs of the command line on one and two processes train a multilayer perceptron of some 30 million numbers with AdamW:
three numbers of state for each. A run takes 24 steps and is saved at every 4th. The ways take turns: saves in the
background, saves that training waits for, and none. `held` is how long training stood still for a save, and `written`
when the checkpoint was complete. `memcpy` copies as many bytes as rank 0 saves in one piece, in memory that was used
before: in that rank, just before each save, which begins once all ranks are there. All three are the least over all
saves: others on the machine add to them. CPU seconds are those of all ranks from their start to the end of training,
without these copies, and wall time that of the run; the least of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.processes import PATIENCE_S, ROOT
from bench.rounds import alternating
from bench.rows import Row, table
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from dtf.core.types import Batch

STEPS, EVERY, ROWS = 24, 4, 16
WAYS = {
    "background": ["checkpoint.background=true"],
    "training waits": ["checkpoint.background=false"],
    "none": ["checkpoint=off"],
}
CASES = {"ddp, 1 process": ("ddp", 1), "ddp, 2 processes": ("ddp", 2), "fsdp, 2 processes": ("fsdp", 2)}


class Noise(Dataset):
    """Rows that nobody can learn from."""

    def __init__(self, width: int, rows: int = ROWS * STEPS) -> None:
        self.width, self.rows = width, rows

    def __len__(self) -> int:
        return self.rows

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        import torch

        rows = torch.from_numpy(ids)
        return rows[:, None].expand(-1, self.width) % 7 / 7.0, rows % 10


@register("recipe", "wide")
class Wide(Recipe):
    """A multilayer perceptron of few and wide layers."""

    width: int = option(default=4096, doc="features of the inner layers")
    rows: int = option(default=ROWS * STEPS, doc="of the data")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def check(self) -> None:
        """Nothing can be wrong."""

    def build_model(self) -> nn.Module:
        watch_saves()
        return self.layers()

    def layers(self) -> nn.Module:
        from torch import nn

        ends = [self.width // 4, self.width, self.width, self.width // 2, 10]
        layers = [[nn.Linear(a, b), nn.ReLU()] for a, b in pairwise(ends)]
        return nn.Sequential(*[part for layer in layers for part in layer][:-1])

    def open_data(self, split: str, seed: int) -> Dataset:
        return Noise(self.width // 4, self.rows)

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        from dtf.model.metrics import weighted_sums

        return weighted_sums(batch.weight, loss)


def watch_saves() -> None:
    """From now on saves of this process are timed, and the rank says so in its log when it has trained."""
    import torch

    from dtf.checkpoint.saves import Saves
    from dtf.engine import saving

    class Timed(Saves):
        """Copies as many bytes before each save."""

        pair: tuple[Tensor, Tensor] | None = None
        copied_s: list[float] = []  # noqa: RUF012
        cpu_s = 0.0

        def ready(self) -> None:
            super().ready()
            if torch.distributed.is_initialized():  # a rank that is slower in its steps is no matter of saves
                torch.distributed.all_reduce(torch.zeros(1))

        def save(self, step: int, state: Any, *rest: Any) -> None:
            began, size = time.process_time(), sum(box.tensor.nbytes for box in state.boxes)
            if size:
                self.pair = self.pair or (torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8))
                at = time.perf_counter()
                self.pair[0].copy_(self.pair[1])
                self.copied_s.append(time.perf_counter() - at)
            self.cpu_s += time.process_time() - began
            super().save(step, state, *rest)

        def finish(self) -> None:
            super().finish()
            found = {"copied_s": self.copied_s, "cpu_s": time.process_time() - self.cpu_s}
            print(json.dumps(found), file=sys.stderr, flush=True)

    saving.Saves = Timed  # type: ignore[misc]


class Measured(NamedTuple):
    """One run."""

    wall_s: float
    cpu_s: float
    held_s: list[float]
    written_s: list[float]
    copied_s: list[float]


def run(strategy: str, processes: int, width: int, way: list[str]) -> Measured:
    with TemporaryDirectory(prefix="dtf-bench-saves-") as folder:
        command = [
            *(sys.executable, "-m", "dtf", "recipe=wide", "plugins=[bench.saves]", f"recipe.width={width}", *way),
            *(f"strategy={strategy}", f"launcher.processes={processes}", f"run.dir={folder}/run", "optimizer=adamw"),
            *(f"step.batch_size={ROWS}", f"train.steps={STEPS}", "train.eval_every=0", "observer=[console]"),
            *([f"checkpoint.every_steps={EVERY}", "checkpoint.keep_last=1"] if way != WAYS["none"] else []),
        ]
        environment, began = os.environ | {"PYTHONPATH": str(ROOT)}, time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        wall = time.perf_counter() - began
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        told = [json.loads(log.read_text().splitlines()[-1]) for log in sorted(Path(folder).glob("run/rank_*.log"))]
    saved = re.findall(r"^saved .* seconds=(\S+)(?: held=(\S+))?", done.stdout, re.MULTILINE)
    return Measured(
        wall,
        sum(rank["cpu_s"] for rank in told),
        [float(held or seconds) for seconds, held in saved],
        [float(seconds) for seconds, _ in saved],
        told[0]["copied_s"],
    )


def measure(quick: bool, only: str = "", rounds: int = 3, width: int = 4096) -> list[Row]:
    if quick:
        only, rounds, width = next(iter(CASES)), 1, 256
    state_mb = 12 * sum(p.numel() for p in Wide(width=width).layers().parameters()) / 1e6
    found = []
    for name, (strategy, processes) in CASES.items():
        if only not in ("", name):
            continue
        runs: dict[str, list[Measured]] = {way: [] for way in WAYS}
        for _, way in alternating(rounds, WAYS):
            runs[way].append(run(strategy, processes, width, WAYS[way]))
        work = f"{name}, state of {state_mb:.0f} MB"
        for way, some in runs.items():
            wall, cpu = [one.wall_s for one in some], [one.cpu_s for one in some]
            settings = "no saves" if way == "none" else f"a save at every {EVERY}th of {STEPS} steps"
            found.append(Row(f"{work}: the run", way, "s", wall, cpu=cpu, cpu_unit="s", settings=settings))
        for way, some in list(runs.items())[:2]:
            for title, key in (("training stands still", "held_s"), ("written", "written_s"), ("memcpy", "copied_s")):
                times = [1e3 * seconds for one in some for seconds in getattr(one, key)]
                found.append(Row(f"{work}: a save", f"{way}: {title}", "ms", times))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="", help="one alone; by default all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=4096)
    options = parser.parse_args()
    print(table(measure(False, options.case, options.rounds, options.width)))


if __name__ == "__main__":
    main()
