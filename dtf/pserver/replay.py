"""A recorded run once more, one thing after the other in one process: the same pulls and updates in the same order give the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dtf.build import sketch
from dtf.errors import DataError
from dtf.launcher import Place
from dtf.passes import received, to_device
from dtf.pserver.blocks import lay_out, travelling
from dtf.pserver.computing import Computed, Computing, Pulled
from dtf.pserver.feeder import Prepared
from dtf.pserver.holdings import Holdings
from dtf.pserver.ledger import TRAIN, Lease
from dtf.pserver.local import Local
from dtf.pserver.merging import Merging
from dtf.pserver.narrow import FORMATS, rounded
from dtf.pserver.protocol import ANY, NONE
from dtf.pserver.push import Push
from dtf.pserver.recorder import Pull
from dtf.pserver.rows import Wanted
from dtf.strategy import Source, Task
from dtf.values import Batch, Box, Shard, Train
from dtf.world import World

if TYPE_CHECKING:
    from dtf.loader import Loader
    from dtf.strategies.pserver import Pserver

Open = Callable[[str, Shard, int], "Loader"]


class _Alone(World):
    """One of several servers that are all in this process; nothing here waits for another."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(Place(rank=rank, size=size))

    def reduce(self, sums: Tensor) -> Tensor:
        return sums


class _Reply:
    """What one server gave for one pull."""

    def __init__(self, applied: int, dense: np.ndarray, rows: dict[str, np.ndarray]) -> None:
        self.applied, self.dense, self.rows = applied, dense, rows


