"""Finds the files of a log by a path, a folder or a pattern."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from dtf.core.errors import DataError


def find_files(path: Path, key: str, root: str = "") -> list[Path]:
    """The files of a path, a folder or a pattern, in the order of their names.

    `key`: the option that names it, as `key=value`, for messages. DataError when there are none, or when one cannot be
    read.
    """
    in_root = f" in recipe.data.root={root}" if root else ""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith((".", "_")))
        if not files:
            raise DataError(
                f"{key}{in_root}: the folder holds no files, hidden ones apart; give one that does, or a pattern"
            )
    else:
        files = (
            [path] if path.exists() else [Path(name) for name in sorted(glob.glob(str(path))) if Path(name).is_file()]
        )
    if not files:
        raise DataError(f"{key}: there is no such file{in_root}; give a file, a folder of files or a pattern")
    for file in files:
        if not os.access(file, os.R_OK):
            raise DataError(f"{key}: {file} may not be read")
    return files
