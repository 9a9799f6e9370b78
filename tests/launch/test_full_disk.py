"""A full disk: what decides how a run ends comes before what is written to its folder, and does not depend on it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dtf.api.options import BudgetOptions
from dtf.config.compose import compose
from dtf.core.errors import Exit, io_failure
from dtf.core.files import replace_text
from dtf.core.lossy_stream import lossy_stream
from dtf.core.types import Measured, Note, Place, Started
from dtf.engine.rank import run_rank
from dtf.observers.jsonl import Jsonl
from dtf.runs.budget import BudgetMeter, is_spent
from tests.support.launching import Launched, launch


def start(folder: Path, name: str, **options: Any) -> Launched:
    """Launch an entry whose ranks' logs are on a full disk."""
    for rank in range(2):
        (folder / f"rank_{rank}.log").symlink_to("/dev/full")
    return launch(f"tests.support.entries:{name}", folder, **options)


@pytest.mark.parametrize("error", ["save", "full"])
def test_last_words_reach_the_launching_process(tmp_path: Path, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that cannot write its log says what ended it all the same, whoever found the disk full first."""
    done = start(tmp_path, "fails", config={"error": error})
    assert done.code == Exit.IO
    assert capsys.readouterr().err.count("dtf: error[E_IO] rank=1") == 1
    cut = [event.text for event in done.of(Note) if "rank_1.log" in event.text]
    assert cut == [f"rank_1.log is cut short, the run goes on: {os.strerror(errno.ENOSPC)}"]


def test_a_rank_that_prints_to_a_full_disk_works_on(tmp_path: Path) -> None:
    done = start(tmp_path, "warns")
    assert done.code == Exit.OK
    assert {"rank 0 warns", "rank 1 warns"} < {note.text for note in done.of(Note)}


def test_ranks_are_restarted_on_a_full_disk(tmp_path: Path) -> None:
    assert start(tmp_path, "killed_once", max_restarts=1).code == Exit.OK


def test_a_log_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "rank_0.log").mkdir()
    done = launch("tests.support.entries:add", tmp_path)
    assert done.code == Exit.OK
    assert [note.text for note in done.of(Note)] == ["rank_0.log is not written, the run goes on: Is a directory"]


def test_a_stream_drops_what_cannot_be_written() -> None:
    lost: list[OSError] = []
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        stream = lossy_stream(descriptor, "utf-8", lost.append)
        for text in ("a line\n", "x" * 100_000, "\udcff\n"):
            stream.write(text)
        stream.flush()
    finally:
        os.close(descriptor)
    assert [error.errno for error in lost] == [errno.ENOSPC]


def test_the_exit_code_survives_error_lines_that_cannot_be_written() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "dtf", "no_such_key=1"]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], stderr=full, stdout=subprocess.DEVNULL)
    assert done.returncode == Exit.CONFIG


def test_metrics_that_cannot_be_written_are_told_by_name(tmp_path: Path) -> None:
    observer = Jsonl()
    observer.open(tmp_path, {})
    observer.see(Started(0, 8, 8, {}))
    observer.close()
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    observer.open(tmp_path, {})
    with pytest.raises(OSError, match=r"No space left on device: .*/metrics\.jsonl"):
        observer.see(Measured("train", 1, 0.1, 1.0, {"loss": 1.0}))


def full(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_budget_ends_where_its_seconds_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", full)
    with BudgetMeter(tmp_path, BudgetOptions(hours=1e-9), lambda: 0.0, lambda text: None):
        pass
    assert is_spent(tmp_path)


def test_a_failed_replacement_keeps_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    replace_text(path, "old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(path, "new")
    assert path.read_text() == "old" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EDQUOT, "make room"),
        (errno.EIO, "mend the disk"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_a_disk_that_fails_ends_a_rank_with_the_code_of_disks(number: int, remedy: str) -> None:
    """Whatever it was writing."""
    sent: list[Any] = []

    def body(rank: Any) -> None:
        raise OSError(number, os.strerror(number))

    config = compose(["launcher.devices=cpu"]).config
    assert run_rank(body, config, "somewhere", "run", Place(), sent.append) == Exit.IO
    assert remedy in sent[-1].message and sent[-1].exit == Exit.IO
    assert sent[-1].message.startswith(f"somewhere: {os.strerror(number)}; ")


def test_a_checkpoint_is_called_kept_only_where_there_is_one(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    said = f"{tmp_path}: No space left on device{{}}; make room, then start again with the same run.dir"
    assert str(io_failure(error, tmp_path)) == said.format("")
    assert "kept" not in str(io_failure(error))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_000004\n")
    assert str(io_failure(error, tmp_path)) == said.format("; the last complete checkpoint is kept")


def test_a_reader_that_fails_otherwise_is_no_matter_of_the_disk() -> None:
    assert io_failure(OSError(errno.ENOENT, "gone")) is None and io_failure(ValueError()) is None
