"""Reads run folders: metrics, resources, profiles, and how the configs of runs differ.

Draws nothing; needs no torch.
"""

from __future__ import annotations

import glob
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from dtf.config.limits import read_checked
from dtf.core.errors import INTERRUPTED, ConfigError, DataError, Exit, code_name
from dtf.core.files import flat
from dtf.core.json_lines import rows
from dtf.core.renamed import upgraded_config
from dtf.core.run_record import is_locked
from dtf.core.text import number_text
from dtf.observers.trace_shares import WORK, Shares
from dtf.runs.budget import spent_s
from dtf.runs.objective_log import check, evaluations, plan_of
from dtf.runs.sweep_record import is_sweep, objective, pruned

_SILENT = ("run.dir", "train.until", "run.name", "launcher.processes", "job.", "observer.", "checkpoint.", "plugins")
"""Keys that do not describe a run in its name; `world` describes its processes."""
_EXACT = 2**53  # whole numbers below it are exact as floats
_PLAIN = ("recipe.name", "strategy.name", "precision.compute", "optimizer.name", "lr.name", "world")
"""Keys whose values need no key in a name."""

_MEASURED = {"split": str, "step": int, "epoch": float}
_SAMPLED = {"time": float, "device": str, "utilisation": float, "memory": float}
_MOST_EPOCHS = 100_000
_MOST_CLASSES = 100
"""Of a confusion matrix that is drawn."""
_WELL = (None, Exit.OK, Exit.PREEMPTED, Exit.BUDGET, INTERRUPTED)
"""Ends of trials that have not failed."""
_NEEDED = ("recipe.name", "strategy.name")

Point = tuple[float, float]


@dataclass
class Result:
    """One run. `name`: the values by which it differs from the other runs, see `read_runs`."""

    folder: Path
    config: dict[str, Any]  # by dotted key; also `world`, such as `2 x cpu`
    record: dict[str, Any]  # run.json
    metrics: list[dict[str, Any]]  # of metrics.jsonl
    samples: list[dict[str, Any]]  # of resources.jsonl
    profiles: list[tuple[int, Shares]]  # of ranks
    confusion: list[tuple[str, list[int]]] = field(default_factory=list)  # class, rows by what they were taken for
    name: str = ""
    live: bool = False  # when it was read

    def rows(self, split: str) -> list[dict[str, Any]]:
        return [row for row in self.metrics if row["split"] == split]

    def curve(self, split: str, metric: str) -> list[Point]:
        """(epoch, value); where a value was not finite there is no point."""
        return [(row["epoch"], row[metric]) for row in self.rows(split) if row.get(metric) is not None]

    @property
    def rows_per_s(self) -> float | None:
        return self.usual("rows_per_s")

    def usual(self, rate: str) -> float | None:
        """The median of a rate of training."""
        rates = [row[rate] for row in self.rows("train") if row.get(rate)]
        return median(rates) if rates else None

    @cached_property
    def epochs(self) -> list[Point]:
        """(epoch, seconds of training in it), without evaluations and saves. Of a run shorter than an epoch: the time
        that an epoch would take.
        """
        marks, spent = [(0.0, 0.0)], 0.0
        for row in self.rows("train"):
            if row.get("rows_per_s") and row["epoch"] > marks[-1][0]:
                spent += (
                    (row["step"] - marks[-1][0] * row["step"] / row["epoch"])
                    * self.config["step.batch_size"]
                    / row["rows_per_s"]
                )
                marks.append((row["epoch"], spent))
        if len(marks) < 2:
            return []
        whole = int(marks[-1][0] + 1e-6)
        if whole > _MOST_EPOCHS:
            return []
        if not whole:
            return [(1.0, marks[-1][1] / marks[-1][0])]
        ends = [_between(marks, float(epoch)) for epoch in range(whole + 1)]
        return [(epoch, ends[epoch] - ends[epoch - 1]) for epoch in range(1, whole + 1)]

    @property
    def epoch_s(self) -> float | None:
        return median(seconds for _, seconds in self.epochs) if self.epochs else None

    @property
    def wall_s(self) -> float | None:
        """Seconds over all launches; those so far, of a run that has not ended."""
        with suppress(DataError):
            return self.record["seconds"] or spent_s(self.folder) or None
        return None

    @property
    def state(self) -> str:
        """What it does, or how it has ended."""
        exit, cause, step = self.record.get("exit"), str(self.record.get("cause") or ""), self.record.get("step")
        if exit is None:
            return "running" if self.live else "under way, or killed"
        if exit == Exit.OK and cause == "stopped" and step is not None:
            stopped = pruned(self.folder.parent).get(self.folder.name) == step
            return f"pruned at step {step}" if stopped else f"waits at step {step}"
        return cause if exit == Exit.OK else code_name(Exit(exit)) if exit in set(Exit) else f"exit {exit}"

    @property
    def standing(self) -> str:
        """In a few words: its newest step, of how many, and its objective there and at its best. Empty before it has
        any.
        """
        values = evaluations(self.record)
        if not values:
            return ""
        step, name, plan = max(values), self.record.get("objective"), plan_of(self.record)
        best = self.record.get("best")
        text = f"step {step}{f'/{plan[0]}' if plan else ''}  {name}={number_text(values[step])}"
        return text + (f"  best={number_text(best[1])}" if best else "")

    def objectives(self, name: str) -> list[float]:
        """Its values of an objective, and the best one."""
        best = self.record.get("best")
        known = [*evaluations(self.record).values()] if self.record.get("objective") == name else []
        return [*filter(math.isfinite, known), *([float(best[1])] if best and best[0] == name else [])]

    @property
    def devices(self) -> list[str]:
        """Those that were sampled."""
        return list(dict.fromkeys(sample["device"] for sample in self.samples))

    def samples_of(self, device: str, key: str) -> list[Point]:
        """(minutes of sampling, value), without the time between two launches."""
        samples = [sample for sample in self.samples if sample["device"] == device]
        gaps = [later["time"] - earlier["time"] for earlier, later in pairwise(samples)]
        usual = median(gaps) if gaps else 0.0
        minutes, points = 0.0, []
        for number, sample in enumerate(samples):
            minutes += min(gaps[number - 1], 3 * usual) / 60 if number else 0.0
            points.append((minutes, sample[key]))
        return points

    @property
    def utilisation(self) -> float | None:
        """Mean over time and devices: of GPUs where there are any, else of the CPU."""
        return _mean([sample["utilisation"] for sample in self._of_devices()])

    @property
    def memory(self) -> float | None:
        """Most bytes on one of these devices."""
        return max((sample["memory"] for sample in self._of_devices()), default=None)

    def _of_devices(self) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["device"] != "cpu"] or self.samples


