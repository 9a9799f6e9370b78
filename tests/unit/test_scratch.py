"""Temporary folders of killed processes are removed by the next; those of living ones stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dtf.host.scratch import remove_scratch, scratch_folder

HOLD = """
import sys
from dtf.host.scratch import scratch_folder
with scratch_folder("dtf-test-") as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder of its own, and that folder."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folders_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (alive, kept), (killed, left) = holder(tmp_path), holder(tmp_path)
    (others := tmp_path / "dtf-test-of-nobody").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "file").exists()
    with scratch_folder("dtf-test-") as own:
        assert own.is_dir() and (kept / "file").exists() and others.is_dir() and not left.exists()
    assert not own.exists()
    killed, left = holder(tmp_path)
    killed.kill()
    killed.wait()
    with scratch_folder("dtf-test-") as own:  # an end that comes before that of the context
        remove_scratch("dtf-test-", tmp_path)
        assert not own.exists() and not left.exists() and (kept / "file").exists() and others.is_dir()
    alive.communicate("")
    assert not kept.exists()
