"""The commit layer: files in blocks, folders that appear whole, and what is kept of them."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import BLOCK_BYTES, Manifest, Objective, StoredBox, StoredTensor
from dtf.checkpoint.retention import Retention, retain
from dtf.core.errors import DataError

GOAL = ("accuracy", "max")


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def silent(text: str) -> None:
    """A note nobody reads."""


def save(
    parent: Path,
    step: int,
    value: float | None = None,
    keep_last: int = 2,
    run: str = "run-1",
    data: bytes = b"",
    base: int | None = None,
) -> Path | None:
    """A checkpoint of one U8 tensor, in the order of calls that a run makes. `base`: the step whose tensor it has."""
    draft = storage.begin(parent, step, run, silent)
    if draft is None:
        return None
    data = data or bytes([step % 256]) * 100
    if base is None:
        files = {"a.bin": storage.write(draft / "a.bin", [data[:7], b"", data[7:]])}
    else:
        folder = parent / storage.step_name(base)
        files = {"a.bin": storage.read_manifest(folder).files["a.bin"]}
        storage.link(folder / "a.bin", draft / "a.bin", files["a.bin"])
    files["b.bin"] = storage.write(draft / "b.bin", [b"tail"])
    tensors = {"model/x": StoredTensor("U8", (len(data),), (StoredBox("a.bin", "model/x", (0,), (len(data),)),))}
    final = storage.commit(
        draft, Manifest(step, run, "ddp", 1, Objective(*GOAL, value) if value is not None else None, files, tensors)
    )
    retain(parent, run, Retention(keep_last, 1, GOAL))
    return final


def good(parent: Path) -> list[int]:
    """Steps of the checkpoints that may be loaded, newest first."""
    return [
        storage.step_of(folder.name) or 0
        for folder in storage.checkpoints(parent)
        if storage.first_fault(folder) is None
    ]


# ---------------------------------------------------------------- files


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.integers(0, 5) | st.sampled_from([BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 3]),
        max_size=6,
    )
)
def test_blocks_are_the_pieces_joined(lengths: list[int]) -> None:
    source = random.Random(0).randbytes(sum(lengths))
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    found = [
        bytes(block)
        for block in storage._in_blocks(memoryview(source)[end - n : end] for n, end in zip(lengths, ends, strict=True))
    ]
    assert found == [source[i : i + BLOCK_BYTES] for i in range(0, len(source), BLOCK_BYTES)]


def test_a_disk_that_takes_little_at_a_time_gets_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, real = random.Random(3).randbytes(10_000), os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:777]))
    storage.write(tmp_path / "f", [source[:5000], source[5000:]])
    assert (tmp_path / "f").read_bytes() == source


def test_a_name_is_never_written_over(tmp_path: Path) -> None:
    storage.write(tmp_path / "f", [b"first"])
    with pytest.raises(FileExistsError):
        storage.write(tmp_path / "f", [b"second"])
    assert (tmp_path / "f").read_bytes() == b"first"


def test_a_file_is_taken_over_by_a_link_or_where_there_are_none_by_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = save(tmp_path, 1)
    two = save(tmp_path, 2, base=1)
    assert one is not None and two is not None and (two / "a.bin").samefile(one / "a.bin")
    save(tmp_path, 3, base=2, keep_last=1)
    assert good(tmp_path) == [3] and (tmp_path / "step_000003" / "a.bin").read_bytes() == b"\x01" * 100

    def refuse(source: Path, target: Path, follow_symlinks: bool) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    four = save(tmp_path, 4, base=3)
    assert four is not None and not (four / "a.bin").samefile(tmp_path / "step_000003" / "a.bin")
    assert good(tmp_path) == [4, 3]
    (four / "a.bin").write_bytes(b"\x01" * 99 + b"\x00")
    with pytest.raises(DataError, match=r"step_000004/a.bin is damaged"):
        save(tmp_path, 5, base=4)
    assert good(tmp_path) == [3]


def test_a_saved_checkpoint_is_complete_and_latest(tmp_path: Path) -> None:
    assert save(tmp_path / "c", 120) == tmp_path / "c" / "step_000120"
    assert sorted(os.listdir(tmp_path / "c")) == ["latest", "step_000120"]
    assert (tmp_path / "c" / "latest").read_text() == "step_000120\n"
    assert good(tmp_path / "c") == [120]


def test_saving_a_complete_step_again_changes_nothing(tmp_path: Path) -> None:
    folder = save(tmp_path, 5)
    assert folder is not None
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    (tmp_path / "latest").unlink()  # killed between the rename and `latest`
    assert save(tmp_path, 5, data=b"other") is None
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before
    assert (tmp_path / "latest").read_text() == "step_000005\n"


def test_a_damaged_checkpoint_of_the_same_step_is_moved_aside(tmp_path: Path) -> None:
    for _ in range(2):
        folder = save(tmp_path, 5)
        assert folder is not None
        (folder / "b.bin").write_bytes(b"Tail")
    assert save(tmp_path, 5) == tmp_path / "step_000005"
    assert good(tmp_path) == [5]
    assert sorted(path.name for path in tmp_path.glob("*.bad-*")) == [
        "step_000005.bad-run-1",
        "step_000005.bad-run-1.2",
    ]


def test_strange_entries_are_refused_without_being_followed(tmp_path: Path) -> None:
    def strange(step: int, make: Callable[[Path], Any]) -> str:
        folder = save(tmp_path, step, keep_last=99)
        assert folder is not None
        (folder / "b.bin").unlink()
        make(folder / "b.bin")
        return storage.first_fault(folder) or ""

    secret = tmp_path / "secret"
    secret.write_bytes(b"tail")
    assert "no regular file" in strange(1, lambda path: path.symlink_to(secret))
    assert "no regular file" in strange(2, lambda path: os.mkfifo(path))
    assert "no regular file" in strange(3, lambda path: path.mkdir())
    for make in (lambda path: path.symlink_to(secret), os.mkfifo, Path.mkdir):
        folder = save(tmp_path, 9, keep_last=99)
        assert folder is not None
        (folder / storage.MANIFEST).rename(secret)
        make(folder / storage.MANIFEST)
        assert (storage.first_fault(folder) or "").startswith("manifest.json: ")
        shutil.rmtree(folder)
    (tmp_path / "step_000004").write_text("no folder")
    assert storage.first_fault(tmp_path / "step_000004") == "is no folder"
    folder = save(tmp_path, 6, keep_last=99)
    assert folder is not None
    folder.rename(tmp_path / "step_000007")
    assert "holds step 6" in (storage.first_fault(tmp_path / "step_000007") or "")
    assert save(tmp_path, 4, keep_last=99) is not None  # none of them blocks the next save
    assert good(tmp_path) == [4]


@pytest.mark.parametrize(
    "name",
    [
        "step_12",
        "step_0000120",
        "step_000120.tmp-x",
        "step_000120.bad-x",
        "step_+00001",
        "step_00012\u0660",
        "Step_000001",
        "latest",
    ],
)
def test_only_exact_names_are_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert storage.checkpoints(tmp_path) == []


def test_steps_beyond_six_digits_sort_by_number(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000, 9, 12_345_678):
        save(tmp_path, step, keep_last=9)
    assert good(tmp_path) == [12_345_678, 1_000_000, 999_999, 9]


def test_clean_removes_leftovers_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    kept = ["latest", "mine.tmp", "notes.txt", "step_000001", "step_000002.bad-run-1"]
    for name in ("step_000003.tmp-other", ".trash-step_000000-other", "step_000002.bad-run-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    for name in ("latest.tmp-other", "mine.tmp", "notes.txt"):
        (tmp_path / name).write_text("x")
    storage.clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == kept
    storage.clean(tmp_path / "absent")


# ---------------------------------------------------------------- retention


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    values = {1: 0.5, 2: 0.9, 3: 0.9, 4: float("nan"), 5: None, 6: 0.1, 7: float("inf")}
    for step, value in values.items():
        save(tmp_path, step, value)
    assert good(tmp_path) == [7, 6, 2]  # of equals the older one; what is not finite is no best


def test_retention_never_counts_or_removes_what_it_cannot_read(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep_last=9)
    (tmp_path / "step_000003" / "a.bin").unlink()
    (tmp_path / "step_000009").mkdir()
    assert [path.name for path in retain(tmp_path, "r", Retention(1, 0, GOAL))] == ["step_000001"]
    assert good(tmp_path) == [2]
    assert retain(tmp_path, "r", Retention(0, 0, GOAL)) == []  # the only good one
    assert {path.name for path in storage.checkpoints(tmp_path)} == {"step_000002", "step_000003", "step_000009"}
