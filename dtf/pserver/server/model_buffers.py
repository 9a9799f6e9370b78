"""What server 0 has of a model beside its parameters: buffers, running averages, and how a step changes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Train
from dtf.model.batch_statistics import BatchNormStatistics
from dtf.model.changing_buffers import ChangingBuffers
from dtf.model.init import layout_of
from dtf.pserver.push import Push

Tickets = Mapping[int, Sequence[Train]]
"""First step of each lease -> its tickets."""

MicroBatches = Callable[[Train, int], tuple[list[tuple[int, int]], tuple[int, int]]]
"""Ticket and share -> row ranges of all micro-batches, and the first and last + 1 of those of the share."""


class ModelBuffers:
    """The buffers of a model whose passes are made elsewhere. `shares`: into how many leases a step is cut.

    Running averages, and buffers with a rule, change by what trainers push. Trainers are sent the buffers with a rule
    at each pull.
    """

    def __init__(self, task: Task, model: nn.Module, shares: int, micro_batches: MicroBatches) -> None:
        self.model, self._shares, self._micro_batches = model, shares, micro_batches
        self.statistics = BatchNormStatistics(model, task.step.ema)
        owned = {*self.statistics.names(), *self.statistics.counters()}
        self._changing = ChangingBuffers(model, layout_of(task.recipe, model).buffers, owned)
        self._changing.take_declared(self.statistics)
        self._uneven: frozenset[str] | None = None  # as trainers have said

    @property
    def scratch(self) -> frozenset[str]:
        """Names of buffers that are no part of the run's state."""
        return self._changing.scratch

    def release(self, uneven: frozenset[str]) -> None:
        """Keep the averages of these normalisations by the rule `mean`: the passes of a trainer do not call them
        exactly once. ConfigError where there are none of these names, or another trainer found others.
        """
        unknown = uneven - self.statistics.layers().keys()
        if unknown or self._uneven not in (None, uneven):
            raise ConfigError(
                "trainers found different normalisations to be called other than once in a pass: "
                f"{', '.join(sorted(uneven)) or 'none'}, and {', '.join(sorted(self._uneven or ())) or 'none'}; do all "
                "run the same code?"
            )
        if self._uneven is None:
            self._uneven = uneven
            self._changing.take(self.statistics.release(uneven - self.statistics.uneven))

    def values(self) -> np.ndarray | None:
        """The buffers with a rule that needs all micro-batches, as bytes; None where there are none."""
        return self._changing.values().numpy() if self._changing else None

    @property
    def changing_numbers(self) -> int:
        """How many numbers a push has of buffers with a rule."""
        return self._changing.numbers

    def whole(self) -> list[torch.Tensor]:
        """All buffers but scratch memory, as bytes."""
        kept = [buffer.detach() for name, buffer in self.model.named_buffers() if name not in self.scratch]
        return [buffer.cpu().contiguous().reshape(-1).view(torch.uint8) for buffer in kept]

    def absorb(self, pushes: Sequence[Push], tickets: Tickets, whole: bool) -> None:
        """Change what the pushes of one update say. `whole`: whether the update was made.

        A push says, step by step, what its micro-batches add to the averages of one of `shares` ranks. Nothing is added
        for an update that was not made, nor for a local step that its trainer skipped: its numbers are not finite.
        """
        self._finish_changing(pushes, tickets, whole)
        if not len(self.statistics):
            return
        for number in range(max(len(tickets[push.step]) for push in pushes)):
            added, count, counted, total = 0.0, 0, 0, 0
            for push in pushes:
                push_tickets = tickets[push.step]
                if number < len(push_tickets):
                    statistics = torch.from_numpy(push.statistics).view(len(push_tickets), -1)[number]
                    ends, (first, last) = self._micro_batches(push_tickets[number], push.part)
                    count, total = count + last - first, len(ends)
                    if whole and statistics.isfinite().all():
                        added, counted = added + statistics, counted + last - first
            if count:
                self.statistics.absorb(
                    added * (total / (self._shares * counted)) if isinstance(added, torch.Tensor) and counted else None
                )

    def _finish_changing(self, pushes: Sequence[Push], tickets: Tickets, whole: bool) -> None:
        """The rules of buffers, over all micro-batches of a step; trainers have them in synchronous modes alone."""
        if not self._changing:
            return
        self._changing.begin()
        total = torch.from_numpy(np.sum([push.buffers for push in pushes], axis=0))
        ends, _ = self._micro_batches(tickets[pushes[0].step][0], 0)
        device = next(iter(self.model.buffers())).device
        self._changing.finish(total.to(device), len(ends), torch.tensor(whole))
