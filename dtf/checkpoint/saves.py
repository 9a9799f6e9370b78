"""The saves of a run: training waits while the state is copied, and a thread writes the copy.

A thread agrees with those of the other ranks by a channel of its own, see `World.channel`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from dtf.checkpoint.agreement import AGAIN
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.core.errors import DtfError, SaveError
from dtf.core.types import Box, State

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE_S = 1.0
"""How long a save waits in silence for the one before."""

Write = Callable[[Path], list[dict[str, Any]]]
"""See `State.others`."""

Told = Callable[[str, float, float], None]
"""Is told of a complete checkpoint: its folder, and the seconds that it took and that training stood still."""


class Saves:
    """The saves of one rank, one at a time and in order. Collective methods have to be called by all ranks alike.

    `checkpointer`: nobody else saves with it. `note` gets what people should know, perhaps from another thread.
    `barrier`: waits until all ranks are there, see `State.private`. None: no thread writes. `copiers`: see `Copies`.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        note: Callable[[str], None],
        barrier: Callable[[], None] | None = None,
        copiers: int = 1,
    ) -> None:
        self._checkpointer, self._note, self._barrier = checkpointer, note, barrier
        self._copies = Copies(copiers)
        self._worker: _Worker | None = None
        self._work: Future[None] | None = None  # under way
        self._step = self._late = 0
        self._failed: SaveError | None = None  # of the last save

    def reserve(self, boxes: Sequence[Box]) -> None:
        """Take the memory for copies of such boxes, in a thread, so that the first save finds it there."""
        if self._barrier:
            with suppress(RuntimeError):  # no thread now: the first save takes it
                self._work = self._begin(lambda: self._copies.reserve(boxes))

    def ready(self) -> None:
        """Wait until the save before is over. Raises its error, but not the first SaveError: it was told, and the next
        save decides. Collective.
        """
        if self._work is not None and wait([self._work], PATIENCE_S).not_done:
            self._late += 1
            if self._step and not self._late & (self._late - 1):  # the first time, the second, the fourth
                self._note(
                    f"the save of step {self._step} is still being written and the next one is due, so training waits "
                    "for it; save less often (checkpoint.every_steps), or to a faster disk"
                )
        self._end()

    def layer(self, whole: bool) -> int | None:
        """See `Checkpointer.layer`. After `ready`, before the state of the save is taken. Collective."""
        return self._checkpointer.layer(whole)

    def save(
        self,
        step: int,
        state: State,
        scalars: dict[str, Any],
        value: float | None,
        told: Told,
        check: Callable[[], None],
    ) -> None:
        """Save as `Checkpointer.save` does, and call `told`; where a thread writes, return once the state is copied.
        After `ready`. Collective.

        `check`: nothing is saved if it raises. It comes after the copy, since not all ranks copy as much: those that
        wait for the others read their state meanwhile.

        After a failed save training waits for the next one, and SaveError ends the run where that fails too.
        """
        started = time.perf_counter()
        self._step = step
        if not self._barrier or self._failed:

            def tell(path: str) -> None:
                seconds = time.perf_counter() - started
                told(path, seconds, seconds)

            check()
            self._checkpointer.save(step, state, scalars, value, tell)
            self._failed = None
            return
        arrive = self._copies.take(state)
        check()
        if not state.private:
            self._barrier()
        held = time.perf_counter() - started

        def tell_late(path: str) -> None:
            told(path, time.perf_counter() - started, held)

        def write() -> None:
            try:
                self._checkpointer.save(step, arrive(), scalars, value, tell_late)
            except SaveError as error:
                with suppress(OSError):  # nobody listens
                    self._tell_failure(error)
                raise

        try:
            self._work = self._begin(write)
        except RuntimeError:  # the machine has no more threads now; the other ranks do not know
            self._work = Future()
            _do(write, self._work)

    def finish(self) -> None:
        """Wait until the last save is complete and mirrored, see `Checkpointer.finish_mirror`. Raises its error.
        Collective.
        """
        self._end()
        if self._failed:
            raise self._failed
        self._checkpointer.finish_mirror()

    def trust(self, step: int) -> None:
        """See `Checkpointer.trust`."""
        self._checkpointer.trust(step)

    def set_aside(self, after: int) -> tuple[list[str], str]:
        """See `Checkpointer.set_aside`. A save that is under way comes to its end first: it may be one of them."""
        self.settle()
        return self._checkpointer.set_aside(after)

    @property
    def mirror_s(self) -> float:
        """See `Checkpointer.mirror_s`."""
        return self._checkpointer.mirror_s

    @property
    def under_way(self) -> bool:
        """Whether a thread is writing."""
        return self._work is not None and not self._work.done()

    def settle(self) -> None:
        """Let a save that is under way come to its end, whatever that is: the run ends by another error."""
        if self._work is not None:
            wait([self._work])

    def close(self) -> None:
        """Let the thread end, once it has done what it was given."""
        self._worker = None

    def _begin(self, work: Callable[[], None]) -> Future[None]:
        self._worker = self._worker or _Worker()
        return self._worker.do(work)

    def _end(self) -> None:
        work, self._work = self._work, None
        error = work.exception() if work else None
        if isinstance(error, SaveError):
            self._failed = error
        elif error is not None:
            raise error

    def _tell_failure(self, error: SaveError) -> None:
        text = str(error).removesuffix(f", {AGAIN}")
        self._note(f"{text}; training goes on, and the run ends when the next save fails too")


