"""Numbers that differ when a tensor differs, computed where the tensor is: to compare copies of it between ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

_WIDTH = 4096
"""Columns into which the elements are summed up."""
_DIRECTIONS = 8
_PART = 256 * _WIDTH
"""Of how many elements there is a copy in fp64 at a time."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprints(tensors: Iterable[Tensor]) -> list[int]:
    """A number for the bits of each tensor, in order, whatever memory they lie in. Waits for each device once.

    It is no proof against intent: bits are added up in columns as integers, so that a copy that goes astray shows.
    """
    sums = [fingerprint(getattr(tensor, "_local_tensor", tensor).detach()) for tensor in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for number, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(number)
    found = dict[int, int]()
    for numbers in by_device.values():
        found |= zip(numbers, torch.stack([sums[number] for number in numbers]).tolist(), strict=True)
    return [found[number] for number in range(len(sums))]


def fingerprint(tensor: Tensor) -> Tensor:
    """The number of one tensor, (), int64, on its device. It waits for nothing.

    One flipped bit always changes it: a column then changes by a power of two, and its factor is odd.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)  # in the order in which it lies in memory, without a copy
    flat = tensor.contiguous().reshape(-1)
    bits = flat.view(_BITS[flat.element_size()])
    whole = len(bits) // _WIDTH * _WIDTH
    factors = _factors(tensor.device)
    total = (bits[whole:].long() * factors[: len(bits) - whole]).sum()
    if whole:
        total += (_column_sums(bits[:whole].view(-1, _WIDTH)).long() * factors).sum()
    return total


def _column_sums(bits: Tensor) -> Tensor:
    """The sums over the rows of whole numbers, in their own dtype, where they wrap."""
    if bits.device.type == "cpu":  # torch adds rows up at a third of the speed
        numbers = bits.numpy()
        return torch.from_numpy(np.add.reduce(numbers, axis=0, dtype=numbers.dtype))
    return bits.sum(0, dtype=bits.dtype)


@cache
def _factors(device: torch.device) -> Tensor:
    """Odd numbers, (_WIDTH,): elements that change places change the sum."""
    return (2 * torch.arange(_WIDTH, dtype=torch.int64, device=device) + 1) * 0x1E3779B97F4A7C15


@torch.no_grad()
def projections(tensor: Tensor, tolerance: float) -> Tensor:
    """What a tensor is along fixed directions, and by how much these numbers may differ between tensors that are
    `tolerance` of their norm apart: (9,), fp64, on its device. It waits for nothing.

    Other elements show, and the same ones in other places, which have the same norm. Elements r, c of the tensor in
    rows of 4,096 count by a product of normal numbers of r and of c: along one direction in 1,000, not along 8, unlike
    tensors are less than 1e-3 apart.
    """
    flat = getattr(tensor, "_local_tensor", tensor).detach().reshape(-1)
    draw, columns = torch.Generator(flat.device).manual_seed(0), _columns(flat.device)
    found = torch.zeros(_DIRECTIONS + 1, dtype=torch.float64, device=flat.device)
    for part in flat.split(_PART):
        missing = -len(part) % _WIDTH
        numbers = functional.pad(part.double(), (0, missing)).view((len(part) + missing) // _WIDTH, _WIDTH)
        rows = torch.randn(_DIRECTIONS, len(numbers), generator=draw, dtype=torch.float64, device=flat.device)
        # by elements: what counts the operations of a pass does not see it
        sums = torch.stack([(numbers * direction).sum(1) for direction in columns])
        found[:-1] += (sums * rows).sum(1)
        found[-1] += numbers.square().sum()
    found[-1].sqrt_().mul_(tolerance)
    return found


@cache
def _columns(device: torch.device) -> Tensor:
    draw = torch.Generator(device).manual_seed(1)
    return torch.randn(_DIRECTIONS, _WIDTH, generator=draw, dtype=torch.float64, device=device)
