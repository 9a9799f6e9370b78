"""In what two runs differ, from what their folders hold: config, code, data, sampled rows, curves, tensors of
checkpoints. Reads, and starts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dtf.checkpoint.manifest import Manifest, parse_json
from dtf.checkpoint.storage import checkpoints, read_manifest, step_of
from dtf.core.errors import DataError
from dtf.core.text import count_text
from dtf.core.types import SPEEDS
from dtf.runs.compare import first_module, relative
from dtf.runs.recorded_run import TABLES, RecordedRun, group_tensors, records, tensor_groups
from dtf.runs.results import Result, differences

_STATE = "state.json"
_COURSE = ("course", "program", "clock", "window", "updated", "clean", "recent")
"""What a checkpoint says beside the facts about its data and model: where it stands, and settings of config.yaml."""
_HEAD = ("split", "step", "epoch", "seconds")  # of a line of metrics
_SHOWN = 60  # characters of a value
_LONGEST = 12  # differences that the text shows of a kind

Pair = list[Any]  # of both runs


def diff(one: Result, other: Result, tolerance: float) -> dict[str, Any]:
    """All differences, as JSON. `tolerance`: relative difference of numbers that counts as none.

    `parts`: in words, the first step and quantity that differ; empty where no number does.
    """
    found: dict[str, Any] = {
        "runs": [str(one.folder), str(other.folder)],
        "config": differences([one, other]),
        "code": _code(one, other),
        "data": _facts(one.folder, other.folder),
        "rows": _rows(one.folder, other.folder),
        "curves": {split: _curves(one, other, split, tolerance) for split in ("train", "eval")},
        "checkpoints": _checkpoints(one.folder, other.folder, tolerance),
        "modules": _modules(one.folder, other.folder, tolerance),
    }
    return found | {"parts": _parts(found)}


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The differences for people."""
    yield f"a = {found['runs'][0]}"
    yield f"b = {found['runs'][1]}"
    for title in ("config", "code", "data"):
        pairs = found[title]
        if pairs is None:
            yield f"{title}: not known of both, as checkpoints hold it"
            continue
        yield f"{title}: {'alike' if not pairs else count_text(len(pairs), 'difference')}"
        for key, (a, b) in list(pairs.items())[:_LONGEST]:
            yield f"  {key}: {_short(a)} | {_short(b)}"
        if len(pairs) > _LONGEST:
            yield f"  and {len(pairs) - _LONGEST} more; job.format=json has all"
    yield f"sampled rows: {found['rows'] or 'alike'}"
    for split, curve in found["curves"].items():
        yield f"{split} lines: {_curve_text(curve)}"
    yield f"checkpoints: {_checkpoint_text(found['checkpoints'])}"
    yield found["parts"] or "no number differs in what both runs have"


def _code(one: Result, other: Result) -> dict[str, Pair]:
    """Versions, commit, host and processes, by run.json."""
    both = [
        {f"versions.{name}": version for name, version in (run.record.get("versions") or {}).items()}
        | {key: run.record.get(key) for key in ("git", "host")}
        | {"roles": (run.record.get("world") or {}).get("roles")}
        for run in (one, other)
    ]
    return _differing(both)


def _facts(one: Path, other: Path) -> dict[str, Pair] | None:
    """What the newest checkpoint of each run says of its data and model: fingerprints, classes, sampler, seed. None
    where one of them has no checkpoint.
    """
    both = []
    for folder in (one, other):
        facts: dict[str, Any] = {}
        for checkpoint in checkpoints(folder / "checkpoints"):
            with suppress(OSError, ValueError, DataError):
                scalars = parse_json((checkpoint / _STATE).read_bytes())
                facts = {key: value for key, value in scalars.items() if key not in _COURSE}
                break
        both.append(facts)
    return _differing(both) if all(both) else None


