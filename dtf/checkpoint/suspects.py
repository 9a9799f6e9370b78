"""Checkpoints that may hold wrong numbers, written after a machine had changed bits. Torch-free.

They leave the run folder first and its mirror as soon as that answers. A mark in the folder says so until both is done,
so that a crash in between is made good.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from dtf.checkpoint.durable_renames import move_aside
from dtf.checkpoint.storage import LATEST, checkpoints, point_latest, step_of
from dtf.core.files import replace_text

_MARK = "suspects.json"


def set_aside(parent: Path, after: int, run_id: str, mirrored: bool = False) -> list[Path]:
    """Rename all checkpoints of later steps than `after` to `step_000120.suspect-<run id>`, and point `latest` to the
    newest of the others. Nothing resumes from them. Returns their new names, newest first.

    `mirrored`: a mirror may have some too; the mark stays until `forget_suspects`.
    """
    earlier = suspects_after(parent)
    _mark(parent, after if earlier is None else min(after, earlier), here=after)
    suspect = [folder for folder in checkpoints(parent) if (step_of(folder.name) or 0) > after]
    moved = [move_aside(folder, f"suspect-{run_id}") for folder in suspect]
    if moved:
        left = checkpoints(parent)
        if left:
            point_latest(parent, left[0].name, run_id)
        else:
            (parent / LATEST).unlink(missing_ok=True)
    if mirrored:
        _mark(parent, after if earlier is None else min(after, earlier), here=None)
    else:
        forget_suspects(parent)
    return moved


def finish_set_aside(parent: Path, run_id: str, mirrored: bool) -> list[Path]:
    """What a crash kept `set_aside` from doing. Before the next save."""
    here = _read(parent).get("here")
    return set_aside(parent, here, run_id, mirrored) if isinstance(here, int) else []


def suspects_after(parent: Path) -> int | None:
    """The step after which checkpoints of the mirror are not to be trusted, unless they are here too. None: all are."""
    after = _read(parent).get("after")
    return after if isinstance(after, int) else None


def forget_suspects(parent: Path) -> None:
    """They have left the mirror too."""
    (parent / _MARK).unlink(missing_ok=True)


def _mark(parent: Path, after: int, here: int | None) -> None:
    if parent.is_dir():
        replace_text(parent / _MARK, json.dumps({"after": after, "here": here}))


def _read(parent: Path) -> dict[str, object]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((parent / _MARK).read_text())
        return found if isinstance(found, dict) else {}
    return {}
