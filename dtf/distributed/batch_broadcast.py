"""Batches for ranks that compute the same rows: one rank of a group has them, and broadcasts to the others."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.core import nest
from dtf.core.types import Batch
from dtf.distributed.strides import axes, dense, empty, message

HEADER_BYTES = 8192
"""Of the first message: forms, shapes and formats of a batch's tensors, as JSON. More than fits takes a second one."""

_INPUT, _IDS = "inputs", "ids"


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
        Collective over the group. `batch`: None on the other ranks.
        """
        gives = dist.get_rank(self._group) == source
        tensors = _dense(batch) if batch is not None else []
        described = self._describe(batch, tensors) if batch is not None else b""
        forms, formats = json.loads(self._header(described, source))
        if not gives:
            tensors = [
                empty(shape, order, getattr(torch, dtype), self._place(kind)) for kind, shape, order, dtype in formats
            ]
        for (kind, *_), tensor in zip(formats, tensors, strict=True):
            if self._inputs or kind != _INPUT:
                dist.broadcast(message(tensor), group=self._group, group_src=source)
        given = iter(tensors)
        inputs, targets = (nest.from_form(form, given) for form in forms)
        weight, ids = given
        return Batch(inputs, targets, weight, ids.numpy())

    @staticmethod
    def _describe(batch: Batch, tensors: list[Tensor]) -> bytes:
        """The forms of inputs and targets, and the format of each tensor, as JSON."""
        inputs = len(nest.leaves(batch.inputs))
        kinds = [_INPUT] * inputs + ["targets"] * (len(tensors) - inputs - 2) + ["weight", _IDS]
        formats = [
            [kind, [*t.shape], axes(t), str(t.dtype).removeprefix("torch.")]
            for kind, t in zip(kinds, tensors, strict=True)
        ]
        return json.dumps([[nest.form(batch.inputs), nest.form(batch.targets)], formats]).encode()

    def _header(self, text: bytes, source: int) -> bytes:
        """The text of the rank `source`: its length and begin in one message, what does not fit in another one."""
        first = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
        whole = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
        begin = whole[:HEADER_BYTES]
        first[: len(begin)] = begin
        dist.broadcast(first, group=self._group, group_src=source)
        size = 8 + int.from_bytes(first[:8].numpy().tobytes(), "little")
        if size > HEADER_BYTES:
            rest = whole[HEADER_BYTES:] if len(whole) == size else torch.empty(size - HEADER_BYTES, dtype=torch.uint8)
            dist.broadcast(rest, group=self._group, group_src=source)
            first = torch.cat([first, rest])
        return first[8:size].numpy().tobytes()

    def _place(self, kind: str) -> torch.device | str:
        if kind == _INPUT and not self._inputs:
            return "meta"
        return "cpu" if kind == _IDS else self._device


def _dense(batch: Batch) -> list[Tensor]:
    """The tensors of a batch in order, without gaps in memory."""
    tensors = *nest.leaves(batch.inputs), *nest.leaves(batch.targets), batch.weight, torch.from_numpy(batch.ids)
    return [dense(tensor) for tensor in tensors]
