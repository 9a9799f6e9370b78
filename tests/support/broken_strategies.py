"""Planted faults: strategies that `job=verify` must catch, and recipes that kill their rank.

A plugin: `plugins=[tests.support.broken_strategies]`.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.recipe import Dataset
from dtf.api.registry import option, register
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.core.types import Shard
from dtf.host.waits import group_of, operation
from dtf.strategies.ddp import Ddp
from dtf.strategies.fsdp import Fsdp
from dtf.strategies.pipeline.strategy import Pipeline
from dtf.strategies.tensor import Tensor
from tests.support.causal import Causal
from tests.support.toy import Toy

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dtf.distributed.world import World


def _ddp(strategy: Ddp, task: Task, world: World) -> Any:
    """ddp's own program, whose insides are then damaged."""
    return Ddp.setup(strategy, task, world)


@register("strategy", "wrong_scale")
class WrongScale(Ddp):
    """The gradient is not divided by the number of ranks: twice as large on two of them."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program._factor *= world.size
        return program


@register("strategy", "skipped_all_reduce")
class SkippedAllReduce(Ddp):
    """Every rank keeps its own gradient."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program._replica._forward = program._replica.model
        return program


@register("strategy", "missed_reduce_scatter")
class MissedReduceScatter(Fsdp):
    """Gradients stay where they were computed."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Fsdp.setup(self, task, world)
        program._replica._sync = lambda last: program._replica.model.set_requires_gradient_sync(False)
        return program


@register("strategy", "wrong_shard_offset")
class WrongShardOffset(Fsdp):
    """The slices of one parameter are drawn from the wrong place."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Fsdp.setup(self, task, world)
        local = program._update._shards["layer2.0.conv1.weight"].local
        local.copy_(local.roll(1, 0))
        return program


def _silent(program: Any, name: str) -> Any:
    """One layer no longer talks to other ranks, from the first step on: the warmup would notice."""
    warmup = program.warmup

    def damaged(batch: Any) -> None:
        warmup(batch)
        layer = program._replica.model.get_submodule(name)
        layer.__class__ = type(
            "Silent", (layer.__class__,), {"forward": lambda self, x: self._conv_forward(x, self.weight, None)}
        )

    program.warmup = damaged
    return program


@register("strategy", "unsummed_row")
class UnsummedRow(Tensor):
    """One row layer keeps its partial sum."""

    def setup(self, task: Task, world: World) -> Program:
        return _silent(Tensor.setup(self, task, world), "layer2.0.conv2")


@register("strategy", "forgotten_fan")
class ForgottenFan(Tensor):
    """The gradient of one column layer's input is not summed: the forward pass is right."""

    def setup(self, task: Task, world: World) -> Program:
        return _silent(Tensor.setup(self, task, world), "layer2.0.conv1")


@register("strategy", "skipped_micro_batch")
class SkippedMicroBatch(Pipeline):
    """The last stage sends zeros back for one micro-batch."""

    def setup(self, task: Task, world: World) -> Program:
        from dtf.strategies.pipeline.program import PipelineProgram

        program: Any = Pipeline.setup(self, task, world)
        if isinstance(program, PipelineProgram):
            link, sent = program._pipeline.backward[0], []
            plain = link.send

            def send(key: Any, tensors: list[torch.Tensor]) -> None:
                sent.append(key)
                plain(key, [tensor * 0 for tensor in tensors] if len(sent) == 3 else tensors)

            link.send = send  # type: ignore[method-assign]
        return program


@register("strategy", "stale_stage")
class StaleStage(Pipeline):
    """The last rank leaves its parameters as they are."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = Pipeline.setup(self, task, world)
        if world.rank == world.size - 1:
            program._update._bound.apply = lambda gradients, lr, skip: None
        return program


@register("strategy", "swapped_batch")
class SwappedBatch(Ddp):
    """Ranks read each other's rows."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program.shard = Shard(world.size - 1 - world.rank, world.size)
        return program