def _differing(both: Sequence[dict[str, Any]]) -> dict[str, Pair]:
    pairs = {key: [side.get(key) for side in both] for key in dict.fromkeys([*both[0], *both[1]])}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _rows(one: Path, other: Path) -> str:
    """Where the sampled rows differ first, over all ranks; empty where they do not."""
    if not records(one) or not records(other):
        return "not recorded by both (train.record=true does)"
    ours, theirs = _ids(one), _ids(other)
    for step in sorted(ours.keys() & theirs.keys()):
        if ours[step] != theirs[step]:
            missing, extra = sorted(set(ours[step]) - set(theirs[step])), sorted(set(theirs[step]) - set(ours[step]))
            what = f"a alone has {missing[:3]}, b {extra[:3]}" if missing or extra else "the same in another order"
            return f"first differ in step {step}: {what}"
    return ""


def _ids(folder: Path) -> dict[int, list[int]]:
    """Step -> sample ids over all ranks. Half a line of a killed writer is skipped."""
    ids: dict[int, list[int]] = {}
    for path in records(folder).values():
        for line in path.read_text(errors="replace").splitlines():
            with suppress(ValueError, TypeError, LookupError):
                row = json.loads(line)
                ids.setdefault(int(row["step"]), []).extend(row["ids"])
    return ids


def _curves(one: Result, other: Result, split: str, tolerance: float) -> dict[str, Any]:
    """Steps of the lines that both have; the first at which a metric differs, and how; the last."""
    ours, theirs = ({row["step"]: row for row in run.rows(split)} for run in (one, other))
    common = sorted(ours.keys() & theirs.keys())
    found: dict[str, Any] = {"common": len(common), "only": [len(ours) - len(common), len(theirs) - len(common)]}
    for step in common:
        if metrics := _metrics(ours[step], theirs[step], tolerance):
            found |= {"first": step, "metrics": metrics}
            break
    if common:
        last = common[-1]
        found |= {"last": last, "at_last": _metrics(ours[last], theirs[last], tolerance)}
    return found


