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
    """The shape, memory layout and dtype of one tensor of a message."""

    shape: list[int]
    order: list[int]  # of its axes in memory
    dtype: str
    gradient: bool  # whether one comes back

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))}) {self.dtype}{'' if self.gradient else ' without a gradient'}"

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        return cls([*tensor.shape], axes(tensor), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


class P2PChannel:
    """A one-way channel between two ranks with a communicator of its own, so that messages of other channels cannot
    come between. Constructed by all ranks of the world alike.

    Tensors arrive in the order in which they were sent. What the messages of a `key` look like (TensorMeta) is sent
    once, through the CPU channel.
    """

    def __init__(self, source: int, target: int, tag: int, device: torch.device) -> None:
        self.source, self.target, self.tag, self._device = source, target, tag, device
        self._group: Any = dist.new_group([source, target])
        self._metas: dict[Any, list[TensorMeta]] = {}
        # a message each, from the first; the memory must stay until it is sent
        self._under_way: deque[list[tuple[dist.Work | None, Tensor]]] = deque()
        self._freed = 0  # messages
        self.byte_count = 0  # of the last message

    def send(self, key: Any, tensors: Sequence[Tensor]) -> None:
        """Send tensors that have no gaps in memory, without waiting. Before the first message of a key, send its
        metadata.

        `key=None`: the receiver knows the metadata. ConfigError for more tensors than a header describes, and for some
        that are not what the metadata of their key says. Another memory layout is brought to that of the metadata.
        """
        parts = []
        if key is not None and key not in self._metas:
            self._metas[key] = [TensorMeta.of(tensor) for tensor in tensors]
            text = json.dumps(self._metas[key]).encode()
            if len(text) > HEADER_BYTES:
                raise ConfigError(
                    f"{len(tensors)} tensors cross a cut of the pipeline, more than a message describes; cut "
                    "elsewhere with strategy.cuts"
                )
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts.append((dist.isend(header, self.target, tag=self.tag), header))
        for tensor in tensors if key is None else self._as_said(key, tensors):
            part = message(tensor.detach())
            parts.append((dist.isend(part, self.target, group=self._group), part))
        self._under_way.append(parts)
        self.byte_count = byte_count(tensors)

    def _as_said(self, key: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors in the memory layout that the receiver knows. Kernels choose it by values and modes."""
        found, said = [TensorMeta.of(tensor) for tensor in tensors], self._metas[key]
        if [meta._replace(order=[]) for meta in found] != [meta._replace(order=[]) for meta in said]:
            raise ConfigError(
                "what crosses a cut of the pipeline is another for rows of the same shape: "
                f"{' and '.join(map(str, found))} after {' and '.join(map(str, said))}; "
                "cut elsewhere with strategy.cuts"
            )
        return [
            tensor
            if now.order == meta.order
            else empty(meta.shape, meta.order, tensor.dtype, tensor.device).copy_(tensor.detach())
            for tensor, now, meta in zip(tensors, found, said, strict=True)
        ]

    def has_meta(self, key: Any) -> bool:
        """Whether the receiver can take messages of this key without waiting for their metadata."""
        return key in self._metas

    def meta(self, key: Any) -> list[TensorMeta]:
        """The metadata of messages of this key. Waits for the header of the first one."""
        if key not in self._metas:
            header = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            dist.recv(header, self.source, tag=self.tag)
            self._metas[key] = [TensorMeta(*fields) for fields in json.loads(header.numpy().tobytes().rstrip(b"\0"))]
        return self._metas[key]

    def receive(self, metas: list[TensorMeta]) -> PendingRecv:
        """Begin to receive a message with this metadata."""
        tensors = tuple(empty(meta.shape, meta.order, getattr(torch, meta.dtype), self._device) for meta in metas)
        self.byte_count = byte_count(tensors)
        return PendingRecv(tensors, [dist.irecv(message(tensor), self.source, group=self._group) for tensor in tensors])

    def free(self, count: int) -> None:
        """Release the memory of the first `count` messages since the last `flush`. The receiver must be known to have
        them.

        Gloo completes a send only for a sender that waits for it.
        """
        while self._freed < count:
            for work, _ in self._under_way.popleft():
                assert work is not None
                work.wait()
            self._freed += 1

    def flush(self) -> None:
        """Wait until all messages have been sent."""
        self.free(self._freed + len(self._under_way))
        self._freed = 0


class PendingRecv:
    """A message that is being received."""

    def __init__(self, tensors: tuple[Tensor, ...], works: list[dist.Work | None]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors of the message. On CUDA the current stream waits, the host does not."""
        for work in self._works:
            assert work is not None
            work.wait()
        return self._tensors
