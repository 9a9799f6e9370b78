"""A model whose gradients are all-reduced in buckets while they are made: torch's DistributedDataParallel, as dtf uses
it.
"""

from __future__ import annotations

from inspect import signature

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtf.distributed.sharding import byte_count


def wrap_ddp(
    model: nn.Module,
    bucket_mb: float = 25.0,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = True,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """`model`, of which every rank drew the same numbers. For the options see `strategies.ddp`."""
    buffers = (
        "forward_sync_buffers"
        if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        else "broadcast_buffers"
    )
    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=gradient_as_bucket_view,
        find_unused_parameters=find_unused_parameters,
        init_sync=False,  # every rank drew the same numbers
        **{buffers: False},  # type: ignore[arg-type]  # running averages are averaged when they are needed, see Program.settle
    )


def inflight_bytes(model: nn.Module, micro_batches: int, gradient_as_bucket_view: bool = True) -> int:
    """Bytes beside buckets that are the gradients: those on their way into a bucket."""
    sizes = [byte_count([p]) for p in model.parameters() if p.requires_grad]
    beside = sum(sizes) if micro_batches > 1 or not gradient_as_bucket_view else 0
    return beside + (sum(sizes) if micro_batches > 2 else max(sizes))
