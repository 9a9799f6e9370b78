"""What a path holds that a key gives as numbers to start from: a checkpoint, a run folder, a file of weights. Reads no numbers, needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from dtf import commit
from dtf.errors import DataError

SUFFIXES = (".ckpt", ".pth", ".pt", ".safetensors")
"""Of files of weights: of training scripts, and plain tensors."""


def located(path: str | Path, key: str) -> list[Path]:
    """Checkpoints that `path` means, newest first: itself, or those of a run folder. Looks at names only. DataError when there is none."""
    folder = Path(path)
    if commit.step_of(folder.name) is not None or (folder / commit.MANIFEST).is_file():
        found = [folder] if folder.is_dir() else []
    else:
        found = commit.checkpoints(folder / "checkpoints") or commit.checkpoints(folder)
    if not found:
        raise DataError(f"{key}={path} holds no checkpoint; give a folder like RUN/checkpoints/step_000120, or a run folder that has one")
    return found


def check_place(place: str, key: str) -> None:
    """Raise DataError for what can be seen, without reading it, to hold no weights. `key` gave the place; empty: nothing is to be read."""
    path = Path(place).expanduser()
    if not place:
        return
    if path.is_dir():
        located(path, key)
    elif not path.exists():
        raise DataError(f"{key}={place} does not exist; give a {', '.join(SUFFIXES)} file, a checkpoint or a run folder")
    elif path.suffix not in SUFFIXES:
        raise DataError(f"{key}={place} is no file of weights; give a {', '.join(SUFFIXES)} file, a checkpoint or a run folder")
    elif not os.access(path, os.R_OK):
        raise DataError(f"{key}={place} cannot be read: Permission denied")
