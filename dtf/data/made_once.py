"""Files that are made of a user's data once, in a cache that may be deleted at any time: indexes, and rows in Arrow.

One process makes a file while others wait for it; whoever is killed leaves nothing that is taken for a whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtf.core.errors import DataError
from dtf.host.user_cache import user_cache


def cache_folder(given: str | Path | None) -> Path:
    """The folder for what is made of data. DataError where the user has no home and gave none."""
    folder = user_cache("rows") if given is None else Path(given).expanduser()
    if folder is None:
        raise DataError("there is no home folder to keep an index in; give cache=FOLDER")
    return folder


def name_of(*parts: Any) -> str:
    """A file name for a key (JSON)."""
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def state_of(path: Path) -> list[int]:
    """Size and time of the last change: other values when a file is written anew. DataError where there is none."""
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return [state.st_size, state.st_mtime_ns]


def made_once(path: Path, fits: Callable[[Path], Any], make: Callable[[Path], None]) -> Any:
    """What `fits` gives for the file or folder `path`, and not None; it is made first where it is not there or does not
    fit. `make` writes to the path that it gets, in the same folder. DataError where the cache cannot be written.
    """
    found = fits(path) if path.exists() else None
    if found is not None:
        return found
    with _one_at_a_time(path):
        found = fits(path) if path.exists() else None  # another process may have been first
        if found is not None:
            return found
        building = path.with_name(f"{path.name}.new")
        _remove(building)
        try:
            make(building)
        except BaseException as error:
            _remove(building)
            if isinstance(error, OSError):
                raise DataError(f"{path} cannot be made: {error}; is its disk full?") from error
            raise
        _remove(path)
        os.replace(building, path)
    found = fits(path)
    if found is None:
        raise DataError(f"{path} was made, and cannot be read back; is its disk damaged?")
    return found


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """The kernel releases the lock when the process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path.with_name(f".{path.name}.lock"), "w")  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written: {error.strerror or error}; give another cache") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
