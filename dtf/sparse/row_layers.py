"""The rows of a table in a checkpoint, where they are looked up in its files. Numpy and the files alone: no torch, no
ranks.

A checkpoint has a layer of all rows, 0. It may have further ones, each with the rows that changed and the ids that
left since the layer before. An id has the row of the newest layer that names it.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dtf.checkpoint.blocks import Blocks, open_regular
from dtf.checkpoint.manifest import BLOCK_BYTES, Manifest, StoredBox, StoredFile, StoredTensor, volume
from dtf.checkpoint.safetensors_format import Slot, slots
from dtf.core.errors import DataError

if TYPE_CHECKING:
    from dtf.sparse.disk.row_files import FileLayer

_NUMBERS = {"I64": np.int64, "F32": np.float32, "F64": np.float64}

_POPULATE_READ = 22
"""MADV_POPULATE_READ."""

Content = tuple[tuple[str, StoredFile, StoredBox], ...]
"""What a layer was read from: layers of the same content are the same."""


class _Part(NamedTuple):
    """A part of a table's rows, and its first row and column."""

    values: np.ndarray
    row: int
    column: int


class Layer:
    """The rows of one layer by id. Rows and their decay stay in the file, which is mapped; ids are held in memory."""

    def __init__(self, files: Files, manifest: Manifest, at: str) -> None:
        def tensor(key: str) -> StoredTensor:
            return manifest.tensors.get(at + key) or StoredTensor("I64", (0,), ())

        ids = files.whole(tensor("ids"))
        ascending = bool(np.all(ids[1:] > ids[:-1]))
        # where the row of each id is, if not in this order
        self._order = None if ascending else np.argsort(ids).astype(np.uint32 if len(ids) >> 32 == 0 else np.int64)
        self._ids = ids if self._order is None else ids[self._order]
        self.removed = np.sort(files.whole(tensor("removed")))
        self._parts, self._decayed = (
            [_Part(files.array(box), box.offset[0], sum(box.offset[1:])) for box in tensor(key).boxes]
            for key in ("rows", "decayed")
        )

    def __len__(self) -> int:
        return len(self._ids)

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which of some ascending ids (n,) have a row here, bool (n,), and where these are."""
        places = _places(self._ids, ids)
        has = places >= 0
        return has, places[has] if self._order is None else self._order[places[has]].astype(np.int64)

    def read(self, places: np.ndarray, decay: float, out: np.ndarray) -> np.ndarray:
        """Fill `out` (n, width) with the rows at some places, as they are when all decay so far is `decay`."""
        _gather(self._parts, places, out)
        if decay:
            decayed = np.zeros((len(places), 1))
            _gather(self._decayed, places, decayed)
            out *= np.exp(decay - decayed).astype(out.dtype)
        return out


def look_up(
    layers: Sequence[Layer | FileLayer], ids: np.ndarray, decay: float, rows: np.ndarray, found: np.ndarray
) -> None:
    """Fill `rows` (n, width) and `found` bool (n,) of those of ids (n,) that have a row in the layers, of which the
    newest comes first. Others stay as they are. `decay`: all so far.
    """
    rest = np.argsort(ids)
    for layer in layers:
        has, places = layer.find(ids[rest])
        here = rest[has]
        rows[here] = layer.read(places, decay, np.empty((len(here), rows.shape[1]), rows.dtype))
        found[here] = True
        rest = rest[~(has | contains(layer.removed, ids[rest]))]


def contains(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Which of the ids `of` (n,), ascending, are among `ids`, bool (n,)."""
    return _places(ids, of) >= 0


