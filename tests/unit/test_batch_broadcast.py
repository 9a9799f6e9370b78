"""A batch of any nest of tensors reaches another rank as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtf.core import nest
from dtf.core.types import Batch
from dtf.distributed.batch_broadcast import HEADER_BYTES, BatchBroadcast

ROWS = 3


class Wire:
    """What rank 0 gives to all, in order; other ranks take it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._messages: list[torch.Tensor] = []
        self._rank = 0
        monkeypatch.setattr(dist, "get_rank", lambda group: self._rank)
        monkeypatch.setattr(dist, "broadcast", self._broadcast)

    def send(self, batch: Batch, inputs: bool = True) -> Batch:
        """The batch as rank 1 gets it."""
        self._rank = 0
        sends, takes = (BatchBroadcast(None, torch.device("cpu"), inputs) for _ in range(2))  # type: ignore[arg-type]
        sends(batch)
        self._rank = 1
        received = takes(None)
        assert not self._messages
        return received

    def _broadcast(self, tensor: torch.Tensor, group: Any, group_src: int) -> None:
        if self._rank == group_src:
            self._messages.append(tensor.clone())
        else:
            message = self._messages.pop(0)
            assert message.shape == tensor.shape and message.dtype == tensor.dtype
            tensor.copy_(message)


def batch_of(inputs: Any) -> Batch:
    targets = {"labels": torch.arange(ROWS), "weights": [torch.rand(ROWS, 2)]}
    return Batch(inputs, targets, torch.ones(ROWS), np.array([4, 5, -1]))


def equal(one: Any, two: Any) -> bool:
    return nest.form(one) == nest.form(two) and all(map(torch.equal, nest.leaves(one), nest.leaves(two)))


@pytest.mark.parametrize("count", [1, 60, 600])
def test_any_number_of_tensors(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their description fills one message, or takes a second one."""
    inputs = {
        f"field {number}": (torch.rand(ROWS, 2, 4).transpose(1, 2), [torch.rand(ROWS)]) for number in range(count)
    }
    sent = batch_of(inputs)
    size = len(BatchBroadcast._describe(sent, [torch.zeros(1)] * (2 * count + 4)))
    assert (size > HEADER_BYTES) == (count == 600)
    received = Wire(monkeypatch).send(sent)
    assert equal(received.inputs, inputs) and equal(received.targets, sent.targets)
    assert received.ids.tolist() == [4, 5, -1] and received.weight.tolist() == [1, 1, 1]
    assert [leaf.stride() for leaf in nest.leaves(received.inputs)] == [leaf.stride() for leaf in nest.leaves(inputs)]


@pytest.mark.parametrize("length", range(-9, 2))
def test_a_description_that_just_fits(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = batch_of({"": torch.rand(ROWS)})
    size = len(BatchBroadcast._describe(sent, [*nest.leaves((sent.inputs, sent.targets)), sent.weight, sent.weight]))
    name = "n" * (HEADER_BYTES - size + length)
    received = Wire(monkeypatch).send(batch_of({name: torch.rand(ROWS)}))
    assert list(received.inputs) == [name]


def test_a_rank_without_inputs_gets_their_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    received = Wire(monkeypatch).send(batch_of([torch.rand(ROWS, 5)]), inputs=False)
    assert received.inputs[0].is_meta and received.inputs[0].shape == (ROWS, 5)
    assert received.targets["labels"].tolist() == [0, 1, 2]
