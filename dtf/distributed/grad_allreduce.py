"""Sums of gradients over ranks that computed different rows of the same parameters, in flat buckets after the backward
pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_BYTES = 25 * 2**20
"""As in torch's DDP: large enough for full bandwidth, small enough that copying out overlaps with the next one's way.
"""


class GradientSum:
    """Adds up a list of gradients over a group, in place; the same shapes and formats at each call. Collective.

    Moves 2 (n - 1) / n of the gradients' bytes per rank.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, gradients: list[Tensor]) -> None:
        under_way = []
        for bucket in buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            under_way.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for bucket, flat, work in under_way:
            assert work is not None
            work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one format, up to the size of a bucket."""
    found: list[list[Tensor]] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not found or held + size > BUCKET_BYTES or found[-1][0].dtype is not tensor.dtype:
            found.append([])
            held = 0
        found[-1].append(tensor)
        held += size
    return found