def read_runs(patterns: Sequence[str]) -> list[Result]:
    """The runs in folders, or of glob patterns, in this order; those of one pattern by time. The folder of a sweep
    stands for its trials.

    ConfigError where there is none.
    """
    folders: dict[Path, None] = {}
    for pattern in patterns:
        # a folder may be called a[1]
        matches = [Path(pattern)] if Path(pattern).exists() else [Path(name) for name in glob.glob(pattern)]
        matches += [path.parent for folder in matches if is_sweep(folder) for path in folder.glob("*/run.json")]
        runs = [folder for folder in matches if (folder / "run.json").is_file()]
        if not runs:
            why = "holds no run.json, so it is no run folder" if matches else "matches nothing"
            raise ConfigError(
                f"job.runs=[{pattern}] {why}; give folders or patterns of folders such as 'outputs/resnet_shapes/*'"
            )
        runs.sort(key=lambda folder: (str(_json(folder / "run.json").get("started", "")), folder))
        folders |= dict.fromkeys(folder.resolve() for folder in runs)
    results = [_result(folder) for folder in folders]
    for result, name in zip(results, _names(results), strict=True):
        result.name = name
    return results


def best_trials(results: Sequence[Result]) -> Iterator[str]:
    """A line for each sweep that these runs are trials of: its best trial so far, by the overrides that name its
    folder, the value, and how it stands. Trials that failed do not count.
    """
    for home in dict.fromkeys(result.folder.parent for result in results):
        aim = objective(home) if is_sweep(home) else None
        if aim is None:
            continue
        better = max if aim[1] == "max" else min
        trials = [result for result in results if result.folder.parent == home and result.record.get("exit") in _WELL]
        values = [(better(found), trial) for trial in trials if (found := trial.objectives(aim[0]))]
        if values:
            value, best = better(values, key=lambda pair: pair[0])
            yield f"best trial of {home.name}: {best.folder.name}  {aim[0]}={number_text(value)}  {best.state}"


