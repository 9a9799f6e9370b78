"""A toy network and a ResNet on noise, and the loops for them that know nothing of dtf: by hand, Fabric, Accelerate,
Lightning. Each is a contestant of `bench.overhead` and `bench.end_to_end`.

All take the same rows of the same model, step torch's fused SGD with momentum, and add up loss and top-1 over rows and
the norm of the gradient, in every step; at the end of a turn the sums are read, over all ranks.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.turns import Run, Turns, contestant

LR, MOMENTUM = 0.001, 0.9


class Work(NamedTuple):
    """What is trained. `rows` are the batch of all ranks, of which each takes its share."""

    model: str
    rows: int
    pixels: int = 0
    channels_last: bool = False
    compiled: bool = False
    static_graph: bool = False
    threads: int = 1


def rank_and_size() -> tuple[int, int]:
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def network(name: str) -> nn.Module:
    if name == "mlp":
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    from torchvision import models

    return getattr(models, name)(num_classes=10)


def data(work: Work) -> tuple[Tensor, Tensor]:
    """16 batches of noise, in memory."""
    generator, rows = torch.Generator().manual_seed(0), 16 * work.rows
    shape = (3, work.pixels, work.pixels) if work.pixels else (32,)
    return torch.randn(rows, *shape, generator=generator), torch.randint(10, (rows,), generator=generator)


def batches(work: Work) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's shares of the batches, in order, without end."""
    inputs, targets = data(work)
    rank, size = rank_and_size()
    share, order, step = work.rows // size, torch.arange(len(targets)), 0
    while True:
        first = step * work.rows % len(order) + rank * share
        rows = order[first : first + share]
        yield inputs[rows], targets[rows]
        step += 1


class Sums:
    """Metrics of a turn, as dtf's recipe computes them."""

    def __init__(self) -> None:
        self.total = torch.zeros(3, dtype=torch.float64)
        self.norms = torch.zeros(())

    def add(self, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        with torch.no_grad():
            hits = (outputs.argmax(-1) == targets).float()
            self.total += torch.stack([torch.ones_like(losses), losses.detach(), hits]).sum(1, dtype=torch.float64)

    def add_norm(self, parameters: list[nn.Parameter]) -> None:
        self.norms = self.norms + nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def close(self) -> float:
        """Mean loss over all ranks; the next turn begins with nothing."""
        total = torch.cat([self.total, self.norms.double()[None]])
        if rank_and_size()[1] > 1:
            torch.distributed.all_reduce(total)
        self.total, self.norms = torch.zeros(3, dtype=torch.float64), torch.zeros(())
        rows, loss, *_ = total.tolist()
        return loss / rows


def prepared(work: Work) -> nn.Module:
    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    model = network(work.model)
    return model.to(memory_format=torch.channels_last) if work.channels_last else model  # type: ignore[call-overload]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM, fused=True)


def formatted(work: Work, inputs: Tensor) -> Tensor:
    return inputs.contiguous(memory_format=torch.channels_last) if work.channels_last else inputs


def loop(
    work: Work,
    turns: Turns,
    forward: Callable[[Tensor], Tensor],
    model: nn.Module,
    optimizer: Any,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
) -> Run:
    """The training loop that everybody writes, with metrics."""
    rows, sums, parameters = batches(work), Sums(), list(model.parameters())

    def run(steps: int) -> float:
        for _ in range(steps):
            turns.mark()
            inputs, targets = next(rows)
            outputs = forward(formatted(work, inputs))
            losses = cross_entropy(outputs, targets, reduction="none")
            backward(losses.mean())
            sums.add(outputs, targets, losses)
            sums.add_norm(parameters)
            optimizer.step()
            optimizer.zero_grad()
        turns.mark()
        return sums.close()

    return run


def by_hand(work: Work, turns: Turns) -> None:
    """torch alone; DistributedDataParallel with more than one rank."""
    model: Any = prepared(work)
    forward = model
    if rank_and_size()[1] > 1:
        torch.distributed.init_process_group("gloo")
        forward = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=work.static_graph
        )
    if work.compiled:
        forward = torch.compile(forward)
    model.train()
    turns.ready()
    turns.serve(loop(work, turns, forward, model, optimizer_of(model)))


def fabric(work: Work, turns: Turns) -> None:
    """Lightning Fabric: `setup` and `backward`, as its guide converts a loop."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    model = prepared(work)
    size = rank_and_size()[1]
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True, static_graph=work.static_graph) if size > 1 else "auto"
    engine = Fabric(accelerator="cpu", devices=size, strategy=strategy)
    engine.launch()
    forward, optimizer = engine.setup(model, optimizer_of(model))
    forward.train()
    turns.ready()
    turns.serve(loop(work, turns, forward, model, optimizer, engine.backward))


def accelerate(work: Work, turns: Turns) -> None:
    """Accelerate: `prepare` and `backward`, as its guide converts a loop."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    wishes = DistributedDataParallelKwargs(gradient_as_bucket_view=True, static_graph=work.static_graph)
    model = prepared(work)
    engine = Accelerator(cpu=True, kwargs_handlers=[wishes])
    torch.set_num_threads(work.threads)
    forward, optimizer = engine.prepare(model, optimizer_of(model))
    forward.train()
    turns.ready()
    turns.serve(loop(work, turns, forward, model, optimizer, engine.backward))


def lightning(work: Work, turns: Turns) -> None:
    """Lightning's Trainer, barebones: no logger, bar or checkpoint. It steps inside of `fit`, so turns end
    in its hooks.
    """
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    sums = Sums()

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = prepared(work)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.model)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            inputs, targets = batch
            outputs = self.model(formatted(work, inputs))
            losses = cross_entropy(outputs, targets, reduction="none")
            sums.add(outputs, targets, losses)
            return losses.mean()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            sums.add_norm(list(self.model.parameters()))

        def on_train_start(self) -> None:
            self.left = turns.begin()

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            turns.mark()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.left -= 1
            if self.left == 0:
                turns.mark()
                turns.end(sums.close())
                self.left = turns.begin()
                self.trainer.should_stop = self.left == 0

    class Rows:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return batches(work)

    size = rank_and_size()[1]
    strategy: Any = DDPStrategy(gradient_as_bucket_view=True, static_graph=work.static_graph) if size > 1 else "auto"
    trainer = Trainer(accelerator="cpu", devices=size, strategy=strategy, max_epochs=1, barebones=True)
    turns.ready()
    trainer.fit(Module(), Rows())


LOOPS = {"by_hand": by_hand, "fabric": fabric, "accelerate": accelerate, "lightning": lightning}


def main(turns: Turns) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("work", help="JSON: the fields of Work")
    given = parser.parse_args()
    LOOPS[given.loop](Work(*json.loads(given.work)), turns)


if __name__ == "__main__":
    contestant(main)
