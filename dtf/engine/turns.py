"""Ranks of a host that cannot hold the model once for each of them build it one after another. Then they share the
numbers of one: the memory of a file without a name, from which strategies cut their parts.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from dtf.core.errors import ConfigError
from dtf.core.text import bytes_text
from dtf.core.types import Memory
from dtf.distributed.world import World
from dtf.host import memory
from dtf.host.waits import Operation, group_of

SHARE = 0.8
"""Of the memory that a host has left, what the models of its ranks may take together."""
_POLL_S = 0.02
_BEAT_S = 30.0
"""Between signs of life of a rank that waits: late enough for the launching process to say first for whom it waits."""
_ALIGNMENT = 64


class TooLargeError(BaseException):
    """A model takes more than it may. No Exception: a constructor that bears errors must not bear this one."""


class Turns:
    """How the ranks of this host have built the model one after another. The first of them holds it, and the others
    know its names and shapes only, until `share`.
    """

    def __init__(self, world: World, ranks: list[int], holds: bool, text: str) -> None:
        self._world, self._ranks, self.holds = world, ranks, holds
        self._why = text
        self.bytes = 0
        """Of the whole model."""

    def share(self, model: nn.Module) -> None:
        """Give all ranks of the host the numbers of the first one, in memory that they share until they write to it.
        Collective.
        """
        world, file, told = self._world, None, None
        if self.holds:
            file, told = _write(model)
        everyone = world.broadcast(world.gather(told))
        path, names, places = everyone[self._ranks[0]]
        tensors = _tensors(model)
        if names != list(tensors):
            name = next(iter(set(names) ^ tensors.keys()), "their order")
            raise ConfigError(f"ranks build different models: they differ in {name}; build_model() must make the same")
        self.bytes = _take(tensors, path, places)
        world.barrier()  # all have opened the file
        if file is not None:
            os.close(file)

    def row(self, planned: Sequence[Memory]) -> dict[str, str]:
        """For the start-up table. `planned`: the needs of all ranks, those of this host among them."""
        parts = sum(needs.parameters for rank, needs in enumerate(planned) if rank in self._ranks)
        most = f"{bytes_text(self.bytes)} of the whole model + {bytes_text(parts)} of parts at most"
        return {"start": f"ranks build the model one after another, {self._why}; {most}"}


def build(
    make: Callable[[], nn.Module], world: World, alike: int, beat: Callable[[], None]
) -> tuple[nn.Module, Turns | None]:
    """The model of `make`. With Turns where the ranks of a host cannot hold it once each: then each rank has made it
    in its turn. Collective.

    `alike`: how many ranks of this host make one. `beat`: a sign of life.
    """
    free = memory.available_bytes() if alike > 1 else None
    try:
        with _at_most(None if free is None else int(SHARE * free / alike)):
            model = make()
    except TooLargeError:
        model = None
    if world.size == 1:
        assert model is not None
        return model, None
    host = f"{socket.gethostname()} {_text('/proc/sys/kernel/random/boot_id')} {os.stat('/proc/self/ns/pid').st_ino}"
    everyone = world.broadcast(world.gather([host, model is None]))
    if not any(too_large for _, too_large in everyone):
        assert model is not None
        return model, None
    model = None
    _give_back()
    ranks = [rank for rank, (other, _) in enumerate(everyone) if other == host]
    model = _in_turn(make, world, ranks, beat)
    why = f"as {len(ranks)} do not fit into the {bytes_text(free or 0)} that this host has left"
    return model, Turns(world, ranks, world.rank == ranks[0], why)


def _in_turn(make: Callable[[], nn.Module], world: World, ranks: list[int], beat: Callable[[], None]) -> nn.Module:
    """Each rank of this host builds when the one after it has done so, and frees all numbers but the first rank's,
    which comes last. Collective.
    """
    place = ranks.index(world.rank)
    file = os.memfd_create("dtf-turns", os.MFD_CLOEXEC) if not place else None
    paths = world.broadcast(world.gather(None if file is None else f"/proc/{os.getpid()}/fd/{file}"))
    board = os.open(paths[ranks[0]], os.O_RDWR | os.O_CLOEXEC)

    def wait(for_place: int, name: str) -> None:
        pair = tuple(sorted((world.rank, ranks[for_place])))
        with Operation(name, group_of(f"turns {name}", pair), ordered=False):
            alive = time.monotonic()
            while os.pread(board, 1, for_place) != b"1":
                time.sleep(_POLL_S)
                if time.monotonic() - alive > _BEAT_S:
                    beat()
                    alive = time.monotonic()

    try:
        if place + 1 < len(ranks):
            wait(place + 1, f"its turn to build the model, after rank {ranks[place + 1]}")
        model = make()
        if place:
            _drop_numbers(model)
        _give_back()
        os.pwrite(board, b"1", place)
        if place:
            wait(0, f"the last turn to build the model, that of rank {ranks[0]}")
        world.barrier()
        return model
    finally:
        os.close(board)
        if file is not None:
            os.close(file)


@contextmanager
def _at_most(limit: int | None) -> Iterator[None]:
    """A context in which modules may be made whose parameters and buffers take `limit` bytes together. Raises
    TooLargeError beyond.
    """
    if limit is None:
        yield
        return
    total, known = 0, dict[int, weakref.ref[Tensor]]()

    def count(tensor: Tensor | None) -> None:
        nonlocal total
        if tensor is None or is_lazy(tensor) or tensor.is_meta:
            return
        before = known.get(id(tensor))
        if before is None or before() is not tensor:
            known[id(tensor)] = weakref.ref(tensor)
            total += tensor.numel() * tensor.element_size()
            if total > limit:
                raise TooLargeError

    def one(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        count(tensor)

    def several(module: nn.Module, name: str, child: nn.Module | None) -> None:  # copies of modules register nothing
        for tensor in _tensors(child).values() if child is not None else ():
            count(tensor)

    hooks = [
        register_module_parameter_registration_hook(one),
        register_module_buffer_registration_hook(one),
        register_module_module_registration_hook(several),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _give_back() -> None:
    """Return memory that is not used any more to the host: the allocator would keep it for this process."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def _drop_numbers(model: nn.Module) -> None:
    """Free the memory of all parameters and buffers; names, shapes and formats stay."""
    for tensor in _tensors(model).values():
        if tensor.numel():
            tensor.data = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


