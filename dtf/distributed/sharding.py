"""Which part of a tensor a rank holds.

Works without importing DTensor, which would delay the first step of runs that use none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Piece(NamedTuple):
    """A box of a global tensor that a rank holds."""

    at: tuple[int, ...]  # where it begins in the local tensor
    offset: tuple[int, ...]  # where it begins in the global tensor
    shape: tuple[int, ...]

    def here(self, part: Tensor) -> Tensor:
        """The box in the local tensor, a view."""
        return part.detach()[tuple(slice(at, at + n) for at, n in zip(self.at, self.shape, strict=True))]

    def of(self, whole: Tensor) -> Tensor:
        """The box in the global tensor, a view."""
        return whole.detach()[tuple(slice(at, at + n) for at, n in zip(self.offset, self.shape, strict=True))]


class Slice(NamedTuple):
    """What a local tensor is of a global one: boxes, which fill the local one. At least one, perhaps empty."""

    shape: tuple[int, ...]  # of the global tensor
    pieces: tuple[Piece, ...]

    def narrow(self, axis: int, first: int, last: int) -> Slice:
        """What elements [first, last) of the local tensor along an axis are of the global one."""
        pieces = []
        for piece in self.pieces:
            begin = max(first, piece.at[axis])
            length = min(last, piece.at[axis] + piece.shape[axis]) - begin
            if length > 0:
                pieces.append(_moved(piece, axis, begin - first, piece.offset[axis] + begin - piece.at[axis], length))
        return Slice(self.shape, tuple(pieces) or (_moved(self.pieces[0], axis, 0, self.shape[axis], 0),))

    def take(self, whole: Tensor) -> Tensor:
        """The local tensor of a global one, contiguous, in memory of its own."""
        axes = range(len(self.shape))
        part = whole.new_empty([max(piece.at[axis] + piece.shape[axis] for piece in self.pieces) for axis in axes])
        for piece in self.pieces:
            piece.here(part).copy_(piece.of(whole))
        return part


def _moved(piece: Piece, axis: int, at: int, offset: int, length: int) -> Piece:
    """The piece with other numbers along an axis."""
    pairs = zip(piece, (at, offset, length), strict=True)
    return Piece(*((*numbers[:axis], number, *numbers[axis + 1 :]) for numbers, number in pairs))


def whole(shape: Sequence[int]) -> Slice:
    """A tensor that is here in whole."""
    zeros = (0,) * len(shape)
    return Slice(tuple(shape), (Piece(zeros, zeros, tuple(shape)),))


def cut(shape: Sequence[int], axis: int, ranges: Iterable[tuple[int, int]]) -> Slice:
    """The elements [first, last) of each of these ranges of a global tensor along an axis, one after another."""
    joined: list[tuple[int, int]] = []
    for first, last in ranges:
        if joined and joined[-1][1] == first:
            first = joined.pop()[0]
        joined.append((first, last))
    (piece,), at, pieces = whole(shape).pieces, 0, []
    for first, last in joined:
        if last > first or len(joined) == 1:
            pieces.append(_moved(piece, axis, at, first, last - first))
        at += last - first
    return Slice(tuple(shape), tuple(pieces) or (_moved(piece, axis, 0, shape[axis], 0),))


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


def balanced(count: int, size: int, rank: int) -> tuple[int, int]:
    """First and last + 1 of a rank's share of `count` things; the first ranks have one more where it does not come out
    even.
    """
    each, more = divmod(count, size)
    first = rank * each + min(rank, more)
    return first, first + each + (rank < more)


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


def slice_of(tensor: Tensor, divided: Slice | None = None) -> Slice:
    """What this rank holds of a tensor, perhaps a DTensor. `divided`: what the tensor itself is of a larger one; None:
    all of it.
    """
    part, begin = divided or whole(tensor.shape), offset(tensor)
    for axis, length in enumerate(local(tensor).shape if is_dtensor(tensor) else ()):
        if length < tensor.shape[axis]:
            part = part.narrow(axis, begin[axis], begin[axis] + length)
    return part


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
