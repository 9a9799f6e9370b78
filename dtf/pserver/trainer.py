"""The life of a trainer: it asks for work, pulls what that needs, computes, and pushes what came of it. It holds nothing that the servers do not."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtf.build import cast_model, draw_model
from dtf.errors import ConfigError
from dtf.passes import loss_dtype, received, rows_of, stand_ins, to_device
from dtf.pserver import protocol
from dtf.pserver.blocks import lay_out, views
from dtf.pserver.feeder import DEADLINE_S, WAIT_S, Feeder, Prepared
from dtf.pserver.ledger import EVALUATE, Lease
from dtf.pserver.merging import Merging
from dtf.pserver.protocol import EXCHANGE, HELLO, LATE, NO, READY, REPORT
from dtf.pserver.rows import Wanted
from dtf.pserver.transport import Transport
from dtf.pserver.wire import Message, decode, encode
from dtf.sampler import cut, share
from dtf.spmd import Replica
from dtf.strategy import Errand, Task
from dtf.values import Shard, Train

if TYPE_CHECKING:
    from dtf.loader import Loader
    from dtf.strategies.pserver import Pserver

warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable")  # what arrives is read, and copied

ANY = -1
"""In the place of a step or a stamp: whatever is there."""


class Pulled(NamedTuple):
    """What the servers gave for one lease, in their order."""

    dense: list[np.ndarray | None]  # learning blocks; None: those that came last
    rows: list[dict[str, np.ndarray]]
    applied: list[int]
    scale: float


class Computed(NamedTuple):
    """What came of one lease, by server."""

    dense: list[np.ndarray]
    rows: list[dict[str, tuple[np.ndarray, np.ndarray]]]
    sums: Tensor  # (M,)
    statistics: np.ndarray
    norm: float


class Trainer:
    """`servers`: what carries requests to each of them. `number`: which trainer this is."""

    def __init__(self, task: Task, errand: Errand, strategy: Pserver, merging: Merging, trainers: int, number: int, servers: Sequence[Transport]) -> None:
        self._task, self._errand, self._servers, self._number = task, errand, servers, number
        self._merging, self._shares = merging, merging.shares(trainers)
        self._micro_batch_rows = task.step.rows_each(self._shares)
        self._device = torch.device(errand.place.device)
        model = draw_model(task.recipe, task.seed, task.weights)
        cast_model(model, task.precision, self._device)
        self._layouts = lay_out(model, task.precision, len(servers), strategy.slice_parameters, strategy.min_block, strategy.placement)
        self._replica = Replica(model, task, self._device)
        parameters = dict(model.named_parameters())
        self._parameters = parameters
        self._learning = [[block.of(parameters[block.name].data) for block in layout.learning] for layout in self._layouts]
        self._outgoing = [torch.zeros(layout.bytes, dtype=torch.uint8, device=self._device) for layout in self._layouts]
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._schemas, self._reports, self._hellos = protocol.exchange_schemas(task.recipe), protocol.report_schemas(), protocol.hello_schemas()
        self._loaders: dict[tuple[int, int, int], Loader] = {}
        self._stamps = [ANY] * len(servers)  # of the learning blocks that were pulled last
        self._evaluation = ANY  # of which the buffers are here
        self._norm_wanted = len(servers) > 1 and not merging.exact
        self._sender = ThreadPoolExecutor(1, "sender")
        self._sending: list[Future[None]] = []
        self._send_queue = strategy.send_queue
        self._feeder = Feeder(servers[0], number, self._prepare, self._join, errand.stop_requested)

    def run(self) -> None:
        """Work until the run is over. PeerError when a server is gone."""
        self._rehearse()
        self._join()
        self._feeder.start()
        try:
            ahead: tuple[Lease, Pulled] | None = None  # what came with the answer to the last push
            while not self._feeder.over:
                prepared = self._feeder.next(WAIT_S)
                if prepared is None:
                    self._errand.beat("wait", 0)
                elif prepared.lease.kind == EVALUATE:
                    self._evaluate(prepared)
                else:
                    ahead = self._train(prepared, ahead)
            self._drain(0)
        finally:
            self._feeder.close()
            self._sender.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ one piece of work

    def _train(self, prepared: Prepared, ahead: tuple[Lease, Pulled] | None) -> tuple[Lease, Pulled] | None:
        lease = prepared.lease
        self._errand.beat("step", lease.step)
        pulled = prepared.pulled or (ahead[1] if ahead is not None and ahead[0] == lease else None)
        if pulled is None:
            state, pulled = self._pull(prepared)
            if state == LATE:
                self._feeder.finished(lease)
                return None
            if pulled is None:
                self._feeder.back(prepared)
                return None
        computed = self._compute(prepared, pulled)
        if self._merging.exact:
            following = self._feeder.peek()
            if following is not None and following.lease.kind == EVALUATE:
                following = None
            _, found = self._push(prepared, pulled, computed, following)
            self._feeder.finished(lease)
            return (following.lease, found) if following is not None and found is not None else None
        messages = self._messages(prepared, pulled, computed, None)
        self._drain(self._send_queue)
        self._sending.append(self._sender.submit(self._send, messages, lease))
        return None

    def _evaluate(self, prepared: Prepared) -> None:
        lease = prepared.lease
        self._errand.beat("evaluate", 0)
        self._drain(0)
        _, pulled = self._pull(prepared, frozen=self._evaluation != lease.step)
        if pulled is None:
            self._feeder.back(prepared)
            return
        self._evaluation = lease.step
        self._load(pulled)
        found = self._replica.evaluate(prepared.wanted.fill(prepared.batch, pulled.rows, self._device))
        arrays = {"sums": found.sums.cpu().double().numpy()}
        if found.rows is not None:
            judged = found.rows.cpu()
            arrays["judged"] = (judged if judged.dtype is torch.float64 else judged.float()).numpy()
        scalars = {"trainer": self._number, "step": lease.step, "part": lease.part, "unread": prepared.unread}
        self._servers[0].call(REPORT, encode(self._reports[0], scalars, arrays), DEADLINE_S)
        self._feeder.finished(lease)

    def _prepare(self, lease: Lease) -> Prepared:
        """Rows of a lease; called by the feeder's thread."""
        key = (lease.kind, lease.part if lease.kind != EVALUATE else 0, lease.shares)
        if key not in self._loaders:
            split, rows = ("eval", self._task.step.batch_size) if lease.kind == EVALUATE else ("train", self._micro_batch_rows)
            self._loaders[key] = self._errand.open(split, Shard(key[1], lease.shares), rows)
        loader = self._loaders[key]
        loader.ahead([(lease.epoch, lease.index)])
        batch = loader.get(lease.epoch, lease.index)
        assert batch is not None
        unread = int(((batch.weight == 0).numpy() & (batch.ids >= 0)).sum())
        batch = received(to_device(batch, self._device, self._task), self._task)
        prepared = Prepared(lease, batch, Wanted(batch, self._widths, len(self._servers)), unread)
        if not self._merging.exact and lease.kind != EVALUATE:  # pulled while the one before it is computed
            prepared = prepared._replace(pulled=self._pull(prepared)[1])
        return prepared

    def _compute(self, prepared: Prepared, pulled: Pulled) -> Computed:
        lease, replica = prepared.lease, self._replica
        self._load(pulled)
        batch = prepared.wanted.fill(prepared.batch, pulled.rows, self._device)
        bounds = cut(lease.rows, self._micro_batch_rows)
        shard = Shard(lease.part, lease.shares)
        replica.model.train()
        replica.statistics.forget(lease.step)
        ticket = Train(lease.step, lease.epoch, lease.index, lease.rows, lease.lr)
        factor = torch.tensor(pulled.scale / lease.rows, dtype=loss_dtype(self._task), device=self._device)
        sums = replica.accumulate(ticket, batch, bounds, share(len(bounds) - 1, shard), shard, factor)
        for layout, memory in zip(self._layouts, self._outgoing, strict=True):
            gradients = [(self._parameters[block.name].grad, block) for block in layout.learning]
            here = views(memory, layout.learning)
            torch._foreach_copy_(
                here, [torch.zeros_like(view) if grad is None else block.of(grad) for (grad, block), view in zip(gradients, here, strict=True)]
            ) if here else None
        for parameter in self._parameters.values():
            parameter.grad = None
        rows = prepared.wanted.gradients(replica.row_gradients)
        dense = [memory.cpu().numpy() for memory in self._outgoing]
        return Computed(dense, rows, sums, replica.statistics.added().cpu().numpy(), self._norm(rows) if self._norm_wanted else 0.0)

    def _norm(self, rows: Sequence[Mapping[str, tuple[np.ndarray, np.ndarray]]]) -> float:
        """Of the whole gradient, in this order: the same for all servers."""
        from dtf.sparse import squares

        total = sum(squares(gradients) for part in rows for _, gradients in part.values())
        for layout, memory in zip(self._layouts, self._outgoing, strict=True):
            total += sum(float(view.double().square().sum()) for view in views(memory, layout.learning))
        return math.sqrt(total)

    @torch.no_grad()
    def _load(self, pulled: Pulled) -> None:
        """Put pulled blocks into the model."""
        for layout, into, arrived in zip(self._layouts, self._learning, pulled.dense, strict=True):
            if arrived is not None and into:
                torch._foreach_copy_(into, views(torch.from_numpy(arrived).to(self._device), layout.learning))

    # ------------------------------------------------------------ messages

    def _pull(self, prepared: Prepared, frozen: bool = False) -> tuple[int, Pulled | None]:
        """What the servers have for a lease, once it is the lease's turn; else how it stands."""
        requests = [self._wants(prepared, server, frozen) for server in range(len(self._servers))]
        return self._answers([encode(self._schemas[0], scalars, arrays) for scalars, arrays in requests])

    def _wants(self, prepared: Prepared, server: int, frozen: bool = False) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        train = prepared.lease.kind != EVALUATE
        after = prepared.lease.step if train and self._merging.exact else ANY
        scalars = {
            "trainer": self._number,
            "pull": 1,
            "after": after,
            "train": int(train),
            "known": self._stamps[server],
            "frozen": int(frozen),
            "wait_s": WAIT_S,
        }
        return scalars, {f"want/{name}": ids for name, ids in prepared.wanted.ids(server).items()}

    def _push(self, prepared: Prepared, pulled: Pulled, computed: Computed, following: Prepared | None) -> tuple[int, Pulled | None]:
        """Gradients go, and what the following lease needs comes back."""
        return self._answers(self._messages(prepared, pulled, computed, following), following is not None)

    def _messages(self, prepared: Prepared, pulled: Pulled, computed: Computed, following: Prepared | None) -> list[bytes]:
        lease = prepared.lease
        finite = math.isfinite(computed.norm)
        found = []
        for server in range(len(self._servers)):
            scalars: dict[str, Any] = {
                "trainer": self._number,
                "push": 1,
                "step": lease.step,
                "part": lease.part,
                "epoch": lease.epoch,
                "unread": prepared.unread,
            }
            scalars |= {"finite": int(finite), "norm": computed.norm if finite else 0.0, "seen": pulled.applied[server]}
            arrays = {"dense": computed.dense[server]}
            for name, (ids, gradients) in computed.rows[server].items():
                arrays |= {f"ids/{name}": ids, f"gradients/{name}": gradients}
            if server == 0:
                ids = prepared.batch.ids
                arrays |= {"sums": computed.sums.cpu().double().numpy(), "statistics": computed.statistics, "rows": ids[ids >= 0]}
            if following is not None:
                more, wants = self._wants(following, server)
                scalars, arrays = scalars | more, arrays | wants
            found.append(encode(self._schemas[0], scalars, arrays))
        return found

    def _send(self, messages: Sequence[bytes], lease: Lease) -> None:
        """Push, in the thread that sends."""
        self._answers(messages, pulls=False)
        self._feeder.finished(lease)

    def _drain(self, left: int) -> None:
        """Wait until so few pushes are on their way. Raises what one of them met."""
        while len(self._sending) > left:
            self._sending.pop(0).result()

    def _answers(self, messages: Sequence[bytes], pulls: bool = True) -> tuple[int, Pulled | None]:
        if len(self._servers) == 1:
            answers = [self._servers[0].call(EXCHANGE, messages[0], DEADLINE_S)]
        else:
            pending = [transport.start(EXCHANGE, message, DEADLINE_S) for transport, message in zip(self._servers, messages, strict=True)]
            answers = [each.result() for each in pending]
        if not pulls:
            return READY, None
        found = [decode(self._schemas[1], answer) for answer in answers]
        states = [int(answer.scalars["pulled"]) for answer in found]
        if LATE in states or NO in states:
            return (LATE if LATE in states else NO), None
        for server, answer in enumerate(found):
            if "dense" in answer.arrays:
                self._stamps[server] = int(answer.scalars["stamp"])
            if "frozen" in answer.arrays:
                self._take_frozen(server, answer.arrays["frozen"])
        return READY, Pulled(
            [answer.arrays.get("dense") for answer in found],
            [self._rows(answer) for answer in found],
            [int(answer.scalars["applied"]) for answer in found],
            float(found[0].scalars["scale"]),
        )

    def _rows(self, answer: Message) -> dict[str, np.ndarray]:
        return {name: answer.arrays[f"rows/{name}"] for name in self._widths}

    @torch.no_grad()
    def _take_frozen(self, server: int, data: np.ndarray) -> None:
        """Blocks that do not learn, and server 0's buffers."""
        layout, memory = self._layouts[server], torch.from_numpy(data)
        for block, view in zip(layout.frozen, views(memory, layout.frozen), strict=True):
            block.of(self._parameters[block.name].data).copy_(view)
        at = layout.frozen_bytes
        if server == 0:
            for _, buffer in self._replica.model.named_buffers():
                size = buffer.numel() * buffer.element_size()
                buffer.copy_(memory[at : at + size].clone().view(buffer.dtype).view(buffer.shape))
                at += size

    # ------------------------------------------------------------ beginning

    def _rehearse(self) -> None:
        """A pass whose results are forgotten: what this strategy cannot run is known before a server is asked."""
        batch = self._errand.open("train", Shard(0, self._shares), self._micro_batch_rows).get(0, 0)
        assert batch is not None
        batch = received(to_device(batch, self._device, self._task), self._task)
        batch = batch._replace(inputs=stand_ins(batch.inputs, self._task.recipe.tables()))
        self._replica.rehearse(rows_of(batch, 0, 4), spread=self._shares > 1)

    def _join(self) -> None:
        """Tell server 0 that this trainer is there, and wait until the servers have their state. ConfigError when this one is of another kind."""
        facts = np.frombuffer(json.dumps(self._errand.facts).encode(), np.uint8)
        ready = False
        while not ready:
            self._errand.beat("wait", 0)
            answer = decode(self._hellos[1], self._servers[0].call(HELLO, encode(self._hellos[0], {"trainer": self._number}, {"facts": facts}), DEADLINE_S))
            refusal = answer.arrays["refusal"].tobytes().decode()
            if refusal:
                raise ConfigError(refusal)
            ready = bool(answer.scalars["ready"])
        self._stamps = [ANY] * len(self._servers)
        first = self._frozen_wanted()
        self._evaluation = ANY
        for server, message in enumerate(first):
            answer = decode(self._schemas[1], self._servers[server].call(EXCHANGE, message, DEADLINE_S))
            self._take_frozen(server, answer.arrays["frozen"])

    def _frozen_wanted(self) -> list[bytes]:
        return [encode(self._schemas[0], {"trainer": self._number, "frozen": 1}, {}) for _ in self._servers]


Connect = Callable[[int], Transport]
"""What carries requests to a server, by its number."""
