"""Which part of a tensor a rank holds.

Works without importing DTensor, which would delay the first step of runs that use none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor: a global tensor of which this rank holds a part."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in the same memory. A plain tensor is returned as it is."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def bounds(width: int, size: int, rank: int) -> tuple[int, int]:
    """First and last + 1 of a rank's slice of `width` elements, cut as `torch.chunk` and DTensor do. The last slices
    may be smaller or empty.
    """
    chunk = -(-width // size)
    return min(width, rank * chunk), min(width, (rank + 1) * chunk)


def offset(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the global tensor. Each axis of a DTensor is cut along one axis of its mesh at
    most.
    """
    start = [0] * tensor.dim()
    if is_dtensor(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
            if placement.is_shard():
                start[placement.dim] = bounds(tensor.shape[placement.dim], mesh.size(axis), mesh.get_local_rank(axis))[
                    0
                ]
    return tuple(start)


def greedy_balance(sizes: dict[str, int], count: int) -> list[frozenset[str]]:
    """Assign names to `count` owners: the largest first, each to the owner with least so far. The same on every rank.
    Returns the names of each owner.
    """
    shares: list[set[str]] = [set() for _ in range(count)]
    loads = [0] * count
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner = loads.index(min(loads))
        shares[owner].add(name)
        loads[owner] += size
    return [frozenset(part) for part in shares]


def byte_count(tensors: Iterable[Tensor]) -> int:
    """Bytes of plain tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
