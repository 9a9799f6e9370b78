"""The program of a server, run by the engine: it opens each step for trainers, and merges and applies their pushes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dtf.api.strategy import Program
from dtf.api.task import Source, Task
from dtf.core.errors import ConfigError, DtfError
from dtf.core.types import Batch, Evaluated, Memory, Shard, State, StepOutput, Train
from dtf.data.batches import micro_batch_bounds, micro_batches_of
from dtf.distributed.world import World
from dtf.host import heartbeat
from dtf.pserver.leases import EVALUATE, TRAIN, Lease, Ledger
from dtf.pserver.net.transport import MOST_BYTES
from dtf.pserver.push import Push
from dtf.pserver.record.recorder import Recorder
from dtf.pserver.server.metrics import MetricAccumulator
from dtf.pserver.server.state import ServerState
from dtf.pserver.server.trainers_work import TrainersWork
from dtf.pserver.sync_modes import SyncMode

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

WAIT_S = 0.5
"""Time between two heartbeats while there is nothing to merge."""

SLEEP_S = 0.0005
"""Time between two checks whether the other servers have come to a barrier."""

FAREWELL_S = 5.0
"""How long a server stays for trainers to learn that the run is over."""


class ServerProgram(Program):
    """One of the servers that hold a model's blocks and tables' rows. `sync_mode`: says when pushes become an update.

    Only the engine's thread changes the state. Threads of the service read it, and put pushes into a basket.
    """

    shard = None
    follows_memory_format = True

    def __init__(self, task: Task, world: World, strategy: PserverOptions, sync_mode: SyncMode, trainers: int) -> None:
        self.shares = sync_mode.shares(trainers)
        self.micro_batch_rows = task.step.rows_each(self.shares * strategy.team)
        self._task, self._world, self._sync_mode, self._trainers = task, world, sync_mode, trainers
        self._team, self._layout = strategy.team, strategy.layout_text(world.slots)
        self._window, self._record = sync_mode.window(trainers), strategy.record
        self.server_state = ServerState(task, world, strategy, sync_mode, self.shares, self.micro_batch_rows)
        self.tables = self.server_state.shards
        largest = max(self.server_state.push_bytes, len(self.server_state.frozen()))
        if largest > MOST_BYTES // 2:  # what else is in a message has room then
            raise ConfigError(
                f"server {world.rank} holds {largest >> 20} MiB of parameters, and a message at most "
                f"{MOST_BYTES >> 21}; use more servers (strategy.servers), or strategy=fsdp for models of this size"
            )
        self.ledger = Ledger()
        self._opening: list[Train] = []  # tickets that the next leases will have
        self._waiting: dict[int, set[int]] = {}  # first step of leases -> shares that are not merged yet
        self._tickets: dict[int, tuple[Train, ...]] = {}  # of these leases
        self._opened = 0
        self._numbers: dict[int, int] = {}  # first step of leases -> how many were opened before
        # by first step and share, in order of arrival; there until they are applied
        self._basket: dict[tuple[int, int], Push] = {}
        self._applying: set[tuple[int, int]] = set()  # those of which an update is being made
        self.change = threading.Condition()  # of all that follows and the ledger
        self.begun = self.over = False
        self.reason = ""  # why it is over
        self._last = -1  # step that was opened last
        self.version = -1  # first step whose update is not whole
        self._kept = 0  # updates that are in the last checkpoint
        self.while_waiting: Callable[[ServerProgram], None] = lambda program: None
        """Called regularly while this server waits for trainers, with `change` held."""
        self.dropped = 0  # pushes that came again
        self._metric_count = 1 + len(task.recipe.train_metrics)
        self.metrics = MetricAccumulator(self._metric_count)
        self.failure: BaseException | None = None
        self.stopping = False  # a trainer was told to stop
        self._evaluations = self._batches = 0
        self._reports: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._close: Callable[[], None] = lambda: None
        self.leased = TrainersWork(self)

    def on_end(self, close: Callable[[], None]) -> None:
        """Register what is called when the run has ended."""
        self._close = close

    @property
    def evaluation_micro_batches(self) -> int:
        return self._team  # a lease, of which each process of a trainer computes one

    def about(self) -> dict[str, str]:
        wait = "; more servers than trainers mostly wait, use fewer unless the tables need the memory of all"
        return {
            "servers": self.server_state.balance + (wait if self._world.size > self._trainers else "")
        } | self._layout

    # ------------------------------------------------------------ the engine's side

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        with self.change:
            if not self.begun:
                self.begun, self.version = True, ticket.step
                if self._record:
                    self.server_state.recorder = Recorder(
                        self._world.folder / self._record, self._world.rank, ticket.step
                    )
            self._opening.append(ticket)
            if len(self._opening) == self._sync_mode.steps:
                self._open()
        self._advance(
            lambda: (
                self._opened - self._numbers.get(min(self._waiting, default=ticket.step), self._opened) <= self._window
            )
        )
        return self.metrics.take()

    def finish_steps(self) -> StepOutput:
        """See `LeasedWork.rest`."""
        if self._sync_mode.synchronous:
            self.sync()
        self.server_state.refuse_overfull()
        return self.metrics.take()

    def sync(self) -> None:
        with self.change:
            self._open()
        self._advance(lambda: not self._waiting)

    def eval_step(self, batch: Batch | None) -> Evaluated:
        if not self._batches:
            self._barrier()  # all are settled, and have the weights to evaluate in place
        with self.change:
            self.begun = True
            if not self._batches:
                self._evaluations += 1
                self.metrics.begin_evaluation()
            if self._world.rank == 0:
                self.ledger.open(
                    [
                        Lease(
                            EVALUATE,
                            self._evaluations,
                            self._batches,
                            1,
                            (Train(self._evaluations, 0, self._batches, 0, 0.0),),
                        )
                    ]
                )
            self._batches += 1
            self.change.notify_all()
        return Evaluated(torch.zeros(self._metric_count, dtype=torch.float64), None)

    def finish_evaluation(self) -> Evaluated | None:
        """See `LeasedWork.eval_rest`."""
        batches, self._batches = self._batches, 0
        reports = []
        if self._world.rank == 0:
            with self.change:
                self._wait(lambda: len(self._reports) == batches)
                reports, self._reports = [self._reports[part] for part in range(batches)], {}
        self._barrier()  # until then trainers evaluate what the other servers have
        if not reports:
            return None
        eval_outputs = [rows for _, rows in reports if rows is not None]
        return Evaluated(
            torch.stack([sums for sums, _ in reports]).sum(0), torch.cat(eval_outputs) if eval_outputs else None
        )

    def swap_ema(self, on: bool) -> None:
        self.server_state.swap_ema(on)

    def state(self) -> State:
        self._kept = self.server_state.applied
        return self.server_state.state()

    def unsaved(self) -> bool:
        """Whether updates were made since the last checkpoint."""
        return self.server_state.applied > self._kept

    def load(self, source: Source) -> None:
        self.server_state.load(source)

    def memory(self) -> Memory:
        return self.server_state.memory()

    def counts(self) -> dict[str, int]:
        return self.server_state.counts()

    def skipped(self) -> int:
        return self.server_state.skipped()

    def first_skipped(self) -> tuple[int, list[str]] | None:
        return self.server_state.first_skipped()

    def release_trainers(self, reason: str) -> None:
        """See `LeasedWork.end`."""
        with self.change:
            self.over, self.reason = True, reason
            self.change.notify_all()
            if self._world.rank == 0:
                # A run that was over when it began would end before its trainers come, and they would look for
                # servers that are gone.
                self.change.wait_for(
                    lambda: (
                        not self.ledger.members() and (self.begun or len(self.ledger.ever_joined) >= self._trainers)
                    ),
                    FAREWELL_S,
                )
        self._barrier()  # server 0 knows when trainers need no server any more
        if self.server_state.recorder is not None:
            self.server_state.recorder.close()
        self._close()

    # ------------------------------------------------------------ the service's side

    def receive(self, push: Push) -> None:
        """Put a push into the basket, unless it came before."""
        with self.change:
            step, part = push.step, push.part
            merged = part not in self._waiting[step] if step in self._waiting else step <= self._last
            if merged or (step, part) in self._basket:
                self.dropped += 1
                return
            self._basket[step, part] = push
            self.change.notify_all()

    def keep(self, push: Push) -> None:
        """The memory of this push is used for something else from now on: what is still needed of it is copied."""
        key = push.step, push.part
        with self.change:
            self.change.wait_for(lambda: key not in self._applying)  # a failure ends that too
            if self._basket.get(key) is push:
                self._basket[key] = push.copied()

    def ready(self, after: int, pushed: tuple[int, int] | None) -> bool:
        """Whether a trainer may pull now. It has to see all updates before step `after`, and the push `pushed` of the
        same message where the mode applies each push at once. `change` is held.
        """
        known = pushed is None or not self._sync_mode.immediate or pushed not in self._basket
        return self.begun and self.version >= after and known

    def may_come(self, step: int) -> bool:
        """Whether a push for this step is possible. Another server may be ahead by as many steps as may be open."""
        return 0 <= step <= max(self._last, self.version, 0) + 2 * (self._window + 1) * self._sync_mode.steps

    def tickets_of(self, step: int) -> int | None:
        """How many tickets the leases have whose first step this is; 0 where they are done or there are none, None
        where they are not open yet.
        """
        with self.change:
            return len(self._tickets.get(step, ())) if step <= self._last else None

    def report(self, evaluation: int, part: int, sums: Tensor, eval_outputs: Tensor | None, unread: int) -> None:
        """Take the result of an evaluation batch, unless it came before."""
        with self.change:
            if evaluation == self._evaluations and self.ledger.finish((EVALUATE, evaluation, part)):
                self._reports[part] = sums, eval_outputs
                self.metrics.add_eval_unread(unread)
                self.change.notify_all()

    def fail(self, error: BaseException) -> None:
        """An error in a thread of the service: the engine's thread will raise it."""
        with self.change:
            self.failure = self.failure or error
            self.change.notify_all()

    # ------------------------------------------------------------ merging

    def _advance(self, enough: Callable[[], bool]) -> None:
        """Merge and apply pushes until `enough`."""
        while True:
            with self.change:
                if enough():
                    return
                self._wait(lambda: bool(self._next()))
                keys = sorted(map(_order, self._next()))  # arrival decides nothing more
            if self._sync_mode.collective:
                # or a server that has all shares would keep trainers out, of which one has to compute another server's
                # share
                self._barrier()
            with self.change:
                pushes = [self._basket[key] for key in keys]
                self._applying.update(keys)
            try:
                norm = self.server_state.apply(pushes, self._tickets)
            except BaseException:
                with self.change:  # `keep` waits no more
                    self._applying.clear()
                    self.change.notify_all()
                raise
            if self._world.rank == 0:
                self.metrics.add_norm(norm)
            with self.change:
                for push in pushes:
                    if self._world.rank == 0:
                        self.metrics.add(push)
                    del self._basket[push.step, push.part]
                    missing = self._waiting[push.step]
                    missing.discard(push.part)
                    if self._world.rank == 0 and (self._world.size == 1 or self._sync_mode.synchronous):
                        self.ledger.finish((TRAIN, push.step, push.part))
                    if not missing:
                        del self._waiting[push.step], self._tickets[push.step], self._numbers[push.step]
                self._applying.clear()
                self.version = min(self._waiting, default=self._last + 1)
                self.change.notify_all()

    def _open(self) -> None:
        """Open leases for the tickets that were gathered; `change` is held."""
        tickets, self._opening = tuple(self._opening), []
        if not tickets:
            return
        first = tickets[0].step
        parts = self._parts(max(ticket.rows for ticket in tickets))
        self._last = tickets[-1].step
        self._waiting[first], self._tickets[first], self._numbers[first] = set(parts), tickets, self._opened
        self._opened += 1
        for step, part in [
            key for key in self._basket if first <= key[0] <= self._last and (key[0] > first or key[1] not in parts)
        ]:
            del self._basket[step, part]  # it came early, for a share that there is not
        if self.server_state.recorder is not None:
            self.server_state.recorder.opened(tickets)
        self.version = min(self._waiting)
        if self._world.rank == 0:
            self.ledger.open(Lease(TRAIN, first, part, self.shares, tickets) for part in parts)
        self.change.notify_all()

    def _next(self) -> list[Push]:
        """The pushes that make the next update; empty while more have to come.

        Another server may be ahead, and trainers with it: pushes for steps that are not open here are left aside.
        """
        known = [push for push in self._basket.values() if push.step in self._waiting]
        if self._sync_mode.synchronous:
            known.sort(key=_order)
        return known[: self._sync_mode.ready(known, self._waiting)]

    def _barrier(self) -> None:
        """Wait for the other servers, with heartbeats meanwhile. Collective."""
        if self._world.size == 1:
            return
        barrier = dist.barrier(async_op=True)
        assert barrier is not None
        heard = monotonic()
        while not barrier.is_completed():
            self._raise_failure()
            if monotonic() - heard > WAIT_S:
                heard = monotonic()
                heartbeat.beat("wait", max(0, self.version))
                if not self.over:  # another server may wait for a push of a trainer that is gone
                    with self.change:
                        self.while_waiting(self)
            sleep(SLEEP_S)
        barrier.wait()

    def _parts(self, rows: int) -> list[int]:
        """The shares of a global batch that have micro-batches."""
        count = len(micro_batch_bounds(rows, self.micro_batch_rows)) - 1
        return [
            part
            for part in range(self.shares)
            if micro_batches_of(count, Shard(part, self.shares))[0]
            < micro_batches_of(count, Shard(part, self.shares))[1]
        ]

    # ------------------------------------------------------------ small things

    def _raise_failure(self) -> None:
        failure = self.failure
        if failure is not None:
            raise (
                failure
                if isinstance(failure, DtfError)
                else DtfError(f"the service failed: {type(failure).__name__}: {failure}")
            ) from failure

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready`; `change` is held. Raises the error of a thread of the service."""
        while True:
            self._raise_failure()
            if ready():
                return
            heartbeat.beat("wait", max(0, self.version))
            self.while_waiting(self)
            self.change.wait(WAIT_S)


def _order(push: Push) -> tuple[int, int]:
    return push.step, push.part
