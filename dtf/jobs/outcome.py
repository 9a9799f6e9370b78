"""What `dtf.train`, `dtf.evaluate` and `dtf.predict` return. Torch-free, but for `load_model`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dtf.checkpoint.resolve_path import BEST, resolve_checkpoints
from dtf.checkpoint.storage import checkpoints
from dtf.core.errors import ConfigError, DataError, DtfError
from dtf.core.json_lines import rows
from dtf.core.text import number_text
from dtf.core.types import Ended, Event, Measured, Started

if TYPE_CHECKING:
    from torch import nn

    from dtf.config.compose import Composed

FILE = "evaluation.json"
"""Where an evaluation is, in its run folder."""

_MEASURED = {"split": str, "step": int, "epoch": float}
_HEAD = (*_MEASURED, "seconds")


class Best(NamedTuple):
    """The best evaluation of a run."""

    metric: str  # run.objective
    value: float
    step: int


@dataclass(frozen=True)
class Result:
    """A run that came to its end, see `dtf.train`."""

    folder: Path
    """The run folder."""

    config: Composed = field(repr=False)
    """The config that was trained."""

    step: int
    """Optimizer steps that are done."""

    cause: str
    """Why it ended: `finished`, or `early_stop`."""

    last: dict[str, float]
    """The metrics of the last evaluation; empty where there was none."""

    best: Best | None
    """None where there was no evaluation."""

    history: list[dict[str, Any]] = field(repr=False)
    """A row for each measurement, as in metrics.jsonl: `split` (train or eval), `step`, `epoch`, `seconds`, and the
    metrics by name. Of the whole run, where it writes metrics.jsonl; else from where this call began.
    """

    callback_errors: dict[str, BaseException] = field(default_factory=dict, repr=False)
    """What callbacks raised, by name."""

    def curve(self, metric: str, split: str = "eval") -> list[tuple[int, float]]:
        """(step, value) of one metric. ConfigError for one that was never measured."""
        found = [(row["step"], row[metric]) for row in self.history if row["split"] == split and metric in row]
        if not found:
            known = dict.fromkeys(f"{row['split']} {name}" for row in self.history for name in row if name not in _HEAD)
            raise ConfigError(f"{split} {metric} was not measured; choices: {', '.join(known) or 'none'}")
        return found

    @cached_property
    def best_checkpoint(self) -> Path | None:
        """The folder of the best checkpoint; None where no evaluation judged one that is kept."""
        try:
            return resolve_checkpoints(self.folder / BEST, "best_checkpoint")[0]
        except DataError:
            return None

    @property
    def newest_checkpoint(self) -> Path | None:
        """The folder of the newest checkpoint; None where none was saved."""
        return next(iter(checkpoints(self.folder / "checkpoints")), None)

    def checkpoint(self, which: Literal["best", "newest"] = "best") -> Path:
        """The best checkpoint, or the newest: also where none is known to be the best. DataError where there is none,
        ConfigError for another word.
        """
        if which not in ("best", "newest"):
            raise ConfigError(f"{which!r} is no choice; use 'best' or 'newest'")
        found = (self.best_checkpoint if which == "best" else None) or self.newest_checkpoint
        if found is None:
            raise DataError(f"{self.folder} holds no checkpoint; train with checkpoint=every to keep some")
        return found

    def load_model(self, which: Literal["best", "newest"] = "best") -> nn.Module:
        """The recipe's model with the weights of `checkpoint(which)`, as `dtf.load_model` gives it."""
        from dtf.engine.trained_model import load_trained

        return load_trained(self.config.settings, str(self.checkpoint(which)))


class History:
    """Listens to a run, and keeps what its result says."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.step, self.cause = 0, ""
        self.values: dict[str, float] = {}

    def see(self, event: Event) -> None:
        match event:
            case Started(step):
                self.rows = [row for row in self.rows if row["step"] <= step]  # what follows is measured again
                known = {(row["split"], row["step"]) for row in self.rows}
                self.rows += [_row(one) for one in event.recent if (one.split, one.step) not in known]
            case Measured():
                self.rows.append(_row(event))
            case Ended(step, reason, values):
                self.step, self.cause, self.values = step, reason, values

    def result(self, folder: Path, config: Composed, errors: dict[str, BaseException]) -> Result:
        """The result of the run that was heard."""
        objective = config.settings.objective[0]
        value, step = self.values.get(f"best_{objective}"), self.values.get("best_step")
        best = Best(objective, value, int(step)) if value is not None and step is not None else None
        last = {name: value for name, value in self.values.items() if not name.startswith("best_")}
        written = config.settings.observer.get("jsonl")
        history = list(_written(folder / getattr(written, "path", ""))) if written is not None else self.rows
        return Result(folder, config, self.step, self.cause, last, best, history, errors)


def _row(event: Measured) -> dict[str, Any]:
    head = {"split": event.split, "step": event.step, "epoch": event.epoch, "seconds": round(event.seconds, 3)}
    return head | event.values | head


def _written(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics.jsonl, where null stands for a number that is not finite."""
    for row in rows(path, _MEASURED):
        yield {name: math.nan if value is None else value for name, value in row.items()}


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on a split, see `dtf.evaluate`."""

    metrics: dict[str, float]
    classes: list[dict[str, Any]] = field(repr=False)
    """For each class: `class`, `rows`, `predicted`, `recall`, `precision`; empty where the recipe has none."""

    confusions: list[tuple[int, int, int]] = field(repr=False)
    """For each pair of classes that were confused, by number: what rows are, what they were taken for, how many."""

    rows: int
    """Of the split; each counts once."""

    unread: int
    """Rows of these that cannot be read."""

    unread_rows: list[str] = field(repr=False)
    """The first of them, and why."""

    split: str
    model: str
    """Which weights they were, in words."""

    digest: str = field(repr=False)
    folder: Path
    """The run folder, with evaluation.json."""

    @classmethod
    def read(cls, folder: Path) -> Evaluation:
        """From the file in a run folder."""
        return cls(**json.loads((folder / FILE).read_text()), folder=folder)

    def __str__(self) -> str:
        values = " ".join(f"{name}={number_text(value)}" for name, value in self.metrics.items())
        unread = f" of which {self.unread:,} cannot be read" if self.unread else ""
        return f"{self.split} split, {self.rows:,} rows{unread}: {values}"


class Predictions:
    """The predictions of a model, one dict for each row in order, see `dtf.predict`. They are read from the file as
    they are iterated, as often as wanted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        """predictions.jsonl in the run folder."""

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.path.parent

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self.path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

    def __repr__(self) -> str:
        return f"<dtf predictions in {self.path}>"


def error_class(exit: int, name: str = "") -> type[DtfError]:
    """The class of a failure, by the name of what was raised in a rank, else by its exit code."""
    classes = [DtfError, *_subclasses(DtfError)]
    named = [cls for cls in classes if cls.__name__ == name and cls.exit == exit]
    return next(iter(named or [cls for cls in classes if cls.exit == exit]), DtfError)


def _subclasses(cls: type[DtfError]) -> Iterator[type[DtfError]]:
    for one in cls.__subclasses__():
        if one.__module__ == DtfError.__module__:
            yield one
            yield from _subclasses(one)
