"""The place of a rank in a grid: shares of the rows, times the ranks that compute one share together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dtf.core.errors import ConfigError
from dtf.core.types import Shard
from dtf.distributed.batch_broadcast import BatchBroadcast
from dtf.distributed.grad_allreduce import GradientSum
from dtf.distributed.world import World

APART = 1e-3
"""Relative difference of what should be alike bit for bit, but for kernels that are not deterministic."""


class ParallelDims:
    """`degree` neighbouring ranks compute a share together. Built by all ranks alike; collective.

    `axis`: what the mesh calls their axis. `inputs`: whether all of them need a batch's inputs, see Feed.
    """

    def __init__(self, world: World, axis: str, degree: int, inputs: bool = True) -> None:
        mesh = world.mesh({"dp": world.size // degree, axis: degree})
        self._rows = mesh["dp"].get_group()
        self.share = Shard(mesh["dp"].get_local_rank(), world.size // degree)
        self.mesh = mesh[axis]
        self.group = self.mesh.get_group()
        self.place = self.mesh.get_local_rank()
        self.lines: list[list[int]] = mesh.mesh.tolist()  # share -> its ranks
        self.feed = BatchBroadcast(self.group, world.device, inputs)
        self.reduce = GradientSum(self._rows) if self.share.count > 1 else None
        """Sums gradients over the ranks that hold the same part of the model and compute other rows."""

    def average(self, flat: torch.Tensor) -> None:
        """Mean of a tensor over the ranks that hold the same part of the model, in place. Collective."""
        dist.all_reduce(flat, group=self._rows)
        flat.div_(self.share.count)

    def check_alike(self, norms: dict[str, torch.Tensor]) -> None:
        """Raise ConfigError on all ranks when what they compute alike, norms by name, differs between them.

        Collective; waits for the device.
        """
        if not norms:
            return
        mine = torch.stack([norm.double() for norm in norms.values()])
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        apart = [name for name, differs in zip(norms, (most - least > APART * most).tolist(), strict=True) if differs]
        if apart:
            raise ConfigError(
                f"strategy.degree={self.mesh.size()}: ranks that should agree have different {apart[0]}: it works on "
                "slices, or on what was made of them; "
                "name its module, and dropouts beside it, in the splits of the recipe's layout"
            )

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that compute a share together, in place. Collective."""
        dist.all_reduce(sums, group=self.group)
        return sums
