"""Compares the numbers of two recorded runs, and names what differs first. Reads run folders, starts nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from dtf.runs.recorded_run import TABLES, RecordedRun

FP64_BOUND = 1e-10  # max|a - b| / max|a| of loss, gradient norm and every tensor
FP32_BOUND = 1e-5  # |a - b| / |a|, L2 over all parameters at once
ROUNDING = 1e-6
FP64_MODULE_BOUND = 1e-9  # of sums over the outputs of a module
FP32_METRIC_BOUND = 1e-3
"""In fp32: max|a - b| / max|a| of loss, gradient norm and evaluation; |a - b| / |a|, L2, of all tensors of each kind of
optimizer state and of running averages.
"""
NOISE_FACTOR = 10
"""How many times as far as rounding alone moves a tensor it may be from the reference."""

EVALUATION = "evaluation"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


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
    evaluation: float = 0.0  # of metrics
    tensors: dict[str, float] = field(default_factory=dict)
    first: str = ""
    kinds: dict[str, float] = field(default_factory=dict)  # as `parameters`, of each kind of other tensors
    tells_norm: bool = True  # else no process of the run ever has the whole gradient
    rounding: dict[str, float] = field(default_factory=dict)
    """What is out of bounds as rounding alone may put it there -> how far it may be. See `_Noise`."""

    @property
    def ok(self) -> bool:
        return not self.first

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "ok": self.ok}


def compare(
    reference: RecordedRun, run: RecordedRun, exact: bool, noisy: Callable[[], Sequence[RecordedRun]] = tuple
) -> Comparison:
    """Compare a run with the reference: element by element with `exact` (fp64), else by the L2 norm of all parameters
    (fp32).

    `noisy`: gives runs of the reference that began one rounding away from it. Asked only where something is out of
    bounds, while losses and gradient norms are not.
    """
    verdict = _measure(reference, run, exact)
    if not verdict.first:
        verdict.first = _rows(reference, run)
    if not verdict.first and numbers_differ(verdict, exact):
        if _steps_agree(verdict, exact):
            _allow(verdict, reference, run, _Noise.of(reference, noisy(), exact), exact)
        verdict.first = _cause(reference, run, verdict) if numbers_differ(verdict, exact) else ""
    verdict.first = verdict.first or _ranks(run)
    if verdict.first and (module := first_module(reference, run, exact)):
        verdict.first += f"; {module}"
    return verdict


def _measure(reference: RecordedRun, run: RecordedRun, exact: bool) -> Comparison:
    """All differences. `first` says only whether there are the same steps, tensors and evaluations."""
    tensors = _distances(reference, run)
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
        evaluation=_evaluation(reference, run, exact),
        tensors=tensors,
        kinds=_kinds(reference, run),
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
    elif _last(reference) != _last(run):
        verdict.first = f"the last evaluation: {_last(run)} instead of {_last(reference)}"
    return verdict


def _last(run: RecordedRun) -> tuple[int, list[str]]:
    """The step and the metrics of the last evaluation. Earlier ones may be at other steps."""
    last = max(run.evaluated, default=0)
    return last, sorted(run.evaluated.get(last, ()))


def _distances(reference: RecordedRun, run: RecordedRun) -> dict[str, float]:
    floors = _floors(reference.tensors)
    return {
        name: relative(reference.tensors[name], run.tensors[name], floors.get(name, 0.0))
        for name in reference.tensors.keys() & run.tensors.keys()
    }


def _kinds(reference: RecordedRun, run: RecordedRun) -> dict[str, float]:
    """The L2 distance of all tensors of each kind, such as momentum or running_mean, at once; not of parameters."""
    kinds: dict[str, list[str]] = {}
    for name in sorted(reference.tensors.keys() & run.tensors.keys()):
        if not _is_parameter(name):
            kinds.setdefault(re.split(r"[/.]", name)[-1], []).append(name)
    return {
        kind: _l2([reference.tensors[name] for name in names], [run.tensors[name] for name in names])
        for kind, names in kinds.items()
    }


def _evaluations(reference: RecordedRun, run: RecordedRun) -> dict[str, float]:
    """Relative difference of each metric, over all evaluations that both have."""
    steps = sorted(reference.evaluated.keys() & run.evaluated.keys())
    names = {name for step in steps for name in reference.evaluated[step].keys() & run.evaluated[step].keys()}
    return {name: relative(_series(reference, steps, name), _series(run, steps, name)) for name in names}


def _evaluation(reference: RecordedRun, run: RecordedRun, exact: bool) -> float:
    """The worst metric; in fp32 the loss, where there is one, as counts and ranks jump where rows are nearly tied."""
    metrics = _evaluations(reference, run)
    return metrics["loss"] if not exact and "loss" in metrics else max(metrics.values(), default=0.0)


def _series(run: RecordedRun, steps: Sequence[int], name: str) -> np.ndarray:
    return np.array([run.evaluated[step].get(name, math.nan) for step in steps])


@dataclass
class _Noise:
    """How far rounding alone moves the reference: the distances from it of runs that began one rounding away.

    The gradient of a bias that a normalisation takes away again is rounding. An optimizer that divides by the size of
    gradients makes whole steps of it, in directions that mean nothing.
    """

    tensors: dict[str, float]
    squares: dict[str, float]  # of differences of parameters, summed
    kinds: dict[str, float]
    evaluation: float

    @classmethod
    def of(cls, reference: RecordedRun, runs: Sequence[RecordedRun], exact: bool) -> _Noise:
        return cls(
            _most([_distances(reference, run) for run in runs]),
            _most([_squares(reference, run) for run in runs]),
            _most([_kinds(reference, run) for run in runs]),
            max((_evaluation(reference, run, exact) for run in runs), default=0.0),
        )


def _most(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The largest value of each name that all have."""
    return {name: max(each.get(name, 0.0) for each in found) for name in found[0]} if found else {}


