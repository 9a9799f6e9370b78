"""Checkpoints that may hold wrong numbers, written after a machine had changed bits. Torch-free."""

from __future__ import annotations

from pathlib import Path

from dtf.checkpoint.durable_renames import move_aside
from dtf.checkpoint.storage import LATEST, checkpoints, point_latest, step_of


def set_aside(parent: Path, after: int, run_id: str) -> list[Path]:
    """Rename all checkpoints of later steps than `after` to `step_000120.suspect-<run id>`, and point `latest` to the
    newest of the others. Nothing resumes from them. Returns their new names, newest first.
    """
    suspect = [folder for folder in checkpoints(parent) if (step_of(folder.name) or 0) > after]
    moved = [move_aside(folder, f"suspect-{run_id}") for folder in suspect]
    if moved:
        left = checkpoints(parent)
        if left:
            point_latest(parent, left[0].name, run_id)
        else:
            (parent / LATEST).unlink(missing_ok=True)
    return moved
