"""Rows for ranks that work on them together: one rank of a group reads a batch, the others get it from there."""

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
    """A batch from the first rank of a group to all of it. Bytes: those of the tensors that are sent, and a header.

    `inputs=False`: only the first rank gets the inputs, the others their shapes (on meta), with the rest of the batch.
    Headers and sample ids go by the CPU channel, tensors by the device's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, inputs: bool = True) -> None:
        self._group, self._device, self._inputs = group, device, inputs
        self.reads = dist.get_rank(group) == 0

    def __call__(self, batch: Batch | None) -> Batch:
        """The reading rank's batch, on the device, on every rank with the same strides. Collective."""
        tensors = _dense(batch) if batch is not None else {}
        header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        if self.reads:
            text = json.dumps(
                [[name, [*t.shape], axes(t), str(t.dtype).removeprefix("torch.")] for name, t in tensors.items()]
            ).encode()
            if len(text) > HEADER_BYTES:
                raise ConfigError(
                    f"a batch of {len(tensors)} tensors is described by {len(text)} bytes, more than {HEADER_BYTES}; "
                    "put them into fewer tensors"
                )
            header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        dist.broadcast(header, group=self._group, group_src=0)
        if not self.reads:
            described = json.loads(bytes(header.numpy().tobytes()).rstrip(b"\0"))
            tensors = {
                name: empty(shape, order, getattr(torch, dtype), self._place(name))
                for name, shape, order, dtype in described
            }
        for name, tensor in tensors.items():
            if self._inputs or not name.startswith(_INPUT):
                dist.broadcast(message(tensor), group=self._group, group_src=0)
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
