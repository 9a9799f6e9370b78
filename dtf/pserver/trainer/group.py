"""The processes of one host that are one trainer (`strategy.team`): rendezvous, and messages between them.

Knows no server and no gRPC. A process that loses another one ends with PeerError. The launcher starts them again, and
they form a new group: no process is ever in two groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtf.core.errors import PeerError
from dtf.core.types import Shard
from dtf.distributed.grad_allreduce import buckets

_POLL_S = 0.01
"""Between two looks for a process that is still to come."""

BUILD_S = 30.0
"""How long processes that have met may take to connect; one that dies in between is missed so late."""

PATIENCE = timedelta(days=7)
"""Timeout between connected processes. gloo notices a death at once; a process that hangs, or one that dies while NCCL
waits for it, is found by the launcher.
"""

MAX_ORDER_NUMBERS = 9
"""Most numbers in an order."""

_groups: list[Any] = []
"""Process groups, kept until the process ends, which closes them. Destroying one could deadlock: it would wait for
gloo's threads, which may wait for the interpreter.
"""


class Topic(IntEnum):
    """What a message is about. Messages of one topic are sent by one thread, and arrive in order."""

    READ = 1
    READING = 2
    WORK = 3
    ROWS = 4


def form_group(store: dist.Store, part: Shard, beat: Callable[[], None]) -> str:
    """The name of the new group, once all of its processes are there. Process 0 chooses it and tells the others in
    turn.

    A process asks once in its life, and is answered once. A life that was answered before belongs to an earlier group
    and ends with it, so process 0 waits for the next life.
    """

    def wait(key: str) -> None:
        while not store.check([key]):
            beat()
            time.sleep(_POLL_S)

    if part.index:
        life = f"{part.index}/{store.add(f'{part.index}/lives', 1)}"
        store.set(f"{life}/asks", "")
        wait(f"{life}/team")
        return store.get(f"{life}/team").decode()
    name, lives = str(store.add("teams", 1)), list[str]()
    others = range(1, part.count)
    while True:
        before = lives
        lives = [_unanswered(store, member) for member in others]
        if lives == before:
            break
        for life in lives:
            wait(f"{life}/asks")
    for life in lives:
        store.set(f"{life}/team", name)
    return name


def _unanswered(store: dist.Store, member: int) -> str:
    """The life of a process that belongs to no group yet; it may be still to come."""
    number = store.add(f"{member}/lives", 0)
    return f"{member}/{number + (not number or store.check([f'{member}/{number}/team']))}"


class TrainerGroup:
    """The processes of one trainer, as this one sees them; `part.index` of the first process is 0.

    `stopping`: whether one of the others was told to stop.
    """

    def __init__(self, store: dist.Store, part: Shard, device: torch.device, beat: Callable[[], None]) -> None:
        self.part, self.stopping = part, False
        with _peer_errors():
            group_store = dist.PrefixStore(form_group(store, part, beat), store)
            self._host: Any = dist.ProcessGroupGloo(
                dist.PrefixStore("host", group_store), part.index, part.count, timedelta(seconds=BUILD_S)
            )
            self._device = self._host  # any, as torch's types leave out what a group can do
            if device.type == "cuda":
                self._device = dist.ProcessGroupNCCL(
                    dist.PrefixStore("device", group_store), part.index, part.count, dist.ProcessGroupNCCL.Options()
                )
        _groups.extend([self._host, self._device])

    @property
    def is_leader(self) -> bool:
        """Whether this is the first process."""
        return self.part.index == 0

    @property
    def others(self) -> range:
        """Indices of all processes but the first."""
        return range(1, self.part.count)

    # ------------------------------------------------------------ all at once; collective, by one thread of each

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first process's numbers to all, in place. Collective."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = 0, PATIENCE
        for bucket in buckets(tensors):
            flat = (
                torch.cat([tensor.reshape(-1) for tensor in bucket])
                if self.is_leader
                else bucket[0].new_empty(sum(tensor.numel() for tensor in bucket))
            )
            with _peer_errors():
                self._group(flat).broadcast([flat], options).wait()
            if not self.is_leader:
                _copy(bucket, flat)

    def reduce(self, tensors: Iterable[Tensor]) -> None:
        """Sum over all processes into the first one, in place. Collective. The others' tensors are undefined
        afterwards.
        """
        options = dist.ReduceOptions()
        options.rootRank, options.timeout = 0, PATIENCE
        for bucket in buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            with _peer_errors():
                self._group(flat).reduce([flat], options).wait()
            if self.is_leader:
                _copy(bucket, flat)

    def _group(self, tensor: Tensor) -> Any:
        return self._device if tensor.is_cuda else self._host

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all processes, which JSON can say, at the first one; None at the others. Collective."""
        if not self.is_leader:
            self._send_value(0, value)
            return None
        return [value, *(self._receive_value(member) for member in self.others)]

    def send_value(self, value: Any) -> Any:
        """The first process's value, which JSON can say, at all. Collective."""
        if not self.is_leader:
            return self._receive_value(0)
        for member in self.others:
            self._send_value(member, value)
        return value

    # ------------------------------------------------------------ one to another, in host memory

    def send_order(self, topic: Topic, *numbers: float) -> None:
        """Send numbers from the first process to all others; no numbers: the run is over."""
        order = np.zeros(1 + MAX_ORDER_NUMBERS)
        order[: 1 + len(numbers)] = len(numbers), *numbers
        for member in self.others:
            self.send(topic, member, order)

    def receive_order(self, topic: Topic) -> list[float]:
        """The next order of the first process."""
        count, *numbers = self.receive(topic, 0, (1 + MAX_ORDER_NUMBERS,)).tolist()
        return numbers[: int(count)]

    def send_end(self) -> None:
        """Tell all others, from the first process, that the run is over."""
        self.send_order(Topic.READ)
        self.send_order(Topic.WORK)

    def send(self, topic: Topic, member: int, array: np.ndarray) -> None:
        """Send an array whose shape and dtype the receiver knows."""
        if array.size:
            with _peer_errors():
                self._host.send([torch.from_numpy(np.ascontiguousarray(array))], member, topic).wait(PATIENCE)

    def receive(
        self, topic: Topic, member: int, shape: Sequence[int], kind: type[np.generic] = np.float64
    ) -> np.ndarray:
        """The next array that a process sends about a topic."""
        array = np.empty(shape, kind)
        if array.size:
            with _peer_errors():
                self._host.recv([torch.from_numpy(array)], member, topic).wait(PATIENCE)
        return array

    def send_lists(self, topic: Topic, member: int, lists: Sequence[np.ndarray]) -> None:
        """Send lists of integers; the receiver knows how many lists."""
        self.send(topic, member, np.array([len(numbers) for numbers in lists], np.int64))
        self.send(topic, member, np.concatenate(lists).astype(np.int64, copy=False))

    def _send_value(self, member: int, value: Any) -> None:
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        self.send(Topic.WORK, member, np.array([len(text)]))
        self.send(Topic.WORK, member, text)

    def _receive_value(self, member: int) -> Any:
        (length,) = self.receive(Topic.WORK, member, (1,), np.int64)
        return json.loads(self.receive(Topic.WORK, member, (int(length),), np.uint8).tobytes())

    def receive_lists(self, topic: Topic, member: int, count: int) -> list[np.ndarray]:
        """Inverse of `send_lists`."""
        ends = np.cumsum(self.receive(topic, member, (count,), np.int64))
        return np.split(self.receive(topic, member, (int(ends[-1]),), np.int64), ends[:-1])


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Raise PeerError for errors of communication with another process."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo has no class of its own
        raise PeerError(f"lost another process of its team: {error}") from error


def _copy(tensors: Sequence[Tensor], flat: Tensor) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
