"""A platform whose scheduler is this host, as a plugin."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="session")
def platform_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one plugin: a bundle of it takes nothing else along, as one of `tests.support` would."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "here_platform.py").write_text((SUPPORT / "here.py").read_text())
    return folder


@pytest.fixture
def platform(platform_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(platform_folder)
    monkeypatch.setenv("PYTHONPATH", f"{platform_folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
