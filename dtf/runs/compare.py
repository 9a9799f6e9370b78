"""Compares the numbers of two recorded runs, and names what differs first. Reads run folders, starts nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.checkpoint.storage import read_manifest
from dtf.core.errors import DataError

FP64_BOUND = 1e-10  # max|a - b| / max|a| of loss, gradient norm and every tensor
FP32_BOUND = 1e-5  # |a - b| / |a|, L2 over all parameters at once
ROUNDING = 1e-6
TABLES = "table/"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass
class RecordedRun:
    """What a run with `train.record` wrote into its folder."""

    metrics: dict[int, dict[str, float]]  # finished steps -> loss, grad_norm
    ids: dict[int, list[list[int]]]  # step -> sample ids of each rank
    held: list[dict[str, int]]  # for each rank: parameter -> digest of the bytes of its copy
    tensors: dict[str, np.ndarray]  # of the last checkpoint

    @classmethod
    def read(cls, folder: Path) -> RecordedRun:
        """From a run folder. DataError when something is missing."""
        try:
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            records = [
                [json.loads(line) for line in path.read_text().splitlines()]
                for path in sorted(
                    folder.glob("record_rank_*.jsonl"), key=lambda path: int(path.stem.rpartition("_")[2])
                )
            ]
        except OSError as error:
            raise DataError(
                f"{folder} is no recorded run: {error.strerror} ({error.filename}); run it with train.record=true "
                "observer=[jsonl]"
            ) from None
        ids: dict[int, list[list[int]]] = {}
        for record in records:
            for line in record:
                if "ids" in line:
                    ids.setdefault(line["step"], []).append(line["ids"])
        held = [line for record in records for line in record if "held" in line]
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
        )


@dataclass
class Comparison:
    """How far a run is from its reference. `first` names what differs first, in the order in which one quantity causes
    the next; it is empty when all differences are within the bound.
    """

    bound: float
    loss: float
    grad_norm: float
    parameters: float  # L2, all parameters at once
    tensor: float  # the worst tensor's max|a - b| / max|a| ...
    worst: str  # ... and its name
    tensors: dict[str, float] = field(default_factory=dict)
    first: str = ""
    tells_norm: bool = True  # else no process of the run ever has the whole gradient

    @property
    def ok(self) -> bool:
        return not self.first

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "ok": self.ok}


def checkpoint_tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, whole, in fp64; ids of rows in int64. Needs no torch, as the launching process has
    none.
    """
    tensors = {}
    for name, stored in sorted(read_manifest(checkpoint).tensors.items()):
        if name.startswith("share_"):
            continue  # running averages of one share of the rows: they depend on the number of shares
        tensors[name] = np.full(stored.shape, np.nan) if not name.endswith("/ids") else np.empty(stored.shape, np.int64)
        for box in stored.boxes:
            with safe_open(checkpoint / box.file, framework="numpy") as file:
                tensors[name][tuple(slice(at, at + n) for at, n in zip(box.offset, box.shape, strict=True))] = (
                    file.get_tensor(box.key)
                )
    return in_order(tensors)


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


def compare(reference: RecordedRun, run: RecordedRun, exact: bool) -> Comparison:
    """Compare a run with the reference: element by element with `exact` (fp64), else by the L2 norm of all parameters
    (fp32).
    """
    floors = _floors(reference.tensors)
    tensors = {
        name: relative(reference.tensors[name], run.tensors[name], floors.get(name, 0.0))
        for name in reference.tensors.keys() & run.tensors.keys()
    }
    worst = max(sorted(tensors), key=lambda name: tensors[name], default="")
    parameters = [name for name in sorted(tensors) if _is_parameter(name)]
    steps = sorted(reference.metrics)
    verdict = Comparison(
        bound=FP64_BOUND if exact else FP32_BOUND,
        loss=_metric(reference, run, "loss"),
        grad_norm=_metric(reference, run, "grad_norm"),
        parameters=_l2([reference.tensors[name] for name in parameters], [run.tensors[name] for name in parameters]),
        tensor=tensors.get(worst, float("nan")),
        worst=worst,
        tensors=tensors,
        tells_norm=not all(
            math.isnan(values["grad_norm"]) and math.isfinite(values["loss"]) for values in run.metrics.values()
        ),
    )
    if sorted(run.metrics) != steps or sorted(run.ids) != sorted(reference.ids):
        verdict.first = (
            f"steps: {len(run.metrics)} were reported and {len(run.ids)} recorded, the reference has {len(steps)}"
        )
    elif reference.tensors.keys() != run.tensors.keys():
        verdict.first = (
            f"tensors: only one run has {', '.join(sorted(reference.tensors.keys() ^ run.tensors.keys())[:5])}"
        )
    else:
        held = numbers_differ(verdict, exact)
        verdict.first = _rows(reference, run) or (held and _cause(reference, run, verdict)) or _ranks(run)
    return verdict


def _number(value: float | None) -> float:
    return math.nan if value is None else value  # JSON has no NaN


