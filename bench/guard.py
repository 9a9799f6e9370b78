"""What a guarded step costs, beside what it should: one more pass over a micro-batch, and the reading of digests.

    python bench/guard.py                       # toy MLP and ResNet-18 at 64 px, two ddp ranks
    python bench/guard.py --only resnet18

Plain and guarded steps alternate in the same processes. The parts of the prediction are timed alone, on all ranks at
the same time: forward and backward of one micro-batch without communication, and a digest of what a rank holds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from overhead import LR, Case

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


def measure(rank: int, size: int, name: str, batch: int, blocks: int, threads: int) -> dict[str, list[float]]:
    """Milliseconds of each block's plain step, guarded step, pass and digest."""
    torch.set_num_threads(threads)
    case, world = Case(name, batch), World(Place(rank=rank, size=size, slots=size))
    program: Any = Ddp().setup(Task(case, Sgd(momentum=0.9), Precision(), StepOptions(batch_size=batch), 0), world)
    epochs = Epochs(Sequential(), len(case.rows), batch, 0)
    loader = Loader(case.rows, epochs, program.shard, program.micro_batch_rows)
    whole = Loader(case.rows, epochs, Shard(0, 1), program.micro_batch_rows)
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


def report(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and what was predicted."""
    plain, guarded, one_pass, digest = (statistics.median(times[key]) for key in ("plain", "guarded", "pass", "digest"))
    return {
        "model": name, "plain_ms": round(plain, 2), "guarded_ms": round(guarded, 2),
        "extra_ms": round(statistics.median(a - b for a, b in zip(times["guarded"], times["plain"], strict=True)), 2),
        "predicted_ms": round(one_pass + digest, 2), "pass_ms": round(one_pass, 2), "digest_ms": round(digest, 2),
        "every_100_percent": round((guarded - plain) / plain, 2),
    }  # fmt: skip


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.ranks import ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--only", choices=["mlp", "resnet18"])
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {platform.machine()}, {given.ranks} ranks, one thread each")
    for name in ("mlp", "resnet18"):
        if given.only in (None, name):
            arguments = {"name": name, "batch": 32, "blocks": given.blocks, "threads": 1}
            times = ranks(given.ranks, "bench.guard:measure", timeout_s=900, **arguments)[0]
            print(json.dumps(report(name, times)), flush=True)


if __name__ == "__main__":
    main()