@register("strategy", "lost_rows")
class LostRows(Ddp):
    """All ranks read the first one's rows. They name their own when they are asked before."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        answers = [program.shard]
        plain = type(program)

        class Lost(plain):
            @property
            def shard(self) -> Shard:
                return answers.pop() if answers else Shard(0, world.size)

        program.__class__ = Lost
        return program


@register("strategy", "stale_average")
class StaleAverage(Ddp):
    """Running statistics are not averaged over ranks before they are saved."""

    def setup(self, task: Task, world: World) -> Program:
        program = _ddp(self, task, world)
        program.sync = lambda: None
        return program


class Waits(Ddp):
    """Ranks wait for each other for ever in the exchange of gradients."""

    def exchange(self, world: World, gradients: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def setup(self, task: Task, world: World) -> Program:
        from dtf import Replica, Sharding, Spmd, cast, full_params, model_of

        model = model_of(task)
        params = full_params(model, cast(model, task.precision, world.device))
        sharding = Sharding(
            params=params, writes=world.rank == 0, complete_gradients=lambda gradients: self.exchange(world, gradients)
        )
        return Spmd(Replica(model, task, world.device), sharding, task, world)


@register("strategy", "never_meets")
class NeverMeets(Waits):
    """Each rank waits in an operation of its own."""

    def exchange(self, world: World, gradients: list[torch.Tensor]) -> None:
        if world.size > 1:
            with operation(f"the sum of rank {world.rank}", group_of("gradients", (0, 1))):
                threading.Event().wait()


@register("strategy", "broadcasts_alone")
class BroadcastsAlone(Waits):
    """Rank 0 waits for a broadcast of rank 1, which makes none."""

    def exchange(self, world: World, gradients: list[torch.Tensor]) -> None:
        import torch.distributed as dist

        if world.rank == 0 and world.size > 1:
            dist.broadcast(gradients[0], src=1)


@register("strategy", "dies")
class Dies(Waits):
    """Rank 1 is killed."""

    def exchange(self, world: World, gradients: list[torch.Tensor]) -> None:
        if world.rank:
            os.kill(os.getpid(), signal.SIGKILL)


@register("strategy", "keeps_gradients")
class KeepsGradients(Waits):
    """Ranks step by their own gradients."""

    def exchange(self, world: World, gradients: list[torch.Tensor]) -> None:
        """Nobody tells the others."""


@register("strategy", "forgetful")
class Forgetful(Ddp):
    """Going on from a checkpoint leaves the optimizer as it was at the start."""

    def setup(self, task: Task, world: World) -> Program:
        program: Any = _ddp(self, task, world)
        load = program.load

        def forget(source: Any) -> None:
            load(source)
            for state in program._update._bound.states.values():
                for tensor in state.values():
                    tensor.zero_()

        program.load = forget
        return program


@register("recipe", "mortal")
class Mortal(Toy):
    """The toy recipe in which the rank that fetches a certain row in the second epoch is killed, once."""

    row: int = option(default=40, doc="training row at which the rank dies")
    marker: str = option(default="", doc="file that says it happened already; empty: never")

    def open_data(self, split: str, seed: int) -> Dataset:
        return _deadly(self, split, super().open_data(split, seed))


@register("recipe", "mortal_text")
class MortalText(Causal):
    """The same of a language model."""

    row: int = option(default=40, doc="training row at which the rank dies")
    marker: str = option(default="", doc="file that says it happened already; empty: never")

    def open_data(self, split: str, seed: int) -> Dataset:
        return _deadly(self, split, super().open_data(split, seed))


def _deadly(recipe: Mortal | MortalText, split: str, data: Dataset) -> Dataset:
    return DeadlyRows(data, recipe.row, Path(recipe.marker)) if split == "train" and recipe.marker else data


class DeadlyRows(Dataset):
    prefetch = 0

    def __init__(self, data: Dataset, row: int, marker: Path) -> None:
        self._data, self._row, self._marker = data, row, marker

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        if epoch == 1 and self._row in ids and not self._marker.exists():
            self._marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self._data.fetch(ids, epoch)
