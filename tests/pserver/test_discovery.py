"""Externally started processes that do not find each other: each says whom it misses, in words."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtf.api.helper_roles import RendezvousContext, RoleContext
from dtf.core.consistency import config_facts
from dtf.core.errors import BusyError, ConfigError, DtfError, Exit, PeerError, Preempted, code_name
from dtf.core.types import ManualStart, Place
from dtf.pserver import discovery, manual_rendezvous
from dtf.pserver.leases import Ledger
from dtf.pserver.net.rpc import Client
from dtf.pserver.net.transport import Lost
from dtf.pserver.strategy import Pserver
from dtf.pserver.trainer_watch import TrainerWatch
from tests.support.manual_start import TOKEN, endpoints


def standing(
    where: list[str],
    wait: Callable[[], None] = lambda: None,
    said: list[str] | None = None,
    timeout_s: float = 600.0,
) -> RendezvousContext:
    """Of server 1 of two."""
    manual = ManualStart(tuple(where), timeout_s)
    return RendezvousContext(
        Place(rank=1, size=2, role="server", token=TOKEN, prefix="run/0", manual=manual),
        Path(),
        "run",
        {"config": {}},
        wait,
        (said if said is not None else []).append,
    )


def test_a_server_that_cannot_listen_says_who_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        where = ["127.0.0.1:1", f"127.0.0.1:{held.getsockname()[1]}"]
        with pytest.raises(
            BusyError, match=f"{where[1]} is taken by another process; is server 1 of this run at work already"
        ):
            manual_rendezvous.rendezvous(standing(where), 1)
    with pytest.raises(
        ConfigError, match="192.0.2.1:4000 cannot be listened on: .*; is this host really that of launcher.id=1"
    ):
        manual_rendezvous.rendezvous(standing(["127.0.0.1:1", "192.0.2.1:4000"]), 1)


def test_a_server_that_is_taken_for_server_0_says_so_and_that_it_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "QUIET_S", 0.0)
    where, refusals, messages = endpoints(2), list[str](), list[str]()

    def ask() -> None:
        client = Client(where[1], TOKEN, "none")
        try:
            with pytest.raises(ConfigError) as refused:
                discovery.Member(client, discovery.TRAINER, where, {}).ask()
            refusals.append(str(refused.value))
        finally:
            client.close()

    with pytest.raises(PeerError, match=f"server 0 cannot be reached: meet at {where[0]}"):
        manual_rendezvous.rendezvous(standing(where, ask, messages, timeout_s=0.3), 1)
    assert "this is server 1, and launcher.endpoints calls it server 0" in refusals[0] and where[1] in refusals[0]
    assert f"waiting for the servers: server 0 cannot be reached: meet at {where[0]}" in messages[0]


def test_a_trainer_says_which_server_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "QUIET_S", 0.0)
    monkeypatch.setattr(manual_rendezvous, "READY_S", 0.1)
    where, messages = endpoints(2), list[str]()
    place = Place(rank=2, size=3, token=TOKEN, manual=ManualStart(tuple(where), timeout_s=0.3))
    context = RoleContext(
        place, {"config": {}}, cast(Any, None), lambda phase, step: None, lambda: False, messages.append
    )
    trainer = manual_rendezvous.ManualTrainer(cast(Any, None), context, Pserver(servers=2), 1, 0)
    monkeypatch.setattr(
        trainer._member, "wait_complete", lambda *_: discovery.RendezvousInfo("run/0", "", "", "run", "host")
    )
    monkeypatch.setattr(
        trainer,
        "_client",
        lambda server, generation: SimpleNamespace(
            endpoint=where[server], close=lambda: None, wait_ready=waits(server)
        ),
    )
    with pytest.raises(PeerError, match=f"within launcher.timeout_s=0.3: server 1 is not ready at {where[1]}"):
        trainer.run()
    assert messages and messages[0].startswith(f"waiting for the servers: server 1 is not ready at {where[1]}")


def waits(server: int) -> Callable[[float], None]:
    def wait_ready(deadline_s: float) -> None:
        if server:
            time.sleep(deadline_s)
            raise Lost("DEADLINE_EXCEEDED")

    return wait_ready


class Clock:
    """Stands for time.monotonic()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        for module in modules:
            monkeypatch.setattr(f"{module}.monotonic", lambda: self.now)


class Direct:
    """A transport to a coordinator of this process."""

    def __init__(self, coordinator: discovery.Coordinator) -> None:
        self._coordinator = coordinator

    def call(self, method: str, data: bytes, deadline_s: float) -> bytes:
        return self._coordinator.answer(data)


WHERE = ["10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.3:4000"]
INFO = discovery.RendezvousInfo("run/0", "", "", "run", "host")


def member(coordinator: discovery.Coordinator, server: int, stopping: bool = False) -> discovery.Member:
    return discovery.Member(cast(Any, Direct(coordinator)), server, WHERE, {}, lambda: stopping)


