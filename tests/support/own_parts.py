"""Parts from outside dtf, as a user would write them: a job that shows what it was given, a strategy, an observer, a
recipe with a mandatory key.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtf.api.job import Job
from dtf.api.observer import Observer
from dtf.api.recipe import Dataset, Recipe
from dtf.api.registry import option, register
from dtf.api.task import Task
from dtf.core.errors import DataError, Preempted
from dtf.core.types import Event
from dtf.strategies.dp import Dp

if TYPE_CHECKING:
    from torch import Tensor, nn

    from dtf.config.compose import Composed
    from dtf.core.types import Batch


class Mood(Enum):
    calm = "calm"
    angry = "angry"


@dataclass(kw_only=True)
class Inner:
    root: str = option(doc="a path that must be given")
    size: int = option(default=4, doc="how many", unit="rows")


@register("recipe", "front_toy")
class FrontToy(Recipe):
    """A recipe that is never trained."""

    data: Inner = option(factory=Inner, doc="where rows come from")
    mood: Mood = option(default=Mood.calm, doc="how it feels")
    kind: Literal["a", "b"] = option(default="a", doc="one of two")
    limit: float | None = option(default=None, doc="an optional number")
    either: int | str = option(default="auto", doc="a number or a word")
    names: dict[str, int] = option(factory=dict, doc="numbers by name")
    steps: list[float] = option(factory=lambda: [0.5, 1.0], doc="numbers")

    @property
    def train_metrics(self) -> tuple[str, ...]:
        return ("loss",)

    @property
    def objective(self) -> tuple[str, str]:
        return ("loss", "min")

    def check(self) -> None:
        if self.data.root == "missing":
            raise DataError("recipe.data.root=missing does not exist; give a folder")

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def open_data(self, split: str, seed: int) -> Dataset:
        raise NotImplementedError

    def loss(self, outputs: Any, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def measure(self, outputs: Any, batch: Batch, loss: Tensor) -> Tensor:
        raise NotImplementedError


@register("strategy", "front_mine")
class Mine(Dp):
    """A strategy of the user's own."""

    extra: int = option(default=3, doc="a key that dp has not")

    def check(self, task: Task, processes: int, devices: str) -> None:
        del task, processes, devices


@register("observer", "front_watch")
class Watch(Observer):
    """Watches, says nothing."""

    every: int = option(default=1, doc="look so often", unit="events")

    def see(self, event: Event) -> None:
        del event


@register("job", "front_show")
class Show(Job):
    """Print the config as JSON, or fail as told."""

    fail: str = option(default="", doc="`data`, `stop`, `bug`, `interrupt`, or an exit code")
    file: str = option(default="", doc="append the config there instead")

    def run(self, composed: Composed) -> int:
        if self.file:
            with Path(self.file).open("a", encoding="utf-8") as file:
                file.write(json.dumps(composed.config) + "\n")
        else:
            print(json.dumps(composed.config))
        match self.fail:
            case "data":
                raise DataError("the data is gone; look for it")
            case "stop":
                raise Preempted("asked to stop; state saved")
            case "bug":
                raise ZeroDivisionError("a mistake")
            case "interrupt":
                raise KeyboardInterrupt
        return int(self.fail or 0)