def _metrics(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> dict[str, Pair]:
    """Metrics of a line that differ, without those of speed."""
    names = [name for name in ours if name in theirs and name not in (*_HEAD, *SPEEDS)]
    values = {name: [math.nan if row[name] is None else row[name] for row in (ours, theirs)] for name in names}
    return {
        name: [None if math.isnan(value) else value for value in pair]
        for name, pair in values.items()
        if not relative(np.array(pair[:1]), np.array(pair[1:])) <= tolerance
    }


def _checkpoints(one: Path, other: Path, tolerance: float) -> dict[str, Any]:
    """Steps of the checkpoints that both have: the last at which all tensors are alike, and the first at which not."""
    ours, theirs = (
        {step_of(path.name): path for path in checkpoints(folder / "checkpoints")} for folder in (one, other)
    )
    found: dict[str, Any] = {"common": [], "alike": None, "first": None}
    for step in sorted(step for step in ours.keys() & theirs.keys() if step is not None):
        distances, only = _tensors(ours[step], theirs[step])
        found["common"].append(step)
        off = {name: value for name, value in distances.items() if not value <= tolerance}
        if not off and not only:
            found["alike"] = step
            continue
        worst = max(off, key=lambda name: off[name], default="")
        return found | {
            "first": step,
            "tensors": len(distances),
            "differ": {name: _number(value) for name, value in off.items()},
            "tensor": _first_tensor(list(off)) or min(only, default=""),
            "worst": worst,
            "only": only,
        }
    return found


def _tensors(one: Path, other: Path) -> tuple[dict[str, float], list[str]]:
    """max|a - b| / max|a| of each tensor that both have, read one after the other; names that only one has."""
    manifests = [(path, _manifest(path)) for path in (one, other)]
    groups = [tensor_groups(manifest) for _, manifest in manifests]
    distances, only = dict[str, float](), list[str]()
    for group in sorted({*groups[0], *groups[1]}):
        a, b = (
            dict(group_tensors(path, manifest, group, names.get(group, ())))
            for (path, manifest), names in zip(manifests, groups, strict=True)
        )
        distances |= {name: relative(a[name], b[name]) for name in a if name in b}
        only += a.keys() ^ b.keys()
    return distances, sorted(only)


def _manifest(checkpoint: Path) -> Manifest:
    try:
        return read_manifest(checkpoint)
    except DataError as error:
        raise DataError(f"{checkpoint}: {error}; move this checkpoint away to compare the others") from error


def _first_tensor(names: Sequence[str]) -> str:
    """One to look at first: a parameter rather than the state of its optimizer."""
    return min(names, key=lambda name: (not name.startswith(("model/", TABLES)), name), default="")


def _modules(one: Path, other: Path, tolerance: float) -> str:
    """The first module whose output differs in the first step, where both runs recorded that."""
    if not records(one) or not records(other):
        return ""
    try:
        return first_module(RecordedRun.read(one), RecordedRun.read(other), exact=tolerance < 1e-9)
    except (DataError, OSError, ValueError, KeyError):
        return ""


def _parts(found: dict[str, Any]) -> str:
    """Where the runs part, in the order in which one difference causes the next."""
    pieces = []
    if found["rows"].startswith("first"):
        pieces.append(f"sampled rows {found['rows']}")
    if found["modules"]:
        pieces.append(found["modules"].replace("first differs: ", "of the modules, first "))
    train, saved = found["curves"]["train"], found["checkpoints"]
    if "first" in train:
        name, (a, b) = next(iter(train["metrics"].items()))
        pieces.append(f"{name} differs first after step {train['first']}: {_exactly(a, b)}")
    if saved["first"] is not None:
        since = f"alike after step {saved['alike']}, " if saved["alike"] is not None else ""
        name = saved["tensor"]
        by = f" by {saved['differ'][name]:.2g}" if saved["differ"].get(name) is not None else ""
        pieces.append(f"of the tensors, {since}{name} differs{by} after step {saved['first']}")
    if not pieces and "first" in found["curves"]["eval"]:
        curve = found["curves"]["eval"]
        name, (a, b) = next(iter(curve["metrics"].items()))
        pieces.append(
            f"the evaluation after step {curve['first']} differs while training agrees: {name} {_exactly(a, b)}"
        )
    return f"the runs part: {'; '.join(pieces)}" if pieces else ""


def _curve_text(curve: dict[str, Any]) -> str:
    text = f"{curve['common']} in common"
    text += f", {curve['only'][0]} of a alone, {curve['only'][1]} of b alone" if any(curve["only"]) else ""
    if "first" not in curve:
        return f"{text}, alike" if curve["common"] else text
    last = "; ".join(f"{name} {_short(a)} | {_short(b)}" for name, (a, b) in list(curve["at_last"].items())[:3])
    return f"{text}, differ from step {curve['first']} on" + (f"; after step {curve['last']}: {last}" if last else "")


def _checkpoint_text(saved: dict[str, Any]) -> str:
    if not saved["common"]:
        return "none of the same step"
    if saved["first"] is None:
        return f"alike after steps {', '.join(map(str, saved['common']))}"
    text = f"{len(saved['differ'])} of {saved['tensors']} tensors differ after step {saved['first']}"
    if saved["worst"]:
        by = saved["differ"][saved["worst"]]
        text += f", most {saved['worst']}" + (f", by {by:.2g} of its largest value" if by is not None else "")
    return text + (f"; only one run has {', '.join(saved['only'][:3])}" if saved["only"] else "")


def _exactly(a: Any, b: Any) -> str:
    """Two numbers with as many digits as it takes to tell them apart."""
    for digits in range(6, 17):
        texts = [f"{value:.{digits}g}" if isinstance(value, float) else str(value) for value in (a, b)]
        if texts[0] != texts[1]:
            break
    return " | ".join(texts)


def _number(value: float) -> float | None:
    """None for what is not finite: shapes that differ, NaN on one side."""
    return value if math.isfinite(value) else None


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."
