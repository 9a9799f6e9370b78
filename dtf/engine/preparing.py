"""What a recipe needs before its data are opened, got once on each host of a run."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from dtf.api.recipe import Recipe

_PREFIX = "dtf-prepared-"


def prepare_once(recipe: Recipe, run_id: str, attempt: int) -> None:
    """Call `Recipe.prepare` in the first rank of this host that comes here; others wait until it has returned. Where it
    raises, the next one tries.
    """
    if type(recipe).prepare is Recipe.prepare:
        return
    name = re.sub(r"[^\w.-]", "_", f"{_PREFIX}{os.getuid()}-{run_id}-{attempt}")
    path = Path(tempfile.gettempdir(), name)
    _remove_unlocked(path)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.read():
            recipe.prepare()
            file.write("done")


def _remove_unlocked(but: Path) -> None:
    """Files of other runs of this user which are a day old."""
    newest = max((path.stat().st_mtime for path in but.parent.glob(f"{_PREFIX}{os.getuid()}-*")), default=0.0)
    for path in but.parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        with suppress(OSError):
            if path != but and path.stat().st_mtime < newest - 86400:
                path.unlink()
