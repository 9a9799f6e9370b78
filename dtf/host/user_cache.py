"""The folder of this user in which runs keep what later runs can use. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(part: str) -> Path | None:
    """`$XDG_CACHE_HOME/dtf/<part>`, by default in ~/.cache. None where the user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(given) if os.path.isabs(given) else Path.home() / ".cache") / "dtf" / part
    except RuntimeError:
        return None
