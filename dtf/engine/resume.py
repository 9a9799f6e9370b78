"""Going on from a checkpoint: what has to be the same, what may change, and what is loaded."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtf.api.registry import base_of
from dtf.api.task import Source
from dtf.core.errors import ConfigError
from dtf.core.files import flat
from dtf.core.types import Measured, Note
from dtf.engine.assemble import TrainingSetup

RECENT_BYTES = 65536
"""Of the measurements sent again: as much as a pipe holds, and half of what a message may."""


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on; the defaults are those of a run without a checkpoint."""

    clock: dict[str, Any] | None = None
    """The clock's state."""

    carried: list[float] | None = None
    """The sums of the open metric window, over all ranks."""

    updated: bool = False
    """Whether an update was ever made."""

    recent: tuple[Measured, ...] = ()
    """The last measurements before the checkpoint."""

    @property
    def step(self) -> int:
        return self.clock["step"] if self.clock else 0


def identity(setup: TrainingSetup) -> dict[str, Any]:
    """What must be the same when a run goes on, else its data position and numbers would not continue."""
    settings, config = setup.joined.rank.settings, setup.joined.rank.config
    recipe = settings.recipe
    return {
        "recipe": config["recipe"]["name"],
        "seed": settings.seed,
        "batch_size": settings.step.batch_size,
        "data": setup.inputs.splits.fingerprint,
        "sampler": config["sampler"],
        "optimizer": config["optimizer"]["name"],
        "objective": list(setup.plan.objective),
        "recipe.model.weights": setup.inputs.weights_digest,
        "recipe.model.freeze": recipe.fine_tuning.freeze,
        "averaged weights (step.ema)": bool(settings.step.ema),
        "sparse": config["sparse"]["name"] if recipe.tables() else "",
        **{f"sparse.{key}": config["sparse"][key] for key in (settings.sparse.bound if recipe.tables() else ())},
    }


def hyperparameters(setup: TrainingSetup) -> dict[str, Any]:
    """What changes the numbers and may be another when a run goes on."""
    config = setup.joined.rank.config
    groups = ["precision", "optimizer", "lr", "step"]
    if setup.joined.rank.settings.recipe.tables():
        groups.append("sparse")
    values = {group: config[group] for group in groups} | {"train": {"steps": setup.plan.total}}
    # its keys say all, and earlier versions recorded the name of the class
    values["precision"] = values["precision"] | {"name": base_of("precision", config["precision"]["name"])}
    # the config's 0 is another number under another strategy
    values["step"] = values["step"] | {"micro_batch_rows": setup.program.micro_batch_rows}
    return values


def resume(setup: TrainingSetup) -> Resumed:
    """Load the newest checkpoint, if there is one to go on from. Collective.

    ConfigError when it is of another task, or lies behind the end of this run.
    """
    checkpointer, plan = setup.checkpointer, setup.plan
    path = checkpointer.find(setup.joined.rank.place.attempt)
    resumed = _load(setup, path) if path is not None else Resumed()
    if resumed.step > plan.end:
        key = f"train.until={plan.until}" if plan.end < plan.total else f"a run of {plan.total} steps"
        raise ConfigError(
            f"{key} ends before step {resumed.step}, where the checkpoint is; train on, or go to another run.dir"
        )
    if resumed.clock:
        checkpointer.retain()  # now that this run is known to go on from here
    return resumed


def _load(setup: TrainingSetup, path: Path) -> Resumed:
    checkpointer = setup.checkpointer
    source = checkpointer.load(path)
    scalars = source.scalars
    _refuse_another_task(setup, path, source)
    now, before = dict(flat(hyperparameters(setup), "")), dict(flat(scalars["course"], ""))
    changed = [
        f"{key}={now.get(key)} (was {before.get(key)})"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
    ]
    if changed:
        setup.joined.see(Note("warning", f"from step {scalars['clock']['step']} on with {', '.join(changed)}"))
    source.scalars = scalars["program"]
    setup.program.load(source)
    recent = [Measured(**fields) for fields in scalars["recent"]] if checkpointer.owns(path) else []
    while len(json.dumps([asdict(measured) for measured in recent])) > RECENT_BYTES:
        recent = recent[len(recent) // 2 + 1 :]
    return Resumed(scalars["clock"], scalars["window"], scalars.get("updated", True), tuple(recent))


def _refuse_another_task(setup: TrainingSetup, path: Path, source: Source) -> None:
    """Raise ConfigError that names the first key in which the checkpoint is not of this run's task."""
    for key, value in identity(setup).items():
        if source.scalars.get(key) != value:
            start_anew = ", or start anew in another run.dir" if setup.checkpointer.owns(path) else ""
            raise ConfigError(
                f"checkpoint {path} was written with {key}={source.scalars.get(key)!r}, this run has {key}={value!r}; "
                f"data position and numbers would not continue; use the same{start_anew}"
            )
