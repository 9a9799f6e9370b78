"""What tests of checkpoints share: worlds of threads, random bits, small checkpoints and ways to damage them."""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
import threading
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.checkpoint import storage
from dtf.checkpoint.agreement import Peers
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.manifest import StoredFile, StoredTensor
from dtf.checkpoint.options import Every
from dtf.core.errors import DataError
from dtf.core.types import Box, State
from dtf.engine.resume import refuse_left_over
from dtf.runs.recorded_run import checkpoint_tensors
from dtf.sparse.disk.saved_rows import Part, tensors_of
from dtf.sparse.row_parts import columns_of, extra_of, extras_of

GOAL = ("accuracy", "max")


class Together:
    """A world of threads; every value travels as JSON."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, slots: list[Any]) -> None:
        self.rank, self.size, self._barrier, self._slots = rank, size, barrier, slots

    def gather(self, value: Any) -> list[Any] | None:
        self._slots[self.rank] = json.dumps(value)
        self._barrier.wait(30)
        values = [json.loads(slot) for slot in self._slots]
        self._barrier.wait(30)
        return values if self.rank == 0 else None

    def broadcast(self, value: Any) -> Any:
        self._slots[self.rank] = json.dumps(value)
        self._barrier.wait(30)
        value = json.loads(self._slots[0])
        self._barrier.wait(30)
        return value


def on_ranks(size: int, work: Callable[[Together], Any]) -> list[Any]:
    """Results of `work` by rank, exceptions in place of those that raised."""
    barrier, slots = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Together(rank, size, barrier, slots))
        except Exception as error:  # noqa: BLE001 - the test judges it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def checkpointer(folder: Path, world: Any = None, notes: list[str] | None = None, **options: Any) -> Checkpointer:
    world = world or Together(0, 1, threading.Barrier(1), [None])
    return Checkpointer(
        folder, Every(**options), world, "run-1", GOAL, "ddp", (notes if notes is not None else []).append
    )


def whole(name: str, tensor: Tensor) -> Box:
    return Box(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, NaN payloads included."""
    count = torch.Size(shape).numel() * torch.empty((), dtype=dtype).element_size()
    data = torch.tensor(list(random.Random(seed).randbytes(count)), dtype=torch.uint8)
    return (data & 1 if dtype is torch.bool else data).view(dtype).reshape(shape)


def part(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    for axis, (start, count) in enumerate(zip(offset, shape, strict=True)):
        tensor = tensor.narrow(axis, start, count)
    return tensor


def small_checkpoint(folder: Path, step: int = 2) -> Path:
    boxes = [
        [
            whole(f"model/{r}.w", noise((30 + r, 4), torch.float32, r)),
            whole(f"model/{r}.i", noise((2,), torch.int64, r)),
        ]
        for r in range(3)
    ]
    results = on_ranks(
        3,
        lambda world: checkpointer(folder, world).save(
            step, State(boxes[world.rank], {}), {"clock": {"step": step}}, 0.5
        ),
    )
    assert results == [str(folder / storage.step_name(step))] * 3
    return Path(results[0])


def damage(folder: Path, draw: random.Random) -> str:
    """Change one thing in a checkpoint."""
    files = sorted(folder.iterdir())
    file, other = draw.sample(files, 2)
    data = bytearray(file.read_bytes())
    kind = draw.choice(
        ["flip", "flip", "flip", "byte", "truncate", "append", "delete", "add", "swap", "copy", "zero", "rename"]
    )
    match kind:
        case "flip":
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case "byte":
            data[draw.randrange(len(data))] ^= draw.randrange(1, 256)
        case "zero":
            start = draw.randrange(len(data) - 1)
            fill = b"\0" if any(data[start:]) else b"\xff"  # what is zero already must become something else
            data[start:] = fill * (len(data) - start)
        case "truncate":
            del data[draw.randrange(len(data)) :]
        case "append":
            data += draw.randbytes(draw.randrange(1, 9))
    if kind in ("flip", "byte", "truncate", "append", "zero"):
        file.write_bytes(data)
    elif kind == "delete":
        file.unlink()
    elif kind == "add":
        (folder / draw.choice(["x", "rank_9.safetensors", ".hidden", "manifest.json.bak", "latest"])).write_bytes(b"")
    elif kind == "rename":
        file.rename(folder / "rank_7.safetensors")
    else:
        mine, theirs = file.read_bytes(), other.read_bytes()
        file.write_bytes(theirs)
        if kind == "swap":
            other.write_bytes(mine)
    return f"{kind} {file.name}"


def boxes_of_others(state: State, task: Task) -> list[Box]:
    """What is written for this rank beside its boxes. Of tables on disk: all rows of each writer, as
    `table/NAME/KEY@WRITER`.
    """
    found: list[Box] = []
    parts: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="dtf-others-") as folder:
        for part in state.others()(Path(folder)) if state.others else ():
            tensors = load_file(Path(folder, part["file"]))
            for name, _, shape, key, offset, _ in part["boxes"]:
                if "/disk_" not in name:
                    found.append(Box(name, tensors[key], tuple(shape), tuple(offset)))
                    continue
                writer, kind = name.rsplit("/", 1)
                stored = StoredFile(part["size"], tuple(part["crc32"]))
                parts.setdefault(writer, {}).setdefault(kind, []).append((Path(folder, part["file"]), stored))
        for writer, kinds in parts.items():
            table, number = writer.split("/disk_")
            assert task.rows is not None
            width = task.recipe.tables()[table.removeprefix("table/")].width
            columns = {key: (each.start, each.stop) for key, each in columns_of(task.rows, width).items()}
            part = Part(*(kinds.get(kind, []) for kind in Part._fields))
            rows, extra = tensors_of([part], {"rows": (0, width)} | columns)
            if rows:
                rows |= {key: extra_of(key, extra, where) for key, where in extras_of(task.rows).items()}
            for key, array in rows.items():
                tensor = torch.from_numpy(np.ascontiguousarray(array))
                found.append(Box(f"{table}/{key}@{number}", tensor, array.shape, (0,) * array.ndim))
    return found


