"""Losses and metrics of class scores that work under any strategy: scores may be divided by classes over ranks (a
DTensor).

Scores have shape (..., C): (B, C) for rows, (B, T, C) for rows of tokens. On divided scores each call is collective
over the ranks that hold the slices. It sends a few numbers per target, never the scores. Tokens may be divided too:
results are those of all tokens, alike on all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from dtf.distributed.sharding import is_dtensor, local, offset

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

IGNORED = -100
"""A target without a loss, as in torch."""


def cross_entropy(scores: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each target (...), as `torch.nn.functional.cross_entropy(reduction="none")`. `scores` (..., C);
    `targets` (...) int64: class numbers, or IGNORED for a loss of 0.

    On divided scores, a target that is no class makes the loss NaN, so that the update is skipped and counted: raising
    an error would need host synchronisation. Collective on divided scores.
    """
    scores = _in_known_places(scores)
    places = _places(scores)
    if places is None:
        return _cross_entropy(scores, targets, label_smoothing)
    return places.whole(_cross_entropy(scores, places.own(targets), label_smoothing))


def _cross_entropy(scores: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    """That of the targets whose scores are here."""
    slices = _slices(scores)
    if slices is None:
        rows = local(scores).reshape(-1, scores.shape[-1])
        loss = functional.cross_entropy(rows, targets.reshape(-1), reduction="none", label_smoothing=label_smoothing)
        return loss.view(targets.shape)
    from torch import distributed as dist

    from dtf.distributed.collectives import total

    here, group = slices.local, slices.group
    with torch.no_grad():  # only for the sake of range: it cancels out
        top = here.amax(dim=-1) if here.shape[-1] else here.new_full(targets.shape, -torch.inf)
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = here - top[..., None]
    sums = [shifted.exp().sum(dim=-1), slices.at(shifted, targets)]
    if label_smoothing:
        sums.append(shifted.sum(dim=-1))
    denominator, right, *rest = total(torch.stack(sums), group).unbind()
    spread = label_smoothing / scores.shape[-1] * rest[0] if rest else 0.0
    loss = denominator.log() - (1 - label_smoothing) * right - spread
    return loss.masked_fill(_beyond(scores, targets), torch.nan).masked_fill(targets == IGNORED, 0.0)


def target_rank(scores: Tensor, targets: Tensor) -> Tensor:
    """How many scores are at least that of the target, the target's own included: (...) int64, 1 is the best.
    `scores` (..., C), `targets` (...) int64. Collective on divided scores.

    A tie and a NaN count against the model. A target that is no class, such as IGNORED, has a score of NaN, so that it
    counts as the worst.
    """
    scores = _in_known_places(scores)
    places = _places(scores)
    if places is None:
        return _target_rank(scores, targets)
    return places.whole(_target_rank(scores, places.own(targets)))


def _target_rank(scores: Tensor, targets: Tensor) -> Tensor:
    """That of the targets whose scores are here."""
    slices, beyond = _slices(scores), _beyond(scores, targets)
    if slices is None:
        scores = local(scores)
        right = scores.gather(-1, targets.masked_fill(beyond, 0)[..., None])[..., 0]
        return _at_least(scores, right.masked_fill(beyond, torch.nan))
    from torch import distributed as dist

    right = slices.at(slices.local, targets)
    dist.all_reduce(right, group=slices.group)
    count = _at_least(slices.local, right.masked_fill(beyond, torch.nan))
    dist.all_reduce(count, group=slices.group)
    return count


def _at_least(scores: Tensor, right: Tensor) -> Tensor:
    return (~(scores < right[..., None])).sum(dim=-1)


def _beyond(scores: Tensor, targets: Tensor) -> Tensor:
    return (targets < 0) | (targets >= scores.shape[-1])


class _Slices(NamedTuple):
    """The classes of the scores on this rank. `first`: the first one."""

    local: Tensor
    first: int
    group: ProcessGroup

    def at(self, columns: Tensor, targets: Tensor) -> Tensor:
        """The element at each target, 0 where another rank has it, (...)."""
        index = targets - self.first
        in_slice = (index >= 0) & (index < columns.shape[-1])
        if not columns.shape[-1]:
            return columns.new_zeros(targets.shape) + 0 * columns.sum(dim=-1)
        chosen = columns.gather(-1, index.clamp(0, columns.shape[-1] - 1)[..., None])[..., 0]
        return torch.where(in_slice, chosen, torch.zeros_like(chosen))


def _slices(scores: Tensor) -> _Slices | None:
    group = _divided(scores, scores.dim() - 1)
    return None if group is None else _Slices(local(scores), offset(scores)[-1], group)


class _Places(NamedTuple):
    """The tokens whose scores are on this rank, along axis 1: `first` to `last` of `count`."""

    first: int
    last: int
    count: int
    group: ProcessGroup

    def own(self, targets: Tensor) -> Tensor:
        return targets[:, self.first : self.last]

    def whole(self, part: Tensor) -> Tensor:
        """Those of all tokens, from those of the tokens here. What follows is computed alike by all ranks."""
        from dtf.distributed.collectives import total

        before, after = self.first, self.count - self.last
        shapes = ([part.shape[0], length, *part.shape[2:]] for length in (before, after))
        begin, end = (part.new_zeros(shape) for shape in shapes)
        return total(torch.cat([begin, part, end], 1), self.group)


def _places(scores: Tensor) -> _Places | None:
    """Which tokens' scores are here, if they are divided."""
    group = _divided(scores, 1) if scores.dim() > 2 else None
    if group is None:
        return None
    first = offset(scores)[1]
    return _Places(first, first + local(scores).shape[1], scores.shape[1], group)


def _in_known_places(scores: Tensor) -> Tensor:
    """The scores, divided by classes or tokens alone. Parts of divided scores that a recipe has taken, such as all
    tokens but the last, may lie in other ways; of these each rank gets all.
    """
    if not is_dtensor(scores):
        return scores
    from torch.distributed.tensor import Replicate

    axes, placements = {scores.dim() - 1, *([1] if scores.dim() > 2 else [])}, scores.placements  # type: ignore[attr-defined]
    known = [placement if any(map(placement.is_shard, axes)) else Replicate() for placement in placements]
    return scores if known == [*placements] else scores.redistribute(placements=known)  # type: ignore[attr-defined]


def _divided(scores: Tensor, axis: int) -> ProcessGroup | None:
    """The ranks that divide an axis of the scores, if any do."""
    places: Any = scores.placements if is_dtensor(scores) else ()  # type: ignore[attr-defined]
    at = next((i for i, placement in enumerate(places) if placement.is_shard(axis)), None)
    return None if at is None else scores.device_mesh.get_group(at)  # type: ignore[attr-defined]
