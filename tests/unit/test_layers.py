"""Saves of the rows that changed: which ones may be no whole saves, and what becomes of the rows in between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dtf.api.row_life import WhenFull
from dtf.api.sparse_table import Table
from dtf.checkpoint import layers, storage
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.saves import Saves
from dtf.core.errors import SaveError
from dtf.core.types import Box, Place, State
from dtf.distributed.world import World
from dtf.pserver.row_routing import ServerShard, ServerShards
from dtf.sparse.living_table import table_class
from dtf.sparse.row_optimizers import RowAdagrad, RowSgd
from tests.support.checkpoints import checkpointer, whole


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


# ---------------------------------------------------------------- layers of a table

WIDTH = 2
RULES: dict[str, Callable[[], Any]] = {
    "plain": RowAdagrad,
    "decay": lambda: RowSgd(weight_decay=0.3),
    "evict": lambda: RowAdagrad(when_full=WhenFull.evict, evict_unseen=2, score_decay=0.9),
    "admit": lambda: RowAdagrad(when_full=WhenFull.evict, admit_count=2),
}


class Stored:
    """The tensors of the newest checkpoint, in memory."""

    place, folder = "here", Path()

    def __init__(self) -> None:
        self.scalars: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self.layered: set[str] = set()

    def save(self, servers: list[ServerShards], layer: int) -> None:
        sizes = np.stack([server.part_sizes(layer) for server in servers])
        parts = zip(servers, np.cumsum(sizes, 0) - sizes, strict=True)
        boxes = [box for server, before in parts for box in server.parts(before, sizes.sum(0), layer)]
        self.tensors = {name: tensor for name, tensor in self.tensors.items() if layer and name in self.layered}
        for box in boxes:
            whole_tensor = self.tensors.setdefault(box.name, torch.zeros(box.shape, dtype=box.tensor.dtype))
            places = zip(box.offset, box.tensor.shape, strict=True)
            whole_tensor[tuple(slice(at, at + size) for at, size in places)] = box.tensor
        self.layered = {box.name for box in boxes if box.layer is not None} | (self.layered if layer else set())

    def names(self) -> set[str]:
        return set(self.tensors)

    def read(self, name: str, offset: Any = None, shape: Any = None, whole: Any = None) -> Tensor:
        found = self.tensors[name]
        if offset is not None:
            found = found[tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))]
        return found.clone()

    def read_into(self, name: str, out: Tensor, offset: Any = None, whole: Any = None) -> None:
        out.copy_(self.read(name, offset, tuple(out.shape)))


def servers_of(rule: str, count: int) -> list[ServerShards]:
    made = RULES[rule]()
    made.check_life()
    tables = [
        table_class(made)(Table(WIDTH, 0, 40 if made.lives else 60, 0.1), made, 1, "t", np.float64)
        for _ in range(count)
    ]
    worlds = [World(Place(rank=rank, size=count)) for rank in range(count)]
    return [ServerShards({"t": ServerShard(t, world)}, world) for t, world in zip(tables, worlds, strict=True)]


def held(servers: list[ServerShards]) -> tuple[Any, ...]:
    """All rows and what is kept of them by id, over all servers; and the decay."""
    stores = [server._shards["t"].store for server in servers]
    exports = [store.export() for store in stores]
    order = np.argsort(np.concatenate([export.ids for export in exports]))
    columns = [{"ids": export.ids, "rows": export.rows, **export.states} for export in exports]
    names = set().union(*columns)
    joined = {name: np.concatenate([one[name] for one in columns if name in one])[order] for name in names}
    return joined, {store.decayed for store in stores}


def step(servers: list[ServerShards], some: np.ndarray, number: int) -> None:
    for server in servers:
        ids, store = some[server.owns("t", some)], server._shards["t"].store
        if not store.rule.lives:
            store.lookup(ids, create=True)
        lr = 0.1 if number > 4 else 0.0  # then there is decay
        store.update(ids, np.full((len(ids), WIDTH), 0.1), lr, 1.0, number, np.ones((len(ids), 2)))
        if number % 5 == 4 and not store.rule.lives:  # as trainers that learn by themselves
            store.add(ids, np.ones((len(ids), store.stride)))


@pytest.mark.parametrize("rule", RULES)
def test_whatever_happened_layers_hold_what_the_table_held(rule: str) -> None:
    """Random steps and saves, on one to three servers, loaded by as many others."""
    for seed in range(24):
        random = np.random.default_rng(seed)
        servers, stored, layer, changed = servers_of(rule, 1 + seed % 3), Stored(), -1, set[int]()
        for number in range(random.integers(2, 25)):
            some = random.choice(60, random.integers(0, 12), replace=False).astype(np.int64)
            step(servers, some, number)
            changed |= set(some.tolist())
            if random.random() < 0.35:
                layer = 0 if random.random() < 0.2 else layer + 1
                stored.save(servers, layer)
                found = stored.tensors.get(f"table/t/delta_{layer}/ids", torch.empty(0, dtype=torch.int64))
                assert not layer or set(found.tolist()) <= changed
                changed = set()
        stored.save(servers, layer + 1)
        loaded = servers_of(rule, 1 + seed // 3 % 3)
        for server in loaded:
            server.load(stored)
        (a, decay), (b, other_decay) = held(servers), held(loaded)
        assert decay == other_decay and all(np.array_equal(a[name], b[name]) for name in a if len(a["ids"])), seed


# ---------------------------------------------------------------- which saves are whole


class Run:
    """A table of `rows` rows on one rank, of which each save says that some changed."""

    def __init__(self, folder: Path, rows: int = 10_000, **options: Any) -> None:
        self.checkpointer: Checkpointer = checkpointer(folder, delta_every=1, **options)
        self.folder, self.rows = folder, rows

    def save(self, step: int, whole_save: bool = False, changed: int = 100) -> int:
        """Returns the layer that was saved."""
        layer = self.checkpointer.layer(whole_save)
        assert layer is not None
        self.checkpointer.save(step, State(self.boxes(layer, changed), {}), {"step": step})
        return layer

    def boxes(self, layer: int, changed: int) -> list[Box]:
        name = f"table/t/delta_{layer}/rows" if layer else "table/t/rows"
        rows = torch.full((changed if layer else self.rows,), float(layer))
        return [whole("model/w", torch.ones(3)), Box(name, rows, tuple(rows.shape), (0,), layer)]

    def read(self, step: int) -> dict[str, float]:
        """The first number of each tensor of rows."""
        found = self.checkpointer.load(self.folder / storage.step_name(step))
        assert storage.first_fault(found.folder) is None
        return {name: float(found.read(name)[0]) for name in sorted(found.names()) if "rows" in name}


def test_the_first_save_is_whole_and_those_that_follow_link_what_was_there(tmp_path: Path) -> None:
    run = Run(tmp_path, keep_last=1)
    assert [run.save(step, step == 4) for step in (1, 2, 3)] == [0, 1, 2]
    assert [path.name for path in storage.checkpoints(tmp_path)] == ["step_000003"], "the others are not needed"
    assert run.read(3) == {"table/t/delta_1/rows": 1.0, "table/t/delta_2/rows": 2.0, "table/t/rows": 0.0}
    manifest = storage.read_manifest(tmp_path / "step_000003")
    assert manifest.base is not None and manifest.base.step == 2
    assert set(manifest.base.files) == {"rows_0.safetensors", "rows_0.delta_1.safetensors"}
    assert [run.save(4, True), run.save(5)] == [0, 1]
    assert run.read(5) == {"table/t/delta_1/rows": 1.0, "table/t/rows": 0.0}
    assert checkpointer(tmp_path).layer(False) is None, "nobody asked for it"


def test_layers_that_are_as_large_as_the_table_or_too_many_are_followed_by_a_whole_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "a")
    assert [run.save(step, changed=6000) for step in range(1, 6)] == [0, 1, 2, 0, 1]
    monkeypatch.setattr(layers, "MOST_LAYERS", 2)
    run = Run(tmp_path / "b")
    assert [run.save(step, changed=1) for step in range(1, 6)] == [0, 1, 2, 0, 1]


def failing(*arguments: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_what_cannot_be_taken_over_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    assert run.save(1) == 0
    shutil.rmtree(tmp_path / "step_000001")
    assert run.save(2) == 0, "its folder is gone"
    with monkeypatch.context() as patch, pytest.raises(SaveError):
        patch.setattr(storage, "commit", failing)
        run.save(3)
    assert [run.save(4), run.save(5)] == [0, 1], "the changes went with the save that failed"
    layer = run.checkpointer.layer(False)
    assert layer == 2
    shutil.rmtree(tmp_path / "step_000005")  # between the two
    with pytest.raises(SaveError, match="step_000006 could not be written"):
        run.checkpointer.save(6, State(run.boxes(layer, 1), {}), {})
    assert run.save(6) == 0 and not [path for path in tmp_path.iterdir() if "tmp" in path.name]


def test_a_disk_without_links_gets_copies_and_a_damaged_file_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path, follow_symlinks: bool) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run = Run(tmp_path)
    assert [run.save(1), run.save(2)] == [0, 1]
    data = tmp_path / "step_000002" / "rows_0.safetensors"
    assert data.stat().st_nlink == 1
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    with pytest.raises(SaveError, match=r"rows_0.safetensors is damaged"):
        run.save(3)
    assert run.save(3) == 0 and run.read(3) == {"table/t/rows": 0.0}


def test_a_failed_save_of_a_thread_is_followed_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, notes = Run(tmp_path), list[str]()
    saves, write = Saves(run.checkpointer, notes.append, lambda: None), storage.write

    def save(step: int) -> int | None:
        saves.ready()
        layer = saves.layer(False)
        assert layer is not None
        saves.save(step, State(run.boxes(layer, 100), {}), {}, None, lambda *told: None, lambda: None)
        return layer

    def full(path: Path, pieces: Any) -> Any:
        if "delta_2" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, pieces)

    monkeypatch.setattr(storage, "write", full)
    assert [save(step) for step in (1, 2, 3, 4, 5)] == [0, 1, 2, 0, 1]
    saves.finish()
    assert len(notes) == 1 and "step_000003 could not be written" in notes[0]
    assert run.read(5) == {"table/t/delta_1/rows": 1.0, "table/t/rows": 0.0}