def _squares(reference: RecordedRun, run: RecordedRun) -> dict[str, float]:
    """The sum of squared differences of each parameter."""
    return {
        name: float(np.square(tensor - run.tensors[name]).sum())
        for name, tensor in reference.tensors.items()
        if _is_parameter(name) and name in run.tensors and run.tensors[name].shape == tensor.shape
    }


def _allow(verdict: Comparison, reference: RecordedRun, run: RecordedRun, noise: _Noise, exact: bool) -> None:
    """Note in `rounding` what may be out of bounds, as it is within NOISE_FACTOR of what rounding alone does."""
    if exact:
        for name, distance in verdict.tensors.items():
            allowed = NOISE_FACTOR * noise.tensors.get(name, 0.0)
            if verdict.bound < distance <= allowed:
                verdict.rounding[name] = allowed
    else:
        moved = _squares(reference, run)
        whole = max(sum(float(np.square(reference.tensors[name]).sum()) for name in moved), 1e-300)
        left = sum(moved.values())
        # the largest differences first, until the rest is within the bound
        for name in sorted(moved, key=lambda name: -moved[name]):
            most = NOISE_FACTOR**2 * noise.squares.get(name, 0.0)
            if math.sqrt(max(left, 0.0) / whole) <= verdict.bound or not moved[name] <= most:
                break
            left -= moved[name]
            verdict.rounding[name] = math.sqrt(most / whole)
        if not math.sqrt(max(left, 0.0) / whole) <= verdict.bound:
            verdict.rounding.clear()
        for kind, distance in verdict.kinds.items():
            allowed = NOISE_FACTOR * noise.kinds.get(kind, 0.0)
            if FP32_METRIC_BOUND < distance <= allowed:
                verdict.rounding[kind] = allowed
    allowed = NOISE_FACTOR * noise.evaluation
    if _metric_bound(verdict, exact) < verdict.evaluation <= allowed:
        verdict.rounding[EVALUATION] = allowed


def _metric_bound(verdict: Comparison, exact: bool) -> float:
    return verdict.bound if exact else FP32_METRIC_BOUND


def _steps_agree(verdict: Comparison, exact: bool) -> bool:
    """Whether losses and gradient norms are within bounds in all steps."""
    norm = (verdict.grad_norm,) if verdict.tells_norm else ()
    return all(value <= _metric_bound(verdict, exact) for value in (verdict.loss, *norm))


def _is_parameter(name: str) -> bool:
    """Whether a tensor of a checkpoint is a trained parameter, dense or sparse."""
    return (name.startswith("model/") and not name.endswith(STATISTICS)) or (
        name.startswith(TABLES) and name.endswith("/rows")
    )


def numbers_differ(verdict: Comparison, exact: bool) -> bool:
    """Whether a difference is beyond the bound, and not allowed as rounding. A NaN is."""
    if not (verdict.evaluation <= _metric_bound(verdict, exact) or EVALUATION in verdict.rounding):
        return True
    if not _steps_agree(verdict, exact):
        return True
    if exact:
        return not all(value <= verdict.bound or name in verdict.rounding for name, value in verdict.tensors.items())
    if any(math.isinf(value) for value in verdict.tensors.values()):
        return True
    if not all(value <= FP32_METRIC_BOUND or kind in verdict.rounding for kind, value in verdict.kinds.items()):
        return True
    return not (verdict.parameters <= verdict.bound or verdict.rounding.keys() & verdict.tensors.keys())


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
    # what is not finite on both sides alike is no difference
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x).all() or relative(x, y)]
    difference = sum(float(np.square(x - y).sum()) for x, y in pairs)
    return float(np.sqrt(difference / max(sum(float(np.square(x).sum()) for x, _ in pairs), 1e-300)))