def rows_of_writers(parts: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    """Takes the tensors `table/NAME/KEY@WRITER` out of `parts`, and puts those of all writers together."""
    tensors: dict[str, np.ndarray] = {}
    for name in [
        name for name in parts if "@" in name or "/columns/" in name or "/bytes/" in name or "/life/rows_" in name
    ]:
        boxes, (whole, _, _) = parts.pop(name), name.partition("@")
        if whole != name:
            rows = np.array(boxes[0][2])
            tensors[whole] = np.concatenate([tensors[whole], rows]) if whole in tensors else rows
    return tensors


def same_tensors(one: Path, other: Path) -> None:
    """Assert that two checkpoints hold the same bits, however the rows of their tables were saved."""
    a, b = checkpoint_tensors(one), checkpoint_tensors(other)
    assert a.keys() == b.keys() and any(name.endswith("/rows") and len(a[name]) for name in a)
    assert [name for name in a if not np.array_equal(a[name], b[name])] == []


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any], files: dict[str, bytes] | None = None) -> None:
    """Change the content of a checkpoint and make its digests right again, as somebody who means harm would do it.

    `change` gets the manifest as JSON, with sizes and digests of `files`, the new content of files, already in it.
    """
    manifest = json.loads((folder / storage.MANIFEST).read_bytes())
    del manifest["sha256"]
    for name, data in (files or {}).items():
        (folder / name).unlink(missing_ok=True)
        stored = storage.write(folder / name, [data])
        manifest["files"][name] = {"size": stored.size, "crc32": list(stored.crc32)}
    change(manifest)
    body = json.dumps(manifest).encode()[:-1]
    (folder / storage.MANIFEST).write_bytes(body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode())


def load(program: Program, source: StoredCheckpoint, world: Peers, tables: Container[str]) -> None:
    """Have a program go on from a checkpoint, as `dtf.engine.resume` does, after the law that it takes none of another
    model: not of larger tensors, of which its own would be a part, and none that has tensors or tables beside its own.
    Collective.
    """
    for kind in ("model/", "optimizer/", "table/"):
        larger = StoredCheckpoint(source.folder)
        larger.scalars = source.scalars
        grown = {
            name: _wider(tensor) for name, tensor in larger.manifest.tensors.items() if _has_width(kind, name, tensor)
        }
        larger.manifest = replace(larger.manifest, tensors={**larger.manifest.tensors, **grown})
        refused = ""
        try:
            program.load(larger)
        except DataError as error:
            refused = str(error)
        assert not grown.keys() - larger.unread() or "and this run's has" in refused, (
            f"{kind} is taken in part: {refused}"
        )
    program.load(source)
    refuse_left_over(source, world, tables)
    for name, named in (("model/gone.weight", "model/gone.weight"), ("table/gone/count", "the sparse table gone")):
        more = StoredCheckpoint(source.folder)
        more._read = set(source.names())
        more.manifest = replace(more.manifest, tensors={**more.manifest.tensors, name: StoredTensor("F32", (), ())})
        with pytest.raises(DataError, match=f"holds {named}, and this run has none"):
            refuse_left_over(more, world, tables)


def _has_width(kind: str, name: str, tensor: StoredTensor) -> bool:
    """Whether it is of this kind, and no counter; of tables those of rows by columns."""
    return name.startswith(kind) and len(tensor.shape) > (kind == "table/")


def _wider(tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))
