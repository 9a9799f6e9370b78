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
from dtf.checkpoint.storage import step_of
from dtf.core.errors import ConfigError, SaveError

SCHEMES = ("s3", "gs")
_WRITE = "write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def is_url(place: str) -> bool:
    """Whether a text names a place that is no folder of this machine."""
    return "://" in place


def is_mistyped(place: str) -> bool:
    """Whether a text reads as a URL that lacks `//`, and nothing of this name is here."""
    return bool(_SCHEME.match(place)) and not os.path.exists(place)


def check_place(place: str, key: str) -> None:
    """Raise KeyProblem when a place cannot be used, as far as its text says. `key`: that gave it. Empty: none."""
    if not is_url(place):
        _check_folder(place, key)
        return
    try:
        url = urlsplit(place)
    except ValueError:
        url = urlsplit("")
    if url.scheme not in SCHEMES or not url.hostname or url.query or url.fragment:
        raise KeyProblem(key, f"{key}={place.partition('?')[0]} is no place; {_WRITE}")
    if step_of(url.path.rstrip("/").rpartition("/")[2]) is not None:
        mirror = place.rstrip("/").rpartition("/")[0]
        raise KeyProblem(key, f"{key}={place} is one checkpoint; write {mirror}, the place of all; the newest is taken")
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


def refuse_inside(mirror: str, run_folder: Path) -> None:
    """Raise ConfigError for a mirror that is lost with the run folder."""
    run = run_folder.resolve()
    if mirror and not is_url(mirror) and run in [(place := Path(mirror).expanduser().resolve()), *place.parents]:
        raise ConfigError(
            f"checkpoint.mirror={mirror} lies in the run folder {run_folder}, and would be lost with it; choose a "
            "folder elsewhere, best on another disk"
        )


def _check_folder(place: str, key: str) -> None:
    if place and not place.strip():
        raise KeyProblem(key, f"{key}='{place}' is no place; {_WRITE}")
    if scheme := _SCHEME.match(place):
        meant = f"{scheme[0].lower()}//{place[scheme.end() :].lstrip('/')}"
        cure = f"write {meant}" if scheme[0][:-1].lower() in SCHEMES else _WRITE
        raise KeyProblem(key, f"{key}={place} is no place; {cure}; a folder of this name is written ./{place}")
    try:
        folder = Path(place).expanduser().absolute()
    except RuntimeError:
        raise KeyProblem(key, f"{key}={place}: there is no such user; write the path of a folder") from None
    there = next((one for one in (folder, *folder.parents) if os.path.exists(one)), folder)
    if place and there.exists() and not there.is_dir():
        raise KeyProblem(key, f"{key}={place} cannot be used: {there} is no folder; {_WRITE}")


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
