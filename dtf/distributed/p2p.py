"""Activations and their gradients between the stages of a pipeline: point-to-point messages, one way each."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.core.errors import ConfigError
from dtf.distributed.sharding import byte_count
from dtf.distributed.strides import axes, empty, message

HEADER_BYTES = 65536


class TensorMeta(NamedTuple):
    """What one tensor of a message looks like."""

    shape: list[int]
    order: list[int]  # of its axes in memory
    dtype: str
    gradient: bool  # whether one comes back

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls([*tensor.shape], axes(tensor), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


class P2PChannel:
    """One way from a rank to another, with a communicator of its own: messages of other ways cannot come between. Built
    by all ranks of the world alike.

    Tensors arrive in the order in which they were sent. What a message looks like travels once for each `key`, by the
    CPU channel.
    """

    def __init__(self, source: int, target: int, tag: int, device: torch.device) -> None:
        self.source, self.target, self._tag, self._device = source, target, tag, device
        self._group: Any = dist.new_group([source, target])
        self._forms: dict[Any, list[TensorMeta]] = {}
        # a message each, from the first; the memory must stay until it is sent
        self._under_way: deque[list[tuple[dist.Work | None, Tensor]]] = deque()
        self._freed = 0  # messages
        self.byte_count = 0  # of the last message

    def send(self, key: Any, tensors: Sequence[Tensor]) -> None:
        """Send tensors without gaps in memory, and do not wait; tell the form of messages of this key when it is new.

        `key=None`: the receiver knows.
        """
        parts = []
        if key is not None and key not in self._forms:
            self._forms[key] = [TensorMeta.of(tensor) for tensor in tensors]
            text = json.dumps(self._forms[key]).encode()
            if len(text) > HEADER_BYTES:
                raise ConfigError(
                    f"{len(tensors)} tensors cross a cut of the pipeline, more than a message describes; cut "
                    "elsewhere with strategy.cuts"
                )
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts.append((dist.isend(header, self.target, tag=self._tag), header))
        for tensor in tensors:
            part = message(tensor.detach())
            parts.append((dist.isend(part, self.target, group=self._group), part))
        self._under_way.append(parts)
        self.byte_count = byte_count(tensors)

    def knows(self, key: Any) -> bool:
        """Whether messages of this key can be received without waiting for a header."""
        return key in self._forms

    def form(self, key: Any) -> list[TensorMeta]:
        """What messages of this key look like; waits for the first one's header."""
        if key not in self._forms:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            dist.recv(header, self.source, tag=self._tag)
            self._forms[key] = [TensorMeta(*found) for found in json.loads(header.numpy().tobytes().rstrip(b"\0"))]
        return self._forms[key]

    def receive(self, forms: list[TensorMeta]) -> PendingRecv:
        """Begin to receive a message of these forms."""
        tensors = tuple(empty(form.shape, form.order, getattr(torch, form.dtype), self._device) for form in forms)
        self.byte_count = byte_count(tensors)
        return PendingRecv(tensors, [dist.irecv(message(tensor), self.source, group=self._group) for tensor in tensors])

    def free(self, count: int) -> None:
        """Let go of the first `count` messages since all was settled, which the receiver has shown to have.

        Gloo tells nobody but who waits.
        """
        while self._freed < count:
            for work, _ in self._under_way.popleft():
                assert work is not None
                work.wait()
            self._freed += 1

    def settle(self) -> None:
        """Wait until all that was sent has left."""
        self.free(self._freed + len(self._under_way))
        self._freed = 0


class PendingRecv:
    """A message on its way."""

    def __init__(self, tensors: tuple[Tensor, ...], works: list[dist.Work | None]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors. On CUDA the current stream waits, the host does not."""
        for work in self._works:
            assert work is not None
            work.wait()
        return self._tensors
