"""What a recipe needs before its data are opened, got once on each host of a run."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from dtf.api.recipe import Recipe

_PREFIX = f"dtf-prepared-{os.getuid()}-"
_KEPT_S = 86_400
"""How long the file of a run is kept, which says that its host is ready."""


def prepare_once(recipe: Recipe, run_id: str, attempt: int) -> None:
    """Call `Recipe.prepare` in the first rank of this host that comes here; others wait until it has returned. Where it
    raises, the next one tries. Not collective.
    """
    if type(recipe).prepare is Recipe.prepare:
        return
    path = Path(tempfile.gettempdir(), _PREFIX + re.sub(r"[^\w.-]", "_", f"{run_id}-{attempt}"))
    _remove_old()
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not file.read():
            recipe.prepare()
            file.write("ready")


def _remove_old() -> None:
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                path.unlink()
