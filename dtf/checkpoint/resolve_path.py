"""What a path holds that a key gives as numbers to start from: a checkpoint, a run folder, a file of weights.

Reads no numbers, needs no torch.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from dtf.checkpoint import storage
from dtf.core.errors import DataError

SUFFIXES = (".ckpt", ".pth", ".pt", ".safetensors")
"""Of files of weights: of training scripts, and plain tensors."""


BEST = "best"
"""After a run folder: its best checkpoint, as in RUN/best."""


def is_checkpoint(path: Path) -> bool:
    """Whether a path means a checkpoint rather than a file."""
    return path.is_dir() or (path.name == BEST and path.parent.is_dir())


def resolve_checkpoints(path: str | Path, key: str) -> list[Path]:
    """Checkpoints that `path` means, newest first: itself, those of a run folder, or its best one alone. Looks at names
    only, but for the best.

    DataError when there is none.
    """
    folder = Path(path)
    if folder.name == BEST and not folder.exists():
        return [_best(resolve_checkpoints(folder.parent, key), f"{key}={path}")]
    if storage.step_of(folder.name) is not None or (folder / storage.MANIFEST).is_file():
        folders = [folder] if folder.is_dir() else []
    else:
        folders = storage.checkpoints(folder / "checkpoints") or storage.checkpoints(folder)
    if not folders:
        raise DataError(
            f"{key}={path} holds no checkpoint; give a folder like RUN/checkpoints/step_000120, or a run folder that "
            "has one"
        )
    return folders


def check_weights_path(given: str, key: str) -> None:
    """Raise DataError for what can be seen, without reading it, to hold no weights.

    `key` gave the place; empty: nothing is to be read.
    """
    path = Path(given).expanduser()
    if not given:
        return
    if is_checkpoint(path):
        resolve_checkpoints(path, key)
    elif not path.exists():
        raise DataError(
            f"{key}={given} does not exist; give a {', '.join(SUFFIXES)} file, a checkpoint or a run folder"
        )
    elif path.suffix not in SUFFIXES:
        raise DataError(
            f"{key}={given} is no file of weights; give a {', '.join(SUFFIXES)} file, a checkpoint or a run folder"
        )
    elif not os.access(path, os.R_OK):
        raise DataError(f"{key}={given} cannot be read: Permission denied")


def _best(folders: list[Path], given: str) -> Path:
    """The one with the best value of the objective, the earliest of equals."""
    goals = [
        (folder, goal)
        for folder in reversed(folders)
        if (goal := storage.read_manifest(folder).objective) is not None and math.isfinite(goal.value)
    ]
    if not goals:
        raise DataError(
            f"{given}: none of these checkpoints was made right after an evaluation, so none is known to be the best; "
            "name one"
        )
    return max(goals, key=lambda pair: pair[1].value if pair[1].mode == "max" else -pair[1].value)[0]
