"""Launching processes of several hosts: who meets whom, who is refused, and what is heard when one fails.

On loopback, in threads, without ranks.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from dtf.core.consistency import digest
from dtf.core.errors import BusyError, ConfigError, Exit, PeerError, Preempted
from dtf.core.types import Failed
from dtf.launch import host_connection, host_rendezvous
from dtf.launch.exit_cause import GroupResult
from dtf.launch.host_rendezvous import HostRendezvous
from tests.support.launching import HANG_S

TASK = {"config": {"seed": 1}, "versions": {"torch": "2.15"}}
ANSWER = {"folder": "/run", "id": "one"}
LOST = Failed(1, 7, int(Exit.PEER), "lost another rank", "")
BUG = Failed(1, 9, int(Exit.BUG), "it broke", "trace")


class Meeting:
    """Hosts of one address, each in a thread of its own."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._threads = stack.enter_context(ThreadPoolExecutor(8))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address: tuple[str, int] = free.getsockname()
        self.notes: list[str] = []

    def host(self, node: int, nodes: int = 2, silence_s: float = 60.0, token: str = "") -> HostRendezvous:
        return self._stack.enter_context(
            closing(HostRendezvous(node, nodes, 1, self.address, silence_s, self.notes.append, token))
        )

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self._threads.submit(function, *arguments)

    def pair(self, silence_s: float = 60.0) -> tuple[HostRendezvous, HostRendezvous]:
        """Two that have met."""
        leader, other = self.host(0, silence_s=silence_s), self.host(1, silence_s=silence_s)
        joining = self.start(leader.join_as_leader, TASK, HANG_S, lambda: ANSWER)
        assert other.join_as_follower(TASK, HANG_S) == ANSWER
        joining.result()
        return leader, other


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ExitStack() as stack:
        yield Meeting(stack)


def test_hosts_meet_whoever_comes_first(meeting: Meeting) -> None:
    others = [meeting.start(meeting.host(node, 3).join_as_follower, TASK, HANG_S) for node in (2, 1)]
    meeting.host(0, 3).join_as_leader(TASK, HANG_S, lambda: ANSWER)
    assert [other.result() for other in others] == [ANSWER, ANSWER]


def test_a_host_that_differs_is_named_to_all(meeting: Meeting) -> None:
    other = meeting.start(
        meeting.host(1).join_as_follower, {"config": {"seed": 2}, "versions": {"torch": "2.14"}}, HANG_S
    )
    words = (
        f'host {socket.gethostname()} differs from host 0: seed=2, host 0 has 1; versions.torch="2.14", host 0 '
        'has "2.15"; give all the same'
    )
    with pytest.raises(ConfigError) as caught:
        meeting.host(0).join_as_leader(TASK, HANG_S, lambda: pytest.fail("nothing may be made"))
    assert words in str(caught.value)
    with pytest.raises(
        ConfigError, match=f"^host {socket.gethostname()} differs from host 0 in seed, versions.torch; host 0 says how$"
    ):
        other.result()


def test_a_host_with_another_file_of_a_plugin_is_named_to_all(meeting: Meeting) -> None:
    task = TASK | {"code": {"mine.py": "ab12", "mine/model.py": "cd34"}}
    other = meeting.start(
        meeting.host(1).join_as_follower, TASK | {"code": {"mine.py": "ab12", "mine/model.py": "ef56"}}, HANG_S
    )
    words = f'host {socket.gethostname()} differs from host 0: code.mine/model.py="ef56", host 0 has "cd34"; give all'
    with pytest.raises(ConfigError) as caught:
        meeting.host(0).join_as_leader(task, HANG_S, lambda: pytest.fail("nothing may be made"))
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="differs from host 0 in code.mine/model.py; host 0 says how$"):
        other.result()


def test_a_host_that_has_loaded_other_files_may_come(meeting: Meeting) -> None:
    other = meeting.start(meeting.host(1).join_as_follower, TASK | {"code": {"a.py": "1", "b.py": "2"}}, HANG_S)
    meeting.host(0).join_as_leader(TASK | {"code": {"a.py": "1", "c.py": "3"}}, HANG_S, lambda: ANSWER)
    assert other.result() == ANSWER


