"""Which commit of its repository the code of dtf is."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the code, with `-dirty` when it was changed since; empty when it is in no repository."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parents[1]),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
