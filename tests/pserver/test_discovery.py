"""Externally started processes that do not find each other: each says whom it misses, in words."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtf.api.helper_roles import RendezvousContext, RoleContext
from dtf.core.errors import BusyError, ConfigError, PeerError
from dtf.core.types import ManualStart, Place
from dtf.pserver import discovery, manual_rendezvous
from dtf.pserver.net.rpc import Client
from dtf.pserver.net.transport import Lost
from dtf.pserver.strategy import Pserver
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
                discovery.Member(client, discovery.TRAINER, 2, {}).ask()
            refusals.append(str(refused.value))
        finally:
            client.close()

    with pytest.raises(PeerError, match=f"server 0 cannot be reached: meet at {where[0]}"):
        manual_rendezvous.rendezvous(standing(where, ask, messages, timeout_s=0.3), 1)
    assert "this is server 1, and launcher.endpoints calls it server 0" in refusals[0] and where[1] in refusals[0]
    assert f"waiting for the servers: server 0 cannot be reached: meet at {where[0]}" in messages[0]


def test_a_trainer_says_which_server_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manual_rendezvous, "QUIET_S", 0.0)
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
    assert len(messages) == 1 and messages[0].startswith(
        f"waiting for the servers: server 1 is not ready at {where[1]}"
    )


def waits(server: int) -> Callable[[float], None]:
    def wait_ready(deadline_s: float) -> None:
        if server:
            time.sleep(deadline_s)
            raise Lost("DEADLINE_EXCEEDED")

    return wait_ready
