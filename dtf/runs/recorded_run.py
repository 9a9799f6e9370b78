"""Reads what a run with `train.record` wrote into its folder. Starts nothing."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from dtf.checkpoint.manifest import Manifest, StoredTensor
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.storage import read_manifest
from dtf.core.errors import DataError

TABLES = "table/"
_OF_LAYER = re.compile(r"(?:delta_([1-9]\d*)/)?([\w.]+)")
"""Of a table: what is kept of its rows, by layer."""
_HEAD = ("split", "step", "epoch", "seconds")
"""What a line of metrics.jsonl has beside metrics."""


@dataclass
class RecordedRun:
    """What a run with `train.record` wrote into its folder."""

    metrics: dict[int, dict[str, float]]  # finished steps -> loss, grad_norm
    ids: dict[int, list[list[int]]]  # step -> sample ids of each rank
    held: list[dict[str, int]]  # for each rank: parameter -> digest of the bytes of its copy
    tensors: dict[str, np.ndarray]  # of the last checkpoint
    evaluated: dict[int, dict[str, float]] = field(default_factory=dict)  # finished steps -> metrics
    # of the first step: whether the rank reads rows, and sums over the outputs of each module
    outputs: list[tuple[bool, dict[str, list[float]]]] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """From a run folder. DataError when something is missing."""
        try:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            recorded = [
                [json.loads(line) for line in path.read_text().splitlines()] for path in records(folder).values()
            ]
        except OSError as error:
            raise DataError(
                f"{folder} is no recorded run: {error.strerror} ({error.filename}); run it with train.record=true "
                "observer=[jsonl]"
            ) from None
        ids: dict[int, list[list[int]]] = {}
        for record in recorded:
            for line in record:
                if "ids" in line:  # none for ranks that read nothing
                    ids.setdefault(line["step"], []).append(line["ids"])
        held = [line for record in recorded for line in record if "held" in line]
        last = max((line["after"] for line in held), default=0)
        return cls(
            metrics={
                line["step"]: {name: _number(line[name]) for name in ("loss", "grad_norm")}
                for line in lines
                if line["split"] == "train"
            },
            ids=ids,
            # a run that went on with fewer ranks has some of earlier ones
            held=[line["held"] for line in held if line["after"] == last],
            tensors=checkpoint_tensors(resolve_checkpoints(folder, "run folder")[0]),
            outputs=[(line["reads"], line["outputs"]) for record in recorded for line in record if "outputs" in line],
            evaluated={
                line["step"]: {name: _number(value) for name, value in line.items() if name not in _HEAD}
                for line in lines
                if line["split"] == "eval"
            },
        )


def records(folder: Path) -> dict[int, Path]:
    """Rank -> its record, in order of ranks. See `dtf.runs.record`."""
    found = {int(path.stem.rpartition("_")[2]): path for path in folder.glob("record_rank_*.jsonl")}
    return dict(sorted(found.items()))


def checkpoint_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole, in fp64; ids of rows in int64. Needs no torch, as the launching process has
    none.
    """
    manifest = read_manifest(checkpoint)
    groups = tensor_groups(manifest).items()
    return {key: array for group, names in groups for key, array in group_tensors(checkpoint, manifest, group, names)}


def tensor_groups(manifest: Manifest) -> dict[str, list[str]]:
    """The names of what is read together: of a sparse table, under `table/NAME/`, and of each other tensor alone."""
    ends = (name.removesuffix("count") for name in manifest.tensors if re.fullmatch(rf"{TABLES}.+/count", name))
    tables = sorted(ends, key=len, reverse=True)
    groups: dict[str, list[str]] = {}
    for name in filter(name_counts, sorted(manifest.tensors)):
        groups.setdefault(next((table for table in tables if name.startswith(table)), name), []).append(name)
    return groups


