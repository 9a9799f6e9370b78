"""Dropout masks that depend on the seed, the step, the micro-batch and the layer, not on the rank that draws them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dtf.core.errors import ConfigError
from dtf.core.seeding import seed_of


class SeededDropout:
    """Seeds the dropout layers of one replica of a model, in place. One key per micro-batch, the same on every rank."""

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._seed, self.key = seed, 0
        self._seeded: list[Any] = []
        self._generator = (
            torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index or 0]
        )
        for name, module in model.named_modules():
            if isinstance(module, DROPOUTS) and type(module).forward in _FORWARDS:  # also one whose class FSDP changed
                # The class changes, the module and its name stay: parameter names and hooks of the user's model are
                # untouched. Others that draw (AlphaDropout, functional dropout) follow the global generator, which
                # `begin_micro_batch` seeds.
                kind: Any = type(
                    f"Seeded{type(module).__name__}",
                    (_Seeded, type(module)),
                    {"_channels": not isinstance(module, nn.Dropout)},
                )
                module.__class__ = kind
                self._seeded.append(module)
                module.__dict__ |= {"_masks": self, "_name": name}

    @contextmanager
    def record_input_norms(self) -> Iterator[dict[str, Tensor]]:
        """A context. The dict that it yields gets the norm () of the input of each dropout that draws its mask for all
        channels, and so must get all channels.
        """
        seen: dict[str, Tensor] = {}

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen[f"inputs of {module._name}"] = inputs[0].detach().norm()

        hooks = [module.register_forward_pre_hook(note) for module in self._seeded if not module._slice]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()

    def rng_state(self) -> Tensor:
        """The state of the global generator, from which everything but the seeded layers draws."""
        return self._generator.get_state()

    def begin_micro_batch(self, step: int, micro_batch: int) -> None:
        """Called before a micro-batch. All random numbers in it are functions of (seed, step, micro-batch)."""
        self.key = seed_of(self._seed, "mask", step, micro_batch)
        self._generator.manual_seed(self.key)  # for functional dropout and torch.rand in a user's forward


class _Seeded:
    """A dropout layer whose mask is drawn from hash(seed, step, micro-batch, layer name)."""

    _masks: SeededDropout
    _name: str
    _channels = True  # whether whole channels are dropped
    # axis, its whole width, this rank's first and last + 1: the mask is drawn whole, then cut
    _slice: tuple[int, int, int, int] | None = None
    p: float
    training: bool

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        generator = torch.Generator(x.device).manual_seed(seed_of(self._masks.key, self._name))
        shape = [*x.shape]
        if self._slice:
            axis, width, first, last = self._slice
            if shape[axis] != last - first:
                raise ConfigError(
                    f"the recipe's layout splits {self._name} as local, but axis {axis} of its input has {shape[axis]} "
                    f"elements and not the {last - first} that are this rank's of the {width} channels divided before "
                    "it; put it where channels are as the divided layer makes them"
                )
            shape[axis] = width
        if self._channels:
            shape[2:] = [1] * len(shape[2:])
        mask = torch.empty(shape, dtype=x.dtype, device=x.device).bernoulli_(1 - self.p, generator=generator)
        # else what it drops at once spans all channels
        if self._slice and mask.shape[self._slice[0]] == self._slice[1]:
            axis, _, first, last = self._slice
            mask = mask.narrow(axis, first, last - first)
        return x * mask.mul_(0.0 if self.p == 1 else 1 / (1 - self.p))


DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


_FORWARDS = [kind.forward for kind in DROPOUTS]