def differences(results: Sequence[Result]) -> dict[str, list[Any]]:
    """Config key -> its value in each run, where not all are the same; None where a run has no such key."""
    keys = dict.fromkeys(key for result in results for key in result.config)
    values = {
        key: [result.config.get(key) for result in results]
        for key in keys
        if key not in ("run.dir", "launcher.processes")
    }
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _names(results: Sequence[Result]) -> list[str]:
    """A name for each run: at most three values by which it differs, and a number where names are the same."""
    differing = {key: values for key, values in differences(results).items() if not key.startswith(_SILENT)}
    chosen_parts = [key.removesuffix("name") for key in differing if key.endswith(".name")]
    keys = [key for key in _PLAIN if key in differing]
    keys += [key for key in differing if key not in _PLAIN and not key.startswith(("precision.", *chosen_parts))]
    names = [" · ".join(_word(key, differing[key][number]) for key in keys[:3]) for number in range(len(results))]
    if len(results) == 1:
        return [results[0].folder.name]
    return [
        name if names.count(name) == 1 else f"{name} #{names[: number + 1].count(name)}".strip()
        for number, name in enumerate(names)
    ]


def _word(key: str, value: Any) -> str:
    if key in _PLAIN:
        return str(value)
    if value is None or isinstance(value, bool):
        return f"{key}={'null' if value is None else str(value).lower()}"
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return f"{key}={int(value) if whole else value}"


def _result(folder: Path) -> Result:
    import yaml

    live = is_locked(folder)  # asked first: a run that ends meanwhile has its end in the record
    record = _json(folder / "run.json")
    if not isinstance(record.get("seconds"), int | float):
        record["seconds"] = None
    try:
        check(record)
        nested = upgraded_config(yaml.safe_load(read_checked(folder / "config.yaml")))
        world = f"{record['world']['processes']} x {record['world']['devices']}"
        config = {str(key): value for key, value in flat(nested, "")} | {
            "step.batch_size": int(nested["step"]["batch_size"]),
            "world": world,
        }
        missing = [key for key in _NEEDED if key not in config]
        if missing:
            raise KeyError(missing[0])
    except (ConfigError, ValueError, yaml.YAMLError, KeyError, AttributeError, TypeError) as error:
        raise DataError(
            f"{folder} cannot be read: {type(error).__name__}: {error}; it is no run folder, or a damaged one"
        ) from error
    profiles = [
        _json(path)
        for path in sorted((folder / "profile").glob("rank_*.json"))
        if not path.name.endswith(".pt.trace.json")
    ]
    try:
        shares = [(int(one["rank"]), _shares(one)) for one in profiles]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{folder / 'profile'} cannot be read: {type(error).__name__}: {error}; remove the damaged file"
        ) from error
    metrics = [*rows(folder / Path(str(config.get("observer.jsonl.path", "metrics.jsonl"))).name, _MEASURED)]
    if not any(row["split"] == "eval" for row in metrics):
        metrics += _recorded(record)
    return Result(
        folder,
        config,
        record,
        metrics,
        [*rows(folder / "resources.jsonl", _SAMPLED)],
        sorted(shares),
        _confusion(folder / "evaluation.json"),
        live=live,
    )


def _recorded(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The evaluations that a run without metrics.jsonl has in its run.json: of the objective alone."""
    plan, name = plan_of(record), str(record.get("objective"))
    if plan is None:
        return []
    return [
        {"split": "eval", "step": step, "epoch": step / plan[1], name: value if math.isfinite(value) else None}
        for step, value in evaluations(record).items()
    ]


def _confusion(path: Path) -> list[tuple[str, list[int]]]:
    """Of a folder of `job=evaluate`: each class, and how many of its rows were taken for each class."""
    if not path.is_file():
        return []
    found = _json(path)
    try:
        classes, counts = found["classes"], {(a, b): int(rows) for a, b, rows in found.get("confusions", [])}
        names = [str(one["class"]) for one in classes] if counts and len(classes) <= _MOST_CLASSES else []
        table = [[counts.get((label, guess), 0) for guess in range(len(names))] for label in range(len(names))]
        for number, row in enumerate(table):
            row[number] = int(classes[number]["rows"]) - sum(row)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}; remove the damaged file") from error
    return list(zip(names, table, strict=True))


def _shares(one: dict[str, Any]) -> Shares:
    parts = {name: float(one["parts"][name]) for name in (*WORK, "other")}
    return Shares(int(one["steps"]), float(one["step_s"]), parts, float(one["hidden"]))


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} cannot be read: it is no JSON object")
    return content


def _between(marks: Sequence[Point], at: float) -> float:
    """A line through the marks, at `at`."""
    for (x0, y0), (x1, y1) in pairwise(marks):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return marks[-1][1]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