def test_each_line_about_a_wait_doubles_the_time_until_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, said = Clock(monkeypatch, "dtf.pserver.discovery"), list[str]()
    report = discovery.WaitReport(said.append)
    for _ in range(60):
        clock.now += 1
        report.tell("waiting")
    assert said == [f"waiting ({seconds} s so far)" for seconds in (4, 9, 19, 39)]


def test_who_is_missing_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a server that came and has gone."""
    clock, said = Clock(monkeypatch, "dtf.pserver.discovery"), list[str]()
    coordinator = discovery.Coordinator(INFO, 3, {}, silence_s=60.0)
    member(coordinator, 1).ask()
    assert coordinator.missing() == [2] and not coordinator.complete()

    def wait() -> None:
        clock.now += 4

    with pytest.raises(PeerError, match=r"server 0 waits for server 2 \(at 10.0.0.3:4000\)$"):
        member(coordinator, discovery.TRAINER).wait_complete(10.0, wait, said.append)
    assert "waiting for the servers: server 0 waits for server 2 (at 10.0.0.3:4000) (" in said[0]
    clock.now += 60
    assert coordinator.missing() == [1, 2]


def test_a_run_that_server_0_ends_ends_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "DEADLINE_S", 0.0)  # nobody asks meanwhile
    coordinator = discovery.Coordinator(INFO, 3, {}, silence_s=60.0)
    member(coordinator, 2, stopping=True).ask()
    assert coordinator.stop_requested and member(coordinator, discovery.TRAINER).ask()[1].stopping
    for why in (Preempted("asked to stop"), discovery.RendezvousTimeout("no trainer came")):
        coordinator.end(why)
        for server in (1, discovery.TRAINER):
            with pytest.raises(type(why), match=f"server 0 has ended the run: {why}"):
                member(coordinator, server).failure(10.0)


def watched(
    monkeypatch: pytest.MonkeyPatch, stop_requested: bool = False, grace_s: float = 25.0
) -> tuple[Any, Clock, TrainerWatch, list[str]]:
    """A program without trainers, and the watch of its server."""
    monkeypatch.setattr(discovery, "DEADLINE_S", 0.0)
    clock, said = Clock(monkeypatch, "dtf.pserver.discovery", "dtf.pserver.trainer_watch"), list[str]()
    place = Place(slots=3, hang_timeout_s=60.0, grace_s=grace_s)
    context = RendezvousContext(place, Path(), "run", {}, lambda: None, said.append, lambda: stop_requested)
    coordinator = discovery.Coordinator(INFO, 1, {}, 60.0, context.stop_requested)
    watch = TrainerWatch(coordinator, context, timeout_s=30.0)
    program = SimpleNamespace(ledger=Ledger(), change=threading.Condition(), unsaved=lambda: False)
    return program, clock, watch, said


def test_a_server_whose_trainers_never_come_says_so_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    program, clock, watch, said = watched(monkeypatch)
    with pytest.raises(discovery.RendezvousTimeout, match=r"no trainer came within launcher\.timeout_s=30"):
        for _ in range(60):
            watch(program)
            clock.now += 1
    assert clock.now < 1032
    assert said[0] == "server 0 waits for trainers: none has come, of launcher.processes=3 (4 s so far)" and said[1:]


def test_a_server_whose_trainers_have_left_holds_what_they_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    program, clock, watch, said = watched(monkeypatch)
    program.ledger.join(0, clock.now)
    for _ in range(60):
        program.ledger.renew(0, clock.now)
        watch(program)
        clock.now += 1
    assert not said
    program.ledger.leave(0)
    for _ in range(60):
        watch(program)
        clock.now += 1
    assert said and all("server 0 waits for trainers: all have left" in text for text in said)


@pytest.mark.parametrize(("unsaved", "kept"), [(False, "nothing is lost"), (True, "since the last checkpoint is lost")])
def test_a_server_without_trainers_stops_at_once(unsaved: bool, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, clock, watch, _ = watched(monkeypatch, stop_requested=True)
    program.unsaved = lambda: unsaved
    program.ledger.join(0, clock.now)
    watch(program)  # a trainer finishes the step, and the server saves
    program.ledger.leave(0)
    with pytest.raises(Preempted, match=kept):
        watch(program)


@pytest.mark.parametrize(
    ("stop_requested", "grace_s", "wait_s"),
    [(True, 30, 15), (True, 16, 10), (True, 8, 6), (True, 600, 60), (False, 30, 60)],
)
def test_a_killed_trainer_does_not_use_up_the_time_to_stop(
    stop_requested: bool, grace_s: float, wait_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Server 0 looks by itself: where no other trainer is left, nobody asks it."""
    program, clock, watch, _ = watched(monkeypatch, stop_requested, grace_s)
    program.ledger.join(0, clock.now)
    with program.change:
        clock.now += wait_s
        watch(program)
        assert program.ledger.members() == [0]
        clock.now += 1
        with pytest.raises(Preempted, match="nothing is lost") if stop_requested else nullcontext():
            watch(program)
    assert program.ledger.members() == []