def _is_parameter(name: str) -> bool:
    """Whether a tensor of a checkpoint is a trained parameter, dense or sparse."""
    return (name.startswith("model/") and not name.endswith(STATISTICS)) or (
        name.startswith(TABLES) and name.endswith("/rows")
    )


def numbers_differ(verdict: Comparison, exact: bool) -> bool:
    """Whether a difference is beyond the bound. A NaN is."""
    if exact:
        norm = (verdict.grad_norm,) if verdict.tells_norm else ()
        return not all(value <= verdict.bound for value in (verdict.loss, *norm, verdict.tensor))
    return not verdict.parameters <= verdict.bound


def _floors(tensors: dict[str, np.ndarray]) -> dict[str, float]:
    """Scales below which differences of optimizer state are rounding: name -> a millionth of the largest value of that
    kind of state.

    The gradient of a bias before a normalisation is rounding around zero, and so is its momentum.
    """
    kinds: dict[str, float] = {}
    for name, tensor in tensors.items():
        if _is_state(name) and tensor.size:
            kind = name.rpartition("/")[2]
            kinds[kind] = max(kinds.get(kind, 0.0), float(np.abs(tensor).max()))
    return {
        name: ROUNDING * kinds[kind]
        for name in tensors
        if _is_state(name) and (kind := name.rpartition("/")[2]) in kinds
    }


def _is_state(name: str) -> bool:
    """Whether a tensor of a checkpoint is an optimizer's."""
    return name.startswith("optimizer/") or (name.startswith(TABLES) and not name.endswith(("/ids", "/rows")))


def relative(a: np.ndarray, b: np.ndarray, floor: float = 0.0) -> float:
    """max|a - b| / max|a|, or / `floor` if that is more; inf when shapes differ or one side is not finite where the
    other is.
    """
    if a.shape != b.shape:
        return float("inf")
    if not a.size:
        return 0.0
    if a.dtype == np.int64:  # ids of rows are the same or not
        return 0.0 if np.array_equal(a, b) else float("inf")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    difference, scale = np.abs(a - b).max(), max(np.abs(a).max(), floor)
    return float(difference / scale) if scale else float(difference)


def _l2(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    if any(x.shape != y.shape for x, y in zip(a, b, strict=True)):
        return float("inf")
    difference = sum(float(np.square(x - y).sum()) for x, y in zip(a, b, strict=True))
    return float(np.sqrt(difference / max(sum(float(np.square(x).sum()) for x in a), 1e-300)))


def _metric(reference: RecordedRun, run: RecordedRun, name: str) -> float:
    steps = sorted(reference.metrics.keys() & run.metrics.keys())
    return relative(
        np.array([reference.metrics[s][name] for s in steps]), np.array([run.metrics[s][name] for s in steps])
    )


def _rows(reference: RecordedRun, run: RecordedRun) -> str:
    for step in sorted(reference.ids):
        expected, actual = list(chain(*reference.ids[step])), list(chain(*run.ids[step]))
        if expected != actual:
            missing, extra = sorted(set(expected) - set(actual)), sorted(set(actual) - set(expected))
            what = (
                f"{len(missing)} missing (first {missing[:3]}), {len(extra)} foreign (first {extra[:3]})"
                if missing or extra
                else "the same rows in another order"
            )
            return f"sample ids at step {step}: {what}"
    return ""


def _cause(reference: RecordedRun, run: RecordedRun, verdict: Comparison) -> str:
    """The first quantity out of bounds, in the order in which one causes the next."""
    loose = max(verdict.bound * 100, 1e-4) if verdict.bound == FP32_BOUND else verdict.bound
    for step in sorted(reference.metrics):
        for name in ("loss", "grad_norm") if verdict.tells_norm else ("loss",):
            a, b = reference.metrics[step][name], run.metrics[step][name]
            if not relative(np.array([a]), np.array([b])) <= loose:
                ratio = f", {b / a:.4g} x the reference's" if a and np.isfinite(b) else ""
                split = _ranks(run)
                return f"{name} at step {step - 1}: {b:.9g} instead of {a:.9g}{ratio}" + (f"; {split}" if split else "")
    off = sorted(name for name, value in verdict.tensors.items() if not value <= loose)
    statistics = [name for name in off if name.endswith(STATISTICS)]
    if off and statistics == off:
        return f"running averages: {off[0]} and {len(off) - 1} more differ while loss, gradients and parameters agree"
    first = off[0] if off else verdict.worst
    return f"tensor {first}: differs by {verdict.tensors[first]:.3g}, and {max(len(off) - 1, 0)} more"


def _ranks(run: RecordedRun) -> str:
    """Whether all ranks hold the same bits of what they should all hold."""
    first: dict[str, tuple[int, int]] = {}
    for copy, held in enumerate(run.held):
        for name in sorted(held):
            holder, digest = first.setdefault(name, (copy, held[name]))
            if held[name] != digest:
                return f"ranks {holder} and {copy} hold different {name}: gradients were not summed over all ranks"
    return ""
