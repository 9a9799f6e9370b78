"""Gradient updates on this rank: scale, clip, step, skip. Says nothing about how gradients were produced or summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dtf.errors import ConfigError
from dtf.optimizer import Optimizer
from dtf.strategy import Source, Update
from dtf.values import Box, State

GROWTH_INTERVAL = 2000  # steps without overflow before the loss scale doubles; as in Micikevicius et al. 2018, section 3.2


class LocalUpdate(Update):
    """The optimizer lives in this process, over all parameters or over those it owns.

    `masters`: what the optimizer updates, by name, see `build.cast_model`; `owned`: names whose optimizer state lives here (default all);
    `after`: called once the owned parameters are updated, to fetch the others. `writes`: whether this rank writes what every rank holds.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Mapping[str, Tensor],
        optimizer: Optimizer,
        clip_norm: float,
        loss_scale: float,
        owned: frozenset[str] | None = None,
        after: Callable[[], None] | None = None,
        writes: bool = True,
    ) -> None:
        self._clip, self._after, self._writes = clip_norm, after, writes
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        self._masters = dict(masters)
        if not self._parameters:
            raise ConfigError("the model has no parameter that requires a gradient; there is nothing to train")
        own = [name for name in self._parameters if owned is None or name in owned]
        self._own, self._sharded = own, owned is not None
        self._own_index = [i for i, name in enumerate(self._parameters) if owned is None or name in owned]
        self._bound = optimizer.bind({name: self._masters[name] for name in own})
        self._trained = list(self._parameters.values())
        self._copies = [(self._parameters[name], self._masters[name]) for name in own if self._parameters[name].dtype != self._masters[name].dtype]
        device = self._trained[0].device
        self._host = device.type == "cpu"
        self._scale = torch.full((), loss_scale, dtype=torch.float32, device=device) if loss_scale else None
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._skipped: int | Tensor = 0 if self._host else torch.zeros((), device=device)

    def begin(self) -> None:
        """Parameters are here already."""

    def scale(self, factor: Tensor) -> Tensor:
        return factor if self._scale is None else factor * self._scale

    @torch.no_grad()
    def apply(self, step: int, lr: float) -> Tensor:
        # Zeros for parameters that the loss did not reach: their update is the optimizer's own (decay, momentum).
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained]
        norms = torch._foreach_norm(gradients, 2, dtype=_norm_dtype(gradients))
        norm = torch.linalg.vector_norm(torch.stack(norms))
        if self._scale is not None:
            norm = norm / self._scale
        factor = None
        if self._clip:
            factor = (self._clip / (norm + 1e-6)).clamp(max=1.0)
        if self._scale is not None:
            factor = (1.0 if factor is None else factor) / self._scale
        if self._host:
            # Reading a host tensor waits for nothing, and a skipped step then touches nothing at all.
            finite = math.isfinite(norm.item())
            if finite:
                self._step(gradients, factor, lr, None)
            self._count(not finite)
        else:
            skip = torch.isfinite(norm).logical_not_().to(torch.float32)
            self._step(gradients, factor, lr, skip)
            self._count_device(skip)
        for parameter in self._trained:
            parameter.grad = None
        known = torch.ones_like(norm)
        if self._scale is not None:  # an overflow is routine then, and says nothing of the gradient's size
            known = torch.isfinite(norm).to(norm.dtype)
            norm = norm.where(known > 0, 0.0)
        return torch.stack([norm, known])

    def _step(self, gradients: list[Tensor], factor: Tensor | None, lr: float, skip: Tensor | None) -> None:
        if self._sharded:
            gradients = [gradients[i] for i in self._own_index]
        if self._copies:
            gradients = [g.to(self._masters[name].dtype) for name, g in zip(self._own, gradients, strict=True)]
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)
        self._bound.apply(gradients, lr, skip)
        for parameter, master in self._copies:
            parameter.copy_(master)
        if self._after is not None:
            self._after()

    def _count(self, skipped: bool) -> None:
        assert isinstance(self._skipped, int)
        if self._scale is None:
            self._skipped += skipped
            return
        # With loss scaling an overflow is how the scale finds its value; it counts only when the scale cannot be the reason.
        self._skipped += skipped and float(self._scale) <= 1.0
        torch._amp_update_scale_(self._scale, self._growth, torch.tensor(float(skipped)), 2.0, 0.5, GROWTH_INTERVAL)

    def _count_device(self, skip: Tensor) -> None:
        assert isinstance(self._skipped, Tensor)
        if self._scale is None:
            self._skipped += skip
            return
        self._skipped += skip * (self._scale <= 1.0)
        torch._amp_update_scale_(self._scale, self._growth, skip, 2.0, 0.5, GROWTH_INTERVAL)

    def skipped(self) -> int:
        return int(self._skipped)

    def state(self) -> State:
        boxes = []
        if self._writes:
            boxes += [_whole(f"model/{name}", self._masters.get(name, p.data)) for name, p in self._frozen.items()]
        for name in self._parameters if self._writes or self._sharded else ():
            if name in self._bound.states:
                boxes.append(_whole(f"model/{name}", self._masters[name]))
                boxes += [_whole(f"optimizer/{name}/{key}", t) for key, t in self._bound.states[name].items()]
        scalars: dict = {"skipped": self.skipped()}
        if self._scale is not None:
            scalars["loss_scale"] = [float(self._scale), int(self._growth)]
        return State(boxes, scalars)

    @torch.no_grad()
    def load(self, source: Source) -> None:
        for name, parameter in [*self._parameters.items(), *self._frozen.items()]:
            value = source.read(f"model/{name}", shape=tuple(parameter.shape))
            if name in self._masters:
                self._masters[name].copy_(value)
            parameter.copy_(value)
        for name, state in self._bound.states.items():
            for key, tensor in state.items():
                tensor.copy_(source.read(f"optimizer/{name}/{key}", shape=tuple(tensor.shape)))
        if self._scale is not None and "loss_scale" in source.scalars:
            scale, growth = source.scalars["loss_scale"]
            self._scale.fill_(scale)
            self._growth.fill_(growth)
        skipped = source.scalars.get("skipped", 0)
        if isinstance(self._skipped, int):
            self._skipped = skipped
        else:
            self._skipped.fill_(skipped)


def _whole(name: str, tensor: Tensor) -> Box:
    return Box(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def _norm_dtype(gradients: list[Tensor]) -> torch.dtype:
    """Norms of half-format gradients are taken in fp32: squares overflow fp16 and drown in bf16."""
    return torch.float64 if gradients and gradients[0].dtype is torch.float64 else torch.float32
