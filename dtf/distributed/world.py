"""The processes of a run, as one rank sees them: its own rank, the number of ranks, and a CPU channel for small
values.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dtf.core.errors import ConfigError
from dtf.core.types import Place
from dtf.distributed.store import rank_store
from dtf.host.waits import Group, Operation, group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_left: list[Any] = []
"""Closed process groups, kept until the process ends. Whoever frees one waits for the threads of gloo. Up to torch 2.11
at least, DDP's reducer would do so while it holds the interpreter lock, and those threads may wait for that lock to
free what they sent."""


class World:
    """The ranks of a run. Made by `join`, which is collective. With one rank nothing here communicates.

    Collective methods must be called by all ranks in the same order. The control channel carries CPU tensors (gloo, or
    mpi); gradients go through the device backend of the same group.
    """

    def __init__(self, place: Place) -> None:
        self.place, self.rank, self.size, self.slots = place, place.rank, place.size, place.slots
        self.device = torch.device(place.device)
        # what all processes of the run must have in common, once known: see `dtf.core.consistency`
        self.facts: dict[str, Any] = {}
        self.folder = Path()  # the run folder, once known
        self._group: Any = None  # None: the one that `join` made
        self._channels: list[Any] = []
        everyone = group_of("world", tuple(range(self.size)))
        self._sum, self._average, self._barrier, self._broadcast, self._gather, self._collect = (
            self._waiting(name, everyone)
            for name in (
                "a sum over all ranks",
                "an average over all ranks",
                "a barrier of all ranks",
                "a broadcast from rank 0",
                "a gathering of values on rank 0",
                "a gathering of rows on rank 0",
            )
        )

    def _waiting(self, name: str, group: Group) -> AbstractContextManager[None]:
        return Operation(name, group)

    @classmethod
    def join(cls, place: Place, backend: str | None, timeout_s: float = 1800) -> World:
        """Meet the other ranks at the store `place.store`. Collective.

        `backend`: see `Strategy.communication`; None: ranks never communicate. `timeout_s`: for the meeting and for
        every collective. ConfigError where the backend is not built into torch, or numbers its ranks otherwise.
        """
        if place.device.startswith("cuda"):
            torch.cuda.set_device(place.device)
        if place.size > 1 and backend is not None:
            if backend == "nccl":
                backend = "cpu:gloo,cuda:nccl"
            if backend == "mpi" and not dist.is_mpi_available():
                raise ConfigError(
                    "strategy.backend=mpi: this torch was built without MPI; use strategy.backend=gloo, or build "
                    "torch from source with MPI"
                )
            named = [part.rpartition(":")[2].lower() for part in backend.split(",")]
            unknown = [name for name in named if name not in dist.Backend.backend_list]
            if unknown:
                raise ConfigError(
                    f"the strategy's communication() names the backend {unknown[0]!r}, which torch does not have; "
                    f"choices: {', '.join(name for name in dist.Backend.backend_list if name != 'undefined')}"
                )
            options: dict[str, Any] = {}
            if backend != "mpi":  # MPI ranks know each other already
                options = {"store": rank_store(place, timeout_s), "rank": place.rank, "world_size": place.size}
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **options)
            if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.size):
                raise ConfigError(
                    f"strategy.backend={backend}: this is rank {dist.get_rank()} of {dist.get_world_size()} there and "
                    f"{place.rank} of {place.size} here; start the ranks with mpirun and launcher=env"
                )
        return cls(place)

    def channel(self) -> World | None:
        """The same ranks by a gloo group of their own, for one thread beside that which trains: what the two do never
        meets. CPU tensors alone. Collective. None where torch can make no such group: ranks of MPI have no store.
        """
        if self.size > 1 and dist.get_backend() == "mpi":
            return None
        other = _Channel(self.place)
        if self.size > 1:
            other._group = dist.new_group(backend="gloo")
            self._channels.append(other._group)
        return other

    def leave(self) -> None:
        """Close the process group. Collective."""
        if self.size > 1 and dist.is_initialized():
            _left.extend([dist.group.WORLD, *self._channels])
            dist.destroy_process_group()

    def mesh(self, axes: dict[str, int]) -> DeviceMesh:
        """The ranks as a device mesh: `axes` maps the names of the axes to their sizes. Along the last axis ranks are
        neighbours. Collective.
        """
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    def reduce(self, sums: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over ranks, in place, and return it; the same bits on every rank. Collective."""
        if self.size > 1:
            with self._sum:
                dist.all_reduce(sums, group=self._group)
        return sums

    def average(self, flat: torch.Tensor) -> None:
        """Mean of a device tensor over ranks, in place. Collective."""
        if self.size > 1:
            with self._average:
                dist.all_reduce(flat, group=self._group)
            flat.div_(self.size)

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        if self.size > 1:
            with self._barrier:
                dist.all_reduce(torch.zeros(1), group=self._group)

    def broadcast(self, value: Any) -> Any:
        """The JSON value of rank 0, on every rank. Collective."""
        if self.size == 1:
            return value
        data = _encode(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        with self._broadcast:
            dist.broadcast(length, src=0, group=self._group)
            if self.rank:
                data = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._group)
        return _decode(data)

    def send_from_first(self, tensor: torch.Tensor) -> None:
        """Overwrite a CPU tensor with rank 0's bytes. Collective."""
        if self.size > 1:
            flat = tensor.reshape(-1).contiguous()
            with self._broadcast:
                dist.broadcast(flat.view(torch.uint8) if flat.numel() else flat, src=0, group=self._group)
            tensor.copy_(flat.view(tensor.shape))

    def gather(self, value: Any) -> list[Any] | None:
        """The JSON values of all ranks in order of rank, on rank 0; None on other ranks. Collective."""
        if self.size == 1:
            return [value]
        data = _encode(value)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = data.numel()
        with self._gather:
            dist.all_reduce(lengths, group=self._group)
            longest = int(lengths.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._group)
        return (
            [_decode(part[:length]) for part, length in zip(parts, lengths.tolist(), strict=True)]
            if self.rank == 0
            else None
        )

    def collect(self, rows: torch.Tensor) -> torch.Tensor | None:
        """The rows of all ranks in order of rank, on rank 0; None on other ranks. `rows`: a CPU tensor (R, ...), with
        any R on each rank. Collective.
        """
        if self.size == 1:
            return rows
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(rows)
        with self._collect:
            dist.all_reduce(counts, group=self._group)
            longest = int(counts.max())
            padded = rows.new_zeros(longest, *rows.shape[1:])
            padded[: len(rows)] = rows
            parts = [torch.empty_like(padded) for _ in counts] if self.rank == 0 else None
            dist.gather(padded, parts, group=self._group)
        return (
            torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])
            if parts is not None
            else None
        )


class _Channel(World):
    """For a thread of its own: what it waits for is no wait of the thread whose waits the launching process reads."""

    def _waiting(self, name: str, group: Group) -> AbstractContextManager[None]:
        return nullcontext()


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())
