"""Batches for ranks that compute the same rows: one rank of a group has them, and broadcasts to the others."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.core.errors import ConfigError
from dtf.core.types import Batch
from dtf.distributed.strides import axes, dense, empty, message

HEADER_BYTES = 8192
"""Room for names, shapes and formats of a batch's tensors, as JSON."""

_INPUT = "inputs"


class BatchBroadcast:
    """Broadcasts a batch from the first rank of a group. Bytes: those of the tensors that are sent, and a header.

    `inputs=False`: only the first rank gets the inputs. The others get their shapes (on meta) and the rest of the
    batch. Headers and sample ids go through the CPU channel, tensors through the device backend.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, inputs: bool = True) -> None:
        self._group, self._device, self._inputs = group, device, inputs
        self.reads = dist.get_rank(group) == 0

    def __call__(self, batch: Batch | None, source: int = 0) -> Batch:
        """The batch of the rank `source` of the group, on the device, with the same strides on every rank of the group.
        Collective over the group.

        `batch`: None on the other ranks. ConfigError for a batch with too many tensors to describe in a header.
        """
        tensors = _dense(batch) if batch is not None else {}
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        gives = dist.get_rank(self._group) == source
        if gives:
            text = json.dumps(
                [[name, [*t.shape], axes(t), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
            ).encode()
            if len(text) > HEADER_BYTES:
                raise ConfigError(
                    f"a batch of {len(tensors)} tensors is described by {len(text)} bytes, more than {HEADER_BYTES}; "
                    "put them into fewer tensors"
                )
            header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(header, group=self._group, group_src=source)
        if not gives:
            described = json.loads(bytes(header.numpy().tobytes()).rstrip(b"\0"))
            tensors = {
                name: empty(shape, order, getattr(torch, dtype), self._place(name))
                for name, shape, order, dtype in described
            }
        for name, tensor in tensors.items():
            if self._inputs or not name.startswith(_INPUT):
                dist.broadcast(message(tensor), group=self._group, group_src=source)
        return _batch(tensors)

    def _place(self, name: str) -> torch.device | str:
        if name.startswith(_INPUT) and not self._inputs:
            return "meta"
        return "cpu" if name == "ids" else self._device


def _dense(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch by name, without gaps in memory."""
    named = (
        {f"{_INPUT}.{key}": value for key, value in batch.inputs.items()}
        if isinstance(batch.inputs, dict)
        else {_INPUT: batch.inputs}
    )
    named |= {"targets": batch.targets, "weight": batch.weight, "ids": torch.from_numpy(batch.ids)}
    return {name: dense(tensor) for name, tensor in named.items()}


def _batch(tensors: dict[str, Tensor]) -> Batch:
    inputs: Any = {name.removeprefix(f"{_INPUT}."): t for name, t in tensors.items() if name.startswith(f"{_INPUT}.")}
    return Batch(tensors.get(_INPUT, inputs), tensors["targets"], tensors["weight"], tensors["ids"].numpy())
