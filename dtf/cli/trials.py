"""Trials of a sweep in the folder that they share: which are finished already, and the table at the end.

Starts nothing.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dtf.api.registry import base_of, registered
from dtf.api.schema import show
from dtf.config.limits import MAX_BYTES, checked
from dtf.core.errors import INTERRUPTED, BusyError, ConfigError, DataError, Exit, code_name
from dtf.core.files import flat, small_text
from dtf.core.redaction import may_be, redact
from dtf.core.renamed import upgraded_config
from dtf.core.run_record import record_of
from dtf.core.text import display_path, number_text
from dtf.runs.budget import spent_s
from dtf.runs.objective_log import best_value, check
from dtf.runs.run_folder import untouched

NOT_STARTED = -1
ENDS = (Exit.PREEMPTED, Exit.BUDGET, INTERRUPTED)
"""Codes of a trial that was stopped, which end the sweep too: the same command goes on with it."""
_MAY_CHANGE = ("budget", "launcher", "observer", "plugins", "run", "sweep")
"""Groups that may change between two launches of the same trial."""
_UNTIL = "train.until"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,=+-]{0,99}")


@dataclass(kw_only=True)
class Trial:
    """One run of a sweep, as its table shows it."""

    title: str  # the overrides that make it differ from the others
    code: int = Exit.BUG
    before: bool = False  # it was finished when the sweep started
    folder: Path | None = None
    best: tuple[str, float] | None = None  # the objective and its best value
    rung: int | None = None  # the step at which it waits, or
    pruned: bool = False  # has stopped for good

    @property
    def outcome(self) -> str:
        if self.rung is not None:
            return f"{'pruned' if self.pruned else 'waits'} at step {self.rung}"
        known = {NOT_STARTED: "not begun", Exit.OK: "finished before" if self.before else "finished"}
        known |= dict.fromkeys(ENDS, "stopped, goes on" if self.folder else "stopped")
        known[Exit.BUDGET] = "stopped by the budget"
        return known.get(self.code) or f"failed, {self.cause}"

    @property
    def cause(self) -> str:
        """The name of its exit code."""
        return code_name(Exit(self.code)) if self.code in set(Exit) else f"exit code {self.code}"


def digest(swept: Iterable[str], configs: Iterable[dict[str, Any]]) -> str:
    """Eight digits that are the same for the same sweep: what is swept over, and what each trial trains."""
    text = json.dumps([sorted(swept), [_lasting(config) for config in configs]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def folder_name(overrides: Sequence[str]) -> str:
    """The name of a trial's folder: the overrides that only some trials have, as in `lr.peak=0.1,strategy=dp`.

    A digest replaces what cannot stand in a name.
    """
    text = ",".join(overrides) or "trial"
    if _NAME.fullmatch(text):
        return text
    readable = re.sub(r"[^A-Za-z0-9_.,=+-]", "_", text).lstrip(".,=+-")[:91]
    return f"{readable}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


class Found(NamedTuple):
    """A trial as its folder has it."""

    record: dict[str, Any]  # run.json
    until: int | None  # train.until of its last launch
    finished: bool
    same_plan: bool  # whether it is as long as it was

    @property
    def best(self) -> tuple[str, float] | None:
        return best_value(self.record)

    @property
    def code(self) -> int:
        """Of its last launch; E_PREEMPTED for one that goes on, as it was killed or is to be longer."""
        exit = self.record["exit"]
        return Exit.OK if self.finished else Exit.PREEMPTED if exit in (None, Exit.OK) else exit


def find(folder: Path, config: dict[str, Any]) -> Found | None:
    """The trial in `folder`; None when it is to be started.

    BusyError when the folder holds a trial of another config. Only its length (train.*) and the groups in _MAY_CHANGE
    may differ. It is finished where these do not differ, but for a `train.until` that its plan did not need.
    """
    import yaml

    try:
        record, path = record_of(folder), folder / "config.yaml"
        check(record)
        saved = upgraded_config(yaml.safe_load(checked(path, small_text(path, MAX_BYTES))))
        old, new = (dict(flat(_lasting(config_node), "")) for config_node in (saved, redact(config)))
        exit, cause = record["exit"], record.get("cause")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, ConfigError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):  # as of a disk that fails
            raise
        raise BusyError(
            f"{folder} holds what is no trial ({type(error).__name__}: {error}); choose another run.dir"
        ) from error
    if untouched(folder):
        return None
    changed = [key for key in sorted(old.keys() | new.keys()) if not may_be(new.get(key), old.get(key))]
    for key in changed:
        if not key.startswith("train."):
            was, now = show(old.get(key)), show(new.get(key))
            raise BusyError(
                f"{folder} holds a trial with {key}={was}, this one has {key}={now}; choose another run.dir, or the "
                f"same {key}"
            )
    whole = not changed or (changed == [_UNTIL] and cause in ("finished", "early_stop"))
    until = old.get(_UNTIL)
    same_plan = not {"train.steps", "train.epochs"} & {*changed}
    return Found(record, until if isinstance(until, int) else None, exit == Exit.OK and whole, same_plan)


def left_alone(title: str, folder: Path | None, config: dict[str, Any]) -> Trial:
    """A trial that a sweep did not come to before it was stopped, as its folder has it."""
    found = None
    if folder is not None:
        with suppress(BusyError):
            found = find(folder, config)
    if found is None:
        return Trial(title=title, code=NOT_STARTED)
    return Trial(title=title, code=found.code, before=found.finished, folder=folder, best=found.best)


def seconds(home: Path, but: Path | None = None, needed: bool = False) -> float:
    """Seconds that the trials in the folder of a sweep have taken, without the one in `but`, as far as their files say
    them. DataError where one does not, and they are `needed`.
    """
    total = 0.0
    for folder in home.iterdir() if home.is_dir() else ():
        try:
            total += spent_s(folder) if folder != but else 0.0
        except DataError:
            if needed:
                raise
    return total


def best_of(trials: Sequence[Trial], direction: str) -> int | None:
    """Number of the best trial, from 1, of those that came to their ends; None where no two have the same objective."""
    whole = [(number, trial) for number, trial in enumerate(trials, 1) if trial.best and trial.code == Exit.OK]
    valued = [(trial.best[1], number) for number, trial in whole if trial.best and trial.rung is None]
    if not valued or len(whole) < 2 or len({trial.best[0] for trial in trials if trial.best}) > 1:
        return None
    return max(valued, key=lambda pair: pair[0])[1] if direction == "max" else min(valued)[1]


def table(trials: Sequence[Trial]) -> Iterator[str]:
    """A line for each trial: outcome, best value, run folder, and the overrides where the folder's name is not made of
    them.
    """
    rows = []
    for number, trial in enumerate(trials, 1):
        best = f"{trial.best[0]}={number_text(trial.best[1])}" if trial.best else ""
        named = trial.folder is not None and trial.folder.name == trial.title.replace(" ", ",")
        where = [*([display_path(trial.folder)] if trial.folder else []), *([] if named else [trial.title])]
        rows.append((f"dtf: trial {number}: {trial.outcome}", best, "  ".join(where)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for *cells, where in rows:
        yield "  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=False) if width), where])


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same. An option that only has other defaults is known by its keys: earlier versions recorded
    the name of its class.
    """
    objective = (config.get("run") or {}).get("objective", "")
    lasting = {key: value for key, value in config.items() if key not in _MAY_CHANGE} | {
        "run": {"objective": objective}
    }
    for group, node in lasting.items():
        if isinstance(node, dict) and node.get("name") in registered(group):
            lasting[group] = node | {"name": base_of(group, node["name"])}
    return lasting
