"""What the ranks of a pipeline send each other: activations forward, their gradients backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtf.core import nest
from dtf.core.types import Batch
from dtf.distributed.p2p import P2PChannel, PendingRecv, TensorMeta
from dtf.distributed.strides import axes, dense
from dtf.host.waits import Operation, group_of, operation
from dtf.strategies.pipeline.schedules import Action

AHEAD = 2
"""Messages that a rank is ready to receive before it needs them, so that they travel while it computes."""

UNANSWERED = 2
"""Gradients that a rank has sent and keeps: its knowledge of the rank before is as old."""


class PipelineRanks(NamedTuple):
    """One pipeline as one of its ranks sees it. Stage s is on `ranks[s % len(ranks)]`."""

    ranks: list[int]
    place: int  # of this rank among them
    stages: int
    forward: list[P2PChannel]  # from stage s to s + 1
    backward: list[P2PChannel]  # from stage s + 1 to s

    @property
    def last(self) -> int:
        return self.stages - 1

    def early_bytes(self, rank: int) -> int:
        """Of gradients that a rank has received ahead of the last passes."""
        gradients = [channel for channel in self.backward if channel.target == rank]
        return sum(channel.byte_count for channel in gradients[-AHEAD:])

    def waiting_bytes(self, rank: int) -> int:
        """Of messages that wait in the memory of a rank at once, at most."""
        received = [channel.byte_count for channel in (*self.forward, *self.backward) if channel.target == rank]
        sent_back = [channel.byte_count for channel in self.backward if channel.source == rank]
        return AHEAD * max(received, default=0) + UNANSWERED * max(sent_back, default=0)


def channels(
    pipelines: list[list[int]], stages: int, rank: int, device: torch.device
) -> tuple[list[P2PChannel], list[P2PChannel]]:
    """The channels of the pipeline that `rank` is in, forward and backward.

    `pipelines`: the ranks of each. All ranks build the channels of all pipelines, in the same order. Collective.
    """
    forward: list[P2PChannel] = []
    backward: list[P2PChannel] = []
    for ranks in pipelines:
        for s in range(stages - 1):
            source, target = ranks[s % len(ranks)], ranks[(s + 1) % len(ranks)]
            there = P2PChannel(source, target, tag=2 * s, device=device)
            back = P2PChannel(target, source, tag=2 * s + 1, device=device)
            if rank in ranks:
                forward.append(there)
                backward.append(back)
    return forward, backward


class StageMessages:
    """The messages of one rank in one run of its `actions`. Neighbouring stages are always on different ranks.

    What was sent stays in memory until an answer shows that it was received. The answer to an activation is its
    gradient; the answer to a gradient is an input that was computed after it. `answers`: see schedules; None: nothing
    comes back. `narrow`: whether stages compute in the run's formats.
    """

    def __init__(
        self,
        pipeline: PipelineRanks,
        actions: list[Action],
        parts: list[Batch],
        answers: dict[tuple[int, int], int] | None,
        narrow: bool,
    ) -> None:
        self._pipeline, self._actions, self._answers = pipeline, actions, answers or {}
        self._keys = [(_shapes(part.inputs), answers is not None, narrow) for part in parts]
        self._receiving = [  # numbers of the actions that need a message
            n for n, action in enumerate(actions) if (action.stage if action.forward else action.stage < pipeline.last)
        ]
        self._begun = 0  # how many of these are being received, or were
        self._pending: dict[Action, PendingRecv] = {}
        self._sent: dict[tuple[int, int], list[TensorMeta]] = {}  # what went forward and gets gradients back

    def open(self, number: int) -> None:
        """Before action `number`: begin to receive what it and the next few need.

        A message ahead of its action is received early only where its shapes are known.
        """
        while self._begun < len(self._receiving):
            next_number = self._receiving[self._begun]
            if next_number > number and len(self._pending) >= AHEAD:
                return
            forward, s, j = action = self._actions[next_number]
            channel = self._pipeline.forward[s - 1] if forward else self._pipeline.backward[s]
            if forward:
                known = next_number == number or channel.has_meta(self._keys[j])
                metas = channel.meta(self._keys[j]) if known else None
            else:
                metas = self._sent.pop((s, j), None)
            if metas is None:
                return
            self._pending[action] = channel.receive(metas)
            self._begun += 1

    def inputs(self, s: int, j: int) -> tuple[Tensor, ...]:
        """The outputs of the stage before; they are leaves of this stage's graph."""
        metas = self._pipeline.forward[s - 1].meta(self._keys[j])
        with _entering("receiving the outputs", self._pipeline.forward[s - 1], s - 1, j):
            tensors = self._pending.pop(Action(True, s, j)).wait()
        self._pipeline.backward[s - 1].free(self._answers.get((s - 1, j), 0))
        return tuple(tensor.requires_grad_(meta.gradient) for tensor, meta in zip(tensors, metas, strict=True))

    def send_outputs(self, s: int, j: int, outputs: tuple[Tensor, ...]) -> None:
        """Send a stage's outputs to the stage after."""
        channel, key = self._pipeline.forward[s], self._keys[j]
        with _entering("sending the outputs", channel, s, j):
            channel.send(key, [dense(tensor) for tensor in outputs])
        self._sent[s, j] = [meta for meta in channel.meta(key) if meta.gradient]

    def gradients(self, s: int, j: int) -> tuple[Tensor, ...]:
        """The gradients of a stage's outputs, from the stage after."""
        with _entering("receiving the gradients", self._pipeline.backward[s], s + 1, j):
            gradients = self._pending.pop(Action(False, s, j)).wait()
        self._pipeline.forward[s].free(j + 1)
        return gradients

    def send_gradients(self, s: int, j: int, inputs: tuple[Tensor, ...]) -> None:
        """Send the gradients of a stage's inputs to the stage before; zeros where it did not use one."""
        differentiated = [tensor for tensor in inputs if tensor.requires_grad]
        gradients = [torch.zeros_like(t) if t.grad is None else dense(t.grad, axes(t)) for t in differentiated]
        with _entering("sending the gradients", self._pipeline.backward[s - 1], s, j):
            self._pipeline.backward[s - 1].send(None, gradients)


def _entering(what: str, channel: P2PChannel, stage: int, micro_batch: int) -> Operation:
    """For the launching process: the message of `stage` about a micro-batch. Both ends count their messages."""
    group = group_of(f"channel {channel.tag}", (channel.source, channel.target))
    return operation(f"{what} of stage {stage} for micro-batch {micro_batch}", group, ordered=False)


def _shapes(inputs: Any) -> Any:
    """Names, shapes and formats of a micro-batch's inputs: they decide the shapes of all messages that follow."""
    return tuple((name, tuple(t.shape), str(t.dtype)) for name, t in nest.named(inputs).items())
