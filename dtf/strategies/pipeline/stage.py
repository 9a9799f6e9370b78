"""One stage of a pipeline: a part of the model with what it keeps between micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dtf.api.layout import BufferUpdate
from dtf.api.task import Task
from dtf.distributed.sharding import local
from dtf.model.activation_checkpointing import apply_activation_checkpointing
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.changing_buffers import ChangingBuffers
from dtf.model.compiled_forward import compile_modules
from dtf.model.seeded_dropout import SeededDropout
from dtf.strategies.tensor_parallel.positions import Positions


class Held(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward pass."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]  # of the last stage: what is differentiated
    seed: Tensor | None
    changed: list[Tensor | None]  # the buffers that its passes change


class Stage:
    """A contiguous part of the model: `model` takes and returns the tensors that are live at its ends."""

    def __init__(
        self,
        index: int,
        model: nn.Module,
        task: Task,
        device: torch.device,
        checkpointed: Sequence[str],
        rules: Mapping[str, BufferUpdate],
        positions: Positions | None = None,
    ) -> None:
        self.index, self.model = index, model
        self.statistics = BatchNormStatistics(model, task.step.ema)
        self.changing = ChangingBuffers(model, rules, {*self.statistics.names(), *self.statistics.counters()}, True)
        self.changing.take_declared(self.statistics)
        self.masks = SeededDropout(model, task.seed, device)
        self.compiled = compile_modules(model, task.compiled, f"step.compile={task.step.compile.value}")
        apply_activation_checkpointing(model, checkpointed, task.step.remat, self.masks)
        self.sync: Callable[[bool], None] = lambda last: None
        """Called before each backward pass, with whether it is the last of a step."""
        self.positions = positions
        if positions is not None:
            positions.follow(self.masks)
        model.train()

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that are no part of the run's state."""
        return self.changing.scratch

    @property
    def partial_gradients(self) -> frozenset[str]:
        """Names of the parameters whose gradients ranks that compute a layer together sum up."""
        return self.positions.partial_of(self.model) if self.positions is not None else frozenset()

    def train(self, mode: bool = True) -> None:
        """Training or evaluation, for all modules."""
        if self.model.training is not mode:
            self.model.train(mode)


def local_parameters(model: nn.Module) -> dict[str, Tensor]:
    """What is here of each parameter, by name."""
    return {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
