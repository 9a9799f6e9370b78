"""Runs that a tracker watches: their events, their kills, and what the stand-ins of trackers have of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dtf.api.observer import Observers
from dtf.core.types import Ended, Event, Saved
from dtf.observers.jsonl import Jsonl
from dtf.observers.mlflow_observer import Mlflow
from dtf.observers.tracker import Tracker
from dtf.observers.wandb_observer import Wandb
from tests.support.launching import HANG_S
from tests.unit.test_observers import evaluation, lines, started, train

ROOT = Path(__file__).parents[2]
STAND_INS = ROOT / "tests" / "support" / "tracker_stand_ins"
CONFIG = {
    "recipe": {"name": "shapes", "model": {"width": 8}},
    "strategy": {"name": "ddp"},
    "checkpoint": {"every_steps": 4},
    "observer": {"jsonl": {"path": "metrics.jsonl"}},
    "api_key": "***",
}
LAST = 24


def make(name: str, **options: Any) -> Tracker:
    return {"wandb": Wandb, "mlflow": Mlflow}[name](**{"close_timeout_s": HANG_S, **options})


def end(folder: Path, exit: int | None, cause: str = "finished") -> None:
    """What the launching process writes before observers are closed."""
    (folder / "run.json").write_text(json.dumps({"exit": exit, "cause": cause, "best": ["top1", 0.95]}))


def reports(first: int, last: int) -> Iterator[Event]:
    """A line each step, an evaluation each second, a save each fourth."""
    for step in range(first + 1, last + 1):
        yield train(step, float("nan") if step == 7 else None)
        if step % 2 == 0:
            yield evaluation(step)
        if step % 4 == 0:
            yield Saved(step, "", False, 0.0)


def launch(
    folder: Path,
    observer: Tracker,
    events: Iterable[Event],
    exit: int | None,
    config: dict = CONFIG,
    waits: bool = True,
) -> None:
    """One launching process; `exit` None: it is killed, and what it has in memory is gone. `waits`: for the tracker's
    process, which then ends.
    """
    observers = Observers({"jsonl": Jsonl(), "tracker": observer})
    observers.open(folder, config)
    for event in events:
        observers.see(event)
    if exit is None:
        link = observer._link
        assert link is not None
        link._inbox.put(None)  # its pipe closes
        link._threads[1].join(HANG_S if waits else 0)
        assert link._threads[1].is_alive() != waits
    else:
        end(folder, exit)
        observers.close()


def rows(name: str, folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """What the tracker has: (split, step) -> metric -> value. No value twice."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    for key, value, step in _values(name, folder):
        split, _, metric = key.partition("/")
        if split != "best":
            assert metric not in found.setdefault((split, step), {}), f"{key} of step {step} is there twice"
            found[split, step][metric] = value
    return found


def _values(name: str, folder: Path) -> Iterator[tuple[str, float, int]]:
    if name == "mlflow":
        (run,) = json.loads((folder.parent / "store.json").read_text())["runs"].values()
        yield from ((key, value, step) for key, value, _, step in run["metrics"])
        return
    for line in said(folder, "row"):
        yield from ((key, value, line["step"]) for key, value in line.items() if "/" in key)


def said(folder: Path, what: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "stand_in.jsonl").read_text().splitlines()]
    return [line for line in found if line["what"] == what]


def measured(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """metrics.jsonl in the same form."""
    return {
        (row.pop("split"), row.pop("step")): {key: math.nan if value is None else value for key, value in row.items()}
        for row in lines(folder)
    }


def same(one: dict, other: dict) -> bool:
    return json.dumps(sorted(one.items()), default=str) == json.dumps(sorted(other.items()), default=str)


def steps(last: int) -> Iterator[Event]:
    yield started()
    yield from reports(0, last)
    yield Ended(last, "finished")
