"""What a step of one unmodified LightningModule costs under dtf's engine, Lightning's Trainer and a loop by hand.

    python -m bench.lightning_module        # a toy MLP of 32 rows a step, one process

The module computes its loss, updates a metric of torchmetrics and logs both. All read the same rows in the same order
through its DataLoader. `engine` rows are what a step takes beyond the loop by hand, which calls `training_step` with
`self.log` taken out, and the optimizer. It makes the environment `trainers` of peers.toml, which has torchmetrics.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import json
from statistics import median
from types import SimpleNamespace
from typing import Any

from bench.contest import KEPT, KEPT_MEMORY, Contestant, apart, contest, step_rows
from bench.rows import Row, table, with_ratios
from bench.toy import LR, MOMENTUM, Work
from bench.turns import Run, Turns, contestant

ROWS = 131_072
"""Of the data set: turns do not come to its end."""


def module_class() -> type:
    import lightning.pytorch as pl
    import torch
    import torchmetrics
    from torch.nn.functional import cross_entropy

    from bench.toy import network

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network("mlp")
            self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro", validate_args=False)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            inputs, targets = batch
            outputs = self.model(inputs)
            loss = cross_entropy(outputs, targets)
            self.accuracy.update(outputs, targets)
            self.log("train_loss", loss)
            self.log("train_acc", self.accuracy)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), LR, momentum=MOMENTUM, fused=True)

    return Module


def loaders() -> Any:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(ROWS, 32, generator=generator)
    rows = TensorDataset(inputs, torch.randint(10, (ROWS,), generator=generator))
    return DataLoader(rows, batch_size=32), DataLoader(rows, batch_size=32)


def prepared(work: Work) -> Any:
    import torch

    torch.set_num_threads(work.threads)
    torch.manual_seed(0)
    return module_class()()


def by_hand(work: Work, turns: Turns) -> None:
    module = prepared(work)
    module.log = lambda *args, **kwargs: None
    optimizer, batches = module.configure_optimizers(), iter(loaders()[0])

    def run(steps: int) -> float:
        total = 0.0
        for _ in range(steps):
            turns.mark()
            loss = module.training_step(next(batches), 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = total + loss.detach()
        turns.mark()
        return float(total) / steps

    turns.ready()
    turns.serve(run)


def by_lightning(work: Work, turns: Turns, barebones: bool) -> None:
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.left = self.steps = turns.begin()
            self.total = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            turns.mark()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            self.left -= 1
            self.total = self.total + outputs["loss"]
            if self.left == 0:
                turns.mark()
                turns.end(float(self.total) / self.steps)
                self.left, self.total = turns.begin(), 0.0
                self.steps = self.left
                trainer.should_stop = self.left == 0

    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    given: dict[str, Any] = {"barebones": True} if barebones else {"logger": False, **quiet}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, callbacks=[Watch()], **given)
    module = prepared(work)
    turns.ready()
    trainer.fit(module, loaders()[0])


def by_dtf(work: Work, turns: Turns) -> None:
    turns_of = engine(work, turns)
    turns.ready()
    turns.serve(turns_of)


def engine(work: Work, turns: Turns) -> Run:
    import torch

    from bench.endless import Endless
    from dtf.adapters.lightning import lightning_recipe
    from dtf.api.options import StepOptions, TrainOptions
    from dtf.api.precision import Precision
    from dtf.api.registry import lookup
    from dtf.api.task import Task
    from dtf.config.settings import load_parts
    from dtf.core.types import Measured, Place
    from dtf.data.batches import Epochs
    from dtf.data.loader import Loader
    from dtf.data.samplers import Sequential
    from dtf.distributed.world import World
    from dtf.engine.loop import Loop, fit
    from dtf.host.allocator import keep_freed_memory
    from dtf.strategies.ddp import Ddp

    torch.set_num_threads(work.threads)
    keep_freed_memory()
    load_parts([])
    lightning_recipe("measured", module=module_class(), data=loaders)
    parts = {group: lookup(group, "measured")() for group in ("recipe", "optimizer", "lr", "sampler")}
    step = StepOptions(batch_size=work.rows)
    settings = SimpleNamespace(
        **parts, seed=0, job=SimpleNamespace(trains=True), step=step, train=TrainOptions(epochs=1.0)
    )
    recipe = parts["recipe"]
    recipe.join(settings)
    program = Ddp().setup(Task(recipe, parts["optimizer"], Precision(), step, 0), World(Place(rank=0, size=1, slots=1)))
    rows, losses = recipe.open_data("train", 0), []
    epochs = Epochs(Sequential(), len(rows), work.rows, 0)
    clock, loader = Endless(epochs, LR, logs=True, mark=turns.mark), Loader(rows, epochs, program.shard, work.rows)
    world = World(Place(rank=0, size=1, slots=1))
    program.warmup(program.prepare(loader.get(0, 0)))  # as a run does: it finds that nothing is divided

    def see(event: Any) -> None:
        if isinstance(event, Measured):
            losses.append(event.values["loss"])

    loop = Loop(program, clock, loader, loader, 0, recipe, world, None, see, {}, epochs.batches)

    def run(steps: int) -> float:
        clock.turn(steps)
        fit(loop)
        return losses[-1]

    return run


def measure(quick: bool) -> list[Row]:
    rounds, steps = (2, 20) if quick else (24, 80)
    text = json.dumps(Work("mlp", 32))

    def one(who: str, way: str, settings: str) -> Contestant:
        return Contestant(
            who,
            "bench.lightning_module",
            [way, text],
            "trainers",
            settings=f"{settings}, {KEPT_MEMORY}",
            variables=KEPT,
        )

    those = [
        one("dtf", "dtf", "lightning_recipe, strategy=ddp"),
        one("by hand", "by_hand", "training_step and optimizer, without self.log"),
        one("Lightning", "lightning", "Trainer(logger=False), no bar, no checkpoint"),
        one("Lightning barebones", "barebones", "Trainer(barebones=True): self.log does nothing"),
    ]
    work = f"LightningModule, 32 rows, one process: mean of {steps} steps"
    turns, absent = contest(work, those, rounds, steps, warm=2 * steps)
    absent += apart(work, turns, those, 1e-5)
    rows = step_rows(work, those, turns, steps, "us", 1e6)
    engines = [
        Row(
            f"{work}, beyond the loop by hand", who, "us a step",
            [(a.seconds - b.seconds) / steps * 1e6 for a, b in zip(turns[who], turns["by hand"], strict=True)],
        )
        for who in turns if who != "by hand" and "by hand" in turns
    ]  # fmt: skip
    return [*with_ratios(rows), *with_ratios(engines), *absent]


def main(turns: Turns | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="?", choices=("dtf", "by_hand", "lightning", "barebones"), help=argparse.SUPPRESS)
    parser.add_argument("work", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a trial of seconds")
    given = parser.parse_args()
    if not given.way:
        rows = measure(given.quick)
        print(table(rows))
        for row in rows:
            if "beyond" in row.work and row.values:
                print(f"{row.who}: median {median(row.values):.0f} us beyond the loop by hand")
        return
    contestant(lambda turns: run_one(given.way, Work(*json.loads(given.work)), turns))


def run_one(way: str, work: Work, turns: Turns) -> None:
    if way == "dtf":
        by_dtf(work, turns)
    elif way == "by_hand":
        by_hand(work, turns)
    else:
        by_lightning(work, turns, way == "barebones")


if __name__ == "__main__":
    main()
