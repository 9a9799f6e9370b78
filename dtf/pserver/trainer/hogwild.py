"""Several trainers as threads of one process (Hogwild): they share one copy of the dense parameters, and none waits for
another.

Each thread takes leases, pulls, computes and pushes. It writes what it pulled into the parameters while others compute
with them. So a pass may see some parameters newer than others; training tolerates that as it tolerates staleness.
Source: Niu et al. 2011 (arXiv:1106.5730).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import torch

from dtf.api.helper_roles import RoleContext
from dtf.api.task import Task
from dtf.pserver.net.transport import Transport
from dtf.pserver.trainer.group import TrainerGroup
from dtf.pserver.trainer.trainer import Trainer

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

LOOK_S = 0.5
"""Time between two checks of the threads; signals are handled in between."""

END_S = 2.0
"""How long the other threads may take to end when one has failed; then the process ends without them."""


def trainer_numbers(process: int, strategy: PserverOptions) -> range:
    """The numbers of the trainers that run in a process, as servers count them."""
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
    """Run the trainers of this process to the end of the run; returns why it is over.

    `count`: of trainers in all processes. `team`: the processes of this trainer, where it has several; this one is the
    first. Raises the error of the first thread to fail.
    """
    thread_group, sync_mode, trainers = (
        ThreadGroup(strategy.hogwild_threads, context.beat),
        strategy.sync_mode(task),
        list[Trainer](),
    )
    for thread, number in enumerate(trainer_numbers(process, strategy)):
        thread_context = replace(context, beat=thread_group.beat(thread))
        trainers.append(
            Trainer(
                task,
                thread_context,
                strategy,
                sync_mode,
                count,
                number,
                servers,
                trainers[0] if trainers else None,
                team,
            )
        )
    trainers[0].warmup()
    for trainer in trainers[1:]:
        trainer.follow(trainers[0])
    if len(trainers) == 1:
        trainers[0].run()
    else:
        torch.set_num_threads(max(1, context.place.threads // len(trainers)))
        thread_group.run([trainer.run for trainer in trainers])
    return trainers[0].reason


class PeerThreadFailed(BaseException):
    """Raised in a thread because another one has failed."""


class ThreadGroup:
    """Runs functions at the same time, each in a thread. When one fails, the others end at their next heartbeat.

    `beat(thread)` is the heartbeat of a thread. The process reports that of the thread that has been silent longest:
    when one thread hangs, so does the process.
    """

    def __init__(self, threads: int, beat: Callable[[str, int], None]) -> None:
        self._beat, self._lock = beat, threading.Lock()
        # the one that was silent longest comes first
        self._heartbeats: dict[int, tuple[str, int]] = dict.fromkeys(range(threads), ("start", 0))
        self._error: BaseException | None = None

    def beat(self, thread: int) -> Callable[[str, int], None]:
        return partial(self._record_beat, thread)

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        """Return when all functions have returned; raise the error of the first to fail."""
        threads = [
            threading.Thread(target=self._run_guarded, args=numbered, name=f"trainer {numbered[0]}", daemon=True)
            for numbered in enumerate(functions)
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

    def _record_beat(self, thread: int, phase: str, step: int) -> None:
        if self._error is not None:
            raise PeerThreadFailed
        with self._lock:
            longest = next(iter(self._heartbeats))
            self._heartbeats.pop(thread)
            self._heartbeats[thread] = phase, step
            if thread == longest:
                self._beat(*next(iter(self._heartbeats.values())))

    def _run_guarded(self, thread: int, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001  `run` raises it
            self._error = self._error or error
        with self._lock:
            self._heartbeats.pop(thread)
