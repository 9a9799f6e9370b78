"""A host asks node 0 which job it begins."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from dtf.core.errors import ConfigError, PeerError
from dtf.launch.host_job import job_of_node_0
from dtf.launch.host_rendezvous import HostRendezvous
from tests.support.launching import HANG_S

TASK = {"config": {"job": {"name": "doctor"}}}
ANSWER = {"folder": "/run", "id": "one"}


def test_a_host_asks_which_job_node_0_begins_or_is_in() -> None:
    """Also before node 0 listens. Who has another token learns nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        asking = threads.submit(job_of_node_0, address, 1, "secret", HANG_S)
        leader, other = (
            stack.enter_context(closing(HostRendezvous(node, 2, 1, address, 60.0, print, "secret"))) for node in (0, 1)
        )
        joining = threads.submit(leader.join_as_leader, TASK, HANG_S, lambda: ANSWER)
        assert asking.result() == "doctor"
        with pytest.raises(ConfigError, match="DTF_TOKEN"):
            job_of_node_0(address, 1, "another", HANG_S)
        assert other.join_as_follower(TASK, HANG_S) == ANSWER
        joining.result()
        asking = threads.submit(job_of_node_0, address, 1, "secret", HANG_S)
        while not asking.done():
            leader.wait_briefly()
        assert asking.result() == "doctor" and leader.failed is None
    with pytest.raises(PeerError, match="within 0 s"):
        job_of_node_0(address, 1, "secret", 0.0)
