"""Going on from a checkpoint: what has to be the same, what may change, and what is loaded."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dtf.api.registry import base_of
from dtf.api.row_life import RowLife, life_values
from dtf.api.schema import show
from dtf.api.task import Source
from dtf.checkpoint.agreement import Peers
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.core.errors import ConfigError, DataError, by_all
from dtf.core.files import flat
from dtf.core.text import count_text
from dtf.core.types import Measured, Note
from dtf.engine.assemble import TrainingSetup
from dtf.engine.clock import Progress
from dtf.host import waits
from dtf.optim.update import check_scalars

_COUNTS = ("step", "best_step", "since_best")
_MOST_STEPS = 1 << 62
_SHOWN = 200  # characters of a value of a checkpoint
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

    skipped: int = 0
    """Training rows that could not be read, without those of the open window."""

    recent: tuple[Measured, ...] = ()
    """The last measurements before the checkpoint."""

    clean: int = 0
    """The last step at which replicas were compared and alike; of a run that compared none, that of the checkpoint."""

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
    if "sparse" in values:  # where rows are kept changes no number
        values["sparse"] = {key: value for key, value in values["sparse"].items() if key not in ("disk", "memory_gb")}
    # its keys say all, and earlier versions recorded the name of the class
    values["precision"] = values["precision"] | {"name": base_of("precision", config["precision"]["name"])}
    # the config's 0 is another number under another strategy
    values["step"] = values["step"] | {"micro_batch_rows": setup.program.micro_batch_rows}
    return values


def position(scalars: dict[str, Any]) -> Resumed:
    """Where a run goes on that has these scalars in its checkpoint. DataError when no run could have written them."""
    try:
        clock, window = asdict(Progress(**scalars["clock"])), scalars["window"]
        _refuse_unless("clock", _is_clock(clock))
        _refuse_unless("window", window is None or (bool(window) and _are_numbers(window)))
        _refuse_unless("course", isinstance(scalars["course"], dict))
        check_scalars(scalars["program"])
        recent = tuple(Measured(**fields) for fields in scalars["recent"])
        _refuse_unless("recent", all(map(_is_measured, recent)))
        clean = scalars.get("clean")
        clean = clock["step"] if clean is None else clean
        _refuse_unless("clean", type(clean) is int and 0 <= clean <= clock["step"])
        skipped = scalars.get("skipped", 0)  # earlier versions did not count them
        _refuse_unless("skipped", type(skipped) is int and 0 <= skipped < _MOST_STEPS)
        return Resumed(clock, window, bool(scalars.get("updated", True)), skipped, recent, clean)
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(f"state.json lacks what a run needs to go on: {ascii(str(error))[:_SHOWN]}") from None


def _refuse_unless(key: str, makes_sense: bool) -> None:
    if not makes_sense:
        raise DataError(f"state.json holds a {key} that no run writes")


def _is_clock(clock: dict[str, Any]) -> bool:
    best, fallen = clock["best"], clock["fallen"]
    counts = all(type(clock[key]) is int and 0 <= clock[key] < _MOST_STEPS for key in _COUNTS)
    return counts and (best is None or _are_numbers([best])) and _are_numbers([fallen])


def _is_measured(measured: Measured) -> bool:
    place = type(measured.step) is int and isinstance(measured.split, str) and isinstance(measured.values, dict)
    return place and _are_numbers([measured.epoch, measured.seconds, *measured.values.values()])


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is float or (type(value) is int and abs(value) < _MOST_STEPS) for value in values
    )


def resume(setup: TrainingSetup) -> Resumed:
    """Load the newest checkpoint, if there is one to go on from. Collective.

    ConfigError when it is of another task, or lies behind the end of this run.
    """
    checkpointer, plan = setup.checkpointer, setup.plan
    waits.place("resume")
    path = checkpointer.find(setup.joined.rank.place.attempt, position)
    try:
        resumed = _load(setup, path) if path is not None else Resumed()
        if resumed.step > plan.end:
            key = f"train.until={plan.until}" if plan.end < plan.total else f"a run of {plan.total} steps"
            raise ConfigError(
                f"{key} ends before step {resumed.step}, where the checkpoint is; train on, or go to another run.dir"
            )
    except ConfigError:
        if path is not None:
            checkpointer.give_back(path)
        raise
    if resumed.clock:
        if setup.joined.rank.settings.train.guard_every:
            checkpointer.trust(resumed.clean)
        checkpointer.retain()  # now that this run is known to go on from here
    return resumed


def _load(setup: TrainingSetup, path: Path) -> Resumed:
    checkpointer = setup.checkpointer
    source = checkpointer.load(path)
    scalars = source.scalars
    _refuse_another_task(setup, path, source)
    now, before = dict(flat(hyperparameters(setup), "")), dict(flat(scalars["course"], ""))
    # earlier versions did not write them, and had none
    life = {f"sparse.{key}": value for key, value in life_values(RowLife()).items()} | {"sparse.values": "param"}
    before = {key: value for key, value in life.items() if key in now} | before
    changed = [
        f"{_said(key, now.get(key), setup)} (was {show(before.get(key))})"
        for key in sorted(now.keys() | before.keys())
        if now.get(key) != before.get(key)
    ]
    if changed:
        setup.joined.see(Note("warning", f"from step {scalars['clock']['step']} on with {', '.join(changed)}"))
    source.scalars = scalars["program"]
    setup.program.load(source)
    refuse_left_over(source, setup.joined.world, setup.joined.rank.settings.recipe.tables())
    resumed = position(scalars)
    recent = list(resumed.recent) if checkpointer.owns(path) else []
    while len(json.dumps([asdict(measured) for measured in recent])) > RECENT_BYTES:
        recent = recent[len(recent) // 2 + 1 :]
    return replace(resumed, recent=tuple(recent))


def refuse_left_over(source: StoredCheckpoint, world: Peers, tables: Container[str]) -> None:
    """DataError that names a tensor of the model or a table of the checkpoint that this run has not, and would go on
    without. After `Program.load`, which refuses what the checkpoint has not. Collective.
    """
    unread = {name for name in source.unread() if name.startswith("model/")}
    everyone = world.gather(sorted(unread))
    left = world.broadcast(None if everyone is None else sorted(unread.intersection(*everyone)))
    rows = {name.split("/")[1] for name in source.names() if name.startswith("table/")}
    left = [*left, *(f"the sparse table {name}" for name in sorted(rows) if name not in tables)]
    if left:
        more = f" and {len(left) - 1} more" if left[1:] else ""
        raise by_all(
            DataError(
                f"{source.place} holds {left[0]}{more}, and this run has none; give the model what it had, or start "
                "without this checkpoint"
            )
        )


def _said(key: str, value: Any, setup: TrainingSetup) -> str:
    """The key that the user set, with its value."""
    train = setup.joined.rank.settings.train
    if key == "train.steps" and train.steps is None:
        return f"train.epochs={train.epochs:g}, that is {count_text(value, 'step')}"
    return f"{key}={show(value)}"


def _refuse_another_task(setup: TrainingSetup, path: Path, source: Source) -> None:
    """Raise ConfigError that names the first key in which the checkpoint is not of this run's task."""
    for key, value in identity(setup).items():
        if source.scalars.get(key) != value:
            was = repr(source.scalars.get(key))[:_SHOWN]
            mirror = " with another checkpoint.mirror" if setup.joined.rank.settings.checkpoint.mirror else ""
            start_anew = f", or start anew in another run.dir{mirror}" if setup.checkpointer.owns(path) else ""
            raise ConfigError(
                f"checkpoint {path} was written with {key}={was}, this run has {key}={value!r}; "
                f"data position and numbers would not continue; use the same{start_anew}"
            )
