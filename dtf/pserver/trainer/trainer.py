"""The loop of a trainer: it asks server 0 for work, pulls what that needs, computes, and pushes the results.

A trainer keeps no state of its own: all of it is on the servers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtf.api.helper_roles import RoleContext
from dtf.api.task import Task
from dtf.core.errors import BusyError, ConfigError
from dtf.core.types import WHOLE, Train
from dtf.model.author_errors import name_author_errors
from dtf.model.forward import to_device
from dtf.model.init import construct
from dtf.model.metric_checks import TRIAL_ROWS, check_evaluated
from dtf.pserver.leases import EVALUATE, Lease
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Parts, decode, encode
from dtf.pserver.net.compression import WIRE_DTYPES
from dtf.pserver.net.messages import ANY, HELLO, LATE, NO, NONE, REPORT
from dtf.pserver.net.transport import Transport
from dtf.pserver.param_slices import lay_out, wire_layout
from dtf.pserver.sync_modes import SyncMode
from dtf.pserver.trainer.compute import LeaseResult, ModelSetup, ParamBlocks, PulledState, TrainerModel
from dtf.pserver.trainer.exchange import PULL_WAIT_S, Exchange
from dtf.pserver.trainer.group import TrainerGroup
from dtf.pserver.trainer.group_compute import GroupReader, LeaderModel
from dtf.pserver.trainer.local_sgd import LocalSgd
from dtf.pserver.trainer.prefetch import DEADLINE_S, WAIT_S, Prefetcher, PreparedBatch
from dtf.pserver.trainer.reader import BatchReader, rows_to_try

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

SEND_QUEUE = 1
"""Pushes on their way while the next batch is computed, in modes other than sync."""

SOON_S = 0.01
"""How long the answer to a push that is an update by itself may wait for the lease in its place, which is opened
as soon as the update is made.
"""


class Trainer:
    """One trainer of a run.

    `trainers`: how many there are in all; `number`: which of them this is. `servers`: a transport to each server.
    `first`: another trainer of this process, whose parameters and reader this one uses too, see `hogwild`. `team`: the
    processes of this trainer, where it has several; this process is the first of them.
    """

    def __init__(
        self,
        task: Task,
        context: RoleContext,
        strategy: PserverOptions,
        sync_mode: SyncMode,
        trainers: int,
        number: int,
        servers: Sequence[Transport],
        first: Trainer | None = None,
        team: TrainerGroup | None = None,
    ) -> None:
        self._task, self._context, self._servers, self._number = task, context, servers, number
        self._synchronous, self._immediate = sync_mode.synchronous, sync_mode.immediate
        self._shares = sync_mode.shares(trainers)
        self._micro_batch_rows = task.step.rows_each(self._shares * strategy.team)
        setup = self._setup(strategy, sync_mode)
        device, threads, rows = setup.device, strategy.hogwild_threads, self._micro_batch_rows
        self._prepare: Callable[[Lease, Train], PreparedBatch]
        if team is not None:
            reader = BatchReader(task, context.open, device, rows, 1, team.part)
            self._model, self._prepare = LeaderModel(team, setup), GroupReader(team, reader, task, len(servers))
        elif first is not None:
            self._model = TrainerModel(setup, threads=threads, first=first._model)
            self._prepare = first._prepare
        else:
            self._model = TrainerModel(setup, threads=threads)
            self._prepare = BatchReader(task, context.open, device, rows, len(servers))
        self._local_sgd = LocalSgd(task, self._model, setup.layouts) if sync_mode.local_training else None
        self._exchange = Exchange(
            task.recipe,
            strategy,
            servers,
            number,
            self._model,
            sync_mode.synchronous,
            first._exchange if first else None,
        )
        self._reports, self._hellos = messages.report_schemas(), messages.hello_schemas()
        self._evaluation = ANY  # number of the evaluation whose buffers are in the model
        self._sender = ThreadPoolExecutor(1, "sender")
        # a synchronous trainer waits for the answer anyway, and needs no thread for it
        self._start = _call_now if sync_mode.synchronous else self._sender.submit
        self._sending: list[Future[PulledState | None]] = []
        self._pulling: dict[tuple[int, int, int], Future[PulledState | None]] = {}  # by lease
        self._identity = {"trainer": number, "starter": context.place.launch_id}
        self._prefetcher = Prefetcher(servers[0], self._identity, self._prepare, context.stop_requested)

    def _setup(self, strategy: PserverOptions, sync_mode: SyncMode) -> ModelSetup:
        task, servers, wire = self._task, len(self._servers), WIRE_DTYPES[strategy.wire.value]
        layouts = lay_out(
            construct(task.recipe),
            task.precision,
            servers,
            not task.optimizer.by_tensor,
            strategy.min_block,
            strategy.placement,
        )
        return ModelSetup(
            task,
            torch.device(self._context.place.device),
            [wire_layout(layout, wire) for layout in layouts],
            self._shares,
            self._micro_batch_rows,
            servers > 1 and not sync_mode.collective,
            wire,
            _no_buffers(strategy, sync_mode),
            0 if sync_mode.synchronous else SEND_QUEUE,
        )

    @property
    def reason(self) -> str:
        """Why the run is over."""
        return self._prefetcher.reason

    def run(self) -> None:
        """Work until the run is over. PeerError when a server is lost."""
        self._join()
        self._prefetcher.start()
        try:
            while not self._prefetcher.over:
                prepared = self._prefetcher.next(WAIT_S)
                if self._prefetcher.must_rejoin:
                    self._join()
                    self._prefetcher.rejoined()
                elif prepared is None:
                    self._context.beat("wait", 0)
                    self._drain_done()
                elif prepared.lease.kind == EVALUATE:
                    self._evaluate(prepared)
                elif self._local_sgd is not None:
                    self._train_locally(self._local_sgd, prepared)
                else:
                    self._train(prepared)
            self._drain(0)
            self._prefetcher.leave()
        finally:
            self._prefetcher.close()
            self._sender.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ one piece of work

    def _train(self, prepared: PreparedBatch) -> None:
        """Compute the gradients of a lease and push them.

        The push also pulls for the next lease. Where that need not see this push, it is pulled before computing.
        """
        lease = prepared.lease
        self._context.beat("wait", prepared.ticket.step)
        pulling = self._pulling.pop(lease.key, None)
        pulled = None if pulling is None else pulling.result()
        if pulled is None:
            state, pulled = self._pull(prepared)
            if state == LATE:
                self._prefetcher.finished(lease)
                return
            if pulled is None:
                self._prefetcher.put_back(prepared)
                return
        # one lease ahead: more would only be staler
        following = None if self._synchronous or self._pulling else self._next_to_pull()
        if following is not None:
            self._pulling[following.lease.key] = self._sender.submit(lambda: self._exchange.pull(following)[1])
        self._context.beat("step", prepared.ticket.step)
        result = self._model.gradients(prepared, pulled)
        self._context.beat("wait", prepared.ticket.step)
        self._push(lease, self._next_to_pull(), pulled.applied, result, prepared.batch.ids, prepared.unread)

    def _pull(self, prepared: PreparedBatch) -> tuple[int, PulledState | None]:
        """Ask until the answer is there, or for WAIT_S; see `Exchange.pull`. Ends sooner when earlier work has come,
        for which this answer may wait, and when a server says no at once, as it does once it has ended.

        Without an answer the caller puts the batch back, and so asks for one lease more.
        """
        until = monotonic() + WAIT_S
        while True:
            asked = monotonic()
            state, pulled = self._exchange.pull(prepared)
            earlier = any(other.order < prepared.order for other in self._prefetcher.ready())
            now = monotonic()
            if state != NO or earlier or now > until or now < asked + PULL_WAIT_S:
                return state, pulled

    def _next_to_pull(self) -> PreparedBatch | None:
        """The next training batch that is read and for which nothing was pulled yet; None where there is none."""
        return next(
            (
                prepared
                for prepared in self._prefetcher.ready()
                if prepared.lease.kind != EVALUATE and prepared.lease.key not in self._pulling
            ),
            None,
        )

    def _train_locally(self, local_sgd: LocalSgd, prepared: PreparedBatch) -> None:
        """One local step (mode geo); after the last one of the lease, the changes are pushed."""
        lease, first = prepared.lease, prepared.ticket is prepared.lease.tickets[0]
        self._context.beat("step", prepared.ticket.step)
        if first:
            self._drain(0)  # else the state that it begins with would lack its own last push
            self._sample_ids, self._unread = [], 0
        missing = [
            prepared.row_request.ids(server) if first else local_sgd.missing(prepared.row_request, server)
            for server in range(len(self._servers))
        ]
        if first or any(len(ids) for part in missing for ids in part.values()):
            pulled = self._exchange.pull_rows(prepared, missing, ANY if first else NONE)
            if pulled is None:
                self._prefetcher.put_back(prepared)
                return
            if first:
                self._applied = pulled.applied
                local_sgd.begin([blocks.data for blocks in pulled.dense])
                self._exchange.forget_blocks()
            for part, rows in zip(missing, pulled.rows, strict=True):
                for name, ids in part.items():
                    local_sgd.keep(name, ids, rows[name])
        local_sgd.step(prepared)
        self._sample_ids.append(prepared.batch.ids)
        self._unread += prepared.unread
        if prepared.ticket is lease.tickets[-1]:
            sample_ids = np.concatenate(self._sample_ids)
            self._push(lease, None, self._applied, local_sgd.differences(), sample_ids, self._unread)

    def _evaluate(self, prepared: PreparedBatch) -> None:
        """Evaluate one batch and report the result to server 0."""
        lease = prepared.lease
        self._context.beat("evaluate", 0)
        self._drain(0)
        _, pulled = self._exchange.pull(prepared, frozen=self._evaluation != lease.step)
        if pulled is None:
            self._prefetcher.put_back(prepared)
            return
        self._evaluation = lease.step
        evaluated = self._model.evaluate(prepared, pulled)
        arrays = {"sums": evaluated.sums.cpu().double().numpy()}
        if evaluated.rows is not None:
            eval_outputs = evaluated.rows.cpu()
            arrays["judged"] = (eval_outputs if eval_outputs.dtype is torch.float64 else eval_outputs.float()).numpy()
        scalars = {"trainer": self._number, "step": lease.step, "part": lease.part, "unread": prepared.unread}
        self._servers[0].call(REPORT, encode(self._reports[0], scalars, arrays), DEADLINE_S)
        self._prefetcher.finished(lease)

    # ------------------------------------------------------------ pushes under way

    def _push(
        self,
        lease: Lease,
        following: PreparedBatch | None,
        seen: Sequence[int],
        result: LeaseResult,
        sample_ids: np.ndarray,
        unread: int,
    ) -> None:
        """Push, and pull for `following`, in the sender's thread; wait while more than SEND_QUEUE are under way."""
        question = self._prefetcher.sending(lease, SOON_S if self._immediate else 0.0)
        requests, known = self._exchange.push_requests(lease, seen, result, sample_ids, unread, following, question)
        sending = self._start(self._send, requests, known, lease, following is not None, question is not None)
        self._sending.append(sending)
        if following is not None:
            self._pulling[following.lease.key] = sending
        self._drain(SEND_QUEUE)

    def _send(
        self, requests: Sequence[Parts], known: Sequence[ParamBlocks], lease: Lease, pulls: bool, asks: bool
    ) -> PulledState | None:
        _, pulled = self._exchange.send(requests, known, pulls, self._prefetcher.answered if asks else None)
        self._prefetcher.finished(lease)
        return pulled

    def _drain_done(self) -> None:
        """Raise the error of a push that failed: without its answer there may be no work that comes to it."""
        while self._sending and self._sending[0].done():
            self._sending.pop(0).result()

    def _drain(self, left: int) -> None:
        """Wait until at most `left` pushes are under way. Raises the error of a push that failed."""
        while len(self._sending) > left:
            self._sending.pop(0).result()

    # ------------------------------------------------------------ the start

    def warmup(self) -> None:
        """Passes whose results are dropped: a model that cannot run fails here, before servers are asked."""
        with name_author_errors():
            self._warmup()

    def follow(self, first: Trainer) -> None:
        """In place of `warmup`, after that of another trainer of this process. ConfigError where models differ."""
        self._model.follow(first._model)

    def _warmup(self) -> None:
        batch = rows_to_try(self._context.open, self._shares, self._micro_batch_rows)
        self._model.warmup(to_device(batch, self._model.device, self._task))
        rows = min(TRIAL_ROWS, self._task.step.evaluation_rows)
        batch = self._context.open("eval", WHOLE, rows).get(0, 0)
        assert batch is not None
        evaluated = self._model.trial_eval(to_device(batch, self._model.device, self._task))
        check_evaluated(self._task.recipe, evaluated, batch, self._task.recipe.objective[0])
        check = self._task.start_check
        if check.fresh and check.keep is not None:
            check.keep(check)

    def _join(self) -> None:
        """Tell server 0 that this trainer is there, wait until the servers have their state, and pull what is frozen.

        ConfigError when this process differs from server 0 in what all must have alike; BusyError when another trainer
        has this number.
        """
        said = {
            "facts": self._context.facts,
            "uneven": sorted(self._model.replica.statistics.uneven),
            "start": self._model.start,
        }
        texts = {
            name: np.frombuffer(json.dumps(value).encode(), np.uint8)
            for name, value in said.items()
            if value is not None
        }
        ready = False
        while not ready:
            self._context.beat("wait", 0)
            request = encode(self._hellos[0], self._identity, texts)
            answer = decode(self._hellos[1], self._servers[0].call(HELLO, request, DEADLINE_S))
            refusal = answer.arrays["refusal"].tobytes().decode()
            if refusal:
                raise BusyError(refusal) if answer.scalars["taken"] else ConfigError(refusal)
            ready = bool(answer.scalars["ready"])
        self._evaluation = ANY
        self._pulling.clear()
        self._exchange.pull_frozen()


def _no_buffers(strategy: PserverOptions, sync_mode: SyncMode) -> str:
    """Why servers cannot keep buffers that passes change, and what to do; empty where they can."""
    if not sync_mode.synchronous:
        return f"with strategy.mode={strategy.mode.value} no two trainers start from the same; use sync"
    if strategy.record:
        return "strategy.record writes no order of them; leave it out"
    if strategy.team > 1:
        return f"the processes of a trainer (strategy.team={strategy.team}) do not exchange it; use more trainers"
    return ""


def _call_now(send: Callable[..., PulledState | None], *arguments: Any) -> Future[PulledState | None]:
    """As `Executor.submit`, in the caller's thread."""
    done: Future[PulledState | None] = Future()
    done.set_result(send(*arguments))
    return done
