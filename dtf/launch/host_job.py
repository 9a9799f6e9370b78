"""Which job node 0 of several hosts begins, for hosts that follow it. Torch-free."""

from __future__ import annotations

import socket
import time

from dtf.core.consistency import error_from_json
from dtf.core.errors import PeerError
from dtf.host.network import endpoint_text
from dtf.launch.host_connection import HELLO_S, Connection, introduce

_RETRY_S = 0.2


def job_of_node_0(address: tuple[str, int], node: int, token: str, timeout_s: float) -> str:
    """The name of the job that node 0 waits for others in, or is in the midst of. Asks until it answers.

    ConfigError when it has another token, PeerError when it does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with socket.create_connection(address, timeout=HELLO_S) as opened:
                answer = introduce(Connection(opened), node, token, {"task": ""}, time.monotonic() + HELLO_S)
            if "exit" in answer:
                raise error_from_json(answer)
            return str(answer["job"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > deadline:
                raise PeerError(
                    f"host 0 did not answer at launcher.address={endpoint_text(*address)} within {timeout_s:g} s: "
                    f"{error}; see job=doctor"
                ) from error
            time.sleep(_RETRY_S)
