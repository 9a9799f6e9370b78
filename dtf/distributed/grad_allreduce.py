"""All-reduce of gradients over ranks that computed other rows with the same parameters: in flat buckets, after the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.distributed.collectives import waiting_group
from dtf.host.waits import Operation

BUCKET_BYTES = 25 * 2**20
"""As in torch's DDP: large enough for full bandwidth, small enough that copying one bucket overlaps with sending the
next.
"""


class GradientSum:
    """Sums a list of gradients over a group, in place. Shapes and dtypes must be the same at each call. Collective.

    Each rank sends 2 (n - 1) / n of the bytes of the gradients.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._operation = Operation("the all-reduce of gradients", waiting_group(group, "gradients"))

    def __call__(self, gradients: list[Tensor]) -> None:
        under_way = []
        for bucket in buckets(gradients):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            under_way.append((bucket, flat, dist.all_reduce(flat, group=self._group, async_op=True)))
        for bucket, flat, work in under_way:
            assert work is not None
            with self._operation:
                work.wait()
            parts = flat.split([gradient.numel() for gradient in bucket])
            torch._foreach_copy_(bucket, [part.view_as(gradient) for part, gradient in zip(parts, bucket, strict=True)])


def buckets(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Consecutive tensors of one dtype, in lists up to the size of a bucket."""
    lists: list[list[Tensor]] = []
    held = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not lists or held + size > BUCKET_BYTES or lists[-1][0].dtype is not tensor.dtype:
            lists.append([])
            held = 0
        lists[-1].append(tensor)
        held += size
    return lists