def test_a_node_rank_that_is_none_is_refused(meeting: Meeting) -> None:
    other = meeting.start(meeting.host(5, 3).join_as_follower, TASK, HANG_S)
    with pytest.raises(ConfigError, match="launcher.node_rank=5; give each host its own, 0 to 2"):
        meeting.host(0, 3).join_as_leader(TASK, HANG_S, lambda: ANSWER)
    with pytest.raises(ConfigError, match="launcher.node_rank=5"):
        other.result()


def test_a_node_rank_that_another_host_has_is_refused(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(("a", "b"))
    monkeypatch.setattr(socket, "gethostname", lambda: next(names))
    others = [meeting.start(meeting.host(1, 3).join_as_follower, TASK, HANG_S) for _ in range(2)]
    with pytest.raises(
        ConfigError, match="host [ab] says launcher.node_rank=1, as [ab] does; give each host its own, 0 to 2"
    ):
        meeting.host(0, 3).join_as_leader(TASK, HANG_S, lambda: ANSWER)
    for other in others:
        with pytest.raises(ConfigError, match="as [ab] does"):
            other.result()


def test_hosts_may_come_long_before_the_last(meeting: Meeting) -> None:
    """Those that wait are told of life, and lose nobody for it."""
    first, last = (meeting.host(node, 3, silence_s=0.4) for node in (1, 2))
    joining = meeting.start(meeting.host(0, 3, silence_s=0.4).join_as_leader, TASK, HANG_S, lambda: ANSWER)
    early = meeting.start(first.join_as_follower, TASK, HANG_S)
    time.sleep(0.8)  # several signs of life
    assert last.join_as_follower(TASK, HANG_S) == ANSWER == early.result()
    joining.result()
    assert not first.failed


def words(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """What node 0 says to a stranger."""
    with connection, connection.makefile() as file:
        yield from map(json.loads, file)


def connect(meeting: Meeting) -> socket.socket:
    """To node 0, once it listens."""
    for _ in range(200):
        with suppress(ConnectionRefusedError):
            return socket.create_connection(meeting.address, timeout=HANG_S)
        time.sleep(0.01)
    raise TimeoutError


def introduce(connection: socket.socket, **more: Any) -> None:
    connection.sendall(
        json.dumps({"nonce": "n", "node": 1, "host": "h", "task": digest(TASK), "proof": "", **more}).encode() + b"\n"
    )


def test_a_stranger_is_told_nothing(meeting: Meeting) -> None:
    joining = meeting.start(meeting.host(0).join_as_leader, {"config": {"seed": 77123}}, 20.0, lambda: ANSWER)
    stranger = connect(meeting)
    introduce(stranger, task="?")
    stranger.sendall(b'{"task": {"config": {}}}\n')
    heard = json.dumps(list(words(stranger)))
    assert "differs from host 0 in seed" in heard and "77123" not in heard and "/run" not in heard
    with pytest.raises(ConfigError, match="host h differs from host 0: seed=null, host 0 has 77123"):
        joining.result()


def test_a_host_without_the_token_is_turned_away(meeting: Meeting) -> None:
    joining = meeting.start(meeting.host(0, token="right").join_as_leader, TASK, 20.0, lambda: ANSWER)
    for token in ("", "wrong"):
        with pytest.raises(ConfigError, match=f"DTF_TOKEN of host {socket.gethostname()} is not that of host 0"):
            meeting.host(1, token=token).join_as_follower(TASK, HANG_S)
    assert meeting.host(1, token="right").join_as_follower(TASK, HANG_S) == ANSWER
    joining.result()
    assert len([note for note in meeting.notes if "turned away" in note]) == 2, (
        "host 0 said so, and waited for the right one"
    )


def test_a_token_on_the_others_alone_is_refused(meeting: Meeting) -> None:
    joining = meeting.start(meeting.host(0).join_as_leader, TASK, 20.0, lambda: ANSWER)
    with pytest.raises(ConfigError, match="DTF_TOKEN of host"):
        meeting.host(1, token="mine").join_as_follower(TASK, HANG_S)
    assert meeting.host(1).join_as_follower(TASK, HANG_S) == ANSWER
    joining.result()


def test_who_plays_host_0_without_the_token_is_found_out(meeting: Meeting) -> None:
    with socket.create_server(meeting.address) as server:
        other = meeting.start(meeting.host(1, token="mine").join_as_follower, TASK, HANG_S)
        connection, _ = server.accept()
        with connection:
            connection.sendall(b'{"nonce": "n"}\n{"proof": "", "differs": true}\n')
            with pytest.raises(ConfigError, match="does not know DTF_TOKEN"):
                other.result()
            said = list(words(connection))
    assert [sorted(each) for each in said] == [["host", "node", "nonce", "proof", "task"]]
    assert said[0]["task"] == digest(TASK) and "mine" not in json.dumps(said)


@pytest.mark.slow
def test_strangers_that_say_nothing_delay_nobody(meeting: Meeting) -> None:
    """Neither while hosts meet, nor signs of life while they wait for a lost one."""
    leader, _, third = met = [meeting.host(node, 3, silence_s=1.0) for node in range(3)]
    joining = meeting.start(leader.join_as_leader, TASK, HANG_S, lambda: ANSWER)
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(meeting)).sendall(b'{"nonce"')
        for each in [meeting.start(each.join_as_follower, TASK, HANG_S) for each in met[1:]]:
            assert each.result() == ANSWER
        joining.result()
        met[1].close()
        while not leader.failed:
            leader.wait_briefly()
        waiting = meeting.start(leader.wait_for_hosts, 1.5)
        while not waiting.done():
            third.wait_briefly()
        with pytest.raises(PeerError, match="host 1 did not come"):
            waiting.result()
        assert third.failed and "host 1 (" in third.failed.message, "of itself it heard signs of life"


def test_a_host_that_comes_again_replaces_what_is_left_of_it(meeting: Meeting) -> None:
    leader, first = meeting.pair()
    leader.begin_attempt(0, "")
    again = meeting.start(meeting.host(1).join_as_follower, TASK, HANG_S)
    while not leader.failed:  # the first one is silent, and its connection lives
        leader.wait_briefly()
    assert "host 1 (" in leader.failed.message and "was started once more" in leader.failed.message
    assert again.result() == ANSWER
    result = leader.report_result(GroupResult(Exit.PEER, leader.failed, external=True, consequence=True))
    assert result.external and "was started once more" in (result.cause.message if result.cause else "")
    leader.wait_for_hosts(0.0)
    with pytest.raises(ConfigError, match="takes the place of this one"):
        while True:
            first.next_message(lambda: True)


def test_a_wrong_host_harms_no_run_under_way(meeting: Meeting) -> None:
    leader, _ = meeting.pair()
    leader.begin_attempt(0, "")
    wrong = meeting.start(meeting.host(1).join_as_follower, {"config": {"seed": 2}}, HANG_S)
    while not wrong.done():
        leader.wait_briefly()
    with pytest.raises(ConfigError, match="differs from host 0 in seed, versions"):
        wrong.result()
    assert not leader.failed and "seed=2, host 0 has 1" in meeting.notes[-1]


def test_what_fails_at_host_0_ends_all(meeting: Meeting) -> None:
    other = meeting.start(meeting.host(1).join_as_follower, TASK, HANG_S)

    def busy() -> dict[str, Any]:
        raise BusyError("somebody lives here")

    with pytest.raises(BusyError):
        meeting.host(0).join_as_leader(TASK, HANG_S, busy)
    with pytest.raises(BusyError, match="somebody lives here"):
        other.result()


def test_who_does_not_come_is_named(meeting: Meeting) -> None:
    with pytest.raises(PeerError, match="host 1, 2 did not come to launcher.address within 0.1 s"):
        meeting.host(0, 3).join_as_leader(TASK, 0.1, lambda: ANSWER)
    with pytest.raises(PeerError, match="host 0 did not answer at launcher.address=127.0.0.1"):
        meeting.host(1).join_as_follower(TASK, 0.1)


def test_a_stranger_is_forgotten(meeting: Meeting) -> None:
    joining = meeting.start(meeting.host(0).join_as_leader, TASK, 20.0, lambda: ANSWER)
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"node": "x"}\n',
        b"[1]\n",
        b"\xff\n",
        b'{"node": 1, "host": "h"}\n{"differs": 3',
        b"[" * 100_000 + b"\n",
    ):
        with connect(meeting) as stranger:
            stranger.sendall(said)
    assert meeting.host(1).join_as_follower(TASK, 20.0) == ANSWER
    joining.result()


