"""Copies of a state: their memory, the threads that make them, and their order beside the steps of a GPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from dtf.checkpoint import saves as module
from dtf.core.types import Box, State
from tests.support.checkpoints import same_bits, whole


def test_a_table_that_grows_gets_more_memory_than_it_needs_now() -> None:
    copies = module.Copies()

    def take(rows: int) -> int:
        (box,) = copies.take(State([Box("t", torch.arange(2.0 * rows).view(rows, 2), (rows, 2), (0, 0))], {}))().boxes
        assert same_bits(box.tensor, torch.arange(2.0 * rows).view(rows, 2))
        return box.tensor.data_ptr()

    assert take(100) == take(100) == take(50)
    first = take(104)
    assert take(125) == take(130) == first


@pytest.mark.parametrize("threads", ["as many as wanted", "one", "none"])
def test_several_threads_copy_what_one_would(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, begun = threading.Thread.start, list[str]()

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith("copies") and len(begun) >= {"one": 1, "none": 0}.get(threads, 9):
            raise RuntimeError("can't start new thread")
        begun.append(thread.name)
        start(thread)

    copies = module.Copies(copiers=3)
    tensors = [torch.arange(10.0 * size) for size in (1, 700, 3, 50_000)]
    monkeypatch.setattr(threading.Thread, "start", limited)
    for step in (1.0, 2.0):
        state = State([whole(f"w{number}", tensor + step) for number, tensor in enumerate(tensors)], {})
        copied = copies.take(state)().boxes
        assert all(torch.equal(box.tensor, own.tensor) for box, own in zip(copied, state.boxes, strict=True))


def test_all_threads_are_there_before_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, tensors = module.Copies(copiers=5), [torch.arange(10.0)] * 9
    boxes = [whole(f"w{number}", tensor) for number, tensor in enumerate(tensors)]
    copies.reserve(boxes)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} may never start"))
    assert all(torch.equal(box.tensor, torch.arange(10.0)) for box in copies.take(State(boxes, {}))().boxes)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]

    def record_stream(self, stream: Any) -> None:
        stream.log.append("kept until the copy is there")


class FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for the event of {event.stream.name}")

    def record_event(self) -> FakeEvent:
        self.log.append(f"{self.name} records")
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        self.stream.log.append("the thread waits")


def test_the_host_does_not_wait_for_copies_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lie between the step before and the step after, on a stream of their own, and in pinned memory."""
    log: list[str] = []
    steps, empty = FakeStream("steps", log), torch.empty

    def pinned(*size: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        log.append(f"memory, pinned: {pin_memory}")
        return empty(*size, **keywords)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copies", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: steps)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(log.append(f"copy on {stream.name}")))
    monkeypatch.setattr(torch, "empty", pinned)
    copies, tensor = module.Copies(), torch.arange(6.0).as_subclass(OnGpu)
    taken = [
        "copies waits for steps",
        "memory, pinned: True",
        *("copy on copies", "kept until the copy is there"),
        *("copies records", "steps waits for the event of copies"),
    ]
    arrive = copies.take(State([whole("w", tensor)], {}))
    assert log == taken
    (box,) = arrive().boxes
    assert log == [*taken, "the thread waits"] and box.tensor.tolist() == list(range(6))
    log.clear()
    copies.take(State([whole("w", tensor)], {}))
    assert log == [line for line in taken if not line.startswith("memory")]
