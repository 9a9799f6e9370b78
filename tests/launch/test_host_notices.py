"""What hosts tell each other of signals and of names: a drained one, and one that comes back elsewhere."""

from __future__ import annotations

import socket

import pytest

from dtf.core.errors import ConfigError
from dtf.host.signals import Stop
from dtf.launch import host_rendezvous
from tests.launch.test_host_rendezvous import ANSWER, TASK, Meeting
from tests.launch.test_host_rendezvous import meeting as meeting
from tests.support.launching import HANG_S


def test_all_hosts_stop_when_one_is_asked_to(meeting: Meeting) -> None:
    """One whose machine is drained, while others wait for its ranks in a rendezvous."""
    leader, other = meeting.pair()
    with Stop() as asked, Stop() as others:
        leader.stop, other.stop = others, asked
        asked.ask()
        for host in (other, leader, other):  # told to node 0, and by it to all, those included that know
            host.wait_briefly()
        assert (others.count, asked.count) == (1, 1)


def test_a_name_that_was_known_comes_back_with_its_host(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster forgets the name of a pod while it is replaced; one that nobody knows is a mistake."""
    known, connect = [False], socket.create_connection

    def lookup(address: tuple[str, int], timeout: float) -> socket.socket:
        known.append(True)
        if len(known) == 2:
            raise ConnectionRefusedError("its last address")
        if len(known) == 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return connect(address, timeout)

    monkeypatch.setattr(host_rendezvous.socket, "create_connection", lookup)
    leader, other = meeting.host(0), meeting.host(1)
    joining = meeting.start(leader.join_as_leader, TASK, HANG_S, lambda: ANSWER)
    assert other.join_as_follower(TASK, HANG_S) == ANSWER
    joining.result()
    known[:] = [False, True]  # now the first answer is that it is unknown
    with pytest.raises(ConfigError, match="this host knows no address of that name"):
        meeting.host(1).join_as_follower(TASK, HANG_S)
