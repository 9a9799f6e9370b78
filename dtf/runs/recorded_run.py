"""Reads what a run with `train.record` wrote into its folder. Starts nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import safe_open

from dtf.checkpoint.manifest import StoredTensor
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.storage import read_manifest
from dtf.core.errors import DataError

TABLES = "table/"
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
    return in_order(
        {
            name: whole_tensor(checkpoint, name, stored)
            for name, stored in sorted(read_manifest(checkpoint).tensors.items())
            if name_counts(name)
        }
    )


def name_counts(name: str) -> bool:
    """Whether runs of any number of ranks have a tensor alike. Running averages of one share of the rows depend on the
    number of shares.
    """
    return not name.startswith("share_")


def whole_tensor(checkpoint: Path, name: str, stored: StoredTensor) -> np.ndarray:
    """One tensor of a checkpoint, see `checkpoint_tensors`; rows of tables in the order of the checkpoint."""
    tensor = np.full(stored.shape, np.nan) if not name.endswith("/ids") else np.empty(stored.shape, np.int64)
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
