"""Micro-batches on their way through the stages of a rank, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.task import Task
from dtf.core import nest
from dtf.core.types import Batch, Evaluated
from dtf.model.annotate import section
from dtf.model.forward import ForwardPass, loss_dtype, merge_evaluated, on_device
from dtf.strategies.pipeline.messages import PipelineRanks, StageMessages
from dtf.strategies.pipeline.schedules import Action, Schedule, answers, order
from dtf.strategies.pipeline.stage import Held, Stage

MicroBatchHook = Callable[[Stage, int], None]


def nothing(stage: Stage, micro_batch: int) -> None:
    """A hook that does nothing."""


class Flow:
    """Runs micro-batches through the `stages` of this rank, by index, in the order of a schedule."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        pipeline: PipelineRanks,
        schedule: Schedule,  # type: ignore[valid-type]
        task: Task,
        passes: ForwardPass,
        device: torch.device,
    ) -> None:
        self._stages, self._pipeline, self._passes, self._device = stages, pipeline, passes, device
        shape = len(pipeline.ranks), pipeline.stages // len(pipeline.ranks)
        self.order: Callable[[int], list[Action]] = cache(lambda count: order(schedule, pipeline.place, *shape, count))
        # of the rank before
        self._answers = cache(lambda count: answers(order(schedule, (pipeline.place - 1) % shape[0], *shape, count)))
        dtype = loss_dtype(task)
        self.no_sums = torch.zeros(1 + len(task.recipe.train_metrics), device=device, dtype=dtype)
        self.counts = torch.zeros((), device=device, dtype=dtype)
        """What the sum of losses is divided by in place of rows, on the ranks that compute losses: added up."""
        self.counted = False
        """Whether a loss had counts."""
        self._seen: list[Any] | None = None
        """Gets the outputs of the model, where no losses are to be computed."""

    @torch.no_grad()
    def evaluated_outputs(self, inputs: Any) -> Any:
        """What the model gives in an evaluation of these inputs, on the ranks of the last stage; None on others.
        Without autocast. Collective over the pipeline.
        """
        rows = len(nest.leaves(inputs)[0])
        weight = torch.ones(rows, device=self._device)
        batch = Batch(on_device(inputs, self._device), weight, weight, np.arange(rows))
        self._seen = []
        for stage in self._stages.values():
            stage.train(False)
        self.run([batch], self.no_sums, lambda stage, j: stage.masks.begin_micro_batch(0, 0), nothing, train=False)
        for stage in self._stages.values():
            stage.train()
        (outputs,), self._seen = self._seen or [None], None
        return self._passes.carried(outputs)

    def run(
        self,
        parts: list[Batch],
        factor: Tensor,
        enter: MicroBatchHook,
        leave: MicroBatchHook,
        train: bool,
        padding: Collection[int] = (),
    ) -> Evaluated:
        """Micro-batches through this rank's stages; returns the sums of those whose losses are computed here.

        `factor`: of the loss, shape (). `enter(stage, micro_batch)`: called before each forward pass, `leave` before
        each backward pass. `padding`: the micro-batches that count for nothing. Collective over the pipeline.
        """
        actions = [action for action in self.order(len(parts)) if train or action.forward]
        answers = self._answers(len(parts)) if train else None
        messages = StageMessages(self._pipeline, actions, parts, answers, narrow=self._seen is None)
        held: dict[tuple[int, int], Held] = {}
        measured = [Evaluated(self.no_sums, None)]
        for number, (forward, s, j) in enumerate(actions):
            messages.open(number)
            if forward:
                enter(self._stages[s], j)
                with section("forward"):
                    kept, evaluated = self._forward(s, j, parts[j], factor, messages, train, j not in padding)
                measured += [] if evaluated is None else [evaluated]
                if train:
                    held[s, j] = kept
                del kept  # activations live as long as the schedule says
            else:
                leave(self._stages[s], j)
                self._stages[s].sync(j == len(parts) - 1)
                with section("backward"):
                    self._backward(s, j, held.pop((s, j)), messages)
                if j not in padding:
                    self._stages[s].changing.end_micro_batch()
        for channel in (*self._pipeline.forward, *self._pipeline.backward):
            channel.flush()
        return merge_evaluated(measured, self._device)

    def _forward(
        self, s: int, j: int, batch: Batch, factor: Tensor, messages: StageMessages, train: bool, counts: bool
    ) -> tuple[Held, Evaluated | None]:
        inputs = messages.inputs(s, j) if s else ()
        given = inputs if s else (batch.inputs,)
        outputs = self._passes.forward(self._stages[s].model, *given, cast=not s, narrow=self._seen is None)
        changed = self._stages[s].changing.current()
        if s < self._pipeline.last:
            messages.send_outputs(s, j, outputs)
            return Held(inputs, tuple(t for t in outputs if t.requires_grad), None, changed), None
        if self._seen is not None:
            self._seen.append(outputs)
            return Held(inputs, (), None, changed), None
        outputs, loss = self._passes.losses(outputs, batch)
        total, seed = self._passes.seeded(loss, factor)
        if loss.counts is not None:
            self.counts = self.counts + loss.counts
            self.counted = True
        if not counts:
            return Held(inputs, (total,), seed, changed), None
        measured = (
            Evaluated(self._passes.measure(outputs, batch, loss), None)
            if train
            else self._passes.evaluated(outputs, batch, loss)
        )
        return Held(inputs, (total,), seed, changed), measured

    def _backward(self, s: int, j: int, kept: Held, messages: StageMessages) -> None:
        self._stages[s].changing.put(kept.changed)
        gradients = (kept.seed,) if kept.seed is not None else messages.gradients(s, j)
        if any(output.requires_grad for output in kept.outputs):
            torch.autograd.backward(kept.outputs, gradients)
        if s:
            messages.send_gradients(s, j, kept.inputs)
