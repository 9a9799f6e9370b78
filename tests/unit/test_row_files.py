"""A table that lay on disk answers from the files of its checkpoint as the same table does that was saved from memory,
bit for bit, and reads no more than the pages that it must.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.row_storage import Values
from dtf.api.sparse_table import Table
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import write_boxes
from dtf.checkpoint.checkpointer import _merge
from dtf.checkpoint.manifest import Manifest
from dtf.core.errors import DataError
from dtf.core.types import Box, Place
from dtf.distributed.world import World
from dtf.sparse.disk.partitioned_run import Reading
from dtf.sparse.disk.segment import LAST, write_segment
from dtf.sparse.living_table import table_class
from dtf.sparse.living_tiered_table import LivingTieredTable
from dtf.sparse.row_optimizers import RowSgd, RowwiseAdagrad
from dtf.sparse.row_reader import RowReader
from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable
from dtf.sparse.table_layouts import DataParallelTable, owned_hashes, owner_of
from dtf.sparse.tiered_table import TieredTable
from tests.support.checkpoints import whole
from tests.unit.test_row_reader import save as save_boxes
from tests.unit.test_tiered_faults import turn_a_bit

WIDTH, MEMORY = 4, 1 << 20
SPEC = Table(WIDTH, 0, 10_000, 0.1)
IDS = np.random.default_rng(0).integers(-(2**62), 2**62, 3000)
GONE = IDS[5:3000:100]


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


def sharded(store: SparseTable) -> ShardedTables:
    world = World(Place())
    return ShardedTables({"t": DataParallelTable(store, world, [True])}, world, 1.0)


class Trained:
    """A table in several processes, of which each has the rows of some hashes: in bases, in deltas of more than a page,
    in memory, and removed. Some rows have not had all of their weight decay.
    """

    def __init__(self, folder: Path, rule: Any = RowSgd, parts: int = 1, dtype: Any = np.float32, **options: Any):
        self.step, self.options, self.dtype, self.rule = 0, options, dtype, rule
        on_disk = rule(disk=str(folder), memory_gb=1.0, **options)
        made, shards = LivingTieredTable if on_disk.lives else TieredTable, on_disk.shards(SPEC)
        self.stores = [
            made(SPEC, on_disk, 1, "t", dtype, MEMORY, owned_hashes(parts, part, shards)) for part in range(parts)
        ]
        for some in (IDS, IDS[::2]):
            self.learn(some)
            self.sweep()
        for store, mine in self.owned(GONE):
            store._leave(mine) if isinstance(store, LivingTieredTable) else store.tiers.remove(mine)
        self.learn(IDS[:40])

    def owned(self, ids: np.ndarray) -> list[tuple[TieredTable, np.ndarray]]:
        owner = owner_of(ids, len(self.stores), self.stores[0].rule.shards(SPEC))
        return [(store, ids[owner == part]) for part, store in enumerate(self.stores)]

    def has(self, ids: np.ndarray) -> np.ndarray:
        there = np.concatenate([store.export().ids for store in self.stores])
        return np.isin(ids, there)

    def learn(self, ids: np.ndarray) -> None:
        for store, mine in self.owned(ids):
            store.lookup(mine, create=True)
            gradients = np.random.default_rng(self.step).standard_normal((len(mine), WIDTH))
            store.update(mine, gradients, 0.1, 1.0, self.step, np.ones((len(mine), 2)))
        self.step += 1

    def sweep(self) -> None:
        for store in self.stores:
            while store.tiers._sweep_one():
                pass

    def save(self, parent: Path) -> Path:
        """As they lie on disk."""
        draft = storage.begin(parent, self.step, "r", print)
        assert draft is not None
        written = [write_boxes(draft / "rank_0.safetensors", sharded(self.stores[0]).boxes())]
        for part, store in enumerate(self.stores):
            written += sharded(store).set_aside(part)(draft)
        return storage.commit(draft, Manifest(self.step, "r", "ddp", 1, None, *_merge(written)))

    def save_from_memory(self, parent: Path) -> Path:
        store = table_class(rule := self.rule(**self.options))(SPEC, rule, 1, "t", self.dtype)
        store.decayed = self.stores[0].decayed
        for part in self.stores:
            store.put(*part.export())
        return save_boxes(parent, self.step, {"rank_0.safetensors": sharded(store).boxes()})


CASES: dict[str, dict[str, Any]] = {
    "decay": {"weight_decay": 0.1},
    "two parts, bfloat16, decay": {"weight_decay": 0.1, "values": Values.bf16, "parts": 2},
    "state, bfloat16": {"rule": RowwiseAdagrad, "values": Values.bf16},
    "decay, rows that leave": {"weight_decay": 0.1, "evict_unseen": 900, "parts": 2},
    "three parts, float64": {"rule": RowwiseAdagrad, "dtype": np.float64, "parts": 3},
}


@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_table_saved_from_memory(case: str, tmp_path: Path) -> None:
    """Bit for bit, in any order and shape of ids, each as often as wanted."""
    table = Trained(tmp_path / "rows", **CASES[case])
    files = [part.files for store in table.stores for part in store.tiers.run.ranges]
    assert max(file.rows for some in files for file in some[1:]) > files[0][0].form.per_page
    on_disk, in_memory = (
        RowReader(save(tmp_path / name)) for save, name in ((table.save, "a"), (table.save_from_memory, "b"))
    )
    ids = np.concatenate([IDS, IDS[:50], GONE, [-1, 0, 7, 7, -(2**63), 2**63 - 1]])
    ids = np.random.default_rng(1).permutation(ids).reshape(2, -1)
    answer, expected = (reader.lookup("t", ids) for reader in (on_disk, in_memory))
    assert answer.rows.dtype == expected.rows.dtype and answer.version == expected.version
    assert answer.rows.tobytes() == expected.rows.tobytes() and (answer.found == expected.found).all()
    assert (expected.found == (np.isin(ids, IDS) & (~np.isin(ids, GONE) | np.isin(ids, IDS[:40])))).all()
    assert on_disk.snapshot.widths == {"t": WIDTH} and on_disk.lookup("t", []).rows.shape == (0, WIDTH)


def test_pages_are_read_that_hold_what_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """About one for an id: filters know which file may hold it. None for an id that nobody has."""
    reader = RowReader(Trained(tmp_path / "rows").save(tmp_path / "a"))
    pages, wait = list[int](), Reading.wait

    def counted(reading: Reading) -> None:
        wait(reading)
        pages.append(reading.pages)

    monkeypatch.setattr(Reading, "wait", counted)
    for key in np.setdiff1d(IDS, GONE)[:200]:
        assert reader.lookup("t", [key]).found.all()
    assert 200 <= sum(pages) < 220
    for key in range(200):
        assert not reader.lookup("t", [key]).found.any()
    assert sum(pages) < 240


def test_files_that_were_read_are_not_opened_again(tmp_path: Path) -> None:
    """A refresh opens what is new; what was opened stays readable where retention removes it."""
    table = Trained(tmp_path / "rows")
    reader, first = RowReader(table.save(tmp_path / "c").parent), tmp_path / "c"
    before, opened = reader.snapshot, dict(reader._segments)
    expected = before.lookup("t", IDS)
    table.learn(IDS[:100])
    table.save(first)
    storage.discard(first / storage.step_name(table.step - 1), "r")
    assert reader.refresh() and reader._segments.keys() == opened.keys()
    assert all(reader._segments[key] is segment for key, segment in opened.items())
    assert (reader.lookup("t", IDS[:100]).rows != expected.rows[:100]).any(1).all()
    assert (reader.lookup("t", IDS[100:]).rows == expected.rows[100:]).all()
    again = before.lookup("t", IDS)
    assert again.version.step == table.step - 1 and (again.rows == expected.rows).all()
    storage.discard(first / storage.step_name(table.step), "r")
    table.sweep()
    table.learn(IDS[:1])
    table.save(first)
    assert reader.refresh() and reader._segments.keys() != opened.keys()
    assert {each.path.parent.name for each in reader._segments.values()} == {storage.step_name(table.step)}


def test_threads_ask_while_others_do(tmp_path: Path) -> None:
    table = Trained(tmp_path / "rows", weight_decay=0.1)
    reader, wrong = RowReader(table.save(tmp_path / "a")), list[int]()
    expected = reader.lookup("t", IDS).rows

    def ask(number: int) -> None:
        for _ in range(10):
            if reader.lookup("t", IDS[number::7]).rows.tobytes() != expected[number::7].tobytes():
                wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_is_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page when its rows are asked for; what changed last, and how the files are read, when the checkpoint opens."""
    table = Trained(tmp_path / "rows")
    folder = table.save(tmp_path / "c")
    reader = RowReader(folder.parent)
    form = next(iter(reader._segments.values())).form
    largest = max(reader._segments.values(), key=lambda segment: segment.rows)
    turn_a_bit(largest.path, form.head_bytes + form.page_bytes + 5)
    with pytest.raises(DataError, match=f"{largest.path}: page 1 is damaged"):
        reader.lookup("t", IDS)
    turn_a_bit(largest.path, form.head_bytes + form.page_bytes + 5)
    for name, at in (("rank_0.t.changed.rows", form.head_bytes), (largest.path.name, largest.stored.size - 9)):
        turn_a_bit(folder / name, at)
        with pytest.raises(DataError, match=f"{name}: (page 0 is|bytes 0 to .* are) damaged"):
            RowReader(folder)
        turn_a_bit(folder / name, at)
    content, twin = largest.path.read_bytes(), tmp_path / "twin.rows"  # the same records, of another run
    write_segment(twin, largest.low, largest.high, form, largest.chunks(0, LAST), filtered=True)
    os.replace(twin, largest.path)
    assert len(content) == largest.path.stat().st_size
    with pytest.raises(DataError, match=f"{largest.path.name}: bytes 0 to .* are damaged"):
        RowReader(folder)
    largest.path.write_bytes(content)
    monkeypatch.setitem(sys.modules, "dtf.sparse.disk.row_files", None)
    with pytest.raises(DataError, match="table t lay on sparse.disk; sparse tables need numba"):
        RowReader(folder)


def test_a_manifest_that_no_run_writes_is_refused(tmp_path: Path) -> None:
    table = Trained(tmp_path / "rows")
    for step, (ends, told) in enumerate({(0, 9): "0 to 9 are no part of the 4", (1,): r"I64 \(1,\)"}.items(), 50):
        table.step = step
        boxes = [whole("table/t/columns/rows", torch.tensor(ends)), whole("table/t/count", torch.tensor(1))]
        draft = storage.begin(tmp_path, step, "r", print)
        assert draft is not None
        written = [write_boxes(draft / "rank_0.safetensors", boxes), *sharded(table.stores[0]).set_aside(0)(draft)]
        folder = storage.commit(draft, Manifest(step, "r", "ddp", 1, None, *_merge(written)))
        with pytest.raises(DataError, match=told):
            RowReader(folder)
    empty = [Box("table/t/count", torch.tensor(0), (), ()), whole("table/t/columns/rows", torch.tensor([0, 3]))]
    reader = RowReader(save_boxes(tmp_path, 60, {"rank_0.safetensors": empty}))
    assert not reader.lookup("t", [1]).found.any() and reader.snapshot.widths == {"t": 3}