@torch.no_grad()
def _write(model: nn.Module) -> tuple[int, list[Any]]:
    """Write a model's numbers into a file without a name, and free each tensor that is written. Returns the file and
    what others need to know of it.
    """
    file, end = os.memfd_create("dtf-model", os.MFD_CLOEXEC), 0
    starts: dict[int, tuple[int, Any]] = {}  # of memory that several tensors may share
    tensors, places = _tensors(model), []
    for tensor in tensors.values():
        held = tensor.untyped_storage()
        known = starts.get(held.data_ptr())
        if known is None:
            known = starts[held.data_ptr()] = end, held
            end += -(-held.nbytes() // _ALIGNMENT) * _ALIGNMENT
        kind = str(tensor.dtype).removeprefix("torch.")
        places.append([known[0], held.nbytes(), kind, tensor.shape, tensor.stride(), tensor.storage_offset()])
    os.ftruncate(file, max(1, end))
    _drop_numbers(model)
    for address in list(starts):
        start, held = starts.pop(address)
        view = torch.empty(0, dtype=torch.uint8).set_(held)
        _write_all(file, view.numpy().data if held.nbytes() else b"", start)
        del held, view
    _give_back()
    return file, [f"/proc/{os.getpid()}/fd/{file}", list(tensors), places]


def _write_all(file: int, data: Any, at: int) -> None:
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while rest:
        count = os.pwrite(file, rest[: 1 << 30], at)
        rest, at = rest[count:], at + count


@torch.no_grad()
def _take(tensors: dict[str, Tensor], path: str, places: list[Any]) -> int:
    """Let tensors lie in a file that `_write` made: what is written to them goes to memory of this process. Returns
    the bytes of the file.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        shared = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    memories: dict[int, Any] = {}
    for tensor, (start, count, kind, shape, stride, offset) in zip(tensors.values(), places, strict=True):
        if not count:
            continue
        if start not in memories:
            memories[start] = torch.frombuffer(shared, dtype=torch.uint8, count=count, offset=start).untyped_storage()
        tensor.data = torch.empty(0, dtype=getattr(torch, kind)).set_(memories[start], offset, shape, stride)
    return size


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
