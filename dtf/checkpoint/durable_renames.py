"""Renames of folders that survive a crash. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path


def move_aside(folder: Path, ending: str) -> Path:
    """Rename a checkpoint, so that only people find it."""
    aside = next(
        path
        for i in range(1, 1 << 30)
        if not os.path.lexists(path := folder.parent / f"{folder.name}.{ending}{f'.{i}' if i > 1 else ''}")
    )
    os.rename(folder, aside)
    sync_folder(folder.parent)
    return aside


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
