"""What a store says when it fails: the cause, in few words, and what to do where there are no credentials."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import obstore.store
import pytest
from obstore.exceptions import GenericError

from dtf.checkpoint.place_names import reaching
from dtf.checkpoint.places import Bucket
from dtf.checkpoint.store_errors import cause
from dtf.core.errors import ConfigError, SaveError

METADATA = (
    "Error performing {} http://169.254.169.254/{} in 748.307us - Server returned non-2xx status code: 403 Forbidden"
)


@pytest.fixture(autouse=True)
def asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a store says is the same after four pauses."""
    make = obstore.store.from_url

    def once(name: str, retry_config: dict[str, Any], **more: Any) -> Any:
        return make(name, retry_config={**retry_config, "max_retries": 0}, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(obstore.store, "from_url", once)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")


@contextmanager
def server(answer: bytes) -> Iterator[str]:
    """The address of one that gives this answer to each request."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def said(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> OSError:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(OSError) as caught:
        Bucket("s3://bucket/x").read_owner()
    return caught.value


def test_the_innermost_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        refused = f"http://127.0.0.1:{closed.getsockname()[1]}"
    assert said(monkeypatch, refused).strerror == "Connection refused"
    busy = b"HTTP/1.1 503 Slow\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello"
    with server(busy) as endpoint:
        assert said(monkeypatch, endpoint).strerror == "503 Service Unavailable: hello"
    text = b"<Error><Code>AccessDenied</Code><Message>Not yours</Message></Error>"
    with server(
        b"HTTP/1.1 403 No\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (len(text), text)
    ) as endpoint:
        error = said(monkeypatch, endpoint)
        assert (error.errno, error.strerror) == (errno.EACCES, "AccessDenied: Not yours")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("kind: Timeout, source: reqwest::Error { kind: Request, source: TimedOut }", "no answer in time"),
        ('Custom { kind: Other, error: "failed to lookup address" }', "failed to lookup address"),
        ("error: InvalidCertificate(\n   UnknownIssuer,\n)", "its certificate is refused (UnknownIssuer)"),
        ("kind: Unheard", "HTTP error: error sending request"),
    ],
)
def test_why_there_was_no_answer_is_told(source: str, expected: str) -> None:
    text = "Generic S3 error: Error performing GET http://x/ in 1s, after 4 retries, max_retries: 4, retry_timeout: 20s"
    error = GenericError(f"{text}  - HTTP error: error sending request\n\nDebug source:\n{source}")
    assert cause(error) == expected


@pytest.mark.parametrize(
    ("store", "asked", "cure"),
    [
        ("s3", ("PUT", "latest/api/token"), "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("gs", ("GET", "computeMetadata/v1/instance/service-accounts/default/token"), "set GOOGLE_SERVICE_ACCOUNT"),
    ],
)
def test_a_run_without_credentials_is_told_which_to_set(
    store: str, asked: tuple[str, str], cure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import obstore

    def get(*_: Any) -> None:
        raise GenericError(f"Generic error: {METADATA.format(*asked)}")

    monkeypatch.setattr(obstore, "get", get)
    place = f"{store}://bucket/x"
    with (
        pytest.raises(ConfigError, match=f"{place} cannot be used: no credentials found: {cure}"),
        reaching(place, "checkpoint.mirror"),
    ):
        Bucket(place).read_owner()


def test_a_machine_that_gives_no_credentials_now_may_do_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    def get(*_: Any) -> None:
        url = "http://169.254.169.254/latest/api/token"
        raise GenericError(f"Generic error: Error performing PUT {url} in 9s - HTTP error: error sending request")

    monkeypatch.setattr(obstore, "get", get)
    with pytest.raises(SaveError, match="no credentials found"), reaching("s3://bucket/x", "checkpoint.mirror"):
        Bucket("s3://bucket/x").read_owner()
