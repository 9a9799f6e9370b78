"""Threads of one trainer process that each work as a trainer by themselves (Hogwild): with one copy of the dense
parameters, and waiting for no other.

Each takes leases, pulls, computes and pushes. What it pulled it writes into the parameters while others compute with
them: a pass may see some of them newer than others, which learning bears as it bears staleness. Source: Niu et al. 2011
(arXiv:1106.5730).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import torch

from dtf.api.strategy import RoleContext, Task
from dtf.pserver.net.transport import Transport
from dtf.pserver.trainer.group import TrainerGroup
from dtf.pserver.trainer.trainer import Trainer

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

LOOK_S = 0.5
"""Between two looks at the threads: signals are handled in between."""

END_S = 2.0
"""For the other threads to end when one has failed; the process ends with them or without."""


def trainer_numbers(process: int, strategy: PserverOptions) -> range:
    """The trainers that a process is, as servers count them."""
    return range(process * strategy.hogwild_threads, (process + 1) * strategy.hogwild_threads)


def run_trainers(
    task: Task,
    context: RoleContext,
    strategy: PserverOptions,
    count: int,
    process: int,
    servers: Sequence[Transport],
    team: TrainerGroup | None = None,
) -> str:
    """The life of a trainer process, which may be the first of a `team`; why the run is over. `count`: of trainers in
    all processes. Raises what the first thread to fail met."""
    thread_group, sync_mode, trainers = (
        ThreadGroup(strategy.hogwild_threads, context.beat),
        strategy.sync_mode(),
        list[Trainer](),
    )
    for thread, number in enumerate(trainer_numbers(process, strategy)):
        own = replace(context, beat=thread_group.beat(thread))
        trainers.append(
            Trainer(task, own, strategy, sync_mode, count, number, servers, trainers[0] if trainers else None, team)
        )
    trainers[0].warmup()
    if len(trainers) == 1:
        trainers[0].run()
    else:
        torch.set_num_threads(max(1, context.place.threads // len(trainers)))
        thread_group.run([trainer.run for trainer in trainers])
    return trainers[0].reason


class Ended(BaseException):
    """Another thread has failed."""


class ThreadGroup:
    """Functions that are called at the same time, each in a thread; when one fails, the others end at their next sign
    of life.

    `beat(thread)` is the one of a thread. The process shows that of the thread that has been silent longest: as one
    hangs, so does the process.
    """

    def __init__(self, threads: int, beat: Callable[[str, int], None]) -> None:
        self._beat, self._lock = beat, threading.Lock()
        # the one that was silent longest comes first
        self._said: dict[int, tuple[str, int]] = dict.fromkeys(range(threads), ("start", 0))
        self._error: BaseException | None = None

    def beat(self, thread: int) -> Callable[[str, int], None]:
        return partial(self._hear, thread)

    def run(self, lives: Sequence[Callable[[], None]]) -> None:
        """Return when all have; raise what the first to fail raised."""
        threads = [
            threading.Thread(target=self._live, args=each, name=f"trainer {each[0]}", daemon=True)
            for each in enumerate(lives)
        ]
        for thread in threads:
            thread.start()
        while self._error is None and any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(LOOK_S / len(threads))
        if self._error is not None:
            until = monotonic() + END_S
            for thread in threads:
                thread.join(max(0.0, until - monotonic()))
            raise self._error

    def _hear(self, thread: int, phase: str, step: int) -> None:
        if self._error is not None:
            raise Ended
        with self._lock:
            longest = next(iter(self._said))
            self._said.pop(thread)
            self._said[thread] = phase, step
            if thread == longest:
                self._beat(*next(iter(self._said.values())))

    def _live(self, thread: int, life: Callable[[], None]) -> None:
        try:
            life()
        except BaseException as error:  # noqa: BLE001  `run` raises it
            self._error = self._error or error
        with self._lock:
            self._said.pop(thread)
