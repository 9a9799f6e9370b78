"""The life of a trainer: it asks for work, pulls what that needs, computes, and pushes what came of it.

It holds nothing that the servers do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtf.api.strategy import RoleContext, Task
from dtf.core.errors import BusyError, ConfigError
from dtf.core.types import Shard, Train
from dtf.model.forward import to_device
from dtf.model.init import build_on_meta
from dtf.pserver.net import messages as protocol
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.compression import FORMATS, narrow, widen
from dtf.pserver.net.messages import ANY, EXCHANGE, HELLO, LATE, NO, NONE, READY, REPORT
from dtf.pserver.net.transport import Transport
from dtf.pserver.param_slices import lay_out, travelling
from dtf.pserver.server.leases import EVALUATE, Lease
from dtf.pserver.server.sync_modes import Merging
from dtf.pserver.trainer.compute import Blocks, Computed, Computing, Pulled, Setup
from dtf.pserver.trainer.group import Team
from dtf.pserver.trainer.group_compute import Gathering, Leader
from dtf.pserver.trainer.local_sgd import Local
from dtf.pserver.trainer.prefetch import DEADLINE_S, WAIT_S, Feeder, Prepared
from dtf.pserver.trainer.reader import Reading

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions


UNKNOWN = Blocks(ANY, np.empty(0))
"""Before any were pulled."""


class Trainer:
    """`servers`: what carries requests to each of them. `number`: which trainer this is. `first`: another one of this
    process, with whose parameters it computes and with whom it takes turns at reading, see `hogwild`. `team`: of which
    this process is the first, if any."""

    def __init__(
        self,
        task: Task,
        errand: RoleContext,
        strategy: PserverOptions,
        merging: Merging,
        trainers: int,
        number: int,
        servers: Sequence[Transport],
        first: Trainer | None = None,
        team: Team | None = None,
    ) -> None:
        self._task, self._errand, self._servers, self._number = task, errand, servers, number
        self._merging, self._shares = merging, merging.shares(trainers)
        self._micro_batch_rows = task.step.rows_each(self._shares * strategy.team)
        self._wire = FORMATS[strategy.wire.value]
        found = lay_out(
            build_on_meta(task.recipe),
            task.precision,
            len(servers),
            strategy.slice_parameters,
            strategy.min_block,
            strategy.placement,
        )
        layouts = [travelling(layout, self._wire) for layout in found]
        whole_norm = len(servers) > 1 and not merging.together
        device, threads = torch.device(errand.place.device), strategy.hogwild_threads
        setup = Setup(task, device, layouts, self._shares, self._micro_batch_rows, whole_norm, self._wire)
        self._prepare: Callable[[Lease, Train], Prepared]
        if team is not None:
            own = Reading(task, errand.open, device, self._micro_batch_rows, 1, team.part)
            self._computing, self._prepare = Leader(team, setup), Gathering(team, own, task, len(servers))
        elif first is not None:
            self._computing, self._prepare = (
                Computing(setup, threads=threads, first=first._computing),
                first._prepare,
            )
        else:
            self._computing, self._prepare = (
                Computing(setup, threads=threads),
                Reading(task, errand.open, device, self._micro_batch_rows, len(servers)),
            )
        self._local = Local(task, self._computing, layouts) if merging.local else None
        self._widths = {name: table.width for name, table in task.recipe.tables().items()}
        self._schemas, self._reports, self._hellos = (
            protocol.exchange_schemas(task.recipe),
            protocol.report_schemas(),
            protocol.hello_schemas(),
        )
        self._latest: list[Blocks] = first._latest if first else [UNKNOWN] * len(servers)  # the newest that were pulled
        self._evaluation = ANY  # of which the buffers are here
        self._sender = ThreadPoolExecutor(1, "sender")
        # what waits for the answer may as well ask itself
        self._start = _at_once if merging.exact else self._sender.submit
        self._sending: list[Future[Pulled | None]] = []
        self._coming: dict[tuple[int, int, int], Future[Pulled | None]] = {}  # what was asked for, by lease
        self._send_queue = strategy.send_queue
        self._name = {"trainer": number, "starter": errand.place.starter}
        self._feeder = Feeder(servers[0], self._name, self._prepare, errand.stop_requested)

    @property
    def reason(self) -> str:
        """Why the run is over."""
        return self._feeder.reason

    def run(self) -> None:
        """Work until the run is over. PeerError when a server is gone."""
        self._join()
        self._feeder.start()
        try:
            while not self._feeder.over:
                prepared = self._feeder.next(WAIT_S)
                if self._feeder.anew:
                    self._join()
                    self._feeder.joined()
                elif prepared is None:
                    self._errand.beat("wait", 0)
                elif prepared.lease.kind == EVALUATE:
                    self._evaluate(prepared)
                elif self._local is not None:
                    self._train_alone(self._local, prepared)
                else:
                    self._train(prepared)
            self._drain(0)
            self._feeder.leave()
        finally:
            self._feeder.close()
            self._sender.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ one piece of work

    def _train(self, prepared: Prepared) -> None:
        """Compute a lease.

        Its push asks for what is ready to follow; where that need not wait for this one, it is asked for at once.
        """
        lease = prepared.lease
        self._errand.beat("wait", prepared.ticket.step)
        coming = self._coming.pop(lease.key, None)
        pulled = None if coming is None else coming.result()
        if pulled is None:
            state, pulled = self._answers(*self._pull(prepared))
            if state == LATE:
                self._feeder.finished(lease)
                return
            if pulled is None:
                self._feeder.back(prepared)
                return
        # one ahead: more would only be staler
        following = None if self._merging.exact or self._coming else self._following()
        if following is not None:
            self._coming[following.lease.key] = self._sender.submit(lambda: self._answers(*self._pull(following))[1])
        self._errand.beat("step", prepared.ticket.step)
        computed = self._computing.gradients(prepared, pulled)
        self._errand.beat("wait", prepared.ticket.step)
        self._send_later(lease, self._following(), pulled.applied, computed, prepared.batch.ids, prepared.unread)

    def _following(self) -> Prepared | None:
        """What is to be computed next and has not been asked for, if its rows are there."""
        return next(
            (
                each
                for each in self._feeder.ready()
                if each.lease.kind != EVALUATE and each.lease.key not in self._coming
            ),
            None,
        )

    def _train_alone(self, local: Local, prepared: Prepared) -> None:
        """A step of this trainer's own; after the last one of the lease, what it learnt is pushed."""
        lease, first = prepared.lease, prepared.ticket is prepared.lease.tickets[0]
        self._errand.beat("step", prepared.ticket.step)
        if first:
            self._drain(0)  # else it would begin without what it learnt last
            self._ids, self._unread = [], 0
        wanted = [
            prepared.wanted.ids(server) if first else local.missing(prepared.wanted, server)
            for server in range(len(self._servers))
        ]
        if first or any(len(ids) for part in wanted for ids in part.values()):
            known = ANY if first else NONE
            requests = [self._wants(prepared, part, ANY, known) for part in wanted]
            _, pulled = self._answers([encode(self._schemas[0], *request) for request in requests], [*self._latest])
            if pulled is None:
                self._feeder.back(prepared)
                return
            if first:
                self._applied = pulled.applied
                local.begin([blocks.data for blocks in pulled.dense])
                self._latest = [UNKNOWN] * len(self._servers)  # these were blocks with their optimizer state
            for part, rows in zip(wanted, pulled.rows, strict=True):
                for name, ids in part.items():
                    local.keep(name, ids, rows[name])
        local.step(prepared)
        self._ids.append(prepared.batch.ids)
        self._unread += prepared.unread
        if prepared.ticket is lease.tickets[-1]:
            self._send_later(lease, None, self._applied, local.differences(), np.concatenate(self._ids), self._unread)

    def _evaluate(self, prepared: Prepared) -> None:
        lease = prepared.lease
        self._errand.beat("evaluate", 0)
        self._drain(0)
        _, pulled = self._answers(*self._pull(prepared, frozen=self._evaluation != lease.step))
        if pulled is None:
            self._feeder.back(prepared)
            return
        self._evaluation = lease.step
        found = self._computing.evaluate(prepared, pulled)
        arrays = {"sums": found.sums.cpu().double().numpy()}
        if found.rows is not None:
            judged = found.rows.cpu()
            arrays["judged"] = (judged if judged.dtype is torch.float64 else judged.float()).numpy()
        scalars = {"trainer": self._number, "step": lease.step, "part": lease.part, "unread": prepared.unread}
        self._servers[0].call(REPORT, encode(self._reports[0], scalars, arrays), DEADLINE_S)
        self._feeder.finished(lease)

    # ------------------------------------------------------------ messages

    def _pull(self, prepared: Prepared, frozen: bool = False) -> tuple[list[bytes], list[Blocks]]:
        """Questions to the servers for what a lease needs, once it is the lease's turn; and the blocks that they are
        told to be here.
        """
        after, held = self._after(prepared.lease), [*self._latest]
        requests = [
            self._wants(prepared, prepared.wanted.ids(server), after, held[server].stamp)
            for server in range(len(self._servers))
        ]
        return [
            encode(self._schemas[0], scalars | {"frozen": int(frozen)}, arrays) for scalars, arrays in requests
        ], held

    def _wants(
        self, prepared: Prepared, ids: dict[str, np.ndarray], after: int, known: int
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        lease = prepared.lease
        scalars = {
            "trainer": self._number,
            "pull": 1,
            "after": after,
            "train": int(lease.kind != EVALUATE),
            "known": known,
            "wait_s": WAIT_S,
        }
        scalars |= {"of_step": lease.step, "of_part": lease.part, "at": prepared.ticket.step}
        return scalars, {f"want/{name}": found for name, found in ids.items()}

    def _push(
        self,
        lease: Lease,
        seen: Sequence[int],
        computed: Computed,
        ids: np.ndarray,
        unread: int,
        following: Prepared | None,
    ) -> tuple[list[bytes], list[Blocks]]:
        """What came of a lease, for each server; and the questions for the following one, as `_pull`."""
        found, held = [], [*self._latest]
        common: dict[str, Any] = {
            "trainer": self._number,
            "push": 1,
            "step": lease.step,
            "part": lease.part,
            "epoch": lease.tickets[0].epoch,
            "unread": unread,
        }
        common |= {"finite": computed.finite, "norm": computed.norm, "skipped": computed.skipped}
        for server in range(len(self._servers)):
            scalars = common | {"seen": seen[server]}
            arrays = {"dense": computed.dense[server]}
            for name, (own, numbers) in computed.rows[server].items():
                arrays |= {f"ids/{name}": own, f"gradients/{name}": narrow(numbers, self._wire)}
            if server == 0:
                arrays |= {
                    "sums": computed.sums.cpu().double().numpy(),
                    "statistics": computed.statistics,
                    "rows": ids[ids >= 0],
                }
            if following is not None:
                more, wants = self._wants(
                    following, following.wanted.ids(server), self._after(following.lease), held[server].stamp
                )
                scalars, arrays = scalars | more, arrays | wants
            found.append(encode(self._schemas[0], scalars, arrays))
        return found, held

    def _after(self, lease: Lease) -> int:
        """Before which step all updates have to be there."""
        return lease.step if lease.kind != EVALUATE and self._merging.exact else ANY

    def _send_later(
        self,
        lease: Lease,
        following: Prepared | None,
        seen: Sequence[int],
        computed: Computed,
        ids: np.ndarray,
        unread: int,
    ) -> None:
        """Push, and ask for what follows, while this thread goes on; and have the feeder read meanwhile."""
        messages, held = self._push(lease, seen, computed, ids, unread, following)
        self._feeder.leaving(lease)
        sending = self._start(self._send, messages, held, lease, following is not None)
        self._sending.append(sending)
        if following is not None:
            self._coming[following.lease.key] = sending
        self._drain(self._send_queue)

    def _send(self, messages: Sequence[bytes], held: Sequence[Blocks], lease: Lease, pulls: bool) -> Pulled | None:
        """Push, in the thread that sends."""
        _, pulled = self._answers(messages, held, pulls)
        self._feeder.finished(lease)
        return pulled

    def _drain(self, left: int) -> None:
        """Wait until so few pushes are on their way. Raises what one of them met."""
        while len(self._sending) > left:
            self._sending.pop(0).result()

    def _answers(
        self, messages: Sequence[bytes], held: Sequence[Blocks], pulls: bool = True
    ) -> tuple[int, Pulled | None]:
        """What the servers answer.

        `held`: the blocks that they were told to be here, which are those of an answer without any.
        """
        if len(self._servers) == 1:
            answers = [self._servers[0].call(EXCHANGE, messages[0], DEADLINE_S)]
        else:
            pending = [
                transport.start(EXCHANGE, message, DEADLINE_S)
                for transport, message in zip(self._servers, messages, strict=True)
            ]
            answers = [each.result() for each in pending]
        if not pulls:
            return READY, None
        found = [decode(self._schemas[1], answer) for answer in answers]
        states = [int(answer.scalars["pulled"]) for answer in found]
        if LATE in states or NO in states:
            return (LATE if LATE in states else NO), None
        dense = [_blocks(answer, here) for answer, here in zip(found, held, strict=True)]
        for server, (answer, blocks) in enumerate(zip(found, dense, strict=True)):
            if blocks.stamp > self._latest[server].stamp:
                self._latest[server] = blocks
            if "frozen" in answer.arrays:
                self._computing.take_frozen(server, answer.arrays["frozen"])
        rows, applied = [self._rows(answer) for answer in found], [int(answer.scalars["applied"]) for answer in found]
        return READY, Pulled(dense, rows, applied, float(found[0].scalars["scale"]))

    def _rows(self, answer: Message) -> dict[str, np.ndarray]:
        return {name: widen(answer.arrays[f"rows/{name}"], answer.dtypes[f"rows/{name}"]) for name in self._widths}

    # ------------------------------------------------------------ beginning

    def warmup(self) -> None:
        """A pass whose results are forgotten: what this strategy cannot run is known before a server is asked."""
        batch = self._errand.open("train", Shard(0, self._shares), self._micro_batch_rows).get(0, 0)
        assert batch is not None
        self._computing.warmup(to_device(batch, self._computing.device, self._task))

    def _join(self) -> None:
        """Tell server 0 that this trainer is there, and wait until the servers have their state.

        ConfigError when this one is of another kind.
        """
        facts = np.frombuffer(json.dumps(self._errand.facts).encode(), np.uint8)
        ready = False
        while not ready:
            self._errand.beat("wait", 0)
            answer = decode(
                self._hellos[1],
                self._servers[0].call(HELLO, encode(self._hellos[0], self._name, {"facts": facts}), DEADLINE_S),
            )
            refusal = answer.arrays["refusal"].tobytes().decode()
            if refusal:
                raise BusyError(refusal) if answer.scalars["taken"] else ConfigError(refusal)
            ready = bool(answer.scalars["ready"])
        self._evaluation = ANY
        self._coming.clear()
        question = encode(self._schemas[0], {"trainer": self._number, "frozen": 1}, {})
        for server, transport in enumerate(self._servers):
            answer = decode(self._schemas[1], transport.call(EXCHANGE, question, DEADLINE_S))
            self._computing.take_frozen(server, answer.arrays["frozen"])


def _blocks(answer: Message, held: Blocks) -> Blocks:
    """Of one server's answer; `held`: see `Trainer._answers`."""
    return Blocks(int(answer.scalars["stamp"]), answer.arrays["dense"]) if "dense" in answer.arrays else held


def _at_once(send: Callable[..., Pulled | None], *arguments: Any) -> Future[Pulled | None]:
    """As `Executor.submit`, without a thread."""
    done: Future[Pulled | None] = Future()
    done.set_result(send(*arguments))
    return done