def test_a_trainer_that_is_told_to_stop_stays_where_the_whole_run_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler tells all at once, and the signals arrive one after the other."""
    clock = Clock(monkeypatch, "dtf.pserver.discovery")
    servers = list[int]()
    coordinator = discovery.Coordinator(INFO, 1, {}, 60.0, lambda: bool(servers))
    here = [discovery.Member(cast(Any, Direct(coordinator)), discovery.TRAINER, WHERE[:1], {}) for _ in range(2)]
    alone, one_of_all = (discovery.RunStopCheck(member, patience_s=3.0) for member in here)
    assert alone.may_stay()
    clock.now += 4
    assert not alone.may_stay() and one_of_all.may_stay()
    servers.append(15)
    clock.now += 2
    assert one_of_all.may_stay()
    clock.now += 20
    assert one_of_all.may_stay()  # its launcher ends it where that takes too long


def ended(folder: Path, exit: int | None, id: str = "first") -> None:
    """Write the record of a run, which has ended with the code `exit`; None: which goes on."""
    record = {"id": id, "ended": exit is not None, "exit": exit, "cause": "so it was"}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text("{seed: 1, api_key: '***', launcher: {role: server}, run: {dir: here}}")


def late_trainer(
    folder: Path, said: list[str], seed: int = 1, timeout_s: float = 600.0, wait: Callable[[], None] = lambda: None
) -> manual_rendezvous.ManualTrainer:
    """A trainer whose servers are not there. `wait` is called whenever it looks for them."""
    place = Place(rank=1, size=2, token=TOKEN, manual=ManualStart((endpoints(1)[0],), timeout_s))
    config = config_facts({"seed": seed, "api_key": "hunter2", "run": {}})
    context = RoleContext(
        place, {"config": config}, cast(Any, None), lambda *_: wait(), lambda: False, said.append, run_dir=str(folder)
    )
    return manual_rendezvous.ManualTrainer(cast(Any, None), context, Pserver(), 1, 0)


def test_a_trainer_that_comes_after_the_end_of_the_run_ends_too(tmp_path: Path) -> None:
    said = list[str]()
    ended(tmp_path, Exit.OK)
    late_trainer(tmp_path, said).run()
    assert said == [f"the run in {tmp_path} has finished; nothing is left to do for trainer 0"]
    with pytest.raises(PeerError, match="it was not started yet, or the run has ended"):
        late_trainer(tmp_path, said, seed=2, timeout_s=0.1).run()  # of another config: its servers are still to come


@pytest.mark.parametrize("exit", [Exit.DIVERGED, Exit.BUG, Exit.PREEMPTED])
@pytest.mark.parametrize("before", ["goes on", "another run has ended"])
def test_a_trainer_whose_run_ends_while_it_waits_has_its_result_at_once(
    exit: Exit, before: str, tmp_path: Path
) -> None:
    ended(tmp_path, None if before == "goes on" else Exit.DATA, "zeroth")
    trainer = late_trainer(tmp_path, [], wait=lambda: ended(tmp_path, exit))
    with pytest.raises(DtfError, match=rf"the run in {tmp_path} has ended with {code_name(exit)}: so it was") as raised:
        trainer.run()
    assert raised.value.exit is exit and raised.value.patient
    assert ("start its servers again" in str(raised.value)) == (exit is Exit.PREEMPTED)


def test_a_trainer_waits_for_servers_that_somebody_starts_again(tmp_path: Path) -> None:
    """Their launcher had no restart left."""
    ended(tmp_path, None, "zeroth")
    with pytest.raises(PeerError, match="it was not started yet, or the run has ended"):
        late_trainer(tmp_path, [], timeout_s=0.1, wait=lambda: ended(tmp_path, Exit.PEER)).run()


@pytest.mark.parametrize(("exit", "waits"), [(Exit.DIVERGED, False), (Exit.PREEMPTED, True), (Exit.PEER, True)])
def test_a_run_that_had_ended_may_be_starting_again(
    exit: Exit, waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all its processes at once, in any order. One that ended for good is waited for no longer than one hangs."""
    clock, looks = Clock(monkeypatch, "dtf.pserver.discovery", "dtf.pserver.manual_rendezvous"), list[float]()
    monkeypatch.setattr(discovery, "ASK_S", 0.0)

    def wait() -> None:
        clock.now += 10
        looks.append(clock.now)

    ended(tmp_path, exit)
    with pytest.raises(DtfError) as raised:
        late_trainer(tmp_path, [], wait=wait).run()
    assert raised.value.exit is (Exit.PEER if waits else exit)
    assert 600 <= clock.now - 1000 < 630 if waits else 60 <= clock.now - 1000 < 90
