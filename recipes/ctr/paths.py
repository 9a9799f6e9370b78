"""Where a log lies: the files that a path, a folder or a pattern stands for."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from dtf.core.errors import DataError


def find_files(place: Path, given: str, root: str = "") -> list[Path]:
    """The files that a place stands for, in the order of their names. DataError when there are none."""
    under = f" in recipe.data.root={root}" if root else ""
    if place.is_dir():
        found = sorted(path for path in place.iterdir() if path.is_file() and not path.name.startswith((".", "_")))
        if not found:
            raise DataError(
                f"{given}{under}: the folder holds no files, hidden ones apart; give one that does, or a pattern"
            )
    else:
        found = (
            [place]
            if place.exists()
            else [Path(name) for name in sorted(glob.glob(str(place))) if Path(name).is_file()]
        )
    if not found:
        raise DataError(f"{given}: there is no such file{under}; give a file, a folder of files or a pattern")
    for path in found:
        if not os.access(path, os.R_OK):
            raise DataError(f"{given}: {path} may not be read")
    return found
