"""The server that `observer=[prometheus]` answers with, for programs on this host alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from dtf.observers.openmetrics import CONTENT_TYPE

HOST = "127.0.0.1"
_REQUEST_S = 2.0  # silence of a client
_MOST_CLIENTS = 8


class MetricsServer(ThreadingTCPServer):
    """Answers a few clients at once, each in a thread that nobody waits for. Others are turned away."""

    daemon_threads, block_on_close, allow_reuse_address = True, False, True
    request_queue_size = 2 * _MOST_CLIENTS

    def __init__(self, text: Callable[[], str], port: int) -> None:
        self.text, self._free = text, threading.Semaphore(_MOST_CLIENTS)
        super().__init__((HOST, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is no matter of the run's."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_S
    server_version, sys_version = "dtf", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "the numbers are at /metrics")
            return
        assert isinstance(self.server, MetricsServer)
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass
