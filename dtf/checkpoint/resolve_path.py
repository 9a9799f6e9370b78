"""What a path given by a config key stands for: a checkpoint, a run folder, or a file of weights.

Reads no tensors. Torch-free.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from dtf.checkpoint import storage
from dtf.checkpoint.place_names import is_url
from dtf.core.errors import DataError

SUFFIXES = (".ckpt", ".pth", ".pt", ".safetensors")
"""File names of weights: as training scripts write them, and safetensors."""


BEST = "best"
"""RUN/best stands for the best checkpoint of the run folder RUN."""


def is_checkpoint(path: Path) -> bool:
    """Whether a path stands for a checkpoint, and not for a file of weights."""
    return path.is_dir() or (path.name == BEST and path.parent.is_dir())


def resolve_checkpoints(path: str | Path, key: str) -> list[Path]:
    """The checkpoints that `path` stands for, newest first: the path itself, those of a run folder, or only the best
    one of a run. Looks at names only, except for the best.

    `key`: the config key that gave the path, for errors. DataError when there is none.
    """
    if is_url(str(path)):
        raise DataError(
            f"{key}={path} is no folder: checkpoints are read on this machine; copy one here first, with all its files "
            "(aws s3 cp --recursive, or gcloud storage cp -r), and give its folder"
        )
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


def run_folder_of(resume: str) -> Path | None:
    """The run folder that `checkpoint.resume` names, or that has the checkpoint which it names. None where it names
    none.
    """
    if resume in ("", "auto", "never"):
        return None
    try:
        return resolve_checkpoints(resume, "checkpoint.resume")[0].absolute().parent.parent
    except DataError:
        return None


def check_weights_path(given: str, key: str) -> None:
    """Raise DataError when it can be seen, without reading, that a path holds no weights.

    `key`: the config key that gave the path. An empty path stands for no weights.
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
    """The checkpoint with the best objective; of equal ones the earliest."""
    goals = []
    for folder in reversed(folders):
        try:
            goal = storage.read_manifest(folder).objective
        except DataError as error:
            raise DataError(f"{given}: {folder} cannot be judged: {error}; name one checkpoint") from None
        if goal is not None and math.isfinite(goal.value):
            goals.append((folder, goal))
    if not goals:
        raise DataError(
            f"{given}: none of these checkpoints was made right after an evaluation, so none is known to be the best; "
            "name one"
        )
    return max(goals, key=lambda pair: pair[1].value if pair[1].mode == "max" else -pair[1].value)[0]
