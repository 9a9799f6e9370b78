"""Tables on disk when processes are killed and disks fail: what was saved loads whole, a table is as before, and no
number of a damaged file is used.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from dtf.api.sparse_table import Table
from dtf.checkpoint import storage
from dtf.checkpoint.durable_renames import sync_folder
from dtf.checkpoint.manifest import StoredFile
from dtf.core.errors import ConfigError, DataError, SaveError
from dtf.sparse.disk import page_kernels, saved_rows
from dtf.sparse.disk.saved_rows import Part
from dtf.sparse.disk.segment import LAST
from dtf.sparse.disk.tiered_records import TieredRecords
from dtf.sparse.row_optimizers import RowSgd
from dtf.sparse.tiered_table import TieredTable
from tests.laws.test_storage_kill import Faults, Killed, counted
from tests.unit.test_tiered_records import FORM, content, ints, made, write
from tests.unit.test_tiered_records import save as write_part

ROWS = np.arange(120, dtype=np.int64)


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of files are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def filled(folder: Path) -> tuple[TieredRecords, dict[int, bytes]]:
    """120 rows, of which 60 fit into memory, in bases and deltas; some are dirty, some are removed and not swept."""
    table, kept = made(folder, 60, segment_bytes=2000), {}
    for step, first in enumerate(range(0, 120, 20), 1):
        kept |= write(table, ROWS[first : first + 20], step, step)
    while table._sweep_one():
        pass
    for step in (7, 8):
        kept |= write(table, ROWS[step:60:10], step, step)
        while table._sweep_one():
            pass
    kept |= write(table, ROWS[3:120:9], 9, 9)
    table.remove(ints(5, 50))
    del kept[5], kept[50]
    assert any(len(part.files) > 1 for part in table.run.ranges) and table.dirty
    return table, kept


def save(table: TieredRecords, folder: Path) -> None:
    """As a checkpoint does: whole, or not there."""
    draft = folder.with_name(f"{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    part = write_part(table, draft)
    kinds = [[[path.name, stored.size, stored.crc32] for path, stored in files] for files in part]
    storage.write(draft / "part", [json.dumps(kinds).encode()])
    os.rename(draft, folder)
    sync_folder(folder.parent)


def load(table: TieredRecords, folder: Path) -> None:
    kinds = json.loads((folder / "part").read_text())
    named = [[(folder / name, StoredFile(size, tuple(crc))) for name, size, crc in files] for files in kinds]
    saved_rows.load(table, [Part(*named)])


def loaded(saved: Path, folder: Path) -> dict[int, bytes]:
    table = made(folder, 60)
    load(table, saved)
    found = content(table)
    assert len(table) == len(found)
    table.close()
    return found


def hashes(ids: np.ndarray) -> list[int]:
    found = np.empty(len(ids), np.uint64)
    page_kernels.hashes(ids, found)
    return found.tolist()


def sweep_all(table: TieredRecords) -> None:
    while table._sweep_one():
        pass


def saved_and_changed(home: Path) -> tuple[TieredRecords, dict[int, bytes], dict[int, bytes]]:
    """A table that was saved to `first`, and then changed. What it held then, and what it holds."""
    table, before = filled(home / "rows")
    save(table, home / "first")
    return table, before, before | write(table, ROWS[10:40], 11, 11)


WORK: dict[str, Callable[[TieredRecords, Path], object]] = {
    "sweep": lambda table, home: sweep_all(table),
    "save": lambda table, home: save(table, home / "second"),
    "load": lambda table, home: load(made(home / "other", 60), home / "first"),
}


def trials(root: Path, work: Callable[[TieredRecords, Path], object], stride: int) -> Iterator[tuple[int, Path]]:
    """Each `stride`th system call of `work` and the last one, and a folder for it."""
    table, _, _ = saved_and_changed(root / "count")
    total = len(counted(lambda: work(table, root / "count")))
    assert total > 3
    for at in range(total, 0, -stride):
        yield at, root / str(at)
        shutil.rmtree(root / str(at))


@pytest.mark.parametrize("stride", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WORK)
def test_a_kill_at_any_system_call_leaves_what_was_saved(tmp_path: Path, name: str, stride: int) -> None:
    seen = set()
    for at, home in trials(tmp_path, WORK[name], stride):
        table, before, after = saved_and_changed(home)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
            Faults(patch, at, torn=True)
            WORK[name](table, home)
        assert loaded(home / "first", home / "again") == before
        if (home / "second").exists():
            assert loaded(home / "second", home / "again") == after
        seen.add((home / "second").exists())
        successor = made(home / "rows")  # of the next process
        assert not list(home.glob("rows/*.rows*"))
        load(successor, home / "first")
        save(successor, home / "third")
        assert loaded(home / "third", home / "again") == before
        if not (home / "second").exists():
            save(successor, home / "second")
        successor.close()
    assert seen == ({False, True} if name == "save" else {False})


@pytest.mark.parametrize("name", WORK)
@pytest.mark.parametrize(("error", "stride"), [(errno.ENOSPC, 4), pytest.param(errno.EIO, 1, marks=pytest.mark.slow)])
def test_a_disk_that_fails_at_any_system_call_loses_nothing(tmp_path: Path, name: str, error: int, stride: int) -> None:
    for at, home in trials(tmp_path, WORK[name], stride):
        table, before, after = saved_and_changed(home)
        with pytest.MonkeyPatch.context() as patch, suppress(SaveError, OSError):  # a leftover harms none
            Faults(patch, at, error, torn=True)
            WORK[name](table, home)
        assert content(table) == after
        save(table, home / "elsewhere")
        assert loaded(home / "elsewhere", home / "again") == after
        assert loaded(home / "first", home / "again") == before
        after |= write(table, ROWS[:30], 12, 12)  # there is room again
        sweep_all(table)
        assert content(table) == after and not list(home.glob("rows/*.tmp"))
        table.close()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_is_told_and_no_room_in_memory_is_lost(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, kept = filled(tmp_path / "rows")
    numbers = itertools.count(20)
    with monkeypatch.context() as patch:

        def no_room(*_: object) -> int:
            raise OSError(error, os.strerror(error))

        patch.setattr(os, "write", no_room)
        for step in itertools.count(11):  # until all of the memory is dirty; then again
            try:
                kept |= write(table, ROWS[10 * step % 100 :][:20], step, next(numbers))
            except SaveError as said:
                assert os.strerror(error) in str(said)
            if step > 40:
                break
        with pytest.raises(OSError, match=os.strerror(error)):
            save(table, tmp_path / "full")
        assert not list(tmp_path.glob("rows/set_aside"))
    assert content(table) == kept
    cache = table.cache
    sweep_all(table)
    assert len(table._take(cache.capacity, 1, 0)) == cache.capacity


@pytest.mark.parametrize(("error", "expected"), [(errno.ENOSPC, SaveError), (errno.EACCES, ConfigError)])
def test_a_disk_that_is_full_before_there_is_a_row_is_told_as_such(
    tmp_path: Path, error: int, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(error, os.strerror(error), str(tmp_path))

    monkeypatch.setattr(os, "mkdir", no_room)
    rule = RowSgd(disk=str(tmp_path / "rows"), memory_gb=1e-5)
    with pytest.raises(expected, match=os.strerror(error)):
        TieredTable(Table(2, 0, 100, 0.1), rule, 1, "t", np.float32, 10_000, (0, LAST))


def test_a_step_that_needs_more_memory_says_how_much(tmp_path: Path) -> None:
    rule = RowSgd(disk=str(tmp_path / "rows"), memory_gb=1e-9)
    table = TieredTable(Table(2, 0, 100, 0.1), rule, 1, "words", np.float32, 1, (0, LAST))
    with pytest.raises(
        ConfigError,
        match=r"table words has 1e-09 GB of sparse.memory_gb here, room for 1 row; one step needs 24, about 9",
    ):
        table.lookup(np.arange(-1, 24), create=True)


def right(table: TieredRecords, kept: dict[int, bytes]) -> None:
    """Whatever the table says of any row is true."""
    for ids in np.split(ROWS, 6):
        for key, at in zip(ids.tolist(), table.place(ids, 1).tolist(), strict=True):
            assert (table.records[at].tobytes() + table.extra[at].tobytes() if at >= 0 else None) == kept.get(key)


def turn_a_bit(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def test_a_damaged_page_is_named_before_it_is_used(tmp_path: Path) -> None:
    table, kept = filled(tmp_path / "rows")
    save(table, tmp_path / "saved")
    told_by = {"load": 0, "place": 0, "prefetch": 0}
    for name, page in [(file.path.name, page) for file in table.run.files for page in range(FORM.pages(file.rows))]:
        at = FORM.head_bytes + page * FORM.page_bytes + 13 * page % FORM.page_bytes
        turn_a_bit(tmp_path / "saved" / f"rank_0.{name}", at)
        lazy = made(tmp_path / "lazy", 60)
        try:
            load(lazy, tmp_path / "saved")
        except DataError as error:  # it holds rows that have changed since
            assert f": page {page} is damaged or cannot be read" in str(error)
            told_by["load"] += 1
            lazy.close()
            turn_a_bit(tmp_path / "saved" / f"rank_0.{name}", at)
            continue
        twin = next(
            file.path for file in lazy.run.files if os.path.samefile(file.path, tmp_path / "saved" / f"rank_0.{name}")
        )
        told = f"{twin}: page {page} is damaged or cannot be read"
        with pytest.raises(DataError, match=told):
            content(lazy)
        for way in ("place", "prefetch"):
            try:
                if way == "prefetch":
                    lazy.prefetch(ROWS, 1)
                right(lazy, kept)  # there may be newer ones of all rows of a page
            except DataError as error:
                assert str(error) == told
                told_by[way] += 1
        lazy.close()
        turn_a_bit(tmp_path / "saved" / f"rank_0.{name}", at)
    assert min(told_by.values()) > 5
    assert loaded(tmp_path / "saved", tmp_path / "again") == kept


def test_a_damaged_page_ends_a_sweep_and_leaves_its_rows_dirty(tmp_path: Path) -> None:
    table, kept = filled(tmp_path / "rows")
    part = max(table.run.ranges, key=lambda part: len(part.files))
    ids = ROWS[[part.low <= each <= part.high for each in hashes(ROWS)]]
    kept |= write(table, ids[:20], 11, 11)
    table.remove(ids[-1:])  # so that all of its files become one
    del kept[int(ids[-1])]
    dirty = table.dirty
    turn_a_bit(part.files[0].path, FORM.head_bytes + 5)
    for _ in range(2):
        with pytest.raises(DataError, match=f"{part.files[0].path}: page 0 is damaged"):
            sweep_all(table)
    assert table.dirty <= dirty and set(part.files) <= set(table.run.files)
    turn_a_bit(part.files[0].path, FORM.head_bytes + 5)
    sweep_all(table)
    assert content(table) == kept


def test_a_file_that_is_short_or_missing_is_named(tmp_path: Path) -> None:
    table, _ = filled(tmp_path / "rows")
    save(table, tmp_path / "saved")
    names = sorted(set(os.listdir(tmp_path / "saved")) - {"part"})
    assert {"rank_0.changed.rows", "rank_0.removed.rows"} < set(names)
    for name in names:
        whole = (tmp_path / "saved" / name).read_bytes()
        os.unlink(tmp_path / "saved" / name)
        for kept in (None, len(whole) - 1, len(whole) // 2, 0):
            if kept is not None:
                (tmp_path / "saved" / name).write_bytes(whole[:kept])
            with pytest.raises(DataError, match=f"^{tmp_path}/saved/{name}"):
                load(made(tmp_path / "other"), tmp_path / "saved")
        (tmp_path / "saved" / name).write_bytes(whole)
    file = max(table.run.files, key=lambda file: file.rows)
    os.truncate(file.path, FORM.head_bytes + FORM.page_bytes)
    with pytest.raises(DataError, match=f"{file.path}: page 1 is damaged or cannot be read"):
        content(table)


def test_a_disk_that_does_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, kept = filled(tmp_path / "rows")
    save(table, tmp_path / "saved")
    other = made(tmp_path / "other", 60)
    load(other, tmp_path / "saved")

    def no_answer(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = other.run.files[0]
    with open("/proc/self/mem", "rb") as nothing, monkeypatch.context() as patch:
        patch.setattr(os, "pread", no_answer)
        before = os.dup(file.file)
        os.dup2(nothing.fileno(), file.file)  # reads of low addresses end with EIO
        for ahead in (False, True):
            if ahead:
                other.prefetch(ROWS, 1)
            with pytest.raises(SaveError, match=str(file.path)):
                right(other, kept)
        with pytest.raises(SaveError, match=str(file.path)):
            content(other)
        os.dup2(before, file.file)
        os.close(before)
    right(other, kept)
    assert content(other) == kept