class Replay:
    """`rows` opens the training data; `source`: the checkpoint that the recorded attempt began with."""

    def __init__(self, task: Task, strategy: Pserver, merging: Merging, trainers: int, rows: Open, source: Source | None) -> None:
        self._task, self._merging, self._open = task, merging, rows
        self._servers, self._shares = strategy.count(), merging.shares(trainers)
        self._micro_batch_rows = task.step.rows_each(self._shares * strategy.team)
        self.holdings = [
            Holdings(task, _Alone(server, self._servers), strategy, merging, self._shares, self._micro_batch_rows) for server in range(self._servers)
        ]
        for holdings in self.holdings if source is not None else ():
            assert source is not None
            holdings.load(source)
        found = lay_out(sketch(task.recipe), task.precision, self._servers, strategy.slice_parameters, strategy.min_block, strategy.placement)
        self._wire = FORMATS[strategy.wire.value]
        layouts = [travelling(layout, self._wire) for layout in found]
        whole_norm = self._servers > 1 and not merging.together
        self._computing = Computing(task, torch.device("cpu"), layouts, self._shares, self._micro_batch_rows, whole_norm, self._wire)
        for server, holdings in enumerate(self.holdings):
            self._computing.take_frozen(server, holdings.frozen())
        self._local = Local(task, self._computing, layouts) if merging.local else None
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._tickets: dict[int, tuple[Train, ...]] = {}
        self._replies: dict[tuple[Pull, int], list[_Reply]] = {}
        self._needed: dict[tuple[int, ...], set[tuple[Pull, int]]] = {}  # of each push, what was pulled for it
        self._computed: dict[tuple[int, int, int], Computed] = {}
        self._loaders: dict[int, Loader] = {}
        self._batches: dict[tuple[int, int], Batch] = {}
        self._met: dict[tuple[int, int, int], dict[str, set[int]]] = {}

    def run(self, events: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """All that happened, by server. DataError where what one server recorded does not fit what another one did."""
        for server, own in enumerate(events):
            for pull in (Pull(*event["pull"]) for event in own if "pull" in event):
                self._needed.setdefault(pull[:3], set()).add((pull, server))
        at = [0] * self._servers
        while any(place < len(own) for place, own in zip(at, events, strict=True)):
            moved = False
            for server, own in enumerate(events):
                while at[server] < len(own) and self._do(server, own[at[server]]):
                    at[server], moved = at[server] + 1, True
            if not moved:
                raise DataError("the recorded orders of the servers do not fit each other; was the run killed?")

    def boxes(self) -> list[Box]:
        """The state at the end; of tables each server's own rows, one after the other."""
        return [box for holdings in self.holdings for box in holdings.state().boxes]

    def _do(self, server: int, event: Mapping[str, Any]) -> bool:
        """One thing, if all that it needs has happened."""
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
            if not all(self._may(row[:3]) for row in pushes):
                return False
            self.holdings[server].apply([self._push(server, *row) for row in pushes], self._tickets)
        return True

    def _pull(self, server: int, pull: Pull, applied: int) -> None:
        """Give what was asked for; rows that were met before are not asked for again where training is local."""
        lease = self._lease(pull.step, pull.part)
        first = pull.at == lease.tickets[0].step
        known = ANY if self._local is None or first else NONE
        ids = Wanted(self._batch(pull.part, self._ticket(lease, pull.at)), self._widths, self._servers).ids(server)
        if self._local is not None:
            met = self._met.setdefault((pull.trainer, pull.step, server), {name: set() for name in ids})
            if first:
                for seen in met.values():
                    seen.clear()
            ids = {name: found[[each not in met[name] for each in found.tolist()]] if len(found) else found for name, found in ids.items()}
            for name, found in ids.items():
                met[name] |= set(found.tolist())
        _, now, dense, rows = self.holdings[server].pull(ids, pull, known)
        rows = {name: rounded(found, self._wire) for name, found in rows.items()}
        if now != applied:
            raise DataError(f"server {server} had made {applied} updates when it was asked, here it has made {now}; the record is not whole")
        self._replies.setdefault((pull, server), []).append(_Reply(now, np.empty(0, np.uint8) if dense is None else dense.copy(), rows))

    def _may(self, key: tuple[int, int, int]) -> bool:
        """Whether all servers have given what a push was computed from."""
        return key[1] in self._tickets and self._needed.get(key, set()) <= self._replies.keys()

    def _push(self, server: int, trainer: int, step: int, part: int, seen: int) -> Push:
        key = (trainer, step, part)
        if key not in self._computed:
            lease = self._lease(step, part)
            self._computed[key] = self._alone(trainer, lease) if self._local is not None else self._gradients(trainer, lease, server, seen)
        computed, nothing = self._computed[key], np.empty(0)
        return Push(
            *(trainer, step, part, computed.dense[server], computed.rows[server], computed.finite, computed.norm, seen, 0, 0, computed.skipped),
            *(nothing, computed.statistics, nothing),
        )

    def _gradients(self, trainer: int, lease: Lease, server: int, seen: int) -> Computed:
        prepared = self._prepared(lease, lease.tickets[0])
        pull = Pull(trainer, lease.step, lease.part, lease.step)
        replies = [self._replies[pull, each][-1] for each in range(self._servers)]
        replies[server] = next((reply for reply in self._replies[pull, server] if reply.applied == seen), replies[server])
        columns = [[getattr(reply, name) for reply in replies] for name in ("dense", "rows", "applied")]
        found = self._computing.gradients(prepared, Pulled(*columns, scale=self.holdings[0].scale()))
        parts = [{name: (ids, rounded(numbers, self._wire)) for name, (ids, numbers) in part.items()} for part in found.rows]
        return found._replace(dense=[memory.copy() for memory in found.dense], rows=parts)  # whose memory the next one uses

    def _alone(self, trainer: int, lease: Lease) -> Computed:
        local = self._local
        assert local is not None
        for ticket in lease.tickets:
            prepared = self._prepared(lease, ticket)
            pull = Pull(trainer, lease.step, lease.part, ticket.step)
            replies = [self._replies[pull, server][-1] for server in range(self._servers)] if (pull, 0) in self._replies else []
            if ticket is lease.tickets[0]:
                local.begin([reply.dense for reply in replies])
            for server, reply in enumerate(replies):
                for name, ids in local.missing(prepared.wanted, server).items():
                    local.keep(name, ids, reply.rows[name])
            local.step(prepared)
        return local.differences()

    def _lease(self, step: int, part: int) -> Lease:
        return Lease(TRAIN, step, part, self._shares, self._tickets[step])

    def _ticket(self, lease: Lease, step: int) -> Train:
        return next(ticket for ticket in lease.tickets if ticket.step == step)

    def _prepared(self, lease: Lease, ticket: Train) -> Prepared:
        batch = self._batch(lease.part, ticket)
        return Prepared(lease, ticket, batch, Wanted(batch, self._widths, self._servers), 0)

    def _batch(self, part: int, ticket: Train) -> Batch:
        key = (part, ticket.step)
        if key not in self._batches:
            if part not in self._loaders:
                self._loaders[part] = self._open("train", Shard(part, self._shares), self._micro_batch_rows)
            batch = self._loaders[part].get(ticket.epoch, ticket.index)
            assert batch is not None
            self._batches[key] = received(to_device(batch, torch.device("cpu"), self._task), self._task)
        return self._batches[key]
