"""Names of files as people write them: `shard-{000..010}.tar`, `rows/*.parquet`, a folder, or a list of these."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dtf.core.errors import DataError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def files_of(pattern: str | Path | Sequence[str | Path], suffix: str) -> list[Path]:
    """The files of a pattern, in the order of braces, and sorted where * or a folder leaves the order open.

    DataError where one of them is missing, or there is none.
    """
    patterns = [pattern] if isinstance(pattern, str | Path) else list(pattern)
    found: list[Path] = []
    for text in (spelled for given in patterns for spelled in spell_out(str(given))):
        if re.match(r"[a-z][a-z0-9+.-]*:", text):
            raise DataError(f"{text} is no file of this machine; copy the files to a disk that all ranks see")
        path = Path(text).expanduser()
        if path.is_dir():
            matches = sorted(path.glob(f"*{suffix}"))
        elif glob.has_magic(text) and not path.exists():
            matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        else:
            matches = [path]
        missing = next((match for match in matches if not match.is_file()), None)
        if missing is not None:
            names = given_text(pattern)
            by = f", and {names} names it" if names != str(missing) else ""
            raise DataError(f"{missing} is no file{by}{_looked_in(path)}")
        if not matches:
            raise DataError(f"{text} names no file{f' *{suffix}' if path.is_dir() else ''}{_looked_in(path)}")
        found += matches
    if not found:
        raise DataError("no files are given")
    return found


def _looked_in(path: Path) -> str:
    return "" if path.is_absolute() else f"; it was looked for in {Path.cwd()}"


def given_text(pattern: str | Path | Sequence[str | Path]) -> str:
    return str(pattern) if isinstance(pattern, str | Path) else f"a list of {len(pattern)}"


def spell_out(text: str) -> Iterator[str]:
    """`a{0..2}` -> a0 a1 a2, `{00..02}` keeps zeros, `{x,y}` -> x y; what is in no such braces stays as it is."""
    for match in _BRACES.finditer(text):
        numbers = _RANGE.fullmatch(match[1])
        if numbers:
            first, last = int(numbers[1]), int(numbers[2])
            width = len(numbers[1]) if numbers[1].startswith("0") else 0
            parts = [str(number).zfill(width) for number in range(first, last + 1)]
        elif "," in match[1]:
            parts = match[1].split(",")
        else:
            continue
        for part in parts:
            yield from spell_out(text[: match.start()] + part + text[match.end() :])
        return
    yield text
