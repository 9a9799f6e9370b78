"""Replays a recorded run in one process: the same pulls and updates in the same order give the same numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dtf.api.task import Source, Task
from dtf.core.errors import DataError
from dtf.core.types import Box, Place, Train
from dtf.distributed.world import World
from dtf.model.init import construct
from dtf.pserver.leases import TRAIN, Lease
from dtf.pserver.net.compression import WIRE_DTYPES, rounded
from dtf.pserver.net.messages import ANY, NONE
from dtf.pserver.param_slices import lay_out, wire_layout
from dtf.pserver.push import Push
from dtf.pserver.record.recorder import Pull
from dtf.pserver.server.state import ServerState
from dtf.pserver.sync_modes import SyncMode
from dtf.pserver.trainer.compute import LeaseResult, ModelSetup, ParamBlocks, PulledState, TrainerModel
from dtf.pserver.trainer.local_sgd import LocalSgd
from dtf.pserver.trainer.prefetch import PreparedBatch
from dtf.pserver.trainer.reader import BatchReader, Open

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

Part = tuple[int, int]
"""First step of a lease, and its share."""


class _LoopbackWorld(World):
    """The world of one of several servers that are all in this process; nothing waits for another."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(Place(rank=rank, size=size))

    def reduce(self, sums: Tensor) -> Tensor:
        return sums


class _Reply:
    """What one server gave for one pull."""

    def __init__(self, applied: int, dense: np.ndarray, rows: dict[str, np.ndarray]) -> None:
        self.applied, self.dense, self.rows = applied, dense, rows


