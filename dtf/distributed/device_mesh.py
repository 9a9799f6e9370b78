"""The device mesh of a run: data parallel shares of the rows, times the ranks that compute one share together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtf.core.errors import LayoutError
from dtf.core.types import Shard
from dtf.distributed.batch_broadcast import BatchBroadcast
from dtf.distributed.grad_allreduce import GradientSum
from dtf.distributed.world import World

TOLERANCE = 1e-3
"""Largest relative difference of norms that are bitwise equal unless kernels are not deterministic."""


class ParallelDims:
    """The ranks of a run as a device mesh: data parallel shares, times `degree` neighbouring ranks that compute a share
    together.

    Built by all ranks with the same arguments. Collective. `axis`: the name of the second axis, such as `tp`.
    `inputs`: whether all ranks of a share need the inputs of a batch, see BatchBroadcast.
    """

    def __init__(self, world: World, axis: str, degree: int, inputs: bool = True) -> None:
        mesh = world.mesh({"dp": world.size // degree, axis: degree})
        self._dp_group = mesh["dp"].get_group()
        self.group_of_parts = self._dp_group
        """The ranks that hold the same part of the model and compute other rows, in order of their shares."""
        self.dp_shard = Shard(mesh["dp"].get_local_rank(), world.size // degree)
        self.mesh = mesh[axis]
        self.group = self.mesh.get_group()
        self.axis_rank = self.mesh.get_local_rank()
        self.mesh_rows: list[list[int]] = mesh.mesh.tolist()  # data parallel share -> its ranks
        self.broadcast = BatchBroadcast(self.group, world.device, inputs)
        self.reduce = GradientSum(self._dp_group) if self.dp_shard.count > 1 else None
        """Sums gradients over the ranks that hold the same part of the model and compute other rows."""

    def average(self, flat: torch.Tensor) -> None:
        """Mean of a tensor over the ranks that hold the same part of the model, in place. Collective over them."""
        dist.all_reduce(flat, group=self._dp_group)
        flat.div_(self.dp_shard.count)

    def check_alike(self, norms: dict[str, torch.Tensor]) -> None:
        """Raise ConfigError on all ranks when norms, (), by name, that all ranks of a share compute alike, differ
        between them.

        Collective over the ranks of a share. Waits for the device.
        """
        if not norms:
            return
        values = torch.stack([norm.double() for norm in norms.values()])
        least, most = values.clone(), values.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        unequal = [
            name for name, differs in zip(norms, (most - least > TOLERANCE * most).tolist(), strict=True) if differs
        ]
        if unequal:
            raise LayoutError(
                f"strategy.degree={self.mesh.size()}: ranks that should agree have different {unequal[0]}: it works on "
                "slices, or on what was made of them; "
                "name its module, and dropouts beside it, in the splits of the recipe's layout"
            )

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks of a share, in place. Collective over them."""
        dist.all_reduce(sums, group=self.group)
        return sums
