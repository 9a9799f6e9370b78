"""A lease computed by all processes of a trainer. The leader stands where a trainer of one process computes; the
followers do what it orders.

The leader orders ahead what to read, learns which rows that needs, and asks servers for each row once. Then it sends
out parameters and rows, each process computes its own micro-batches, and gradients are summed at the leader, those of
rows by id.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from dtf.api.helper_roles import RoleContext
from dtf.api.task import Task
from dtf.core.types import Batch, Evaluated, Train
from dtf.model.author_errors import name_author_errors
from dtf.model.forward import to_device
from dtf.model.init import DTYPES
from dtf.pserver.leases import EVALUATE, TRAIN, Lease
from dtf.pserver.row_routing import RowRequest, routed_tables
from dtf.pserver.trainer.compute import ModelSetup, PulledState, TrainerModel
from dtf.pserver.trainer.group import Topic, TrainerGroup
from dtf.pserver.trainer.prefetch import WAIT_S, PreparedBatch
from dtf.pserver.trainer.reader import BatchReader, rows_to_try
from dtf.strategies.start_check import Collectives, differing_module

Rows = Mapping[str, np.ndarray]
"""Table -> rows (U, width) of the distinct ids of one process, or their gradients."""


class GroupRowRequest(RowRequest):
    """The rows that all processes need for one piece of work, each id once.

    `number`: of the piece of work. `own_batch`: what the leader has read. `counts`: ids of each process, by table.
    `oldest`: number of the first piece of work that is still needed.
    """

    number: int
    own_batch: PreparedBatch
    counts: list[dict[str, int]]
    oldest: Callable[[], int]

    def fill(self, batch: Batch, rows: Sequence[Mapping[str, np.ndarray]], device: torch.device) -> Batch:
        """As `RowRequest.fill`, in host memory: from there the rows are sent to all."""
        return super().fill(batch, rows, torch.device("cpu"))


class GroupReader:
    """Has all processes read their parts of a ticket; stands where a trainer of one process has a BatchReader."""

    def __init__(self, team: TrainerGroup, reading: BatchReader, task: Task, servers: int) -> None:
        self._team, self._reading, self._servers = team, reading, servers
        self._tables, self._numbers = routed_tables(task), itertools.count()
        self._alive: WeakSet[GroupRowRequest] = WeakSet()  # what may have to be computed
        self._lock = threading.Lock()

    def __call__(self, lease: Lease, ticket: Train) -> PreparedBatch:
        """Called by one thread."""
        number = next(self._numbers)
        self._team.send_order(Topic.READ, *lease[:4], ticket.step, ticket.epoch, ticket.index, ticket.rows, number)
        prepared = self._reading(lease, ticket)
        parts = [
            _reading_facts(prepared, False),
            *(
                self._team.receive_lists(Topic.READING, member, 2 + 2 * len(self._tables))
                for member in self._team.others
            ),
        ]
        facts, samples, *lists = zip(*parts, strict=True)
        ids, seen = lists[: len(self._tables)], lists[len(self._tables) :]
        unread, stopping = np.sum(facts, axis=0).tolist()
        self._team.stopping = self._team.stopping or bool(stopping)
        inputs = {
            name: torch.from_numpy(np.concatenate(table_ids)) for name, table_ids in zip(self._tables, ids, strict=True)
        }
        batch = Batch(inputs, torch.empty(0), torch.empty(0), np.concatenate(samples))
        counts = [dict(zip(self._tables, map(len, part[2:]), strict=False)) for part in parts]
        shown = {name: np.concatenate(each).reshape(-1, 2) for name, each in zip(self._tables, seen, strict=True)}
        tables = {
            # ids of all processes, as one list by table
            name: table._replace(lives=table.lives and lease.kind == TRAIN, inputs=(name,))
            for name, table in self._tables.items()
        }
        row_request = GroupRowRequest(batch, tables, self._servers, seen=shown)
        row_request.number, row_request.own_batch, row_request.counts, row_request.oldest = (
            number,
            prepared,
            counts,
            self._oldest,
        )
        with self._lock:
            self._alive.add(row_request)
        return PreparedBatch(lease, ticket, batch, row_request, unread)

    def _oldest(self) -> int:
        with self._lock:
            return min(request.number for request in self._alive)


class GroupModel(TrainerModel):
    """What every process of the group does."""

    def __init__(self, team: TrainerGroup, setup: ModelSetup) -> None:
        super().__init__(setup, team.part)
        task = setup.task
        self._team = team
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._kind: type[np.generic] = np.float64 if DTYPES[task.precision.param] is torch.float64 else np.float32
        self._metric_count = 1 + len(task.recipe.train_metrics)
        self._trained = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        self._others = [parameter.data for parameter in self.parameters.values() if not parameter.requires_grad] + list(
            self.replica.model.buffers()
        )

    def warmup(self, batch: Batch) -> None:
        """Collective: the models of all processes are compared, see `TrainerModel.follow`."""
        super().warmup(batch)
        assert self._few is not None
        self._send_params(whole=True)
        team = Collectives(self._team.gather, self._team.send_value)
        passes = [self.replica.passes(self._few)]
        self.refuse_other_model(differing_module(passes, self._task.precision.compute, team))

    def _send_params(self, whole: bool) -> None:
        """Copy the leader's learning parameters, and with `whole` all else that the model has, to all. Collective."""
        self._team.broadcast([parameter.data for parameter in self._trained] + (self._others if whole else []))

    def _pass(self, prepared: PreparedBatch, rows: Rows, factor: float) -> tuple[Tensor, np.ndarray]:
        """Forward and backward over this process's rows. At the leader: metric sums and statistics of the whole group,
        and its summed gradients in the parameters. Collective.
        """
        self.replica.model.train()
        sums, added, counts = (
            torch.zeros(self._metric_count, dtype=torch.float64),
            torch.zeros(len(super().statistics_added()), dtype=torch.float64),
            torch.zeros(2, dtype=torch.float64),  # their sum, and how many processes have some
        )
        if not _idle(prepared):
            sums += (
                super()
                .forward_backward(prepared, prepared.row_request.fill(prepared.batch, [rows], self.device), factor)
                .cpu()
            )
            added += torch.from_numpy(super().statistics_added())
            if self.replica.counts is not None:
                counts += torch.stack([self.replica.counts.cpu().double(), counts.new_ones(())])
        self._team.reduce([sums, added, counts])
        self.replica.counts = counts[0] if counts[1] else None
        for parameter in self._trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self._team.reduce([parameter.grad for parameter in self._trained if parameter.grad is not None])
        return sums, added.numpy()

    def _evaluate_part(self, prepared: PreparedBatch, rows: Rows) -> tuple[Tensor, np.ndarray | None]:
        """Evaluate this process's rows: metric sums, at the leader those of the whole group, and the `eval_outputs` of
        this process's rows. Collective.
        """
        evaluated = Evaluated(torch.zeros(self._metric_count), None)
        if not _idle(prepared):
            evaluated = self.evaluate_rows(prepared.row_request.fill(prepared.batch, [rows], self.device))
        sums = evaluated.sums.cpu().double()
        self._team.reduce([sums])
        return sums, None if evaluated.rows is None else evaluated.rows.cpu().double().numpy()

    def _row_gradients(self, prepared: PreparedBatch) -> Rows:
        """Gradients of the rows of this process's ids."""
        by_table = {} if _idle(prepared) else prepared.row_request.gradients(self.replica.row_gradients)[0]
        return {
            name: by_table[name].gradients if name in by_table else np.empty((0, width), self._kind)
            for name, width in self._widths.items()
        }


