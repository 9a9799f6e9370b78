"""The program of a server: it opens each step for trainers, and merges and applies what they push. The engine runs here as on any rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dtf import heartbeat
from dtf.build import cast_model, draw_model
from dtf.errors import ConfigError, DtfError
from dtf.memory import Memory
from dtf.microbatch import RunningStatistics
from dtf.pserver.blocks import Layout, balance, lay_out, views
from dtf.pserver.ledger import EVALUATE, TRAIN, Lease, Ledger
from dtf.pserver.merging import Merging
from dtf.pserver.rows import Given, Shelf, Shelves
from dtf.sampler import cut, share
from dtf.sparse import SparseTable
from dtf.spmd import buffers, load_buffers
from dtf.strategy import Program, Source, Task
from dtf.update import LocalUpdate, Piece
from dtf.values import Batch, Evaluated, Shard, State, StepOutput, Train
from dtf.world import World

if TYPE_CHECKING:
    from dtf.strategies.pserver import Pserver

WAIT_S = 0.5
"""Between two signs of life while there is nothing to merge."""

FAREWELL_S = 5.0
"""For trainers to hear that the run is over."""


class Push(NamedTuple):
    """What one trainer computed for one lease: gradients of the sum of losses over its rows, divided by the rows of the global batch."""

    step: int
    part: int
    dense: np.ndarray  # (bytes,) uint8: see blocks.views
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]  # by table: ids (U,), each once, and gradients (U, width)
    finite: bool
    norm: float  # of the whole gradient, all servers' parts; of a finite one, where the mode needs it
    seen: int  # updates that this server had made when the trainer pulled
    sums: np.ndarray  # (M,); empty but for server 0, as all that follows
    statistics: np.ndarray
    ids: np.ndarray  # sample ids
    epoch: int
    unread: int  # of its rows


class Part:
    """What a server has of the model beside blocks: buffers and their averages. See `spmd.Part`."""

    def __init__(self, model: nn.Module, statistics: RunningStatistics) -> None:
        self.model, self.statistics = model, statistics


class Serving(Program):
    """One of several servers that hold a model's blocks and tables' rows. `merging` says when pushes become an update.

    The engine's thread alone changes the state; threads of the service read it, and leave pushes in a basket.
    """

    shard = None

    def __init__(self, task: Task, world: World, strategy: Pserver, merging: Merging, trainers: int) -> None:
        self.shares = merging.shares(trainers)
        self.micro_batch_rows = task.step.rows_each(self.shares)
        self._task, self._world, self._merging, self._trainers = task, world, merging, trainers
        self._window = merging.window(trainers)
        model = draw_model(task.recipe, task.seed, task.weights)
        masters = cast_model(model, task.precision, world.device)
        layouts = lay_out(model, task.precision, world.size, strategy.slice_parameters, strategy.min_block, strategy.placement)
        self.layout: Layout = layouts[world.rank]
        self._balance = balance(layouts)
        self._dense, self._frozen, self._gradients = (
            torch.zeros(size, dtype=torch.uint8, device=world.device) for size in (self.layout.bytes, self.layout.frozen_bytes, self.layout.bytes)
        )
        self._arriving = views(self._gradients, self.layout.learning)
        self._learning: list[nn.Parameter] = []
        self._shelves = _shelves(task, world)
        self._update = LocalUpdate(
            self._pieces(masters),
            task.optimizer,
            task.step.clip_norm,
            task.precision.loss_scale,
            gather=self._whole_norm,
            like=next(iter(masters.values())).new_zeros(0),
            tables=self._shelves,
        )
        for parameter in model.parameters():
            parameter.data = parameter.data.new_zeros(0)  # the blocks have it now
        self._part = Part(model, RunningStatistics(model, task.step.ema))
        model.train()
        self.ledger = Ledger()
        self._norm: Tensor | None = None  # of the update being made, where the trainer knows it
        self._waiting: dict[int, set[int]] = {}  # step -> shares whose gradients are not merged yet
        self._tickets: dict[int, Train] = {}
        self._basket: list[Push] = []
        self._basket_keys: set[tuple[int, int]] = set()
        self.change = threading.Condition()  # of all that follows and the ledger
        self.state_lock = threading.Lock()  # of parameters and rows
        self.begun = self.over = False
        self._last = -1  # step that was opened last
        self.version = -1  # first step whose update is not whole
        self.stamp = self.applied = self.dropped = 0
        self.staleness: Counter[int] = Counter()
        self.failure: BaseException | None = None
        self.stopping = False  # a trainer was told to stop
        self._unread: Counter[tuple[str, int]] = Counter()
        self._consumed: list[tuple[int, np.ndarray]] = []
        self._evaluations = self._batches = 0
        self._reports: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._measures = 1 + len(task.recipe.measures)
        self._clear_told()
        self._close: Callable[[], None] = lambda: None

    def on_end(self, close: Callable[[], None]) -> None:
        """Called when the run has ended."""
        self._close = close

    def about(self) -> dict[str, str]:
        return {"servers": self._balance}

    # ------------------------------------------------------------ the engine's side

    def step(self, ticket: Train, batch: Batch | None) -> StepOutput:
        with self.change:
            self.begun, self._last = True, ticket.step
            self.version = min(self._waiting, default=ticket.step)
            parts = self._parts(ticket.rows)
            self._tickets[ticket.step], self._waiting[ticket.step] = ticket, set(parts)
            if self._world.rank == 0:
                self.ledger.open(Lease(TRAIN, ticket.step, i, self.shares, ticket.epoch, ticket.index, ticket.rows, ticket.lr) for i in parts)
            self.change.notify_all()
        self._advance(lambda: len(self._waiting) <= self._window)
        return self._told()

    def rest(self) -> StepOutput:
        if self._merging.exact:
            self.settle()
        return self._told()

    def settle(self) -> None:
        self._advance(lambda: not self._waiting)

    def eval_step(self, batch: Batch | None) -> Evaluated:
        with self.change:
            self.begun = True
            if not self._batches:
                self._evaluations += 1
                self._unread = Counter({key: count for key, count in self._unread.items() if key[0] != "eval"})
            if self._world.rank == 0:
                self.ledger.open([Lease(EVALUATE, self._evaluations, self._batches, 1, 0, self._batches, 0, 0.0)])
            self._batches += 1
            self.change.notify_all()
        return Evaluated(torch.zeros(self._measures, dtype=torch.float64), None)

    def eval_rest(self) -> Evaluated | None:
        batches, self._batches = self._batches, 0
        if self._world.rank:
            return None
        with self.change:
            self._wait(lambda: len(self._reports) == batches)
            reports, self._reports = [self._reports[part] for part in range(batches)], {}
        judged = [rows for _, rows in reports if rows is not None]
        return Evaluated(torch.stack([sums for sums, _ in reports]).sum(0), torch.cat(judged) if judged else None)

    def use_averages(self, on: bool) -> None:
        with self.state_lock:
            self._update.use_averages(on)
            self._part.statistics.use_averages(on)
            self.stamp += 1

    def state(self) -> State:
        state = self._update.state()
        return State(state.boxes + (buffers(self._part) if self._world.rank == 0 else []), state.scalars)

    def load(self, source: Source) -> None:
        with self.state_lock:
            self._update.load(source)
            load_buffers(self._part, source, Shard(0, 1))
            self.stamp += 1

    def memory(self) -> Memory:
        return Memory(*self._update.bytes(), 0)

    def skipped(self) -> int:
        return self._update.skipped()

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        found, self._consumed = self._consumed, []
        return found

    def unread(self, split: str, epoch: int) -> int:
        return self._unread[split, epoch]

    def told_to_stop(self) -> bool:
        return self.stopping

    def end(self) -> None:
        with self.change:
            self.over = True
            self.change.notify_all()
            if self._world.rank == 0:
                self.change.wait_for(lambda: not self.ledger.members(), FAREWELL_S)
        self._close()

    # ------------------------------------------------------------ the service's side

    def receive(self, push: Push) -> None:
        """Take a push, unless it came before."""
        with self.change:
            step, part = push.step, push.part
            merged = part not in self._waiting[step] if step in self._waiting else step <= self._last
            if merged or (step, part) in self._basket_keys:
                self.dropped += 1
                return
            self._basket.append(push)
            self._basket_keys.add((step, part))
            self.change.notify_all()

    def report(self, evaluation: int, part: int, sums: Tensor, judged: Tensor | None, unread: int) -> None:
        """Take what a batch of an evaluation gave, unless it came before."""
        with self.change:
            if evaluation == self._evaluations and self.ledger.finish((EVALUATE, evaluation, part)):
                self._reports[part] = sums, judged
                self._unread["eval", 0] += unread
                self.change.notify_all()

    def pull(self, wanted: Mapping[str, np.ndarray], create: bool, known: int) -> tuple[int, int, np.ndarray | None, dict[str, np.ndarray]]:
        """The stamp of the state, the updates in it, learning blocks unless those of stamp `known`, and rows by table; all of one moment."""
        with self.state_lock:
            rows = {name: self._shelves.rows(name, ids, create) for name, ids in wanted.items()} if self._shelves else {}
            dense = None if known == self.stamp else self._dense.cpu().numpy().copy()
            return self.stamp, self.applied, dense, rows

    def frozen(self) -> np.ndarray:
        """Blocks that do not learn, and on server 0 all buffers, bytes."""
        with self.state_lock:
            found = [self._frozen.cpu()]
            if self._world.rank == 0:
                found += [buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, buffer in self._part.model.named_buffers()]
            return torch.cat(found).numpy()

    def scale(self) -> float:
        """The factor of the loss that trainers differentiate."""
        return float(self._update.scale(torch.ones((), dtype=torch.float64)))

    def fail(self, error: BaseException) -> None:
        """Something went wrong in a thread of the service: the engine ends with it."""
        with self.change:
            self.failure = self.failure or error
            self.change.notify_all()

    def sizes(self) -> dict[str, int]:
        """Rows of each table here."""
        return self._shelves.sizes() if self._shelves else {}

    # ------------------------------------------------------------ merging

    def _advance(self, enough: Callable[[], bool]) -> None:
        """Merge and apply what arrives until it is enough."""
        while True:
            with self.change:
                if enough():
                    return
                self._wait(lambda: self._merging.ready(self._basket, self._waiting) > 0)
                pushes = self._take()
            self._apply(pushes)
            with self.change:
                for push in pushes:
                    missing = self._waiting[push.step]
                    missing.discard(push.part)
                    if self._world.rank == 0 and (self._world.size == 1 or self._merging.exact):
                        self.ledger.finish((TRAIN, push.step, push.part))
                    if not missing:
                        del self._waiting[push.step], self._tickets[push.step]
                self.version = min(self._waiting, default=self._last + 1)
                self.change.notify_all()

    def _take(self) -> list[Push]:
        """The next pushes to be merged, out of the basket."""
        self._basket.sort(key=lambda push: (push.step, push.part)) if self._merging.exact else None
        count = self._merging.ready(self._basket, self._waiting)
        pushes, self._basket = self._basket[:count], self._basket[count:]
        self._basket_keys -= {(push.step, push.part) for push in pushes}
        return pushes

    def _apply(self, pushes: Sequence[Push]) -> None:
        ticket = self._tickets[max(push.step for push in pushes)]
        weights = self._weights(pushes)
        alone = self._world.size == 1
        whole = alone or self._merging.exact  # all of the gradient is here, or on the servers that do this with us
        with self.state_lock:
            self._sum(pushes, weights)
            if self._shelves is not None:
                names = self._task.recipe.tables()
                given = {name: [Given(*push.rows[name], weight) for push, weight in zip(pushes, weights, strict=True) if name in push.rows] for name in names}
                self._shelves.take(given, together=not alone and self._merging.exact)
            if not whole:
                finite = all(push.finite for push in pushes)
                norm = sum(push.norm for push in pushes) / len(pushes) if finite else float("inf")
                self._norm = torch.tensor([norm], device=self._world.device)
                if self._shelves is not None:
                    self._shelves.norm = torch.zeros((), dtype=torch.float64)
            norm = self._update.apply(ticket.step, ticket.lr)
            self._norm = None
            self._absorb(pushes, ticket)
            for push in pushes:
                self.staleness[self.applied - push.seen] += 1
            self.applied += 1
            self.stamp += 1
        if self._world.rank == 0:
            for push in pushes:
                self._sums += torch.from_numpy(push.sums)
                self._unread["train", push.epoch] += push.unread
                self._consumed.append((push.step, push.ids))
            self._norms += norm.cpu().double()

    def _weights(self, pushes: Sequence[Push]) -> list[float]:
        """What each push counts, so that their sum is the mean over the rows of all: 1 where they are all shares of one step."""
        rows = [self._rows(push) for push in pushes]
        return [self._tickets[push.step].rows / sum(rows) for push in pushes]

    def _sum(self, pushes: Sequence[Push], weights: Sequence[float]) -> None:
        for number, (push, weight) in enumerate(zip(pushes, weights, strict=True)):
            blocks = views(torch.from_numpy(push.dense).to(self._world.device), self.layout.learning)
            if not blocks:
                continue
            if number:
                torch._foreach_add_(self._arriving, blocks, alpha=weight)
            else:
                torch._foreach_copy_(self._arriving, blocks)
                if weight != 1:
                    torch._foreach_mul_(self._arriving, weight)
        for parameter, gradient in zip(self._learning, self._arriving, strict=True):
            parameter.grad = gradient

    def _absorb(self, pushes: Sequence[Push], ticket: Train) -> None:
        """Running averages live on server 0; each push says what its micro-batches add to those of one of `shares` ranks."""
        if self._world.rank or not len(self._part.statistics):
            return
        counts = [self._micro_batches(push) for push in pushes]
        total = len(cut(ticket.rows, self.micro_batch_rows)) - 1
        added = sum((torch.from_numpy(push.statistics) for push in pushes), start=torch.zeros(len(pushes[0].statistics), dtype=torch.float64))
        self._part.statistics.absorb(added * (total / (self.shares * sum(counts))))

    def _whole_norm(self, norms: Tensor) -> Tensor:
        """Norms of which the norm is that of the whole gradient, tables apart."""
        if self._norm is not None or self._world.size == 1:
            return norms if self._norm is None else self._norm
        squares = norms.double().square().sum().cpu()
        return self._world.reduce(squares).sqrt().to(norms).reshape(1)

    def _parts(self, rows: int) -> list[int]:
        """Shares of a global batch that have micro-batches."""
        count = len(cut(rows, self.micro_batch_rows)) - 1
        return [part for part in range(self.shares) if share(count, Shard(part, self.shares))[0] < share(count, Shard(part, self.shares))[1]]

    def _micro_batches(self, push: Push) -> int:
        first, last = share(len(cut(self._tickets[push.step].rows, self.micro_batch_rows)) - 1, Shard(push.part, self.shares))
        return last - first

    def _rows(self, push: Push) -> int:
        ends = list(pairwise(cut(self._tickets[push.step].rows, self.micro_batch_rows)))
        first, last = share(len(ends), Shard(push.part, self.shares))
        return ends[last - 1][1] - ends[first][0]

    # ------------------------------------------------------------ small things

    def _pieces(self, masters: Mapping[str, Tensor]) -> dict[str, Piece]:
        found = {}
        for memory, blocks in ((self._dense, self.layout.learning), (self._frozen, self.layout.frozen)):
            for block, view in zip(blocks, views(memory, blocks), strict=True):
                numbers = block.of(masters[block.name].detach())
                view.copy_(numbers)
                parameter = nn.Parameter(view, requires_grad=memory is self._dense)
                if memory is self._dense:
                    self._learning.append(parameter)
                master = parameter.data if block.kept is block.dtype else numbers.clone()
                found[block.name] = Piece(parameter, parameter.data, master, block.whole, block.offset)
        return found

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until it is so; `change` is held. Raises what went wrong in a thread of the service."""
        while True:
            if self.failure is not None:
                failure = self.failure
                raise failure if isinstance(failure, DtfError) else DtfError(f"the service failed: {type(failure).__name__}: {failure}") from failure
            if ready():
                return
            heartbeat.beat("wait", max(0, self.version))
            self.change.wait(WAIT_S)

    def _clear_told(self) -> None:
        self._sums = torch.zeros(self._measures, dtype=torch.float64)
        self._norms = torch.zeros(2, dtype=torch.float64)

    def _told(self) -> StepOutput:
        output = StepOutput(self._sums, self._norms)
        self._clear_told()
        return output


def _shelves(task: Task, world: World) -> Shelves | None:
    """This server's parts of the task's tables."""
    specs = task.recipe.tables()
    if not specs:
        return None
    if task.rows is None:
        raise ConfigError(f"{type(task.recipe).__name__} has sparse tables, and nothing says how their rows learn; give sparse=NAME")
    from dtf.build import DTYPES

    kind = np.float64 if DTYPES[task.precision.param] is torch.float64 else np.float32
    shelves = Shelves({name: Shelf(SparseTable(spec, task.rows, task.seed, name, kind), world) for name, spec in specs.items()}, world)
    if task.weights is not None:
        source = task.weights.source()
        if source is None:
            raise ConfigError(f"{task.weights.place} holds no sparse tables, and {type(task.recipe).__name__} has some; give a run or a checkpoint of dtf")
        shelves.load(source, resume=False)
    return shelves
