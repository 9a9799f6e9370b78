"""Exponential moving averages of the weights, for evaluation. They are optimizer state: sharded, saved and counted as
such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtf.api.optimizer import Group, Optimizer, Step, counter

if TYPE_CHECKING:
    from torch import Tensor

EMA, STEPS = "ema", "ema_steps"
"""Keys of the optimizer state: the average, in fp32 at least, and how many steps are in it."""


def decay_at(decay: float, steps: Tensor) -> Tensor:
    """The decay of the step that follows `steps` steps. It is smaller at first, so that initial values do not stay in
    the average.

    Source: `tf.train.ExponentialMovingAverage(num_updates=...)`: min(decay, (1 + n) / (10 + n)).
    """
    return ((1 + steps) / (10 + steps)).clamp(max=decay)


def decay_after(decay: float, steps: int) -> float:
    """As `decay_at`, of numbers on the host."""
    return min(decay, (1 + steps) / (10 + steps))


def with_ema(optimizer: Optimizer, decay: float) -> Optimizer:
    """The optimizer, with averages of what it steps; with a decay of 0, the optimizer itself."""
    return EmaOptimizer(optimizer, decay) if decay else optimizer


class EmaOptimizer(Optimizer):
    """An optimizer, and after each of its steps: average = decay * average + (1 - decay) * parameter."""

    def __init__(self, optimizer: Optimizer, decay: float) -> None:
        super().__init__(lr_factors=optimizer.lr_factors)
        self._optimizer, self._decay = optimizer, decay
        self.by_tensor, self.averages_squares = optimizer.by_tensor, optimizer.averages_squares

    def init(self, parameter: Tensor) -> dict[str, Tensor]:
        import torch

        average = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
        return {**self._optimizer.init(parameter), EMA: average, STEPS: counter(parameter)}

    def begin(self, step: int) -> None:
        self._optimizer.begin(step)

    def decay_of(self, name: str, shape: Sequence[int]) -> float | None:
        return self._optimizer.decay_of(name, shape)

    def stepper(self, group: Group) -> Step:
        step = self._optimizer.stepper(group)

        def step_and_average(gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
            step(gradients, lr, skip)
            self._average(group, skip)

        return step_and_average

    def step(self, group: Group, gradients: list[Tensor], lr: float, skip: Tensor | None) -> None:
        self.stepper(group)(gradients, lr, skip)

    def _average(self, group: Group, skip: Tensor | None) -> None:
        import torch

        averages, steps = group.slots[EMA], group.slots[STEPS]
        done = 1.0 if skip is None else 1.0 - skip
        weight = ((1 - decay_at(self._decay, steps[0].double())) * done).to(averages[0].dtype)
        # one by one: a list of differences would take as much memory as they
        for parameter, average in zip(group.parameters, averages, strict=True):
            average.lerp_(parameter.to(average.dtype), weight.to(average.dtype))
        if isinstance(done, torch.Tensor):
            torch._foreach_add_(steps, [done] * len(steps))  # one tensor would be read by the host
        else:
            torch._foreach_add_(steps, done)


EMA_PREFIX = "ema/"
"""Tensors of a checkpoint under it are running statistics averaged as `step.ema` says. Averages of parameters are
optimizer state, see `dtf.model.ema`.
"""