class Replay:
    """Replays a record. `rows`: opens the training data. `source`: the checkpoint with which the recorded attempt
    began.
    """

    def __init__(
        self,
        task: Task,
        strategy: PserverOptions,
        sync_mode: SyncMode,
        trainers: int,
        rows: Open,
        source: Source | None,
    ) -> None:
        self._sync_mode = sync_mode
        self._servers, self._shares = strategy.servers, sync_mode.shares(trainers)
        self._micro_batch_rows = task.step.rows_each(self._shares * strategy.team)
        self.server_state = [
            ServerState(
                task, _LoopbackWorld(server, self._servers), strategy, sync_mode, self._shares, self._micro_batch_rows
            )
            for server in range(self._servers)
        ]
        for server_state in self.server_state if source is not None else ():
            assert source is not None
            server_state.load(source)
        whole_layouts = lay_out(
            construct(task.recipe),
            task.precision,
            self._servers,
            not task.optimizer.by_tensor,
            strategy.min_block,
            strategy.placement,
        )
        self._wire = WIRE_DTYPES[strategy.wire.value]
        layouts = [wire_layout(layout, self._wire) for layout in whole_layouts]
        whole_norm = self._servers > 1 and not sync_mode.collective
        setup = ModelSetup(
            task, torch.device("cpu"), layouts, self._shares, self._micro_batch_rows, whole_norm, self._wire
        )
        self._model = TrainerModel(setup)
        for server, server_state in enumerate(self.server_state):
            self._model.take_frozen(server, server_state.frozen())
        self._local_sgd = LocalSgd(task, self._model, layouts) if sync_mode.local_training else None
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._tickets: dict[int, tuple[Train, ...]] = {}
        self._replies: dict[Part, dict[tuple[Pull, int], list[_Reply]]] = {}
        self._computed: dict[Part, dict[int, LeaseResult]] = {}  # by trainer
        self._applied: Counter[Part] = Counter()  # by how many servers
        self._read = BatchReader(task, rows, torch.device("cpu"), self._micro_batch_rows, self._servers)
        self._prepared: dict[tuple[int, int], PreparedBatch] = {}
        self._met: dict[tuple[int, int, int], dict[str, set[int]]] = {}

    def run(self, events: Sequence[Iterator[Mapping[str, Any]]], under_way: Callable[[int], None]) -> None:
        """Do all events, by server. `under_way` is called now and then with the number of updates that all servers have
        made, and may raise.

        DataError where the records of two servers do not fit each other.
        """
        self._under_way = under_way
        next_events = [next(server_events, None) for server_events in events]
        while any(event is not None for event in next_events):
            moved = False
            for server, server_events in enumerate(events):
                while (event := next_events[server]) is not None and self._do(server, event):
                    next_events[server], moved = next(server_events, None), True
                    self._report_progress()
            if not moved:
                raise DataError("the recorded orders of the servers do not fit each other; was the run killed?")

    def boxes(self) -> list[Box]:
        """The state at the end; of tables each server's own rows, one server after the other."""
        return [box for server_state in self.server_state for box in server_state.state().boxes]

    def _report_progress(self) -> None:
        self._under_way(min(server_state.applied for server_state in self.server_state))

    def _do(self, server: int, event: Mapping[str, Any]) -> bool:
        """Do one event, if all that it needs has happened; returns whether it was done."""
        if "open" in event:
            tickets = tuple(Train(*row) for row in event["open"])
            self._tickets[tickets[0].step] = tickets
        elif "pull" in event:
            pull = Pull(*event["pull"])
            if pull.step not in self._tickets:
                return False
            self._pull(server, pull, event["applied"])
        else:
            pushes = [tuple(row) for row in event["apply"]]
            if not all(self._may(server, *row[:3]) for row in pushes):
                return False
            self.server_state[server].apply([self._push(server, *row) for row in pushes], self._tickets)
            for trainer, step, part, _ in pushes:
                self._met.pop((trainer, step, server), None)
                self._applied[step, part] += 1
                if self._applied[step, part] == self._servers:
                    self._forget(step, part)
        return True

    def _pull(self, server: int, pull: Pull, applied: int) -> None:
        """Answer a pull. With local training, rows that the trainer has are not pulled again."""
        lease = self._lease(pull.step, pull.part)
        first = pull.at == lease.tickets[0].step
        known = ANY if self._local_sgd is None or first else NONE
        ids = self._prepare(lease, self._ticket(lease, pull.at)).row_request.ids(server)
        if self._local_sgd is not None:
            met = self._met.setdefault((pull.trainer, pull.step, server), {name: set() for name in ids})
            if first:
                for seen in met.values():
                    seen.clear()
            ids = {
                name: table_ids[[row_id not in met[name] for row_id in table_ids.tolist()]]
                if len(table_ids)
                else table_ids
                for name, table_ids in ids.items()
            }
            for name, table_ids in ids.items():
                met[name] |= set(table_ids.tolist())
        _, now, dense, rows = self.server_state[server].pull(ids, pull, known)
        rows = {name: rounded(table_rows, self._wire) for name, table_rows in rows.items()}
        if now != applied:
            raise DataError(
                f"server {server} had made {applied} updates when it was asked, here it has made {now}; the record is "
                "not whole"
            )
        if self._applied[pull.step, pull.part] == self._servers:  # a trainer pulled too late
            self._prepared.pop((pull.part, pull.at), None)
            if pull.at == lease.tickets[-1].step:  # until then it is asked for the rows that it has not met
                self._met.pop((pull.trainer, pull.step, server), None)
            return
        replies = self._replies.setdefault((pull.step, pull.part), {})
        replies.setdefault((pull, server), []).append(
            _Reply(now, np.empty(0, np.uint8) if dense is None else dense.copy(), rows)
        )

    def _may(self, server: int, trainer: int, step: int, part: int) -> bool:
        """Whether all servers have answered the pulls that a push was computed from. A trainer asks all servers for the
        same: the pulls that this server answered say which.
        """
        replies = self._replies.get((step, part), {})
        asked = [pull for pull, other in replies if other == server and pull.trainer == trainer]
        return step in self._tickets and all(
            (pull, other) in replies for pull in asked for other in range(self._servers)
        )

    def _push(self, server: int, trainer: int, step: int, part: int, seen: int) -> Push:
        results = self._computed.setdefault((step, part), {})
        if trainer not in results:
            lease = self._lease(step, part)
            results[trainer] = (
                self._train_locally(trainer, lease)
                if self._local_sgd is not None
                else self._gradients(trainer, lease, server, seen)
            )
        result, nothing = results[trainer], np.empty(0)
        return Push(
            *(
                trainer,
                step,
                part,
                result.dense[server],
                result.rows[server],
                result.finite,
                result.norm,
                seen,
                0,
                0,
                result.skipped,
            ),
            *(nothing, result.statistics, nothing, result.counts),
        )

    def _gradients(self, trainer: int, lease: Lease, server: int, seen: int) -> LeaseResult:
        prepared = self._prepare(lease, lease.tickets[0])
        pull, by_pull = Pull(trainer, lease.step, lease.part, lease.step), self._replies[lease.step, lease.part]
        replies = [by_pull[pull, other][-1] for other in range(self._servers)]
        replies[server] = next((reply for reply in by_pull[pull, server] if reply.applied == seen), replies[server])
        dense = [ParamBlocks(reply.applied, reply.dense) for reply in replies]
        rows, applied = [reply.rows for reply in replies], [reply.applied for reply in replies]
        result = self._model.gradients(prepared, PulledState(dense, rows, applied, self.server_state[0].scale()))
        parts = [
            {name: table._replace(gradients=rounded(table.gradients, self._wire)) for name, table in part.items()}
            for part in result.rows
        ]
        # whose memory the next one uses
        return result._replace(dense=[memory.copy() for memory in result.dense], rows=parts)

    def _train_locally(self, trainer: int, lease: Lease) -> LeaseResult:
        local, by_pull = self._local_sgd, self._replies[lease.step, lease.part]
        assert local is not None
        for ticket in lease.tickets:
            prepared = self._prepare(lease, ticket)
            pull = Pull(trainer, lease.step, lease.part, ticket.step)
            replies = [by_pull[pull, server][-1] for server in range(self._servers)] if (pull, 0) in by_pull else []
            if ticket is lease.tickets[0]:
                local.begin([reply.dense for reply in replies])
            for server, reply in enumerate(replies):
                for name, ids in local.missing(prepared.row_request, server).items():
                    local.keep(name, ids, reply.rows[name])
            local.step(prepared)
            self._report_progress()  # these may be hundreds
        return local.differences()

    def _forget(self, step: int, part: int) -> None:
        """Drop what was needed for work that all servers have applied."""
        self._replies.pop((step, part), None)
        del self._computed[step, part]
        for ticket in self._tickets[step]:
            self._prepared.pop((part, ticket.step), None)

    def _lease(self, step: int, part: int) -> Lease:
        return Lease(TRAIN, step, part, self._shares, self._tickets[step])

    def _ticket(self, lease: Lease, step: int) -> Train:
        return next(ticket for ticket in lease.tickets if ticket.step == step)

    def _prepare(self, lease: Lease, ticket: Train) -> PreparedBatch:
        key = (lease.part, ticket.step)
        if key not in self._prepared:
            self._prepared[key] = self._read(lease, ticket)
        return self._prepared[key]
