"""What the engine costs per optimizer step, against a loop written by hand that computes the same metrics.

    python bench/overhead.py                # toy MLP and ResNet-18 at 64 px, one process
    python bench/overhead.py --ranks 2      # the same under ddp, against DistributedDataParallel by hand

Both loops run in the same processes on the same rows, alternating in blocks. It fails when the weights that both
trained differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from endless import Endless
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.recipe import Dataset, Recipe
from dtf.api.task import Task
from dtf.core.types import Place
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.engine.loop import Loop, fit
from dtf.model.init import init_model
from dtf.model.metrics import weighted_sums
from dtf.optim.optimizers import Sgd
from dtf.strategies.ddp import Ddp

if TYPE_CHECKING:
    import numpy as np

    from dtf.core.types import Batch

LR = 0.01


class Rows(Dataset):
    """Rows in memory."""

    prefetch = 0

    def __init__(self, rows: int, shape: tuple[int, ...], classes: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(rows, *shape, generator=generator)
        self.targets = torch.randint(classes, (rows,), generator=generator)

    def __len__(self) -> int:
        return len(self.targets)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(ids)
        return self.inputs[rows], self.targets[rows]


class Case(Recipe):
    """A model and rows of noise; accuracy does not matter here."""

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss", "top1")

    @property
    def objective(self) -> tuple[str, str]:
        return ("top1", "max")

    def __init__(self, name: str, batch: int) -> None:
        self.name, self.batch = name, batch
        self.rows = Rows(16 * batch, (32,) if name == "mlp" else (3, 64, 64), 10)

    def check(self) -> None:
        """Nothing can be wrong."""

    def build_model(self) -> nn.Module:
        if self.name == "mlp":
            return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        from torchvision.models import resnet18

        return resnet18(num_classes=10)

    def open_data(self, split: str, seed: int) -> Dataset:
        return self.rows

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets, reduction="none")

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        return weighted_sums(batch.weight, loss, outputs.argmax(-1) == batch.targets)


def by_engine(case: Case, world: World) -> tuple[Callable[[int], None], nn.Module]:
    """A function that trains a number of steps with dtf, and the model."""
    task = Task(case, Sgd(momentum=0.9), Precision(), StepOptions(batch_size=case.batch), 0)
    program = Ddp().setup(task, world)
    epochs = Epochs(Sequential(), len(case.rows), case.batch, 0)
    clock = Endless(epochs, LR)
    loader = Loader(case.rows, epochs, program.shard, program.micro_batch_rows)
    loop = Loop(program, clock, loader, loader, 0, case, world, None, lambda event: None, {}, epochs.batches)

    def run(steps: int) -> None:
        clock.turn(steps)
        fit(loop)

    return run, program._replica.model  # type: ignore[attr-defined]


def by_hand(case: Case, world: World) -> tuple[Callable[[int], None], nn.Module]:
    """The same as people write it: rows by index, loss, top-1, gradient norm, torch's fused SGD."""
    model = init_model(case, 0)
    forward: Any = DistributedDataParallel(model, gradient_as_bucket_view=True) if world.size > 1 else model
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, LR, momentum=0.9, fused=True)
    share, step = case.batch // world.size, 0
    order = torch.arange(len(case.rows))
    sums = torch.zeros(3, dtype=torch.float64)
    norms = torch.zeros(())

    def run(steps: int) -> None:
        nonlocal step, norms
        model.train()
        for _ in range(steps):
            first = (step * case.batch) % len(order) + world.rank * share
            rows = order[first : first + share]
            inputs, targets = case.rows.inputs[rows], case.rows.targets[rows]
            outputs = forward(inputs)
            losses = cross_entropy(outputs, targets, reduction="none")
            losses.mean().backward()
            with torch.no_grad():
                sums.add_(
                    torch.stack(
                        [torch.ones_like(losses), losses.detach(), (outputs.argmax(-1) == targets).float()]
                    ).sum(1, dtype=torch.float64)
                )
            norms = norms + nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            step += 1

    return run, model


def measure(rank: int, size: int, name: str, batch: int, steps: int, blocks: int, threads: int) -> dict[str, Any]:
    """Microseconds per step of both loops, block by block in turn."""
    torch.set_num_threads(threads)
    case, world = Case(name, batch), World(Place(rank=rank, size=size, slots=size))
    (engine, a), (hand, b) = by_engine(case, world), by_hand(case, world)
    times: dict[str, list[float]] = {"engine": [], "hand": []}
    for block in range(blocks + 1):
        pair = [("engine", engine), ("hand", hand)]
        for key, run in pair if block % 2 else reversed(pair):
            started = time.perf_counter()
            run(steps)
            times[key].append((time.perf_counter() - started) / steps * 1e6)
    weights = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (a, b)]
    apart = float((weights[0] - weights[1]).norm() / weights[1].norm())
    return {"times": {key: values[1:] for key, values in times.items()}, "apart": apart}  # the first block warms up


def report(name: str, ranks: int, batch: int, steps: int, result: dict[str, Any]) -> dict[str, Any]:
    """Medians and the spread of the paired differences."""
    engine, hand = result["times"]["engine"], result["times"]["hand"]
    extra = sorted(a - b for a, b in zip(engine, hand, strict=True))
    ratio = sorted(a / b for a, b in zip(engine, hand, strict=True))
    tenth = max(len(extra) // 10, 0)
    return {
        "model": name, "ranks": ranks, "batch": batch, "steps": steps, "blocks": len(extra),
        "hand_us": round(statistics.median(hand), 1), "engine_us": round(statistics.median(engine), 1),
        "extra_us": round(statistics.median(extra), 1),
        "extra_us_10_90": [round(extra[tenth], 1), round(extra[-1 - tenth], 1)],
        "ratio": round(statistics.median(ratio), 4),
        "ratio_10_90": [round(ratio[tenth], 4), round(ratio[-1 - tenth], 4)],
        "weights_apart": result["apart"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--only", choices=["mlp", "resnet18"])
    given = parser.parse_args()
    given.blocks = max(3, given.blocks)
    print(f"torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads, {given.ranks} ranks")
    for name, batch, steps in (("mlp", 32, 300), ("resnet18", 32, 4)):
        if given.only in (None, name):
            threads = 1 if name == "mlp" else max(1, torch.get_num_threads() // given.ranks)
            arguments = {"name": name, "batch": batch, "steps": steps, "blocks": given.blocks, "threads": threads}
            if given.ranks == 1:
                result = measure(0, 1, **arguments)
            else:
                from tests.support.ranks import ranks

                result = ranks(given.ranks, "bench.overhead:measure", timeout_s=900, **arguments)[0]
            if not result["apart"] < 1e-5:
                raise SystemExit(
                    f"{name}: both loops must train the same weights, they are {result['apart']:.1e} apart"
                )
            print(json.dumps(report(name, given.ranks, batch, steps, result)), flush=True)


if __name__ == "__main__":
    main()
