"""The requests of a trainer to all servers, as messages: what it pulls for a lease, and what it pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dtf.api.recipe import Recipe
from dtf.pserver.leases import EVALUATE, Lease
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Message, Parts, decode, encode, in_parts
from dtf.pserver.net.compression import WIRE_DTYPES, compress, decompress
from dtf.pserver.net.messages import ANY, EXCHANGE, LATE, NO, READY
from dtf.pserver.net.transport import Transport
from dtf.pserver.trainer.compute import LeaseResult, ParamBlocks, PulledState, TrainerModel
from dtf.pserver.trainer.prefetch import DEADLINE_S, WAIT_S, PreparedBatch

if TYPE_CHECKING:
    from dtf.pserver.options import PserverOptions

NO_BLOCKS = ParamBlocks(ANY, np.empty(0))
"""Before any blocks were pulled."""


PULL_WAIT_S = 0.25
"""How long a server may let a pull of a synchronous mode wait for the updates before it. Short: they may need a lease
that this trainer is granted meanwhile, and it computes nothing until the pull is answered. In other modes a pull waits
for the push it came with alone, up to WAIT_S.
"""


class Exchange:
    """Requests of one trainer to all servers. Threads may call it.

    `number`: of the trainer. `synchronous`: whether a pull has to see all updates of earlier steps. `first`: of another
    trainer of this process with the same model, with which it shares the newest blocks.
    """

    def __init__(
        self,
        recipe: Recipe,
        strategy: PserverOptions,
        servers: Sequence[Transport],
        number: int,
        model: TrainerModel,
        synchronous: bool,
        first: Exchange | None = None,
    ) -> None:
        self._servers, self._number, self._model, self._synchronous = servers, number, model, synchronous
        self._wire = WIRE_DTYPES[strategy.wire.value]
        self._tables = list(recipe.tables())
        self._schemas = messages.exchange_schemas(recipe)
        self.latest: list[ParamBlocks] = first.latest if first else [NO_BLOCKS] * len(servers)
        """By server, the newest blocks that were pulled."""

    def pull(self, prepared: PreparedBatch, frozen: bool = False) -> tuple[int, PulledState | None]:
        """Ask all servers for what a lease needs; see `send`. `frozen`: also for what does not learn."""
        known = [*self.latest]
        requests = [
            self._pull_request(prepared, prepared.row_request.ids(server), self._after(prepared.lease), blocks.stamp)
            for server, blocks in enumerate(known)
        ]
        data = [in_parts(self._schemas[0], scalars | {"frozen": int(frozen)}, arrays) for scalars, arrays in requests]
        return self.send(data, known)

    def pull_rows(
        self, prepared: PreparedBatch, ids: Sequence[dict[str, np.ndarray]], known: int
    ) -> PulledState | None:
        """Ask each server for rows of these ids, by table; None: ask again. `known`: ANY for blocks too, or NONE."""
        requests = [self._pull_request(prepared, part, ANY, known) for part in ids]
        return self.send([in_parts(self._schemas[0], *request) for request in requests], [*self.latest])[1]

    def push_requests(
        self,
        lease: Lease,
        seen: Sequence[int],
        result: LeaseResult,
        sample_ids: np.ndarray,
        unread: int,
        following: PreparedBatch | None,
        question: bytes | None,
    ) -> tuple[list[Parts], list[ParamBlocks]]:
        """The push of a lease, for each server, with the pull for `following`, if any; and the blocks known here.

        `seen`: by server, how many updates were in what it was computed from. `question`: a request of LEASE for server
        0 that goes along.
        """
        requests, known = [], [*self.latest]
        common: dict[str, Any] = {
            "trainer": self._number,
            "push": 1,
            "step": lease.step,
            "part": lease.part,
            "epoch": lease.tickets[0].epoch,
            "unread": unread,
        }
        common |= {"finite": result.finite, "norm": result.norm, "skipped": result.skipped}
        common |= {} if result.counts is None else {"counts": result.counts}
        for server in range(len(self._servers)):
            scalars = common | {"seen": seen[server]}
            arrays = {"dense": result.dense[server]}
            for name, part in result.rows[server].items():
                arrays |= {f"ids/{name}": part.ids, f"gradients/{name}": compress(part.gradients, self._wire)}
                arrays |= {} if part.seen is None else {f"seen/{name}": part.seen}
            if server == 0:
                arrays |= {
                    "sums": result.sums.cpu().double().numpy(),
                    "statistics": result.statistics,
                    "rows": sample_ids[sample_ids >= 0],
                } | ({} if result.buffers is None else {"buffers": result.buffers})
                arrays |= {} if question is None else {"lease": np.frombuffer(question, np.uint8)}
            if following is not None:
                ids_here, after = following.row_request.ids(server), self._after(following.lease)
                pull_scalars, pull_arrays = self._pull_request(following, ids_here, after, known[server].stamp)
                scalars, arrays = scalars | pull_scalars, arrays | pull_arrays
            requests.append(in_parts(self._schemas[0], scalars, arrays))
        return requests, known

    def send(
        self,
        requests: Sequence[Parts],
        known: Sequence[ParamBlocks],
        pulls: bool = True,
        answered: Callable[[bytes], None] | None = None,
    ) -> tuple[int, PulledState | None]:
        """Send a request to each server, all at once: READY and what they gave, or NO or LATE and None.

        `known`: the blocks that the requests call known here; an answer without blocks means these. `pulls`: whether
        the requests pull anything. `answered` is called with server 0's reply to the request of LEASE that went along.
        """
        if len(self._servers) == 1:
            replies = [self._servers[0].call(EXCHANGE, requests[0], DEADLINE_S)]
        else:
            pending = [
                transport.start(EXCHANGE, request, DEADLINE_S)
                for transport, request in zip(self._servers, requests, strict=True)
            ]
            replies = [reply.result() for reply in pending]
        answers = [decode(self._schemas[1], reply) for reply in replies] if pulls or answered else []
        if answered is not None:
            answered(answers[0].arrays["lease"].tobytes())
        if not pulls:
            return READY, None
        states = [int(message.scalars["pulled"]) for message in answers]
        if LATE in states or NO in states:
            return (LATE if LATE in states else NO), None
        dense = [_blocks(message, blocks) for message, blocks in zip(answers, known, strict=True)]
        for server, (message, blocks) in enumerate(zip(answers, dense, strict=True)):
            if blocks.stamp > self.latest[server].stamp:
                self.latest[server] = blocks
            if "frozen" in message.arrays:
                self._model.take_frozen(server, message.arrays["frozen"])
        rows, applied = [self._rows(message) for message in answers], [int(m.scalars["applied"]) for m in answers]
        return READY, PulledState(
            dense, rows, applied, float(answers[0].scalars["scale"]), answers[0].arrays.get("buffers")
        )

    def pull_frozen(self) -> None:
        """Put what does not learn into the model: frozen blocks, and server 0's buffers."""
        request = encode(self._schemas[0], {"trainer": self._number, "frozen": 1}, {})
        for server, transport in enumerate(self._servers):
            reply = decode(self._schemas[1], transport.call(EXCHANGE, request, DEADLINE_S))
            self._model.take_frozen(server, reply.arrays["frozen"])

    def forget_blocks(self) -> None:
        """The newest blocks are of no use as parameters: they came with their optimizer state."""
        self.latest = [NO_BLOCKS] * len(self._servers)

    def _pull_request(
        self, prepared: PreparedBatch, ids: dict[str, np.ndarray], after: int, known: int
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Scalars and arrays of a request to one server."""
        lease = prepared.lease
        scalars = {
            "trainer": self._number,
            "pull": 1,
            "after": after,
            "train": int(lease.kind != EVALUATE),
            "known": known,
            "wait_s": PULL_WAIT_S if self._synchronous else WAIT_S,
        }
        scalars |= {"of_step": lease.step, "of_part": lease.part, "at": prepared.ticket.step}
        return scalars, {f"want/{name}": table_ids for name, table_ids in ids.items()}

    def _after(self, lease: Lease) -> int:
        """The step before which all updates have to be there."""
        return lease.step if lease.kind != EVALUATE and self._synchronous else ANY

    def _rows(self, message: Message) -> dict[str, np.ndarray]:
        return {
            name: decompress(message.arrays[f"rows/{name}"], message.dtypes[f"rows/{name}"]) for name in self._tables
        }


def _blocks(message: Message, known: ParamBlocks) -> ParamBlocks:
    """The blocks of one server's answer; `known` where it has none."""
    if "dense" not in message.arrays:
        return known
    return ParamBlocks(int(message.scalars["stamp"]), message.arrays["dense"])
