"""Tables on disk: whatever is asked of one in whatever order, it answers as a dict of rows would, bit for bit."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtf.checkpoint.manifest import StoredFile
from dtf.sparse.disk.page_kernels import hashes
from dtf.sparse.disk.record_format import RecordFormat
from dtf.sparse.disk.row_files import layers_of
from dtf.sparse.disk.saved_rows import Part, RowsSetAside, load, rows_of
from dtf.sparse.disk.segment import LAST
from dtf.sparse.disk.tiered_records import TieredRecords
from dtf.sparse.row_layers import contains

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 40), min_size=1, max_size=12, unique=True)
FORM = RecordFormat(2, 1, "float32", 3, page_bytes=128)
FORMS = [
    FORM,
    RecordFormat(2, 1, "float32", 3),
    RecordFormat(3, 2, "bfloat16", 1, page_bytes=128),
    RecordFormat(2, 2, "float64", 0, page_bytes=256),
]


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of files are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def made(folder: Path, rows: int = 40, form: RecordFormat = FORM, **options: Any) -> TieredRecords:
    """With room for so many rows in memory, of segments of few rows."""
    row_bytes = form.stride * form.dtype.itemsize + form.extra + 26
    return TieredRecords(
        folder, form, -(-rows * row_bytes * 8 // 7), **{"depth": 2, "ranges": 2, "segment_bytes": 200, **options}
    )


def save(table: TieredRecords, folder: Path) -> Part:
    """What a checkpoint in this new folder holds of the table."""
    folder.mkdir()
    part = Part([], [], [])
    for told in RowsSetAside(table).write(folder, "rank_0", "disk_0"):
        [[name, *_]] = told["boxes"]
        stored = StoredFile(told["size"], tuple(told["crc32"]))
        getattr(part, name.removeprefix("disk_0/")).append((folder / told["file"], stored))
    return part


def is_in(keys: list[int], low: int, high: int) -> np.ndarray:
    hashed = np.empty(len(keys), np.uint64)
    hashes(ints(*keys), hashed)
    return (hashed >= np.uint64(low)) & (hashed <= np.uint64(high))


def row_of(form: RecordFormat, value: int) -> tuple[np.ndarray, np.ndarray]:
    """A row with its state, and its extra bytes, that only `value` has."""
    random = np.random.default_rng(value)
    row = random.normal(size=form.stride) * np.exp(random.normal(size=form.stride) * 20)
    return row.astype(form.dtype), random.integers(0, 256, form.extra).astype(np.uint8)


def kept_of(form: RecordFormat, value: int) -> bytes:
    """What a table says of `row_of` afterwards."""
    row, extra = row_of(form, value)
    if form.narrow:
        row[: form.width] = torch.from_numpy(row[: form.width]).bfloat16().float().numpy()
    return row.tobytes() + extra.tobytes()


def write(table: TieredRecords, ids: np.ndarray, step: int, value: int) -> dict[int, bytes]:
    """Rows `value` for all of these ids, made where they are not there. Returns what is there now."""
    positions = table.place(ids, step)
    new = (positions < 0) & (ids != -1)
    positions[new] = table.make(ids[new])
    positions = positions[positions >= 0]
    table.records[positions], table.extra[positions] = row_of(table.form, value)
    table.changed(positions)
    return dict.fromkeys(ids[ids != -1].tolist(), kept_of(table.form, value))


def content(table: TieredRecords) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for ids, rows, extra in table.scan():
        for key, row, more in zip(ids.tolist(), rows, extra, strict=True):
            assert key not in found
            found[key] = row.tobytes() + more.tobytes()
    return found


class Life(RuleBasedStateMachine):
    """Rows are written, read, removed, told ahead, saved and loaded; a dict says what they must be."""

    root: Path
    numbers = itertools.count()

    @initialize(rows=st.integers(14, 60), form=st.sampled_from(FORMS))
    def start(self, rows: int, form: RecordFormat) -> None:
        self.home = self.root / str(next(self.numbers))
        self.form, self.kept, self.saves = form, {}, []
        self.step = self.files = 0
        self.table = made(self.home / "0", rows, form)

    @rule(ids=IDS, value=st.integers(0, 1000))
    def write(self, ids: list[int], value: int) -> None:
        self.step += 1
        self.kept |= write(self.table, ints(*ids), self.step, value)

    @rule(ids=IDS)
    def read(self, ids: list[int]) -> None:
        self.step += 1
        places = self.table.place(ints(*ids), self.step)
        for key, at in zip(ids, places.tolist(), strict=True):
            row = self.table.records[at].tobytes() + self.table.extra[at].tobytes() if at >= 0 else None
            assert row == self.kept.get(key), key

    @rule(ids=IDS)
    def remove(self, ids: list[int]) -> None:
        there = [key for key in ids if key in self.kept]
        self.table.remove(ints(*there))
        for key in there:
            del self.kept[key]

    @rule(ids=IDS, ahead=st.integers(1, 3))
    def tell(self, ids: list[int], ahead: int) -> None:
        self.table.expect(ints(*ids), self.step + ahead)

    @rule(ids=IDS)
    def read_ahead(self, ids: list[int]) -> None:
        self.table.prefetch(ints(*ids), self.step + 1)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Rows that are on disk leave the cache."""
        self.table._sweep_one()
        self.table.cache.give_back(self.table._take(data.draw(st.integers(1, 20)), 1, 0))

    @rule()
    def sweep(self) -> None:
        self.table._sweep_one()

    @rule(wait=st.booleans())
    def save(self, wait: bool) -> None:
        if not wait:
            self.table._begin_sweep() if self.table._sweep is None else None
        self.saves.append((save(self.table, self.home / f"save{len(self.saves)}"), dict(self.kept)))

    @precondition(lambda self: self.saves)
    @rule(data=st.data(), rows=st.integers(14, 60))
    def load(self, data: st.DataObject, rows: int) -> None:
        """Two tables have a part of the range each, as if by two owners; one goes on once it has all rows."""
        part, kept = data.draw(st.sampled_from(self.saves))
        self.check(part, kept)
        self.table.close()
        cut = data.draw(st.integers(1, LAST))
        for low, high in ((0, cut - 1), (cut, LAST)):
            self.files += 1
            share = made(self.home / str(self.files), rows, self.form, low=low, high=high)
            load(share, [part])
            there = [key for key, mine in zip(kept, is_in(list(kept), low, high), strict=True) if mine]
            assert content(share) == {key: kept[key] for key in there} and len(share) == len(there)
            share.close()
        self.files += 1
        self.table = made(self.home / str(self.files), rows, self.form)
        load(self.table, [part])
        self.kept, self.step = dict(kept), 0

    def check(self, part: Part, kept: dict[int, bytes]) -> None:
        found: dict[int, bytes] = {}
        for _, ids, rows, extra in rows_of(part):
            for key, row, more in zip(ids.tolist(), rows, extra, strict=True):
                assert key not in found
                found[key] = row.tobytes() + more.tobytes()
        assert found == kept
        self.look_up(part, kept)

    def look_up(self, part: Part, kept: dict[int, bytes]) -> None:
        """Without loading it, page by page."""
        layers, _ = layers_of([part], slice(0, self.form.width), None, {})
        ids = np.unique(ints(*kept, *range(-1, 41), 2**60))
        found: dict[int, bytes] = {}
        for layer in layers:
            has, records = layer.find(ids)
            rows = layer.read(records, 0.0, np.empty((len(records), self.form.width), self.form.dtype))
            found |= zip(ids[has].tolist(), map(np.ndarray.tobytes, rows), strict=True)
            ids = ids[~(has | contains(layer.removed, ids))]
        width = self.form.width * self.form.dtype.itemsize
        assert found == {key: row[:width] for key, row in kept.items()}

    @rule()
    def all_rows(self) -> None:
        assert content(self.table) == self.kept

    @invariant()
    def counts(self) -> None:
        if hasattr(self, "table"):
            cache = self.table.cache
            assert len(self.table) == len(self.kept)
            assert self.table.dirty == int((cache.flags & 1)[: cache._top][cache.ids[: cache._top] != -1].sum())

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
            assert not list(self.table.folder.iterdir())
            shutil.rmtree(self.home)


@pytest.mark.parametrize("examples", [15, pytest.param(400, marks=pytest.mark.slow)])
def test_a_table_on_disk_is_a_dict_of_rows(tmp_path: Path, examples: int) -> None:
    Life.root = tmp_path
    run_state_machine_as_test(Life, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None))
