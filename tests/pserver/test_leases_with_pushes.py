"""The answer to a push brings the lease that takes its place: in `sync` and `async` a step is one request."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from dtf.api.helper_roles import RoleContext
from dtf.core.types import Batch, Place, Train
from dtf.pserver.leases import TRAIN, Lease, Ledger
from dtf.pserver.net import messages
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import EXCHANGE, LEASE
from dtf.pserver.net.transport import Lost
from dtf.pserver.options import Mode
from dtf.pserver.strategy import Pserver
from dtf.pserver.trainer.prefetch import AHEAD, Prefetcher, PreparedBatch
from dtf.pserver.trainer.trainer import Trainer
from tests.pserver.test_hogwild import TASK
from tests.support.one_server import hello, lease, server, steps, until
from tests.support.toy import Toy

REQUEST, REPLY = messages.lease_schemas()
NOTHING = np.empty((0, 3), np.int64)


class Server0:
    """Grants leases as fast as they are asked for, and counts the requests of LEASE."""

    def __init__(self) -> None:
        self.ledger, self.asked, self.known, self.over = Ledger(), 0, True, False
        self.ledger.open(Lease(TRAIN, step, 0, 1, (Train(step, 0, step, 1, 0.1),)) for step in range(100))
        self.ledger.join(0, 0.0)

    def call(self, method: str, data: bytes, deadline_s: float) -> bytes:
        assert method == LEASE
        self.asked += 1
        return self.reply(decode(REQUEST, data))

    def reply(self, request: Message) -> bytes:
        has = {tuple(key) for key in request.arrays["has"].tolist()}
        most = int(request.scalars["most"])
        leases = self.ledger.grant(0, most, has) if self.known and most and not self.over else []
        scalars = {
            "state": messages.OVER if self.over else messages.GO_ON,
            "known": int(self.known),
            "reason": "finished",
        }
        return encode(REPLY, scalars, messages.pack_leases(leases))


def prefetcher(transport: Any) -> Prefetcher:
    def prepare(lease: Lease, ticket: Train) -> PreparedBatch:
        return PreparedBatch(lease, ticket, Batch(None, None, None, np.empty(0)), None, 0)  # type: ignore[arg-type]

    return Prefetcher(transport, {"trainer": 0, "starter": ""}, prepare, lambda: False)


def following(fetched: Prefetcher) -> Lease:
    prepared = fetched.next(20.0)
    assert prepared is not None
    return prepared.lease


def test_who_pushes_asks_for_nothing_else() -> None:
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    for step in range(30):
        computed = following(fetched)
        assert computed.step == step
        question = fetched.sending(computed, 0.0)
        assert question is not None and decode(REQUEST, question).scalars["most"] == 1
        server0.ledger.finish(computed.key)
        fetched.answered(server0.reply(decode(REQUEST, question)))
        fetched.finished(computed)
    fetched.close()
    assert server0.asked == 1, f"once, for the first {AHEAD}"


def test_one_push_at_a_time_asks() -> None:
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    first, second = following(fetched), following(fetched)
    question = fetched.sending(first, 0.0)
    assert question is not None and fetched.sending(second, 0.0) is None
    fetched.answered(server0.reply(decode(REQUEST, question)))
    assert [following(fetched).step for _ in range(2)] == [2, 3]
    until(lambda: server0.asked == 2)  # the room of the second push is left, and nobody asks
    fetched.close()


def test_a_trainer_that_was_removed_learns_it_from_a_push() -> None:
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    question = fetched.sending(following(fetched), 0.0)
    assert question is not None
    server0.known = False
    fetched.answered(server0.reply(decode(REQUEST, question)))
    assert fetched.must_rejoin and not fetched.ready()
    fetched.close()


def test_an_answer_without_a_lease_leaves_the_question_to_the_thread() -> None:
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    question = fetched.sending(following(fetched), 0.0)
    assert question is not None
    scalars = {"state": messages.GO_ON, "known": 1, "reason": ""}
    fetched.answered(encode(REPLY, scalars, messages.pack_leases([])))
    assert [following(fetched).step for _ in range(2)] == [1, 2]
    fetched.close()
    assert server0.asked >= 2


def test_a_question_that_comes_again_is_granted_once() -> None:
    """As when an answer is lost, and the push is sent anew."""
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    question = fetched.sending(following(fetched), 0.0)
    assert question is not None
    first, again = (decode(REPLY, server0.reply(decode(REQUEST, question))) for _ in range(2))
    fetched.close()
    granted = messages.unpack_leases(first.arrays)
    assert [one.step for one in granted] == [2] and messages.unpack_leases(again.arrays) == granted


def test_while_the_thread_asks_no_push_does() -> None:
    """Neither would know what the other is granted, and server 0 would grant it twice."""
    asked, go_on = threading.Event(), threading.Event()

    class Busy(Server0):
        def call(self, method: str, data: bytes, deadline_s: float) -> bytes:
            if self.asked:
                asked.set()
                assert go_on.wait(20.0)
            return super().call(method, data, deadline_s)

    server0 = Busy()
    fetched = prefetcher(server0)
    fetched.start()
    first, second = following(fetched), following(fetched)
    server0.ledger.finish(first.key)
    fetched.finished(first)
    assert asked.wait(20.0)
    assert fetched.sending(second, 0.0) is None
    go_on.set()
    assert following(fetched).step == 2
    fetched.close()


def test_a_push_learns_that_the_run_is_over() -> None:
    server0 = Server0()
    fetched = prefetcher(server0)
    fetched.start()
    question = fetched.sending(following(fetched), 0.0)
    assert question is not None and following(fetched).step == 1
    server0.over = True
    fetched.answered(server0.reply(decode(REQUEST, question)))
    until(lambda: fetched.over)
    assert fetched.reason == "finished" and server0.asked == 1


def test_a_push_that_failed_ends_a_trainer_that_has_nothing_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 0 grants nothing more, as others have all leases."""
    failed: Future[Any] = Future()
    failed.set_exception(Lost("the server"))
    context = RoleContext(Place(), {}, lambda *where: None, lambda phase, step: None, lambda: False)  # type: ignore[arg-type,return-value]
    strategy = Pserver(mode=Mode.async_)
    server0 = Server0()
    server0.ledger = Ledger()
    server0.ledger.join(0, 0.0)
    trainer = Trainer(TASK, context, strategy, strategy.sync_mode(TASK), 1, 0, [server0])  # type: ignore[list-item]
    monkeypatch.setattr(trainer, "_join", lambda: None)
    monkeypatch.setattr("dtf.pserver.trainer.trainer.WAIT_S", 0.0)
    trainer._sending.append(failed)
    with pytest.raises(Lost):
        trainer.run()


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_the_server_grants_with_the_answer_to_a_push() -> None:
    """Of `async`, where the lease is opened once the push is applied: the answer waits for it."""
    request, reply = messages.exchange_schemas(Toy())
    with server(Mode.async_, trainers=1, staleness=0) as (program, servicer, engine):
        done = engine.submit(steps, program, 2)
        until(lambda: program.begun)
        assert hello(servicer, 0) == ""
        assert len(lease(servicer, 0, wait_s=5.0, most=1).arrays["numbers"]) == 1, "no other one is open"
        asks = {"trainer": 0, "starter": "", "most": 1, "wait_s": 5.0, "stopping": 0}
        question = encode(REQUEST, asks, {"done": NOTHING, "has": np.array([[TRAIN, 0, 0]])})
        names = ("of_step", "of_part", "at", "after", "train", "known", "frozen", "pull", "epoch", "unread", "seen")
        scalars = dict.fromkeys(names, 0) | {"trainer": 0, "push": 1, "step": 0, "part": 0, "finite": 1, "skipped": 0}
        arrays = {
            "dense": np.zeros(program.server_state.push_bytes, np.uint8),
            "sums": np.array([24.0, 1.0, 1.0]),
            "statistics": np.empty(0),
            "rows": np.arange(24),
            "lease": np.frombuffer(question, np.uint8),
        }
        message = encode(request, scalars | {"norm": 1.0, "wait_s": 0.0}, arrays)
        answer = decode(reply, servicer.handlers[EXCHANGE](message))
        (granted,) = messages.unpack_leases(decode(REPLY, answer.arrays["lease"].tobytes()).arrays)
        assert granted.key == (TRAIN, 1, 0)
        program.fail(RuntimeError("enough"))
        assert done.exception(20.0) is not None