def _metric(reference: RecordedRun, run: RecordedRun, name: str) -> float:
    steps = sorted(reference.metrics.keys() & run.metrics.keys())
    one, two = (np.array([side.metrics[step][name] for step in steps]) for side in (reference, run))
    return relative(one, two)


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
            if not (apart := relative(np.array([a]), np.array([b]))) <= loose:
                ratio = f", {b / a:.4g} x the reference's" if a and np.isfinite(b) else ""
                ratio = f", {apart:.1e} of it apart" if apart < 1e-3 else ratio
                split = _ranks(run)
                return f"{name} at step {step - 1}: {b:.9g} instead of {a:.9g}{ratio}" + (f"; {split}" if split else "")
    off = sorted(name for name, value in verdict.tensors.items() if not value <= loose and name not in verdict.rounding)
    if not off and verdict.evaluation > loose:
        return _evaluation_cause(reference, run)
    statistics = [name for name in off if name.endswith(STATISTICS)]
    if off and statistics == off:
        return f"running averages: {off[0]} and {len(off) - 1} more differ while loss, gradients and parameters agree"
    if not off and verdict.bound == FP32_BOUND and verdict.parameters <= verdict.bound:
        kind = max(sorted(verdict.kinds), key=lambda kind: verdict.kinds[kind])
        return f"all {kind} together: differs by {verdict.kinds[kind]:.3g}"
    first = off[0] if off else verdict.worst
    return f"tensor {first}: differs by {verdict.tensors[first]:.3g}, and {max(len(off) - 1, 0)} more"


def _evaluation_cause(reference: RecordedRun, run: RecordedRun) -> str:
    distances = _evaluations(reference, run)
    name = max(sorted(distances), key=lambda name: distances[name])
    steps = sorted(reference.evaluated.keys() & run.evaluated.keys())
    step = max(steps, key=lambda step: relative(_series(reference, [step], name), _series(run, [step], name)))
    a, b = reference.evaluated[step][name], run.evaluated[step][name]
    return f"evaluation after step {step}: {name} is {b:.9g} instead of {a:.9g}, while training agrees"


def first_module(reference: RecordedRun, run: RecordedRun, exact: bool) -> str:
    """The first module, in the order in which the reference finished them, whose output differs in the first step.

    Empty where none does, and where one of the two did not record it.
    """
    if not reference.outputs or not run.outputs:
        return ""
    loose = FP64_MODULE_BOUND if exact else FP32_METRIC_BOUND
    expected = _summed(reference.outputs)
    # ranks that divide a model either hold parts of an output, or each the whole one, and one of them reads
    found = [_summed(run.outputs), _summed([each for each in run.outputs if each[0]])]
    for name, sums in expected.items():
        sides = [side[name] for side in found if name in side]
        if sides and not any(_same_outputs(sums, side, loose) for side in sides):
            return f"first differs: {name or 'the model'} (output), step 0"
    return ""


def _same_outputs(a: Sequence[float], b: Sequence[float], bound: float) -> bool:
    """Whether outputs agree by their sums, see `ModuleOutputs.close`. Places in a row tell nothing of parts of rows."""
    (_, sizes, squares, _, width), pairs = a, list(zip(a, b, strict=True))
    scales = (sizes, sizes, squares, *([sizes] if width == b[-1] else []))
    return all(abs(x - y) <= bound * scale for (x, y), scale in zip(pairs, scales, strict=False))


def _summed(outputs: Sequence[tuple[bool, dict[str, list[float]]]]) -> dict[str, list[float]]:
    """The sums over ranks; numbers of a row stay as they are."""
    sums: dict[str, list[float]] = {}
    for _, modules in outputs:
        for name, (*values, width) in modules.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0] * 4)[:4], values, strict=True)] + [width]
    return sums


def _ranks(run: RecordedRun) -> str:
    """Whether all ranks hold the same bits of what they should all hold."""
    first: dict[str, tuple[int, int]] = {}
    for copy, held in enumerate(run.held):
        for name in sorted(held):
            holder, digest = first.setdefault(name, (copy, held[name]))
            if held[name] != digest:
                return f"ranks {holder} and {copy} hold different {name}: gradients were not summed over all ranks"
    return ""
