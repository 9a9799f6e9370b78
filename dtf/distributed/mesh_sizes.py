"""The axes of a device mesh and their sizes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """How many ranks there are along each axis. Along the last axis, ranks are neighbours: the axes that talk most
    often are last.
    """

    replicate: int = 1  # copies of the model, which compute other rows
    pipeline: int = 1  # stages of the model
    shard: int = 1  # slices of each parameter's state, on ranks that compute other rows
    context: int = 1  # slices of the positions of each row
    tensor: int = 1  # slices of each divided layer

    @property
    def total(self) -> int:
        """All ranks."""
        return prod(self.by_axis().values())

    @property
    def shares(self) -> int:
        """Shares of the rows: groups of ranks that compute other rows."""
        return self.replicate * self.shard

    @property
    def layer_ranks(self) -> int:
        """Ranks that compute a layer of the same rows together."""
        return self.context * self.tensor

    def by_axis(self) -> dict[str, int]:
        """Name of each axis -> its size, in their order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def __str__(self) -> str:
        """The axes with more than one rank, as `replicate 2 x tensor 2`."""
        return " x ".join(f"{axis} {size}" for axis, size in self.by_axis().items() if size > 1) or "1 rank"


AXES = tuple(MeshSizes().by_axis())