class LeaderModel(GroupModel):
    """The first process of a group; takes the place of the model of a trainer of one process."""

    _whole = True  # the others do not have all that the model has beside parameters that learn
    _added: np.ndarray | None = None

    def forward_backward(self, prepared: PreparedBatch, batch: Batch, factor: float) -> Tensor:
        row_request = _group_request(prepared)
        rows = self._begin(TRAIN, row_request, batch, factor)
        sums, self._added = self._pass(row_request.own_batch, rows, factor)
        parts = [
            self._row_gradients(row_request.own_batch),
            *(self._receive_rows(member, row_request.counts[member]) for member in self._team.others),
        ]
        self.replica.row_gradients = {
            name: torch.from_numpy(np.concatenate([part[name] for part in parts])) for name in self._widths
        }
        return sums

    def statistics_added(self) -> np.ndarray:
        return super().statistics_added() if self._added is None else self._added

    def evaluate(self, prepared: PreparedBatch, pulled: PulledState) -> Evaluated:
        self.load(pulled)
        row_request = _group_request(prepared)
        rows = self._begin(EVALUATE, row_request, row_request.fill(prepared.batch, pulled.rows, self.device), 0.0)
        sums, eval_outputs = self._evaluate_part(row_request.own_batch, rows)
        parts = [eval_outputs, *(self._receive_eval_outputs(member) for member in self._team.others)]
        outputs = [torch.from_numpy(part) for part in parts if part is not None]
        return Evaluated(sums, torch.cat(outputs) if outputs else None)

    def take_frozen(self, server: int, data: np.ndarray) -> None:
        super().take_frozen(server, data)
        self._whole = True

    def _begin(self, kind: int, row_request: GroupRowRequest, batch: Batch, factor: float) -> Rows:
        """Have all processes compute what they have read; returns the rows of this process."""
        whole, self._whole = self._whole, False
        self._team.send_order(Topic.WORK, kind, row_request.number, row_request.oldest(), whole, factor)
        self._send_params(whole)
        parts: list[dict[str, np.ndarray]] = [{} for _ in row_request.counts]
        for name in self._widths:
            ends = np.cumsum([count[name] for count in row_request.counts])
            for member, part in enumerate(np.split(batch.inputs[name].numpy(), ends[:-1])):
                parts[member][name] = part
                if member:
                    self._team.send(Topic.ROWS, member, part)
        return parts[0]

    def _receive_rows(self, member: int, counts: Mapping[str, int]) -> Rows:
        return {
            name: self._team.receive(Topic.ROWS, member, (counts[name], width), self._kind)
            for name, width in self._widths.items()
        }

    def _receive_eval_outputs(self, member: int) -> np.ndarray | None:
        rows, columns = self._team.receive(Topic.ROWS, member, (2,), np.int64).tolist()
        return self._team.receive(Topic.ROWS, member, (rows, columns)) if columns else None


class FollowerModel(GroupModel):
    """Any other process of a group. One thread reads, one receives orders, and the caller's computes."""

    def run(self, context: RoleContext, reading: BatchReader) -> None:
        """Work to the end of the run. PeerError when another process of the group is lost."""
        self._read: dict[int, PreparedBatch] = {}
        self._orders: queue.SimpleQueue[list[float] | BaseException] = queue.SimpleQueue()
        for work in (lambda: self._read_ahead(reading, context.stop_requested), self._take_orders):
            threading.Thread(target=self._guarded, args=(work,), daemon=True).start()
        step = 0
        while True:
            context.beat("wait", step)
            try:
                order = self._orders.get(timeout=WAIT_S)
            except queue.Empty:
                continue
            if isinstance(order, BaseException):
                raise order
            if not order:
                return
            kind, number, oldest, whole = map(int, order[:4])
            prepared = self._read[number]
            for done in [done for done in list(self._read) if done < oldest]:  # a thread adds to it
                del self._read[done]
            self._send_params(bool(whole))
            rows = {
                name: self._team.receive(Topic.ROWS, 0, (len(ids), width), self._kind)
                for (name, width), ids in zip(self._widths.items(), _ids(prepared), strict=True)
            }
            if kind == EVALUATE:
                context.beat("evaluate", step)
                self._send_eval_outputs(self._evaluate_part(prepared, rows)[1])
            else:
                step = prepared.ticket.step
                context.beat("step", step)
                self._pass(prepared, rows, order[4])
                for gradients in self._row_gradients(prepared).values():
                    self._team.send(Topic.ROWS, 0, gradients)
                for parameter in self._trained:
                    parameter.grad = None

    def _send_eval_outputs(self, eval_outputs: np.ndarray | None) -> None:
        self._team.send(Topic.ROWS, 0, np.array([0, 0] if eval_outputs is None else eval_outputs.shape))
        if eval_outputs is not None:
            self._team.send(Topic.ROWS, 0, eval_outputs)

    def _read_ahead(self, reading: BatchReader, stopping: Callable[[], bool]) -> None:
        while order := self._team.receive_order(Topic.READ):
            kind, step, part, shares, *ticket, number = map(int, order)
            ticket_read = Train(*ticket, lr=0.0)
            prepared = self._read[number] = reading(Lease(kind, step, part, shares, (ticket_read,)), ticket_read)
            self._team.send_lists(Topic.READING, 0, _reading_facts(prepared, stopping()))

    def _take_orders(self) -> None:
        while order := self._team.receive_order(Topic.WORK):
            self._orders.put(order)
        self._orders.put([])

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  # the thread that computes raises it
            self._orders.put(error)


def run_follower(task: Task, context: RoleContext, team: TrainerGroup, shares: int) -> None:
    """Run a follower to the end of the run. `shares`: into how many leases the rows of a step are cut."""
    rows, device = task.step.rows_each(shares * team.part.count), torch.device(context.place.device)
    follower = FollowerModel(team, ModelSetup(task, device, [], shares, rows))  # the first process speaks with servers
    with name_author_errors():
        follower.warmup(to_device(rows_to_try(context.open, shares, rows), device, task))
    follower.run(context, BatchReader(task, context.open, device, rows, 1, team.part))


def _idle(prepared: PreparedBatch) -> bool:
    """Whether a process has no micro-batch of a lease: it has read padding."""
    return bool(prepared.batch.ids[0] < 0)


def _ids(prepared: PreparedBatch) -> list[np.ndarray]:
    """Distinct ids, by table."""
    return [np.empty(0, np.int64) if _idle(prepared) else ids for ids in prepared.row_request.ids(0).values()]


def _reading_facts(prepared: PreparedBatch, stopping: bool) -> list[np.ndarray]:
    """What the leader has to know of a batch that a process has read: [unreadable rows, told to stop]; sample ids; ids
    by table; and by table how often each was shown and clicked, if that is known, one after the other.
    """
    facts, ids = np.array([prepared.unread, int(stopping)]), prepared.row_request.ids(0)
    none = np.empty((0, 2))
    seen = [none if _idle(prepared) else prepared.row_request.seen_of(0).get(name, none) for name in ids]
    shown = [each.astype(np.int64).reshape(-1) for each in seen]
    return [facts, prepared.batch.ids[prepared.batch.ids >= 0], *_ids(prepared), *shown]


def _group_request(prepared: PreparedBatch) -> GroupRowRequest:
    assert isinstance(prepared.row_request, GroupRowRequest)
    return prepared.row_request
