"""A cache of files that are made of a log once: one process makes them while others wait, then all map them.

The cache may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtf.core.errors import DataError
from dtf.recipes.ctr.files import status

FORMAT = 1  # of the cached files; part of every key
_log = logging.getLogger(__name__)


def stamp(paths: Sequence[Path]) -> list[list[Any]]:
    """Names, sizes and modification times of files, as JSON: another value when a file changes."""
    return [[os.path.realpath(path), (state := status(path)).st_size, state.st_mtime_ns] for path in paths]


def cached(cache: Path, key: Any, make: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """The folder in `cache` for `key` (JSON), and what `make` returned for it (JSON).

    Where there is no such folder, or its files are damaged, `make` writes files into a new one. DataError when the
    cache cannot be written. `make` must raise errors of its own for what it reads: an OSError of its would be taken for
    one of the cache.
    """
    folder = cache / hashlib.sha256(json.dumps([FORMAT, key]).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        while True:
            identity = _identity(folder)
            if (result := _intact(folder)) is not None:  # ranks read the files at the same time, so without the lock
                return folder, result
            with open(f"{folder}.lock", "w") as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # the kernel releases it when the process dies
                if _identity(folder) == identity:  # no other process has made it meanwhile
                    return folder, _made(folder, make)
    except OSError as error:
        raise DataError(
            f"recipe.data.cache={cache}: {error.strerror or error}; set recipe.data.cache=DIR to a folder with free "
            "space"
        ) from error


def _made(folder: Path, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    if folder.exists():
        _log.warning("%s is damaged and made anew", folder)
    building = folder.with_name(f"{folder.name}.tmp")
    for stale in (building, folder):
        if stale.exists():
            shutil.rmtree(stale)
    building.mkdir()
    try:
        result = make(building)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    digests = {path.name: _crc32(path) for path in sorted(building.iterdir())}
    (building / "meta.json").write_text(json.dumps({"said": result, "digests": digests}))
    building.rename(folder)
    return result


def _identity(folder: Path) -> tuple[int, int] | None:
    """A value that changes when the folder is made again; None when there is no folder."""
    try:
        state = folder.stat()
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_ctime_ns


def _intact(folder: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((folder / "meta.json").read_text())
        return (
            meta["said"] if all(_crc32(folder / name) == digest for name, digest in meta["digests"].items()) else None
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _crc32(path: Path) -> int:
    return zlib.crc32(np.memmap(path, np.uint8, "r").data) if path.stat().st_size else 0
