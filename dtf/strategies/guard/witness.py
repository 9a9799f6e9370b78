"""What one pass gives to the parameters, seen before it is added to other gradients or sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dtf.core.seeding import seed_of
from dtf.distributed.sharding import local
from dtf.model.fingerprint import fingerprint
from dtf.model.seeded_dropout import SeededDropout
from dtf.strategies.guard.votes import Seen

_WIDTH, _PATTERNS = 4096, 4


class GradientWitness:
    """Takes digests of the gradients that the backward pass of one micro-batch gives to these parameters.

    Between `begin` of that micro-batch and of the next one. Nothing waits for the device until `seen`.
    """

    def __init__(self, parameters: Iterable[Tensor], masks: SeededDropout) -> None:
        masks.begins = self.begin
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._watched, self._active, self._by_bits = (-1, -1), False, False
        self._digests: dict[int, Tensor] = {}
        self._sketches: dict[int, Tensor] = {}
        self._hooks: list[Any] = []

    def watch(self, step: int, micro_batch: int, by_bits: bool) -> None:
        """Look at this micro-batch from now on. Until `close`. `by_bits`: bits are compared, and no sketch is made."""
        self._watched, self._active, self._by_bits = (step, micro_batch), False, by_bits
        self._digests, self._sketches = {}, {}
        if not self._hooks:
            self._hooks = [
                parameter.register_hook(lambda gradient, number=number: self._take(number, gradient))
                for number, parameter in enumerate(self._parameters)
            ]

    def close(self) -> None:
        """Look at nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._watched, self._active = [], (-1, -1), False

    def begin(self, step: int, micro_batch: int) -> None:
        """The passes of this micro-batch begin."""
        self._active = self._watched == (step, micro_batch)
        if self._active:  # padding in its place does not count
            self._digests, self._sketches = {}, {}

    def seen(self) -> Seen:
        """What was seen. Waits for the device."""
        digests = [self._digests.get(number) for number in range(len(self._parameters))]
        found = torch.stack([digest for digest in digests if digest is not None]).tolist() if self._digests else []
        numbers = iter(found)
        parts = [0 if digest is None else next(numbers) for digest in digests]
        sketches = [self._sketches[number] for number in sorted(self._sketches)]  # sums have one order
        if self._by_bits:
            return Seen(seed_of(*parts))
        totals = torch.stack(sketches).sum(0).tolist() if sketches else [0.0] * (1 + _PATTERNS)
        return Seen(seed_of(*parts), (max(totals[0], 0.0) ** 0.5, *totals[1:]))

    @torch.no_grad()
    def _take(self, number: int, gradient: Tensor | None) -> None:
        if not self._active or gradient is None:
            return
        own = local(gradient.detach())
        self._digests[number] = self._digests.get(number, 0) + fingerprint(own)
        if not self._by_bits:
            self._sketches[number] = self._sketches.get(number, 0) + _sketch(own)


class Witness:
    """The witnesses of the parts of a model in this process, as one."""

    def __init__(self, parts: Sequence[GradientWitness]) -> None:
        self._parts = parts

    def watch(self, step: int, micro_batch: int, by_bits: bool) -> None:
        """Look at this micro-batch from now on. Until `close`."""
        for part in self._parts:
            part.watch(step, micro_batch, by_bits)

    def close(self) -> None:
        """Look at nothing any more."""
        for part in self._parts:
            part.close()

    def seen(self) -> Seen:
        """What was seen. Waits for the device."""
        seen = [part.seen() for part in self._parts]
        digest, sketches = seed_of(*(each.digest for each in seen)), [each.sketch for each in seen]
        if not all(sketches):
            return Seen(digest)
        norms, *sums = zip(*sketches, strict=True)
        return Seen(digest, (math.hypot(*norms), *(math.fsum(each) for each in sums)))


def _sketch(tensor: Tensor) -> Tensor:
    """The square of the norm, and sums with patterns of signs, (1 + _PATTERNS,), fp64, on the tensor's device."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    signs = _signs(flat.device)
    whole = flat.numel() // _WIDTH * _WIDTH
    rest = flat[whole:].double()
    sums = signs[:, : len(rest)] @ rest
    square = rest.square().sum()
    if whole:
        columns = flat[:whole].view(-1, _WIDTH)
        sums = sums + signs @ columns.sum(0, dtype=torch.float64)
        square = square + torch.linalg.vector_norm(columns, dtype=torch.float64).square()
    return torch.cat([square.reshape(1), sums])


@cache
def _signs(device: torch.device) -> Tensor:
    """Patterns of signs, (_PATTERNS, _WIDTH): two changes that one pattern cannot see, another one sees."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(2, (_PATTERNS, _WIDTH), generator=generator).mul(2).sub(1).double().to(device)