def _places(ids: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Where the ids `of` are in `ids`, both ascending; -1 for none. That `of` ascends makes it five times as fast."""
    if not len(ids):
        return np.full(len(of), -1)
    places = np.searchsorted(ids, of)
    places[places == len(ids)] = 0
    return np.where(ids[places] == of, places, -1)


def _gather(parts: list[_Part], places: np.ndarray, out: np.ndarray) -> None:
    for values, row, column in parts:
        values = values.reshape(len(values), -1)
        to = slice(column, column + values.shape[1])
        if len(values) and not row and len(parts) == 1:
            out[:, to] = values.take(places, axis=0)
        else:
            here = np.flatnonzero((places >= row) & (places < row + len(values)))
            out[here, to] = values.take(places[here] - row, axis=0)


def layer_names(manifest: Manifest, table: str) -> list[str]:
    """What the tensors of each layer of a table begin with, the newest first."""
    deltas = {
        int(match[1])
        for name in manifest.tensors
        if (match := re.fullmatch(rf"table/{re.escape(table)}/delta_([1-9]\d{{0,8}})/\w+(?:\.\w+)?", name))
    }
    return [*(f"table/{table}/delta_{number}/" for number in sorted(deltas, reverse=True)), f"table/{table}/"]


def content(manifest: Manifest, at: str) -> Content:
    """What the layer whose tensors begin with `at` is read from."""
    return tuple(
        (key, manifest.files[box.file], box)
        for key in ("ids", "rows", "decayed", "removed")
        if (tensor := manifest.tensors.get(at + key))
        for box in tensor.boxes
    )


class Files:
    """The files of a checkpoint. What is read was compared with its digests before."""

    def __init__(self, folder: Path, manifest: Manifest, mapped: bool) -> None:
        self.folder, self._manifest, self._mapped = folder, manifest, mapped
        self._open: dict[str, tuple[Blocks, dict[str, Slot], mmap.mmap | None]] = {}

    def array(self, box: StoredBox) -> np.ndarray:
        """The numbers of a box, in the file or in memory. DataError where they are damaged or of another kind."""
        blocks, by_key, mapping = self._file(box.file)
        slot = by_key.get(box.key)
        if slot is None or slot.shape != box.shape or slot.dtype not in _NUMBERS:
            raise DataError(f"{self.folder}: {box.file} has no {box.key!a} as the manifest says")
        if not volume(slot.shape):
            return np.zeros(slot.shape, _NUMBERS[slot.dtype])
        if mapping is None:
            data = blocks.read(slot.start, slot.stop)
        else:
            damaged = blocks.damaged(range(slot.start // BLOCK_BYTES, -(-slot.stop // BLOCK_BYTES)))
            if damaged:
                raise DataError(f"{self.folder}: {blocks.damage(min(damaged), min(damaged) + 1)}")
            first = slot.start // mmap.PAGESIZE * mmap.PAGESIZE
            with suppress(OSError):  # Linux 5.14
                mapping.madvise(
                    _POPULATE_READ, first, slot.stop - first
                )  # no request waits for the system to find a page
            data = memoryview(mapping)[slot.start : slot.stop]
        return np.frombuffer(data, _NUMBERS[slot.dtype]).reshape(slot.shape)

    def whole(self, tensor: StoredTensor) -> np.ndarray:
        """A tensor of one axis, in memory."""
        out = np.empty(tensor.shape, _NUMBERS[tensor.dtype])
        for box in tensor.boxes:
            out[box.offset[0] : box.offset[0] + box.shape[0]] = self.array(box)
        return out

    def _file(self, name: str) -> tuple[Blocks, dict[str, Slot], mmap.mmap | None]:
        if name not in self._open:
            stored = self._manifest.files[name]
            blocks, mapping = Blocks(self.folder, name, stored), None
            if self._mapped:
                file, size = open_regular(self.folder / name)
                try:
                    if size != stored.size:
                        raise DataError(f"{self.folder}: {name} has {size} bytes instead of {stored.size}")
                    mapping = mmap.mmap(file, size, prot=mmap.PROT_READ)
                finally:
                    os.close(file)
            self._open[name] = blocks, slots(blocks.read, stored.size), mapping
        return self._open[name]
