"""The lines of log files that grow, for platforms whose jobs write into the folder of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dtf.core.errors import DataError
from dtf.core.files import open_regular

_PAUSE_S = 0.2


def followed(files: Callable[[], Iterable[Path]], lives: Callable[[], bool]) -> Iterator[str]:
    """Lines of the files that there are, and, while the job `lives`, of what comes.

    The name of a file stands before its lines where there are several.
    """
    read: dict[Path, int] = {}
    last = ""
    while True:
        going = lives()  # asked first: what was written before the end is read after it
        for path in files():
            text, read[path] = _new_lines(path, read.get(path, 0), whole=not going)
            if text and len(read) > 1 and last != path.name:
                last = path.name
                yield f"==> {path.name} <=="
            yield from text
        if not going:
            return
        time.sleep(_PAUSE_S)


def _new_lines(path: Path, offset: int, whole: bool) -> tuple[list[str], int]:
    """The lines behind `offset`, and where they end. `whole`: with a last one that has no end yet."""
    try:
        with open_regular(path) as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    if not whole:
        content = content[: content.rfind(b"\n") + 1]
    return content.decode(errors="replace").splitlines(), offset + len(content)
