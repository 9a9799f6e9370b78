"""Paths of a job whose processes have another file system than this machine: a pod's or a container's. Pure, but for a
look whether a file lies here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dtf.api.schema import KeyProblem, show

if TYPE_CHECKING:
    from dtf.cluster.platform import JobRequest

_READ = ("job.model", "job.input", "recipe.model.weights")
"""Keys of files that a job reads, and without which it ends at once."""


def below(path: str, folder: str) -> PurePosixPath | None:
    """What a path has beyond `folder`. None where it lies elsewhere, also by `..`, and for the folder itself."""
    known = PurePosixPath(path)
    if ".." in known.parts or not known.is_relative_to(folder) or known == PurePosixPath(folder):
        return None
    return known.relative_to(folder)


def refuse_unseen(request: JobRequest, folder: str, what: str) -> None:
    """Raise ConfigError for a file to read that lies on this machine alone, of any trial. `folder`: what the job's
    processes see besides their image, and `what` that is.
    """
    for trial, config in zip(request.trials or [""], request.configs, strict=True):
        _refuse_unseen(config, folder, what, f"trial {trial}: " if trial else "")


def _refuse_unseen(config: Mapping[str, Any], folder: str, what: str, trial: str) -> None:
    for key in _READ:
        path = _value(config, key)
        plain = os.path.normpath(path)
        if not path or (os.path.isabs(plain) and (below(plain, folder) or not _is_own(Path(plain)))):
            continue
        raise KeyProblem(
            key,
            f"{trial}{key}={show(path)} is a path of this machine, which the job does not see; copy it to {what} and "
            f"give its path there, below {folder}, or the absolute path of a file in launcher.image",
        )


def _is_own(path: Path) -> bool:
    """Whether it lies in the folder of this command, or in the user's: an image may have any other path, too."""
    folders = [folder for folder in (Path.cwd(), Path.home()) if folder != Path(folder.anchor)]
    return path.exists() and any(path.is_relative_to(folder) for folder in folders)


def _value(config: Mapping[str, Any], key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value if isinstance(value, str) else ""


def folder_name(text: str) -> str:
    """A relative path for people, made of a place elsewhere: it leads out of no folder that it is put in."""
    parts = [re.sub(r"[^A-Za-z0-9._=,+-]+", "-", part) for part in text.split("/")]
    return "/".join(part for part in parts if part.strip("."))