def group_tensors(
    checkpoint: Path, manifest: Manifest, group: str, names: Sequence[str]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a group, see `checkpoint_tensors`. Those of a table have its rows by ascending id and the same
    names, whether these lay in memory or on disk, and whether they were saved at once or in layers of changes.
    """
    layers: dict[int, dict[str, np.ndarray]] = {}
    on_disk = any(name.startswith(f"{group}columns/") for name in names)
    for name in names:
        key = _OF_LAYER.fullmatch(name.removeprefix(group))
        if on_disk and name.startswith((f"{group}columns/", f"{group}bytes/", f"{group}disk_", f"{group}life/rows_")):
            continue
        tensor = whole_tensor(checkpoint, name, manifest.tensors[name])
        if key and tensor.ndim and name != group:
            layers.setdefault(int(key[1] or 0), {})[key[2]] = tensor
        else:
            yield name, tensor
    if on_disk:
        layers[0] = _rows_on_disk(checkpoint, manifest, group, names)
    yield from ((f"{group}{key}", array) for key, array in _merged(layers).items())


def _rows_on_disk(checkpoint: Path, manifest: Manifest, table: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    from dtf.sparse.disk.saved_rows import parts_in, tensors_of  # it needs numba
    from dtf.sparse.store import extra_of

    def places(prefix: str) -> dict[str, tuple[int, int]]:
        kept = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        ends = {key: whole_tensor(checkpoint, name, manifest.tensors[name]) for key, name in kept.items()}
        return {key: (int(first), int(last)) for key, (first, last) in ends.items()}

    found, extra = tensors_of(parts_in(checkpoint, set(names), table), places(f"{table}columns/"))
    if found:
        found |= {key: extra_of(key, extra, slice(*ends)) for key, ends in places(f"{table}bytes/").items()}
    return {key: array if key == "ids" else array.astype(np.float64) for key, array in found.items()}


def _merged(layers: dict[int, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of a table by ascending id: each from the newest layer that has its id, unless a newer one removes it.
    What a layer does not keep of its rows, as none had it yet, is 0.
    """
    ids, known, picks = np.empty(0, np.int64), np.empty(0, np.int64), dict[int, np.ndarray]()
    merged: dict[str, np.ndarray] = {}
    for layer in sorted(layers, reverse=True):
        here = layers[layer].pop("ids", known[:0])
        picks[layer] = np.flatnonzero(~np.isin(here, known))
        ids = np.concatenate([ids, here[picks[layer]]])
        known = np.union1d(known, np.concatenate([here, layers[layer].pop("removed", here[:0])]))
    if layers:
        merged["ids"] = ids
    order = np.argsort(ids)
    for key in {key: None for layer in sorted(layers) for key in layers[layer]}:
        width = next(arrays[key].shape[1:] for arrays in layers.values() if key in arrays)
        parts = [
            layers[layer][key][pick] if key in layers[layer] else np.zeros((len(pick), *width))
            for layer, pick in picks.items()
        ]
        merged[key] = np.concatenate(parts)
    return {key: array[order] for key, array in merged.items()}


def name_counts(name: str) -> bool:
    """Whether runs of any number of ranks have a tensor alike. Running averages of one share of the rows depend on the
    number of shares.
    """
    return not name.startswith("share_")


def whole_tensor(checkpoint: Path, name: str, stored: StoredTensor) -> np.ndarray:
    """One tensor of a checkpoint, see `checkpoint_tensors`; rows of tables in the order of the checkpoint."""
    holds_ids = name.endswith(("/ids", "/removed"))
    tensor = np.empty(stored.shape, np.int64) if holds_ids else np.full(stored.shape, np.nan)
    for box in stored.boxes:
        part = tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))
        if stored.dtype == "BF16":  # numpy has no such numbers
            tensor[part] = _bf16(checkpoint / box.file, box.key)
            continue
        with safe_open(checkpoint / box.file, framework="numpy") as file:
            tensor[part] = file.get_tensor(box.key)
    return tensor


def _bf16(path: Path, key: str) -> np.ndarray:
    """Numbers of 16 bits as fp32, which begins with the same bits."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[key]
        first, end = entry["data_offsets"]
        file.seek(8 + length + first)
        bits = np.frombuffer(file.read(end - first), "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).reshape(entry["shape"])


def in_order(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors with the rows of sparse tables in order of ids. A checkpoint has them in order of ranks."""
    orders = {
        name.removesuffix("ids"): np.argsort(ids)
        for name, ids in tensors.items()
        if name.startswith(TABLES) and name.endswith("/ids")
    }
    return {
        name: tensor[orders[table]] if tensor.ndim and (table := name.rpartition("/")[0] + "/") in orders else tensor
        for name, tensor in tensors.items()
    }


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN
