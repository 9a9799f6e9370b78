"""Files that their owner alone can read, files that may come from elsewhere, text files that are replaced whole, the
ends of archives, and nested values by dotted key.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any


def open_private(path: Path, mode: str) -> IO[Any]:
    """`open` for writing; a file that it makes is readable by its owner alone, whatever the umask."""
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, encoding=encoding, opener=lambda name, flags: os.open(name, flags, 0o600))


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read that may come from elsewhere. OSError for a pipe or a device, which could wait for ever."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return file
    file.close()
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def small_text(path: Path, most: int = 1 << 20) -> str:
    """The text of a file that may come from elsewhere. OSError as of `open_regular`; ValueError for one of more than
    `most` bytes, and for what is no text.
    """
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode()


def small_json(path: Path, most: int = 1 << 20) -> dict[str, Any]:
    """The JSON object in a file, as `small_text`. ValueError for what is none."""
    try:
        value = json.loads(small_text(path, most))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {'a list' if isinstance(value, list) else type(value).__name__}, and no object")
    return value


def flat(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dicts by dotted key."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield from flat(value, f"{key}.{name}" if key else name)
    else:
        yield key, node


def replace_text(path: Path, text: str) -> None:
    """Replace a file by `text`, durably. A reader finds the old text or the new one, also after a crash or an error."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):  # give the space of a full disk back
            temporary.unlink()
        raise
    os.replace(temporary, path)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A context in which an OSError says that it is about this file. A failed write names none by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def refuse_unread(read: Callable[[int], bytes], end: int) -> None:
    """Raise EOFError where a tar archive does not end with zeros alone: tarfile takes a damaged header, and a hole of
    zeros in the middle, for its end. `read`: of the archive, from where the last member ends, at byte `end`; it is read
    to its end, by which a compressed one is verified.
    """
    rest = read(10240)
    whole = len(rest) >= 512
    while rest and whole:
        whole, rest = not rest.strip(b"\0"), read(1 << 20)
    if not whole:
        raise EOFError(f"it breaks off, is damaged, or is several archives in one, at byte {end}")