def test_an_attempt_begins_and_ends_together(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    leader.begin_attempt(3, "a:1")
    assert other.next_message(lambda: True) == {"begin": 3, "store": "a:1"}
    other.begin_attempt(3, "a:1")
    assert other.report_result(GroupResult(Exit.OK)) == GroupResult(Exit.OK)
    assert leader.report_result(GroupResult(Exit.OK)) == GroupResult(Exit.OK)
    leader.broadcast({"end": GroupResult(Exit.OK).to_json()})
    assert GroupResult.from_json(other.next_message(lambda: True)["end"]) == GroupResult(Exit.OK)


def test_the_cause_is_the_failure_not_its_consequence(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    leader.begin_attempt(0, "")
    other.report_result(GroupResult(Exit.BUG, BUG))
    while not leader.failed:
        leader.wait_briefly()
    assert leader.failed == BUG
    mine = GroupResult(Exit.PEER, LOST, external=True, consequence=True)
    assert leader.report_result(mine) == GroupResult(Exit.BUG, BUG)


def test_a_failure_here_is_heard_there(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    leader.begin_attempt(0, "")
    other.next_message(lambda: True)
    other.begin_attempt(0, "")
    ended = meeting.start(leader.report_result, GroupResult(Exit.BUG, BUG))
    while not other.failed:
        other.wait_briefly()
    assert other.failed == BUG
    other.report_result(GroupResult(Exit.PEER, other.failed, external=True, consequence=True))
    assert ended.result() == GroupResult(Exit.BUG, BUG)


def test_a_lost_host_fails_the_attempt_and_may_come_back(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    leader.begin_attempt(0, "")
    other.close()
    while not leader.failed:
        leader.wait_briefly()
    assert "host 1 (" in leader.failed.message and "is gone" in leader.failed.message
    cause = leader.failed
    result = leader.report_result(GroupResult(Exit.PEER, LOST, external=True, consequence=True))
    assert result.external and result.cause == cause
    again = meeting.start(meeting.host(1).join_as_follower, TASK, HANG_S)
    leader.wait_for_hosts(HANG_S)
    assert again.result() == ANSWER


def test_a_host_that_cannot_begin_says_why(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    why = GroupResult(Exit.CONFIG, Failed(1, 0, int(Exit.CONFIG), "no such folder here", ""))
    other.report_result(why)  # before any attempt
    leader.begin_attempt(0, "")
    while not leader.failed:
        leader.wait_briefly()
    assert leader.report_result(GroupResult(Exit.PEER, leader.failed, external=True, consequence=True)) == why


def test_silence_is_noticed_on_both_sides(meeting: Meeting) -> None:
    leader, other = meeting.pair(silence_s=0.2)
    leader.begin_attempt(0, "")
    other.next_message(lambda: True)
    begun = time.monotonic()
    while not leader.failed and time.monotonic() - begun < HANG_S:  # `other` does nothing, as if stopped
        leader.wait_briefly()
    assert leader.failed
    assert "host 1" in leader.failed.message and "launcher.hang_timeout_s=0.2" in leader.failed.message
    with pytest.raises(PeerError, match=r"host 0 .*start again with the same run.dir"):
        other.next_message(lambda: True)


def test_beats_keep_a_waiting_host(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of the test: three times as long as the silence that would mean a loss."""
    leader, other = meeting.pair(silence_s=60.0)
    now = time.monotonic()
    for module in (host_rendezvous, host_connection):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for _ in range(12):
        now += 16.0
        for host in (leader, other, leader):
            host.tick()
    assert not leader.failed and not other.failed
    now += 61.0
    leader.tick()
    assert leader.failed, "without a beat it is lost"


def test_waiting_for_a_host_hears_a_stop(meeting: Meeting) -> None:
    leader, other = meeting.pair()
    other.close()
    while not leader.failed:
        leader.wait_briefly()
    with pytest.raises(Preempted, match="waiting for host 1"):
        leader.wait_for_hosts(HANG_S, lambda: True)


def test_outcomes_travel() -> None:
    for result in (GroupResult(Exit.OK), GroupResult(Exit.PEER, LOST, external=True, consequence=True)):
        assert GroupResult.from_json(json.loads(json.dumps(result.to_json()))) == result
