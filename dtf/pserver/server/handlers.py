"""The handlers of a server's requests: messages in, messages out. Independent of gRPC; threads of the service call
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from dtf.api.task import Task
from dtf.core.consistency import describe_differences
from dtf.core.errors import ConfigError
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Buffer, Message, Named, decode, encode, in_parts
from dtf.pserver.net.compression import compress, decompress
from dtf.pserver.net.messages import EXCHANGE, HELLO, LATE, LEASE, NO, OVER, READY, REPORT
from dtf.pserver.net.shared_memory import InPlace, Put
from dtf.pserver.net.transport import Refused
from dtf.pserver.push import Push
from dtf.pserver.record.recorder import Pull
from dtf.pserver.row_routing import RowGradients
from dtf.pserver.same_start import TrainerStart, start_difference
from dtf.pserver.server.program import ServerProgram
from dtf.strategies.start_check import TOLERANCES

LONGEST_WAIT_S = 5.0
"""A handler waits at most so long for something to happen, whatever the request asks for."""

SHOWS = 1 << 24
"""A batch shows an id less often: up to there float32 counts exactly."""

SILENT = -1.0
"""In the place of the time when a trainer was heard: not since the question."""


class Servicer:
    """The request handlers of one server; `handlers`: name of a method -> handler.

    `facts`: what a trainer must have alike, see `dtf.core.consistency`. `lease_s`: a trainer that is silent for longer
    loses its leases.
    """

    def __init__(self, program: ServerProgram, task: Task, facts: dict[str, Any], rank: int, lease_s: float) -> None:
        self._program, self._facts, self._lease_s = program, facts, lease_s
        self._names, self._lives = list(task.recipe.tables()), task.rows is not None and task.rows.lives
        self._leads, self._metric_count = rank == 0, 1 + len(task.recipe.train_metrics)
        self._bound = TOLERANCES[task.precision.compute]
        self._first: tuple[int, TrainerStart] | None = None  # the trainer that joined first, and its model
        self._hello, self._lease = messages.hello_schemas(), messages.lease_schemas()
        self._exchange, self._report = messages.exchange_schemas(task.recipe), messages.report_schemas()
        self.handlers: dict[str, Callable[[bytes], bytes]] = {EXCHANGE: InPlace(self.exchange)}
        if rank == 0:
            self.handlers |= {HELLO: self.hello, LEASE: self.lease, REPORT: self.report}

    def hello(self, data: bytes) -> bytes:
        """HELLO: a trainer joins, once this server has its state."""
        message = decode(self._hello[0], data)
        trainer, launch_id = int(message.scalars["trainer"]), str(message.scalars.get("starter", ""))
        program = self._program
        refusal = describe_differences(
            {"server 0": self._facts, f"trainer {trainer}": messages.json_of(message, "facts")}
        )
        taken, uneven = False, messages.json_of(message, "uneven") if "uneven" in message.arrays else []
        if not isinstance(uneven, list) or not all(isinstance(name, str) for name in uneven):
            raise Refused("uneven is no list of names")
        start = _start_in(message)
        with program.change:
            ready = program.change.wait_for(lambda: program.begun or program.over, LONGEST_WAIT_S)
            if ready and not refusal:
                asked = time.monotonic()
                program.change.wait_for(lambda: self._other(trainer, launch_id, asked) != SILENT, LONGEST_WAIT_S)
                heard = self._other(trainer, launch_id, asked)
                ready, taken = heard is None, heard not in (None, SILENT)
                refusal = (self._other_start(trainer, start) or self._release(frozenset(uneven))) if ready else ""
                if ready and not refusal:
                    program.ledger.join(trainer, time.monotonic(), launch_id)
                    program.change.notify_all()
        if taken:
            refusal = (
                f"another trainer of this run has the number {trainer} and is at work; give each a "
                "launcher.id of its own"
            )
        text = np.frombuffer(refusal.encode(errors="backslashreplace"), np.uint8)
        return encode(self._hello[1], {"ready": int(ready), "taken": int(taken)}, {"refusal": text})

    def _other_start(self, trainer: int, start: TrainerStart | None) -> str:
        """Why a trainer with this model cannot take part; empty where it can. `change` is held."""
        if start is None:
            return ""
        if self._first is None:
            self._first, self._program.row_flops = (trainer, start), start.row_flops
        first, known = self._first
        found = start_difference(known, start, self._bound)
        return found and (
            f"the model of trainer {trainer} is not that of trainer {first}: it {found}. Servers send parameters and "
            "buffers to all trainers, and nothing else; draw what the constructor keeps from torch's global generator, "
            "which is seeded, or make it a buffer; if no attribute is named, look at the machine"
        )

    def _release(self, uneven: frozenset[str]) -> str:
        """Why a trainer with these unevenly called normalisations cannot take part; empty where it can."""
        try:
            self._program.server_state.release(uneven)
        except ConfigError as error:
            return str(error)
        return ""

    def _other(self, trainer: int, launch_id: str, since: float) -> float | None:
        """When a trainer of this number with another launch id was heard last: SILENT if not since `since`, None where
        there is no such trainer. `change` is held.
        """
        self._program.ledger.expire(time.monotonic() - self._lease_s)
        heard = self._program.ledger.other_heard_at(trainer, launch_id)
        return heard if heard is None or heard > since else SILENT

    def lease(self, data: bytes) -> bytes:
        """LEASE: take note of finished work, and grant leases."""
        message = decode(self._lease[0], data)
        trainer, launch_id = int(message.scalars["trainer"]), str(message.scalars.get("starter", ""))
        program = self._program
        with program.change:
            now = time.monotonic()
            if message.scalars.get("leaving"):
                if program.ledger.other_heard_at(trainer, launch_id) is None:
                    program.ledger.leave(trainer)
                    program.change.notify_all()
                return self._leases([], OVER, known=True)
            known = program.ledger.renew(trainer, now, launch_id)
            if program.ledger.expire(now - self._lease_s):
                program.change.notify_all()
            if not known:
                return self._leases([], OVER if program.over else messages.GO_ON, known=program.over)
            if any(message.arrays[name].shape[1] != 3 for name in ("done", "has")):
                raise Refused("done and has are rows of three numbers")
            program.stopping = program.stopping or bool(message.scalars["stopping"])
            finished = [
                program.ledger.finish((int(kind), int(step), int(part))) for kind, step, part in message.arrays["done"]
            ]
            if any(finished):
                program.change.notify_all()
            leases = []
            most, has = int(message.scalars["most"]), {tuple(key) for key in message.arrays["has"].tolist()}

            def granted_or_over() -> bool:
                nonlocal leases
                leases = leases or (
                    program.ledger.grant(trainer, most, has) if most > 0 and trainer in program.ledger.members() else []
                )
                return bool(leases) or program.over

            program.change.wait_for(granted_or_over, min(float(message.scalars["wait_s"]), LONGEST_WAIT_S))
            return self._leases(leases, OVER if program.over and not leases else messages.GO_ON, known=True)

    def exchange(self, data: Buffer, put: Put = bytes) -> bytes:
        """EXCHANGE: take the gradients of one lease, and give the parameters and rows for another one."""
        message, program = decode(self._exchange[0], data), self._program
        if not message.scalars.get("push"):
            return self._give(message, None, put)
        push = self._push(message)
        program.receive(push)
        try:
            return self._give(message, (push.step, push.part), put)
        finally:
            if not isinstance(data, bytes):  # the client may use the memory again
                program.keep(push)

    def _give(self, message: Message, pushed: tuple[int, int] | None, put: Put) -> bytes:
        """The answer to EXCHANGE; `pushed`: step and part of the push that the request brought."""
        scalars, program = message.scalars, self._program
        state, arrays = NO, dict[str, np.ndarray]()
        if scalars.get("frozen"):
            arrays["frozen"] = program.server_state.frozen()
        if scalars.get("pull"):
            after = int(scalars["after"])
            with program.change:
                program.change.wait_for(
                    lambda: program.ready(after, pushed) or program.over, min(float(scalars["wait_s"]), LONGEST_WAIT_S)
                )
                state = NO if not program.ready(after, pushed) else LATE if 0 <= after < program.version else READY
        # after a pull: what is pushed in a mode that applies it at once has made room
        if "lease" in message.arrays and self._leads:
            arrays["lease"] = np.frombuffer(self.lease(message.arrays["lease"].tobytes()), np.uint8)
        if state != READY:
            return put(in_parts(self._exchange[1], {"pulled": state}, arrays))
        wanted_ids = {name: message.arrays[f"want/{name}"].copy() for name in self._names}  # what is checked stays
        with program.server_state.lock:  # until the state is in the message, all of one moment
            stamp, applied, dense, rows = program.server_state.pull(
                wanted_ids, self._pull_of(scalars), int(scalars["known"])
            )
            answer = {"stamp": stamp, "applied": applied, "scale": program.server_state.scale()}
            arrays |= {
                f"rows/{name}": compress(table_rows, program.server_state.wire) for name, table_rows in rows.items()
            }
            if dense is not None:
                arrays["dense"] = dense
            changing = program.server_state.buffers() if scalars["train"] else None
            if changing is not None:
                arrays["buffers"] = changing
            return put(in_parts(self._exchange[1], {"pulled": state, **answer}, arrays))

    def report(self, data: bytes) -> bytes:
        """REPORT: take the result of an evaluation batch."""
        message = decode(self._report[0], data)
        eval_outputs = message.arrays.get("judged")
        if len(message.arrays["sums"]) != self._metric_count:
            raise Refused(f"sums are {len(message.arrays['sums'])} numbers, not {self._metric_count}")
        self._program.report(
            int(message.scalars["step"]),
            int(message.scalars["part"]),
            torch.from_numpy(message.arrays["sums"].copy()),
            None if eval_outputs is None else torch.from_numpy(eval_outputs.copy()),
            int(message.scalars["unread"]),
        )
        return encode(self._report[1], {}, {})

    def _pull_of(self, scalars: Mapping[str, Any]) -> Pull | None:
        """Which trainer pulls for which step; None for an evaluation."""
        return (
            Pull(*(int(scalars[name]) for name in ("trainer", "of_step", "of_part", "at")))
            if scalars["train"]
            else None
        )

    def _push(self, message: Message) -> Push:
        """The push in a message, whose `dense` and gradients are in the message's memory. Refused where it does not fit
        this server or an open step.
        """
        scalars, arrays = message.scalars, Named(message.arrays)
        for name in arrays:  # all that is checked, or kept for longer
            if name != "dense" and not name.startswith("gradients/"):
                arrays[name] = arrays[name].copy()
        if len(arrays["dense"]) != self._program.server_state.push_bytes:
            raise Refused(
                f"dense has {len(arrays['dense'])} bytes, this server takes {self._program.server_state.push_bytes}"
            )
        tables = [name for name in self._names if f"ids/{name}" in arrays]
        if float(scalars.get("counts", 0.0)) < 0:
            raise Refused(f"counts={scalars['counts']}; they are 0 or more")
        if not self._program.may_come(int(scalars["step"])):
            raise Refused(f"step {scalars['step']} is not open")
        if self._leads:
            self._check_leading(scalars, arrays)
        rows = {
            name: RowGradients(
                arrays[f"ids/{name}"],
                decompress(arrays[f"gradients/{name}"], message.dtypes[f"gradients/{name}"]),
                seen_with(arrays, name, self._lives),
            )
            for name in tables
        }
        for name, (ids, gradients, *_) in rows.items():
            if gradients.shape != (len(ids), self._program.server_state.columns(name)):
                raise Refused(
                    f"gradients/{name} has shape {gradients.shape}, wanted is ({len(ids)}, "
                    f"{self._program.server_state.columns(name)})"
                )
            if not self._program.server_state.owns(name, ids):
                raise Refused(f"ids/{name} has some that are not of this server")
        nothing = np.empty(0)
        return Push(
            int(scalars["trainer"]),
            int(scalars["step"]),
            int(scalars["part"]),
            arrays["dense"],
            rows,
            int(scalars["finite"]),
            float(scalars["norm"]),
            int(scalars["seen"]),
            int(scalars["epoch"]),
            int(scalars["unread"]),
            int(scalars["skipped"]),
            arrays.get("sums", nothing),
            arrays.get("statistics", nothing),
            arrays.get("rows", nothing),
            float(scalars["counts"]) if "counts" in scalars else None,
            arrays.get("buffers", nothing),
        )

    def _check_leading(self, scalars: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Check what only server 0 is sent; it alone knows all open steps. Refused where it does not fit."""
        tickets = self._program.tickets_of(int(scalars["step"]))
        if tickets is None:
            raise Refused(f"step {scalars['step']} is not open")
        if len(arrays["sums"]) != self._metric_count:
            raise Refused(f"sums are {len(arrays['sums'])} numbers, not {self._metric_count}")
        buffers, numbers = arrays.get("buffers", ()), self._program.server_state.buffers_numbers
        if len(buffers) != numbers:
            raise Refused(f"buffers are {len(buffers)} numbers, not {numbers}")
        statistics, per_ticket = arrays["statistics"], self._program.server_state.statistics_numbers
        if len(statistics) != tickets * per_ticket and tickets:
            raise Refused(f"statistics are {len(statistics)} numbers, not {tickets} times {per_ticket}")
        if tickets and int(scalars["finite"]) > np.isfinite(statistics.reshape(tickets, per_ticket)).all(axis=1).sum():
            raise Refused(f"finite={scalars['finite']}, but statistics are not")

    def _leases(self, leases: list, state: int, known: bool) -> bytes:
        return encode(
            self._lease[1],
            {"state": state, "known": int(known), "reason": self._program.reason},
            messages.pack_leases(leases),
        )


def seen_with(arrays: Mapping[str, np.ndarray], name: str, lives: bool) -> np.ndarray | None:
    """How often the ids of a push were shown, where that is wanted. Refused where it does not fit."""
    if not lives:
        return None
    seen, ids = arrays[f"seen/{name}"], arrays[f"ids/{name}"]
    if seen.shape != (len(ids), 2) or not ((seen >= 0) & (seen < SHOWS)).all():
        raise Refused(f"seen/{name} are no shows and clicks of {len(ids)} ids")
    return seen


def _start_in(message: Message) -> TrainerStart | None:
    """What a trainer that joins says of its model; None: nothing."""
    if "start" not in message.arrays:
        return None
    try:
        return TrainerStart.from_json(messages.json_of(message, "start"))
    except (ValueError, OverflowError) as error:
        raise Refused(f"start: {error}") from None
