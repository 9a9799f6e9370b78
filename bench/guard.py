"""What a guarded step costs, beside what it should: one more pass over a micro-batch, and the reading of digests.

    python -m bench.guard                       # toy MLP and ResNet-18 at 64 px, two ddp ranks
    python -m bench.guard --only resnet18

Plain and guarded steps alternate in the same processes. The parts of the prediction are timed alone, on all ranks at
the same time: forward and backward of one micro-batch without communication, and a digest of what a rank holds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.engine import Case
from bench.rows import Row, table
from bench.toy import LR, Work
from dtf.api.options import StepOptions
from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.core.types import Place, Shard, Train
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.distributed.world import World
from dtf.model.fingerprint import fingerprints
from dtf.optim.optimizers import Sgd
from dtf.strategies.ddp import Ddp


def on_rank(rank: int, size: int, name: str, batch: int, blocks: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of each block's plain step, guarded step, pass and digest."""
    torch.set_num_threads(threads)
    case = Case(Work(name, batch, 0 if name == "mlp" else 64))
    data, world = case.open_data("train", 0), World(Place(rank=rank, size=size, slots=size))
    program: Any = Ddp().setup(Task(case, Sgd(momentum=0.9), Precision(), StepOptions(batch_size=batch), 0), world)
    epochs = Epochs(Sequential(), len(data), batch, 0)
    loader = Loader(data, epochs, program.shard, program.micro_batch_rows)
    whole = Loader(data, epochs, Shard(0, 1), program.micro_batch_rows)
    program.warmup(program.prepare(whole.get(0, 0)))
    guard, at = program.guard(), 0
    (copy,) = guard.copies

    def timed(work: Callable[[], Any]) -> float:
        world.barrier()
        started = time.perf_counter()
        work()
        world.barrier()
        return (time.perf_counter() - started) * 1e3

    def guarded(ticket: Train, rows: Any) -> None:
        guard.compare_state()
        guard.step(at, ticket, rows, lambda text: None)

    model, replica = program._replica.model, program._replica

    def plain_pass(rows: Any) -> None:
        replica._pass(rows, torch.ones(()), last=False)
        model.zero_grad()

    times: dict[str, list[float]] = {"plain": [], "guarded": [], "pass": [], "digest": []}
    for _ in range(blocks + 1):
        for key in times:
            rows = program.prepare(loader.get(0, at % epochs.batches))
            ticket = Train(at, 0, at % epochs.batches, batch, LR)
            work = {
                "plain": lambda rows=rows, ticket=ticket: program.step(ticket, rows),
                "guarded": lambda rows=rows, ticket=ticket: guarded(ticket, rows),
                "pass": lambda rows=rows: plain_pass(rows),
                "digest": lambda: [fingerprints(part.values()) for part in copy.held().values()],
            }[key]
            times[key].append(timed(work))
            at += key in ("plain", "guarded")
    return {key: values[1:] for key, values in times.items()}


def rows_of(name: str, times: dict[str, list[float]]) -> list[Row]:
    """Of each kind, and what was predicted."""
    times = times | {"predicted": [one + other for one, other in zip(times["pass"], times["digest"], strict=True)]}
    times["extra"] = [one - other for one, other in zip(times["guarded"], times["plain"], strict=True)]
    titles = {
        "plain": "a step", "guarded": "a guarded step", "extra": "a guarded step, less the step of its round",
        "predicted": "predicted: one pass and one digest", "pass": "one pass over a micro-batch",
        "digest": "a digest of all that a rank holds",
    }  # fmt: skip
    return [Row(f"{name}, two ddp ranks", title, "ms", times[key]) for key, title in titles.items()]


def measure(quick: bool, size: int = 2, blocks: int = 20, only: str = "") -> list[Row]:
    from tests.support.ranks import ranks

    found = []
    for name in [only] if only else ["mlp"] if quick else ["mlp", "resnet18"]:
        arguments = {"name": name, "batch": 32, "blocks": 2 if quick else blocks, "threads": 1}
        found += rows_of(name, ranks(size, "bench.guard:on_rank", timeout_s=500, **arguments)[0])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--only", choices=["mlp", "resnet18"], default="")
    given = parser.parse_args()
    print(table(measure(False, given.ranks, given.blocks, given.only)))


if __name__ == "__main__":
    main()
