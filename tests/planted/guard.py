"""A plugin of pytest that stops when the dtf that is tested is not the one in the current directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dtf


def pytest_configure(config: pytest.Config) -> None:
    here = str(Path.cwd() / "dtf" / "__init__.py")
    if dtf.__file__ != here:
        pytest.exit(f"dtf is imported from {dtf.__file__}, not from {here}", returncode=7)


def elsewhere() -> str:
    """Where a command that runs in another folder finds dtf."""
    command = [sys.executable, "-c", "import dtf; print(dtf.__file__)"]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.strip()


def in_a_rank(rank: int, size: int) -> str:
    """Where a rank finds it."""
    return str(dtf.__file__)
