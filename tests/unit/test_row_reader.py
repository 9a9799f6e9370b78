"""A reader of rows without a trainer: it answers as an evaluation does, from one checkpoint at a time, while
checkpoints come and go.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dtf.api.sparse_table import Pooling, Table
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import write_boxes
from dtf.checkpoint.checkpointer import _merge
from dtf.checkpoint.manifest import Manifest
from dtf.checkpoint.suspects import set_aside
from dtf.core.errors import DataError
from dtf.core.types import Box, Place
from dtf.distributed.world import World
from dtf.sparse.inference_module import InferenceModule
from dtf.sparse.row_optimizers import RowSgd
from dtf.sparse.row_reader import RowReader
from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable
from dtf.sparse.table_layouts import DataParallelTable
from tests.support.checkpoints import whole
from tests.support.mirrors import save as save_no_tables

WIDTH = 4


def save(parent: Path, step: int, files: dict[str, list[Box]], before: Path | None = None, links: str = "") -> Path:
    """A checkpoint of these files, and of those of the one `before` whose names begin with `links`, by hard links."""
    draft = storage.begin(parent, step, "r", print)
    assert draft is not None
    stored, tensors = _merge([write_boxes(draft / name, boxes) for name, boxes in files.items()])
    if before is not None:
        earlier = storage.read_manifest(before)
        taken = {name: file for name, file in earlier.files.items() if name.startswith(links)}
        for name in taken:
            os.link(before / name, draft / name)
        stored |= taken
        tensors |= {name: of for name, of in earlier.tensors.items() if all(box.file in taken for box in of.boxes)}
    return storage.commit(draft, Manifest(step, "r", "ddp", 1, None, stored, tensors))


def filled(step: int, ids: int = 50) -> dict[str, list[Box]]:
    """A table all of whose numbers are the step."""
    return {
        "rank_0.safetensors": [
            whole("table/t/count", torch.tensor(ids)),
            whole("table/t/ids", torch.arange(ids)),
            whole("table/t/rows", torch.full((ids, WIDTH), float(step))),
        ]
    }


def cut(boxes: list[Box], at: int, axis: int) -> dict[str, list[Box]]:
    """The same tensors in files of two ranks: rows before `at` and from it on, or columns."""

    def part(box: Box, bounds: slice) -> Box | None:
        if box.tensor.dim() <= axis:
            return box if not bounds.start else None
        size = box.tensor.shape[axis]
        first, last, _ = bounds.indices(size)
        offset = tuple(first if i == axis else 0 for i in range(box.tensor.dim()))
        return Box(box.name, box.tensor.narrow(axis, first, last - first), box.shape, offset)

    return {
        f"rank_{rank}.safetensors": [piece for box in boxes if (piece := part(box, bounds)) is not None]
        for rank, bounds in enumerate((slice(0, at), slice(at, None)))
    }


def shuffled(boxes: list[Box]) -> list[Box]:
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    return [box._replace(tensor=box.tensor[order]) if box.tensor.dim() else box for box in boxes]


CUTS: list[Callable[[list[Box]], dict[str, list[Box]]]] = [
    lambda boxes: {"rank_0.safetensors": boxes},
    lambda boxes: cut(shuffled(boxes), 13, 0),
    lambda boxes: cut(boxes, 3, 1),
]


@pytest.fixture(scope="module")
def trained() -> tuple[SparseTable, list[Box]]:
    """40 rows, of which half had no gradient for three steps with weight decay."""
    rule = RowSgd(weight_decay=0.1)
    store = SparseTable(Table(WIDTH, 0, 1000, 0.1), rule, 1, "t")
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 40)
    for step in range(4):
        now = ids[: 40 if step == 0 else 20]
        store.lookup(now, create=True)
        store.update(now, np.ones((len(now), WIDTH)), 0.1, 1.0, step)
    world = World(Place())
    return store, ShardedTables({"t": DataParallelTable(store, world, [True])}, world, 1.0).boxes()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("files", CUTS, ids=["one rank", "rows", "columns"])
def test_rows_are_those_that_an_evaluation_sees(
    files: Callable[[list[Box]], dict], mapped: bool, trained: tuple[SparseTable, list[Box]], tmp_path: Path
) -> None:
    """Decay of rows that were not touched included; any shape of ids, each as often as wanted."""
    store, boxes = trained
    reader = RowReader(save(tmp_path, 7, files(boxes)), mapped)
    ids = np.concatenate([store.export().ids, store.export().ids[::-1]]).reshape(4, 20)
    answer = reader.lookup("t", ids)
    np.testing.assert_allclose(answer.rows.reshape(-1, WIDTH), store.lookup(ids.reshape(-1), False), rtol=1e-6)
    assert answer.rows.dtype == np.float32 and answer.rows.shape == (4, 20, WIDTH) and answer.found.all()
    assert answer.version == (7, "r") and reader.snapshot.widths == {"t": WIDTH}
    unknown = reader.lookup("t", [5, -1, int(ids[0, 0])])
    assert unknown.found.tolist() == [False, False, True] and not unknown.rows[:2].any()
    assert reader.lookup("t", []).rows.shape == (0, WIDTH)
    for table, ids, told in (("u", [1], "no table 'u'; there are t"), ("t", [0.5], "float64, not integers")):
        with pytest.raises(DataError, match=told):
            reader.lookup(table, ids)


def layer(number: int, ids: list[int], value: float, removed: list[int]) -> list[Box]:
    prefix = f"table/t/delta_{number}/"
    rows = torch.full((len(ids), WIDTH), value)
    named: dict[str, Tensor] = {"ids": torch.tensor(ids, dtype=torch.int64), "rows": rows}
    return [whole(prefix + key, tensor) for key, tensor in named.items()] + [
        whole(f"{prefix}removed", torch.tensor(removed, dtype=torch.int64))
    ]


def test_layers_that_were_read_are_not_read_again(tmp_path: Path) -> None:
    """Each id has the row of the newest layer that names it; ids that left are not found, and may come again."""
    count = [whole("table/t/count", torch.tensor(50))]
    first = save(tmp_path, 1, {"rows_0.safetensors": filled(1)["rank_0.safetensors"][1:], "rank_0.safetensors": count})
    reader = RowReader(tmp_path)
    base, before = list(reader._layers.values()), reader.snapshot
    second = save(tmp_path, 2, {"rows_0.delta_1.safetensors": layer(1, [3, 99], 2, [4, 5, 99])}, first, "r")
    third = save(tmp_path, 3, {"rows_0.delta_2.safetensors": layer(2, [5, 6], 3, [3])}, second, "r")
    storage.discard(first, "r")
    assert reader.refresh() and reader.version.step == 3
    assert [each for each in reader._layers.values() if any(each is one for one in base)] == base
    answer = reader.lookup("t", [2, 3, 4, 5, 6, 99])
    assert answer.found.tolist() == [True, False, False, True, True, True]
    assert answer.rows[:, 0].tolist() == [1, 0, 0, 3, 3, 2]
    assert before.lookup("t", [3, 4]).rows[:, 0].tolist() == [1, 1] and before.version.step == 1
    save(tmp_path, 4, filled(4))
    storage.discard(third, "r")
    assert reader.refresh() and reader.lookup("t", [3, 99]).found.tolist() == [True, False]
    assert len(reader._layers) == 1


def test_no_answer_is_of_two_checkpoints(tmp_path: Path) -> None:
    """While one thread refreshes and checkpoints are removed, others look up."""
    save(tmp_path, 1, filled(1))
    reader, wrong, done = RowReader(tmp_path), [], threading.Event()
    asked = threading.Semaphore(0)

    def ask() -> None:
        while not done.is_set():
            rows, _, version = reader.lookup("t", np.arange(50))
            if not (rows == version.step).all():
                wrong.append(version)
            asked.release()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for step in range(2, 12):
            save(tmp_path, step, filled(step))
            storage.discard(tmp_path / storage.step_name(step - 1), "r")
            asked.acquire()
            assert reader.refresh() and not reader.refresh() and not reader.fault
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not wrong and reader.version.step == 11


def test_a_forked_process_waits_for_no_thread_that_it_has_not(tmp_path: Path) -> None:
    save(tmp_path, 1, filled(1))
    reader = RowReader(tmp_path)
    with reader._lock:  # as a thread that refreshes
        child = os.fork()
        if child == 0:
            os._exit(int(reader._lock.locked()))
    assert os.waitpid(child, 0)[1] == 0


def test_a_table_without_rows_has_no_answers(tmp_path: Path) -> None:
    save(tmp_path, 1, {"rank_0.safetensors": [whole("table/t/count", torch.tensor(0))]})
    with pytest.raises(DataError, match="table t of step 1 has no rows yet"):
        RowReader(tmp_path).lookup("t", [1])


def test_a_checkpoint_that_retention_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(tmp_path, 1, filled(1))
    whole_read = storage.read_manifest

    def removed(folder: Path) -> Any:
        manifest = whole_read(folder)
        if folder == old and old.is_dir():
            save(tmp_path, 2, filled(2))
            storage.discard(old, "r")
        return manifest

    monkeypatch.setattr(storage, "read_manifest", removed)
    assert RowReader(tmp_path).version.step == 2


def test_what_cannot_be_read_leaves_the_answers_as_they_are(tmp_path: Path) -> None:
    """And says so. What is set aside is left for an earlier checkpoint."""
    with pytest.raises(DataError, match="holds no checkpoint"):
        RowReader(tmp_path)
    for step in (1, 2, 3):
        save(tmp_path, step, filled(step))
    reader, damaged = RowReader(tmp_path), tmp_path / "step_000004"
    save(tmp_path, 4, filled(4))
    file = damaged / "rank_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not reader.refresh() and reader.version.step == 3 and "damaged or unreadable" in reader.fault
    storage.discard(tmp_path / "step_000003", "r")
    assert not reader.refresh() and reader.version.step == 3, "an earlier one is no remedy"
    save(tmp_path, 5, filled(5))
    assert next(reader.follow(0)).step == 5 and not reader.fault
    set_aside(tmp_path, 2, "r")
    assert reader.refresh() and reader.version.step == 2
    save_no_tables(tmp_path, 6)
    assert reader.refresh() and reader.snapshot.widths == {}
    count, columns = whole("table/t/count", torch.tensor(1)), whole("table/t/columns/rows", torch.tensor([0, WIDTH]))
    save(tmp_path, 7, {"rank_0.safetensors": [count, columns]})
    assert not reader.refresh() and "table t has 1 rows by its own count, and no files" in reader.fault
    save(tmp_path, 8, {"rank_0.safetensors": [*filled(8)["rank_0.safetensors"][1:], count]})
    assert not reader.refresh() and "has 1 rows by its own count, and ids of 50" in reader.fault


# ---------------------------------------------------------------- docs/serving.md


def documented() -> dict[str, Any]:
    """The reader of docs/serving.md that needs no dtf."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    (block,) = re.findall(r"^```python\n(# in read_rows\.py\n.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.mark.parametrize("files", CUTS, ids=["one rank", "rows", "columns"])
def test_the_documented_reader_reads_a_checkpoint(
    files: Callable[[list[Box]], dict], trained: tuple[SparseTable, list[Box]], tmp_path: Path
) -> None:
    store, boxes = trained
    page, folder = documented(), save(tmp_path, 7, files(boxes))
    ids = np.append(store.export().ids[::-1], 5)
    found = page["lookup"](*page["rows_of_checkpoint"](folder, "t"), ids)
    np.testing.assert_allclose(found, RowReader(folder).lookup("t", ids).rows, rtol=1e-6)


def test_the_documented_reader_reads_layers_and_exports(tmp_path: Path) -> None:
    page, ids = documented(), np.arange(120)
    first = save(tmp_path, 1, {"rows_0.safetensors": filled(1)["rank_0.safetensors"]})
    second = save(tmp_path, 2, {"rows_0.delta_1.safetensors": layer(1, [3, 99], 2, [4, 99])}, first, "rows")
    third = save(tmp_path, 3, {"rows_0.delta_2.safetensors": layer(2, [5], 3, [3])}, second, "rows")
    found = page["lookup"](*page["rows_of_checkpoint"](third, "t"), ids)
    assert (found == RowReader(third).lookup("t", ids).rows).all() and sorted(set(found[:, 0])) == [0, 1, 2, 3]
    for pooling in (None, Pooling.sum):
        rows, specs = torch.ones(2, WIDTH), {"t": Table(WIDTH, 0, 9, 0.1, pooling=pooling)}
        module = InferenceModule(torch.nn.Linear(1, 1), {"t": (torch.tensor([3, 7]), rows)}, specs)
        save_file(module.state_dict(), tmp_path / "model.safetensors")
        read = page["rows_of_export"](tmp_path / "model.safetensors", "t")
        assert len(read[1]) == 2 and np.flatnonzero(page["lookup"](*read, ids)[:, 0]).tolist() == [3, 7]
    on_disk = save(tmp_path, 4, {"rank_0.safetensors": [whole("table/t/columns/rows", torch.tensor([0, WIDTH]))]})
    with pytest.raises(AssertionError, match=r"sparse\.disk: use dtf\.RowReader"):
        page["rows_of_checkpoint"](on_disk, "t")