class Copies:
    """Memory of this host that holds the boxes of a save, the same from save to save.

    Tensors of a GPU are copied on a stream beside that of the steps, into pages that the GPU can write to. The host
    does not wait for them; the next step on the GPU does. Those of the host are copied by so many threads, `copiers`.
    """

    def __init__(self, copiers: int = 1) -> None:
        self._copiers = copiers
        self._threads = ThreadPoolExecutor(copiers, "copies") if copiers > 1 else None
        self._held: dict[tuple[str, tuple[int, ...]], Tensor] = {}  # one axis each
        self._streams: dict[Any, Any] = {}  # by device

    def reserve(self, boxes: Sequence[Box]) -> None:
        """Take the memory for such boxes, so that it need not be found while training waits."""
        with suppress(MemoryError, RuntimeError):  # the first save will say so
            for box in boxes:
                self._room(box).zero_()
        if self._threads and all(box.tensor.device.type == "cpu" for box in boxes):
            self._start_threads(self._threads, self._copiers)

    def _start_threads(self, threads: ThreadPoolExecutor, count: int) -> None:
        """Start them now: each waits for the others, as one that has nothing to do is given the next work."""
        met = threading.Barrier(count)
        try:
            wait([threads.submit(met.wait, PATIENCE_S) for _ in range(count)])
        except RuntimeError:  # the machine has no more threads now: it copies by one
            met.abort()
            threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def take(self, state: State) -> Callable[[], State]:
        """Copy the state into memory that nobody else writes to until the next call. The result waits until the copy is
        there, and returns it.

        What could not be copied fails when it is written, where all ranks hear of it.
        """
        try:
            boxes, events = self._copy(state.boxes)
            write = state.others() if state.others else None
        except (DtfError, OSError, MemoryError, RuntimeError) as error:
            return lambda error=error: State([], {}, _raising(error))

        def arrive() -> State:
            try:
                for event in events:
                    event.synchronize()
            except RuntimeError as error:
                return State([], {}, _raising(error))
            return State(boxes, {}, None if write is None else _giving(write))

        return arrive

    def _copy(self, boxes: Sequence[Box]) -> tuple[list[Box], list[Any]]:
        """Copies of the boxes, and the events after which they are there."""
        import torch

        for device in {box.tensor.device for box in boxes if box.tensor.device.type == "cuda"}:
            stream = self._streams[device] = self._streams.get(device) or torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))  # what has changed the state comes before
        copied = [box if box.layer else box._replace(tensor=self._room(box)) for box in boxes]

        @torch.no_grad()
        def copy(number: int) -> None:
            tensor, room = boxes[number].tensor, copied[number].tensor
            stream = self._streams.get(tensor.device)
            with torch.cuda.stream(stream) if stream else nullcontext():
                room.copy_(tensor, non_blocking=stream is not None)
            if stream:
                tensor.record_stream(stream)  # its memory may be given to others after the copy

        shared = [number for number, box in enumerate(boxes) if not box.layer]
        self._each(copy, sorted(shared, key=lambda number: -boxes[number].tensor.nbytes))
        events = []
        for device, stream in self._streams.items():
            events.append(stream.record_event())
            torch.cuda.current_stream(device).wait_event(events[-1])  # what changes the state next comes after
        return copied, events

    def _each(self, copy: Callable[[int], object], numbers: Sequence[int]) -> None:
        if self._threads and not self._streams:  # streams are those of this thread
            try:
                deque(self._threads.map(copy, numbers), maxlen=0)
                return
            except RuntimeError:  # the machine has no more threads now, or a copy failed, and fails again
                self._threads.shutdown(cancel_futures=True)
                self._threads = None
        deque(map(copy, numbers), maxlen=0)

    def _room(self, box: Box) -> Tensor:
        """Memory for a copy of the box; what has grown, such as the rows of a table, gets more than it needs now."""
        import torch

        key, tensor = (box.name, tuple(box.offset)), box.tensor
        held = self._held.get(key)
        if held is None or held.dtype is not tensor.dtype or held.numel() < tensor.numel():
            grows = self._held.pop(key, None) is not None
            del held
            size = tensor.numel() * 5 // 4 if grows else tensor.numel()
            held = self._held[key] = torch.empty(size, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
        return held[: tensor.numel()].view(tensor.shape)


class _Worker:
    """A thread for one work after another. It is started once: where a process has no memory left for a new thread,
    Python may wait for it for ever. RuntimeError where the machine has no more threads. Exits of the interpreter do
    not wait for it.
    """

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        threading.Thread(target=_work_off, args=[self._works], name="saves", daemon=True).start()
        weakref.finalize(self, self._works.put, None)

    def do(self, work: Callable[[], None]) -> Future[None]:
        done: Future[None] = Future()
        self._works.put((work, done))
        return done


def _work_off(works: SimpleQueue[tuple[Callable[[], None], Future[None]] | None]) -> None:
    while item := works.get():
        _do(*item)
        del item  # and with it what it holds


def _do(work: Callable[[], None], done: Future[None]) -> None:
    try:
        work()
    except BaseException as error:  # noqa: BLE001 - whoever waits for the work raises it
        done.set_exception(error)
    else:
        done.set_result(None)


def _giving(write: Write) -> Callable[[], Write]:
    return lambda: write


def _raising(error: Exception) -> Callable[[], Any]:
    if isinstance(error, RuntimeError) and "memory" in str(error):
        error = MemoryError(str(error))

    def others() -> Any:
        raise error

    return others
