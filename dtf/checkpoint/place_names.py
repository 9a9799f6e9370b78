"""What a place for checkpoints is called, and the errors of one that cannot be used. Torch-free."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from dtf.api.schema import KeyProblem
from dtf.core.errors import ConfigError, SaveError

SCHEMES = ("s3", "gs")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def is_url(place: str) -> bool:
    """Whether a text names a place that is no folder of this machine."""
    return "://" in place


def check_place(place: str, key: str) -> None:
    """Raise KeyProblem when a place cannot be used, as far as its text says. `key`: that gave it. Empty: none."""
    if not is_url(place):
        if place and (not place.strip() or re.match(r"[a-z0-9]{2,}:/", place)):
            raise KeyProblem(key, f"{key}='{place}' is no place; write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH")
        try:
            Path(place).expanduser()
        except RuntimeError:
            raise KeyProblem(key, f"{key}={place}: there is no such user; write the path of a folder") from None
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
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), "")
    if url.scheme == "s3" and os.environ.get(variable, "").startswith("http:") and not allows_http():
        text = f"{key}={place} lies behind {variable}={_without_user(os.environ[variable])}, which is not encrypted"
        raise KeyProblem(key, f"{text}; use https, or set AWS_ALLOW_HTTP=true to allow it")
    if find_spec("obstore") is None:
        raise KeyProblem(
            key, f"{key}={place} needs obstore, which is not installed: {sys.executable} -m pip install 'obstore>=0.12'"
        )


def _without_user(endpoint: str) -> str:
    """An address as it may be shown."""
    scheme, _, rest = endpoint.partition("//")
    return f"{scheme}//{rest.rpartition('@')[2]}"


def allows_http() -> bool:
    return os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true")


_REFUSALS = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EROFS, errno.ELOOP)


@contextmanager
def reaching(name: str, key: str) -> Iterator[None]:
    """A context in which a place that refuses, or is not there, is a ConfigError, and one that does not answer a
    SaveError. `key`: that gave it.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSALS:
            raise ConfigError(f"{key}={name} cannot be used: {error.strerror}") from error
        text = f"{key}={name} does not answer: {error.strerror or error}"
        raise SaveError(f"{text}; start again when it does, or without {key}") from error
