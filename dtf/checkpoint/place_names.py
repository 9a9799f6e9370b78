"""What a place for checkpoints is called, and the errors of one that cannot be used. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from urllib.parse import urlsplit

from dtf.api.schema import KeyProblem
from dtf.core.errors import ConfigError, SaveError

SCHEMES = ("s3", "gs")


def is_url(place: str) -> bool:
    """Whether a text names a place that is no folder of this machine."""
    return "://" in place


def check_place(place: str, key: str) -> None:
    """Raise KeyProblem when a place cannot be used, as far as its text says. `key`: that gave it."""
    if not is_url(place):
        return
    try:
        url = urlsplit(place)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in SCHEMES or not url.hostname or url.query or url.fragment:
        raise KeyProblem(
            key, f"{key}={place.partition('?')[0]} is no place; write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH"
        )
    if url.username is not None:
        text = "holds a user or a password, and a config is saved; give them to the environment (AWS_ACCESS_KEY_ID)"
        raise KeyProblem(key, f"{key} {text}")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    if url.scheme == "s3" and endpoint.startswith("http:") and not allows_http():
        text = f"{key}={place} lies behind AWS_ENDPOINT_URL={endpoint}, which is not encrypted"
        raise KeyProblem(key, f"{text}; use https, or set AWS_ALLOW_HTTP=true to allow it")
    if find_spec("obstore") is None:
        raise KeyProblem(
            key, f"{key}={place} needs obstore, which is not installed: {sys.executable} -m pip install 'obstore>=0.12'"
        )


def allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


@contextmanager
def reaching(name: str, key: str) -> Iterator[None]:
    """A context in which a place that refuses, or is not there, is a ConfigError, and one that does not answer a
    SaveError. `key`: that gave it.
    """
    try:
        yield
    except (PermissionError, FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{key}={name} cannot be used: {error.strerror}") from error
    except OSError as error:
        text = f"{key}={name} does not answer: {error.strerror or error}"
        raise SaveError(f"{text}; start again when it does, or without {key}") from error
