"""Reading files of a checkpoint by blocks, by one thread and by several, into memory of the reader."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from dtf.checkpoint import blocks as module
from dtf.checkpoint import storage
from dtf.checkpoint.blocks import Blocks
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.checkpoint.manifest import BLOCK_BYTES, StoredFile
from dtf.core.errors import DataError
from dtf.core.types import Box, State
from tests.support.checkpoints import Together, checkpointer, same_bits, whole

COUNT = 20
"""Blocks of the file, the last one shorter: enough for several threads."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StoredFile, bytes]:
    folder = tmp_path_factory.mktemp("blocks")
    data = random.Random(1).randbytes((COUNT - 1) * BLOCK_BYTES + 17)
    return folder, storage.write(folder / "f", [data]), data


@pytest.fixture(params=["several threads", "one core", "no threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of the threads that read."""
    readers, fill, start = set[str](), module.fill, threading.Thread.start

    def watched(*arguments: object) -> int:
        readers.add(threading.current_thread().name)
        return fill(*arguments)  # type: ignore[arg-type]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(module, "fill", watched)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: range(1 if request.param == "one core" else 3))
    if request.param == "no threads":
        monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(module, "_BLOCKS_A_THREAD", 2)
    yield readers
    monkeypatch.setattr(threading.Thread, "start", start)
    main = threading.current_thread().name
    assert (readers - {main} != set()) is (request.param == "several threads"), readers


def test_any_range_is_what_was_written(file: tuple[Path, StoredFile, bytes], threads: set[str]) -> None:
    folder, stored, data = file
    reader, draw = Blocks(folder, "f", stored), random.Random(2)
    ranges = [sorted(draw.choices(range(len(data) + 1), k=2)) for _ in range(10)]
    for start, stop in [*ranges, [0, len(data)], [BLOCK_BYTES, 3 * BLOCK_BYTES], [5, 5], [len(data), len(data)]]:
        into = bytearray(stop - start + 2)
        reader.read_into(start, memoryview(into)[1:-1])
        assert into[1:-1] == data[start:stop] and into[0] == into[-1] == 0
        assert reader.read(start, stop) == data[start:stop]


@pytest.mark.parametrize("where", [[0], [3, 4, 11], [COUNT - 1], list(range(COUNT))])
def test_each_damaged_stretch_is_told(
    file: tuple[Path, StoredFile, bytes], threads: set[str], where: list[int], tmp_path: Path
) -> None:
    _, stored, data = file
    damaged = bytearray(data)
    for number in where:
        damaged[number * BLOCK_BYTES + 5] ^= 4
    (tmp_path / "f").write_bytes(damaged)
    reader = Blocks(tmp_path, "f", stored)
    assert reader.damaged(range(COUNT)) == set(where)
    with pytest.raises(DataError, match=f"bytes {where[0] * BLOCK_BYTES} to .* are damaged"):
        reader.read(0, len(data))
    stretches = list(storage._file_faults(reader, range(COUNT)))
    assert len(stretches) == 1 + sum(b - a > 1 for a, b in pairwise(where))


def test_a_stretch_that_two_windows_share_is_told_once(
    file: tuple[Path, StoredFile, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stored, data = file
    (tmp_path / "f").write_bytes(bytes(len(data)))
    monkeypatch.setattr(storage, "_WINDOW", 3)
    (text,) = storage._file_faults(Blocks(tmp_path, "f", stored), range(1, COUNT))
    assert f"bytes {BLOCK_BYTES} to {len(data)} are damaged" in text


def test_a_tensor_is_read_into_memory_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat memory of the stored format gets the bytes of the file; any other is copied to."""
    matrix, third = torch.randn(600, 700), torch.randn(12, 5, 3)
    boxes = [
        *(Box("model/w", matrix[a:b].clone(), (600, 700), (a, 0)) for a, b in ((0, 250), (250, 600))),
        *(Box("model/h", third[:, a:b].clone(), (12, 5, 3), (0, a, 0)) for a, b in ((0, 2), (2, 5))),
        whole("model/step", torch.tensor(7)),
        whole("model/none", torch.empty(0, 4)),
        whole("model/half", torch.randn(9).bfloat16()),
    ]
    world = Together(0, 1, threading.Barrier(1), [None])
    path = checkpointer(tmp_path, world).save(1, State(boxes, {}), {})
    source, copied, copy = StoredCheckpoint(Path(path)), [], torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda into, other: copied.append(into.shape) or copy(into, other))

    def read(name: str, out: torch.Tensor, *offset: int) -> torch.Tensor:
        copied.clear()
        source.read_into(
            f"model/{name}", out, *((offset, source.manifest.tensors[f"model/{name}"].shape) if offset else ())
        )
        return out

    assert same_bits(read("w", torch.zeros(600, 700)), matrix) and not copied
    assert same_bits(read("w", torch.zeros(200, 700), 100, 0), matrix[100:300]) and not copied
    assert same_bits(read("w", torch.zeros(700, 600).t()), matrix) and copied
    assert same_bits(read("w", torch.zeros(600, 700, dtype=torch.float64)), matrix.double()) and copied
    assert same_bits(read("w", torch.zeros(40, 50), 230, 610), matrix[230:270, 610:660]) and copied
    assert same_bits(read("h", torch.zeros(12, 5, 3)), third) and copied
    assert same_bits(read("step", torch.tensor(0)), torch.tensor(7)) and not copied
    assert read("none", torch.empty(0, 4)).shape == (0, 4)
    assert same_bits(read("half", torch.zeros(9, dtype=torch.bfloat16)), boxes[-1].tensor) and not copied
    wanted = torch.zeros(600, 700, requires_grad=True)
    with torch.no_grad():
        assert same_bits(read("w", wanted), matrix)
    for out, offset in ((torch.zeros(600, 701), ()), (torch.zeros(600), ()), (torch.zeros(10, 10), (595, 0))):
        with pytest.raises(DataError, match="model/w has shape"):
            read("w", out, *offset)
