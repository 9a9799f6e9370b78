"""Names of other processes of a job, which a cluster's name service may learn some seconds after they have started."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterable

from dtf.host.network import endpoint

_ASK_S, _PATIENCE_S = 1.0, 5.0


def wait_for_names(endpoints: Iterable[str], timeout_s: float) -> None:
    """Wait until the host of each `HOST:PORT` has an address, or the time is over: whoever connects says what is wrong.

    ConfigError for what is no endpoint.
    """
    missing = {endpoint(text, "DTF_ADDRESS or DTF_ENDPOINTS")[0] for text in endpoints}
    deadline, note_at = time.monotonic() + timeout_s, time.monotonic() + _PATIENCE_S
    while missing := {host for host in missing if not _is_known(host)}:
        now = time.monotonic()
        if now > deadline:
            return
        if note_at and now > note_at:
            print(f"dtf: waiting for an address of {', '.join(sorted(missing))}", file=sys.stderr, flush=True)
            note_at = 0.0
        time.sleep(_ASK_S)


def _is_known(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 1, type=socket.SOCK_STREAM)
        return True
    except socket.gaierror as error:
        # other errors do not pass by waiting
        return error.errno not in (socket.EAI_NONAME, socket.EAI_AGAIN, getattr(socket, "EAI_NODATA", None))
