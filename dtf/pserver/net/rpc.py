"""Requests over gRPC: raw bytes to named handlers, for processes that know the token of the run.

gRPC does not survive a fork: import this module in ranks alone.
"""

from __future__ import annotations

import ctypes
import errno
import hmac
import ipaddress
import logging
import math
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import grpc

from dtf.core.errors import AuthError, BusyError, ConfigError
from dtf.host.network import endpoint as parsed
from dtf.host.network import endpoint_text, listen
from dtf.pserver.net.codec import Parts, WireError
from dtf.pserver.net.shared_memory import Regions
from dtf.pserver.net.transport import MOST_BYTES, Failed, Lost, Pending, Refused, Stale, short

_TOKEN, _GENERATION, _SERVICE = "dtf-token", "dtf-epoch", "/dtf.pserver/"
_HEALTH, _SERVING, _NOT_SERVING = "/grpc.health.v1.Health/Check", b"\x08\x01", b"\x08\x02"
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _ARENA_MAX = -3, -1, -8  # of mallopt
_POLL_S = 0.02
_MOST_METADATA = 8192  # bytes
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tls:
    """Files in PEM: the authority that vouches for the other side, and this side's certificate and key.

    `mutual`: clients show a certificate too.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    mutual: bool = False

    def server(self) -> grpc.ServerCredentials:
        """ConfigError when a file is missing."""
        ca = _pem(self.ca, "ca") if self.mutual else None
        return grpc.ssl_server_credentials([(_pem(self.key, "key"), _pem(self.cert, "cert"))], ca, self.mutual)

    def client(self) -> grpc.ChannelCredentials:
        """ConfigError when a file is missing."""
        certificate = (_pem(self.key, "key"), _pem(self.cert, "cert")) if self.mutual else (None, None)
        return grpc.ssl_channel_credentials(_pem(self.ca, "ca"), *certificate)


class Service:
    """Listens on one address for requests to `handlers`, which get bytes and return bytes, each in one of `threads`
    threads.

    `address`: HOST:PORT, port 0 for a free one; beyond loopback only with `tls` or `allow_insecure` (ConfigError).
    BusyError where the port is taken.

    `generation` names the attempt of the run: a client of another one gets Stale, but for the methods `any_generation`.
    Methods `viewer_methods` also answer clients that have `viewer(token)` alone.

    What a handler raises, except Refused, WireError and Stale, is logged here and handed to `on_error`; the client
    learns only that the server failed. Health checks need no token, as orchestrators have none; they say whether
    `ready` and nothing else.
    """

    def __init__(
        self,
        handlers: Mapping[str, Callable[[bytes], bytes]],
        token: str,
        generation: str,
        address: str = "127.0.0.1:0",
        threads: int = 16,
        most_bytes: int = MOST_BYTES,
        tls: Tls | None = None,
        allow_insecure: bool = False,
        on_error: Callable[[Exception], None] | None = None,
        any_generation: Collection[str] = (),
        viewer_methods: Collection[str] = (),
    ) -> None:
        host, port = _listen_address(address, tls is not None or allow_insecure)
        keep_buffers()
        self.ready: Callable[[], bool] = lambda: True
        self.on_error = on_error
        self.generation = _checked("generation", generation)
        self._token, self._viewer = _checked("token", token).encode(), viewer(token).encode()
        self._any_generation, self._viewer_methods = (
            {_SERVICE + name for name in names} for names in (any_generation, viewer_methods)
        )
        self._threads = ThreadPoolExecutor(threads, "rpc")
        self._aside = ThreadPoolExecutor(1, "rpc-aside")  # what is answered even while all handlers are busy
        self._methods = {_HEALTH: _unread(self._at_once(self._health))}
        self._regions = Regions(2 * threads)
        self.add(handlers)
        self._server = grpc.server(
            self._threads, [_Handlers(self._method)], options=[*_options(most_bytes), *_SERVER_OPTIONS]
        )
        try:
            port = _bind(self._server, endpoint_text(host, port), tls)
        except RuntimeError:
            self._aside.shutdown()
            raise (ConfigError(f"{tls} is no certificate with its key") if tls else _taken(address)) from None
        self.endpoint = endpoint_text(host, port)

    def add(self, handlers: Mapping[str, Callable[[bytes], bytes]]) -> None:
        """Answer these methods too, from now on. Until `ready`, a request for an unknown method is answered with "ask
        again".
        """
        for name, handler in handlers.items():
            method = _SERVICE + name
            # those that look, and those that do not belong to the run yet, have nothing large to say
            large = method not in self._any_generation | self._viewer_methods
            self._methods[method] = grpc.unary_unary_rpc_method_handler(
                self._answer(self._regions.around(handler) if large else handler)
            )

    def start(self) -> None:
        """Begin to answer; requests since the construction have waited."""
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take no more requests. Those under way have `grace_s` to end; then their clients get Lost.

        A handler itself is not interrupted, and the interpreter does not exit before it returns.
        """
        self._server.stop(grace_s).wait()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._aside.shutdown(wait=False, cancel_futures=True)

    def _method(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Runs when the head of a request is there; its body is not received before a handler that wants it runs."""
        method = details.method
        if method != _HEALTH:
            metadata = dict(details.invocation_metadata)
            token = _bytes(metadata.get(_TOKEN, ""))
            if not hmac.compare_digest(token, self._token) and not (
                method in self._viewer_methods and hmac.compare_digest(token, self._viewer)
            ):
                return self._refusal(grpc.StatusCode.UNAUTHENTICATED, "the token of the run is needed")
            if method not in self._any_generation and metadata.get(_GENERATION) != self.generation:
                return self._refusal(grpc.StatusCode.FAILED_PRECONDITION, "another attempt of the run is served here")
            if method not in self._methods and not self.ready():
                return self._refusal(grpc.StatusCode.UNAVAILABLE, "this server is starting")
        return self._methods.get(method)

    def _refusal(self, code: grpc.StatusCode, text: str) -> grpc.RpcMethodHandler:
        def refuse(requests: Any, context: grpc.ServicerContext) -> bytes:
            context.abort(code, text)

        return _unread(self._at_once(refuse))

    def _at_once(
        self, behaviour: Callable[[Any, grpc.ServicerContext], bytes]
    ) -> Callable[[Any, grpc.ServicerContext], bytes]:
        def aside(request: Any, context: grpc.ServicerContext) -> bytes:
            return behaviour(request, context)

        aside.experimental_thread_pool = self._aside  # gRPC's name for it
        return aside

    def _health(self, requests: Any, context: grpc.ServicerContext) -> bytes:
        """HealthCheckRequest -> HealthCheckResponse {ServingStatus status = 1}, which needs no protobuf.

        The request, which names a service, is not read: it may come from anybody and be of any size.
        """
        return _SERVING if self.ready() else _NOT_SERVING

    def _answer(self, handler: Callable[[bytes], bytes]) -> Callable[[bytes, grpc.ServicerContext], bytes]:
        def behave(request: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return handler(request)
            except (Refused, WireError) as error:
                code, text = grpc.StatusCode.INVALID_ARGUMENT, short(str(error))
            except Stale as error:
                code, text = grpc.StatusCode.FAILED_PRECONDITION, short(str(error))
            except Exception as error:  # noqa: BLE001  # whatever it is must not travel
                _LOG.error("a request failed", exc_info=error)
                if self.on_error:
                    self.on_error(error)
                code, text = grpc.StatusCode.INTERNAL, "an error of the server, which its log has"
            return context.abort(code, text)

        return behave


def viewer(token: str) -> str:
    """The token of those who may read the status and change nothing. It is derived from the run's, which cannot be
    derived from it.
    """
    return hmac.digest(token.encode(), b"status", "sha256").hex()


class Client:
    """A connection of its own to the service at `endpoint`, made at the first request and again when it broke.

    Many threads may call. `generation`: the attempt of the run to which this process belongs.
    """

    def __init__(
        self, endpoint: str, token: str, generation: str, most_bytes: int = MOST_BYTES, tls: Tls | None = None
    ) -> None:
        parsed(endpoint, "endpoint")
        keep_buffers()
        self.endpoint = endpoint
        options = [*_options(most_bytes), *_CLIENT_OPTIONS]
        self._channel = (
            grpc.secure_channel(endpoint, tls.client(), options) if tls else grpc.insecure_channel(endpoint, options)
        )
        self._metadata = ((_TOKEN, _checked("token", token)), (_GENERATION, _checked("generation", generation)))
        self._stubs: dict[str, grpc.UnaryUnaryMultiCallable] = {}

    def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server says that it is ready. Lost after the deadline.

        Whether the server accepts the token shows at the first call.
        """
        until = monotonic() + deadline_s
        check = self._channel.unary_unary(_HEALTH)
        try:
            while check(b"", timeout=max(until - monotonic(), 0), wait_for_ready=True) != _SERVING:
                sleep(_POLL_S)
        except grpc.RpcError as error:
            raise self._error("ready", error) from None

    def call(self, method: str, data: bytes | Parts, deadline_s: float) -> bytes:
        """See `Transport`."""
        try:
            return self._stub(method)(bytes(data), timeout=_deadline(deadline_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(method, error) from None

    def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Pending:
        """See `Transport`."""
        return _Answer(
            self, method, self._stub(method).future(bytes(data), timeout=_deadline(deadline_s), metadata=self._metadata)
        )

    def close(self) -> None:
        """Close the connection; calls under way raise Lost."""
        self._channel.close()

    def _stub(self, method: str) -> grpc.UnaryUnaryMultiCallable:
        if method not in self._stubs:
            self._stubs[method] = self._channel.unary_unary(_SERVICE + method)
        return self._stubs[method]

    def _error(self, method: str, error: Any) -> Exception:
        code, text = error.code(), short(error.details() or "")
        where = f"{method} at {self.endpoint}"
        match code:
            case grpc.StatusCode.UNAUTHENTICATED:
                return AuthError(f"{where}: {text}; give all processes of a run the same token")
            case grpc.StatusCode.FAILED_PRECONDITION:
                return Stale(f"{where}: {text}")
            case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.RESOURCE_EXHAUSTED | grpc.StatusCode.UNIMPLEMENTED:
                return Refused(f"{where}: {text}")
            case grpc.StatusCode.INTERNAL:
                return Failed(f"{where}: {text}")
        return Lost(f"{where}: {code.name} {text}")


class _Answer:
    def __init__(self, client: Client, method: str, future: Any) -> None:
        self._client, self._method, self._future = client, method, future

    def result(self) -> bytes:
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._client._error(self._method, error) from None
        except grpc.FutureCancelledError:
            raise Lost(f"{self._method} at {self._client.endpoint}: the connection was closed") from None


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, method: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None]) -> None:
        self._method = method

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self._method(handler_call_details)


def _unread(behaviour: Callable[[Any, grpc.ServicerContext], bytes]) -> grpc.RpcMethodHandler:
    """A handler that answers without its request: of a stream the messages are received as they are asked for."""
    return grpc.stream_unary_rpc_method_handler(behaviour)


def keep_buffers() -> None:
    """Have glibc keep up to 1 GiB of freed memory for the next message.

    By itself it returns each large one, and most of its time goes into page faults.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        for setting, value in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, 1 << 30), (_ARENA_MAX, 1)):
            mallopt(setting, value)


def _options(most_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", most_bytes),
        ("grpc.max_send_message_length", most_bytes),
        ("grpc.enable_http_proxy", 0),
    ]


_SERVER_OPTIONS = (
    ("grpc.max_metadata_size", _MOST_METADATA),  # read before the token is compared
    ("grpc.absolute_max_metadata_size", 2 * _MOST_METADATA),
    ("grpc.so_reuseport", 0),  # or two servers share one port, silently
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # allow the pings below
)
_CLIENT_OPTIONS = (
    # a host that is cut off, or a process that is stopped, sends no end of its connection
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # without it the one before it has no effect
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # or clients of one process share a connection
    ("grpc.enable_retries", 0),  # `RetryingTransport` does it, where it may be done
)


def _listen_address(address: str, open_to_others: bool) -> tuple[str, int]:
    """One address of this host that can be listened on, as numbers."""
    name, port = parsed(address, "address", least=0)
    try:
        host = str(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][4][0])
        where = ipaddress.ip_address(host)
        if where.is_unspecified:
            raise ConfigError(f"address={address} would listen on every interface; give the address of one")
        if not where.is_loopback and not open_to_others:
            raise ConfigError(
                f"address={address} is open to other hosts, and what passes is not encrypted; give tls, or allow it "
                "with allow_insecure=true"
            )
        listen(host, port).close()  # asked here, as gRPC does not say what is wrong
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(address) from None
        raise ConfigError(f"address={address} cannot be listened on: {error.strerror or error}") from None
    return host, port


def _bind(server: grpc.Server, address: str, tls: Tls | None) -> int:
    return server.add_secure_port(address, tls.server()) if tls else server.add_insecure_port(address)


def _taken(address: str) -> BusyError:
    return BusyError(f"address={address} is taken by another process; give another port, or 0 for a free one")


def _checked(name: str, text: str) -> str:
    if not text or not text.isascii() or not text.isprintable():
        raise ValueError(f"the {name} of a run is printable ASCII and not empty")
    return text


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _deadline(deadline_s: float) -> float:
    if not 0 < deadline_s < math.inf:
        raise ValueError(f"a deadline of {deadline_s} s is none")
    return deadline_s


def _pem(path: Path | None, name: str) -> bytes:
    if path is None:
        raise ConfigError(f"tls needs the file of its {name}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls: {name} {path} cannot be read: {error.strerror}") from None
