"""The device mesh of a run: shares of the rows, times the ranks that compute one share together."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
import torch.distributed as dist

from dtf.core.errors import LayoutError
from dtf.core.types import Shard
from dtf.distributed.batch_broadcast import BatchBroadcast
from dtf.distributed.mesh_sizes import AXES, MeshSizes
from dtf.distributed.world import World

SHARE = ("pipeline", "context", "tensor")
"""Axes of the ranks that compute one share of the rows."""
LAYER = ("context", "tensor")
"""Of these, those that compute a layer together."""
ROWS = ("replicate", "shard")
"""The ranks that hold the same part of the model and compute other rows."""
SLICES = ("shard", "context", "tensor")
"""The ranks that have all slices of a stage."""
COPIES = ("replicate", "context")
"""Those that have the same slice, and compute other rows or positions."""
SEGMENTS = ("pipeline", "context")
"""Those of a share that compute other layers or positions."""


class ParallelDims:
    """The ranks of a run as a device mesh, and the groups of ranks along its axes.

    Built by all ranks with the same arguments. Collective. `inputs`: whether all ranks of a share need the inputs of a
    batch, see BatchBroadcast.
    """

    def __init__(self, world: World, sizes: MeshSizes, inputs: bool = True) -> None:
        self.sizes, self._world = sizes, world
        sharded = sizes.shard > 1
        self.mesh = world.mesh(
            {axis: size for axis, size in sizes.by_axis().items() if size > 1 or (sharded and axis in ROWS)}
        )
        self._grid = torch.arange(world.size).view([*sizes.by_axis().values()])
        self.place = self.place_of(world.rank)
        """This rank's place along each axis."""
        self._made: dict[tuple[str, ...], dist.ProcessGroup] = {}
        self.summed: list[tuple[tuple[str, ...], list[torch.Tensor]]] = []
        """What is summed after the passes of a step: axes, and tensors like the gradients."""
        for axes in (SHARE, LAYER, ROWS, SLICES, COPIES, SEGMENTS):  # all ranks make all groups, in one order
            self.group(*axes)
        self._share, self._layer = self.group(*SHARE), self.group(*LAYER)
        self._rows, self.slices = self.group(*ROWS), self.group(*SLICES)
        self.mesh_rows = self.rank_lists(*SHARE)
        """The ranks of each share of the rows, in order of the shares."""
        self.dp_shard = Shard(self.place["replicate"] * sizes.shard + self.place["shard"], sizes.shares)
        self.layer_rank = self.place["context"] * sizes.tensor + self.place["tensor"]
        """This rank's place among those that compute a layer together."""
        self.broadcast = BatchBroadcast(self._share, world.device, inputs) if self._share is not None else None

    def place_of(self, rank: int) -> dict[str, int]:
        """The place of a rank along each axis."""
        return dict(zip(AXES, (self._grid == rank).nonzero()[0].tolist(), strict=True))

    def rank_lists(self, *axes: str) -> list[list[int]]:
        """The groups of ranks that differ along these axes alone, of the whole mesh."""
        kept = [number for number, axis in enumerate(AXES) if axis not in axes]
        inside = [number for number, axis in enumerate(AXES) if axis in axes]
        return self._grid.permute(*kept, *inside).reshape(-1, prod(self._grid.shape[n] for n in inside)).tolist()

    def group(self, *axes: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along these axes alone; None: there are no others. Collective over all
        ranks at the first call for these axes.
        """
        longer = tuple(axis for axis in axes if self.sizes.by_axis()[axis] > 1)
        if not longer:
            return None
        if longer not in self._made:
            self._made[longer] = self._new_group(longer)
        return self._made[longer]

    def _new_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        if len(axes) == 1:
            return self.mesh[axes[0]].get_group()
        lists = self.rank_lists(*axes)
        if len(lists) == 1:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        groups = [dist.new_group(ranks) for ranks in lists]
        own = next(group for group, ranks in zip(groups, lists, strict=True) if self._world.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        return own

    @property
    def reads(self) -> bool:
        """Whether this rank reads the rows of its share, for the others."""
        return self.broadcast is None or self.broadcast.reads

    @property
    def row_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model and compute other rows, in order of their shares."""
        assert self._rows is not None
        return self._rows

    def average(self, flat: torch.Tensor) -> None:
        """Mean of a tensor over the ranks that hold the same part of the model, in place. Collective over them."""
        _add(flat, self._rows).div_(self.dp_shard.count)

    def total(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks of a share, in place. Collective over them."""
        return _add(sums, self._share)

    def total_of_stages(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks that have the same part of each stage, in place. Collective over them."""
        return _add(sums, self.group("pipeline"))

    def total_of_segments(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks of a share that compute other layers or positions, in place. Collective over
        them.
        """
        return _add(sums, self.group(*SEGMENTS))

    def total_of_slices(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum of a tensor over the ranks that have all slices of a stage, in place. Collective over them."""
        return _add(sums, self.slices)

    def unlike(self, everywhere: Mapping[str, torch.Tensor], by_layer: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of the tensors that differ between the ranks which compute a layer together, or of `by_layer` between
        those of them which divide layers; the same on all of these. Given are projections, (N + 1,), of which the last
        is by how much the others may differ. Collective over them. Waits for the device.
        """
        if self._layer is None:
            return []
        found, names = list[torch.Tensor](), [*everywhere, *by_layer]
        for prints, group in ((everywhere, self._layer), (by_layer, self.group("tensor"))):
            if not prints:
                continue
            most = torch.stack([each.to(self._world.device) for each in prints.values()])
            least = most.clone()
            if group is not None:
                dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
                dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
            found.append(((most - least)[:, :-1].amax(1) > most[:, -1]).int())
        if not found:
            return []
        differs = torch.cat(found)
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self._layer)  # others have other positions
        return [name for name, one in zip(names, differs.tolist(), strict=True) if one]

    def unlike_error(self, name: str) -> LayoutError:
        """For a name that `unlike` found."""
        return LayoutError(
            f"{self.sizes}: ranks that should agree have different {name}: it works on slices, or on what was made of "
            "them; name its module, and dropouts beside it, in the splits of the recipe's layout; modules of its "
            "positions must compute each position by itself, and what is dropped there has to be (B, T, ...)"
        )


def _add(sums: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums
