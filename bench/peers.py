"""Environments of other projects that a bench compares with, each in a folder of its own with pinned versions."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


class Absent(Exception):
    """A peer that cannot be run; the text says why."""


def environment(name: str, pins: Sequence[str]) -> Path:
    """The interpreter of an environment with these packages, in the user's cache directory; made where it is not there.

    Absent where it cannot be made.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dtf", "bench")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(" ".join([version, *pins]).encode()).hexdigest()[:12]
    folder = home / f"{name}-{digest}"
    if not (folder / "complete").exists():
        home.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        print(f"making the environment of {name} in {folder}: {' '.join(pins)}", file=sys.stderr, flush=True)
        with tempfile.TemporaryFile("w+") as said:
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *pins],
            ):
                if subprocess.run(command, stdout=said, stderr=subprocess.STDOUT).returncode:
                    said.seek(0)
                    last = next((line for line in reversed(said.read().splitlines()) if line.strip()), "no word")
                    raise Absent(f"its environment cannot be made: {last.strip()}")
        (folder / "complete").touch()
    return folder / "bin" / "python"
