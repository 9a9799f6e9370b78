"""Temporary folders that outlive a killed process no longer than until the next is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

LOCK = "lock"
"""The file in such a folder that is locked as long as its process lives."""

_own: set[Path] = set()


@contextmanager
def scratch_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder in `parent` (None: that of the system), removed at the end of the context. First those of this
    user are removed whose process was killed: a lock on a file in the folder ends with its process.
    """
    parent = parent or Path(tempfile.gettempdir())
    for path in parent.glob(f"{prefix}*"):
        with suppress(OSError):
            _remove_unlocked(path)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as name:
        _own.add(Path(name).absolute())
        made = Path(name, ".made")
        lock = os.open(made, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made.rename(Path(name, LOCK))  # nobody sees it without its lock
            yield Path(name)
        finally:
            os.close(lock)
            _own.discard(Path(name).absolute())


def remove_scratch(prefix: str, parent: Path) -> None:
    """Remove the folders in `parent` of this process, and those of this user whose processes have ended."""
    for path in parent.absolute().glob(f"{prefix}*"):
        if path in _own:
            shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            _remove_unlocked(path)


_held: set[weakref.finalize] = set()


def hold_scratch_folder(owner: object, prefix: str, parent: Path) -> Path:
    """A scratch folder that is removed with its `owner`, by `held_folders`, or with the process."""
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder(prefix, parent))
    _held.add(weakref.finalize(owner, _close, stack))
    return folder


@contextmanager
def held_folders() -> Iterator[None]:
    """At the end of this context nobody needs the folders that are held: forked processes have no interpreter's end."""
    try:
        yield
    finally:
        while _held:
            _held.pop()()


def _close(stack: ExitStack) -> None:
    with suppress(OSError):  # a thread still writes there: the next run removes the folder
        stack.close()


def _remove_unlocked(folder: Path) -> None:
    """OSError where there is nothing to remove."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(lock)
