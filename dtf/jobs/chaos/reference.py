"""The run that trials are compared with: undisturbed, and once more to see whether its numbers repeat."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.core.errors import BusyError, ConfigError, Exit, Preempted, SaveError
from dtf.core.files import replace_text
from dtf.jobs.chaos import results
from dtf.jobs.chaos.command import Command
from dtf.jobs.chaos.folder import REFERENCES, TRIALS, read_json
from dtf.jobs.chaos.timeline import Timeline
from dtf.jobs.chaos.trial import Subject, same_bits
from dtf.runs.recorded_run import RecordedRun

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.config.settings import Settings

_MOST_S = 1800.0
"""For one undisturbed run."""
_START_S, _LEAST_HANG_S, _HANG_STEPS = 60.0, 5.0, 20
"""A trial does not wait for launcher.hang_timeout_s=60 where a step takes milliseconds: so many of the longest step are
enough.
"""
_NAME = "reference.json"


def plan(composed: Composed, settings: Settings, text: str) -> Subject:
    """A strategy to rehearse faults on, without its reference. `text`: how it was written in a list; may be empty."""
    roles = settings.strategy.roles(settings.launcher.count())
    return Subject(
        strategy=text or f"{composed.config['strategy']['name']} processes={settings.launcher.count()}",
        command=tuple(composed.command),
        roles=tuple(role for role, number in roles.items() for _ in range(number)),
        exact=composed.config["precision"]["param"] == "fp64",
        rows=_rows(composed.config["sparse"].get("disk")),
        limits=tuple(composed.config["launcher"][key] for key in ("hang_timeout_s", "start_timeout_s", "grace_s")),
    )


def _rows(disk: str | None) -> Path | None:
    return Path(disk).expanduser().absolute() if disk else None


def add_reference(subject: Subject, folder: Path, check: Callable[[], None]) -> Subject:
    """The same with its reference, which is run twice unless `folder` has it from an earlier command. `check` is called
    all the time.

    ConfigError when a run does not end well, or SaveError where a disk was full.
    """
    place = _place(subject, folder)
    made = read_json(place / _NAME)
    tried = any(outcome.strategy == subject.strategy for outcome in results.read(folder / TRIALS))
    if not made or (_options(made["command"]) != _options(subject.command) and not tried):
        _make(subject, place, check)
        made = read_json(place / _NAME)
    timeline = Timeline.from_json(made["timeline"])
    given_s, start_s, grace_s = subject.limits
    hang_s = min(given_s, max(_LEAST_HANG_S, _HANG_STEPS * timeline.longest("step")))
    start_s = min(start_s, max(_START_S, 5 * made["seconds"]))
    return replace(
        subject,
        command=(
            *subject.command,
            f"launcher.hang_timeout_s={hang_s:.1f}",
            f"launcher.start_timeout_s={start_s:.1f}",  # of a save too
        ),
        # starts, hangs that are noticed, a stop that is refused, and the run itself a few times over
        hang_s=2 * start_s + 5 * made["seconds"] + 4 * hang_s + grace_s,
        reference=place / "first",
        timeline=timeline,
        repeats=made["repeats"],
    )


def refuse_other_options(subjects: Sequence[Subject], folder: Path) -> None:
    """BusyError where the folder has trials of one of these strategies with other options."""
    tried = {outcome.strategy for outcome in results.read(folder / TRIALS)}
    for subject in subjects:
        made = read_json(_place(subject, folder) / _NAME)
        if made and subject.strategy in tried:
            known, now = _options(made["command"]), _options(subject.command)
            if other := [f"{key}={now.get(key)}" for key in {**known, **now} if known.get(key) != now.get(key)]:
                raise BusyError(
                    f"{folder} holds trials of strategy '{subject.strategy}' with other options than {', '.join(other)}"
                    "; their numbers would mix; choose another run.dir"
                )


def _place(subject: Subject, folder: Path) -> Path:
    return folder / REFERENCES / re.sub(r"[^A-Za-z0-9.-]+", "_", subject.strategy)


def _options(command: Sequence[str]) -> dict[str, str]:
    """What the runs of a strategy have in common, wherever their folder is: of a key that is given twice, the last."""
    pairs = (word.partition("=") for word in command if not word.startswith("run."))
    return {key: value for key, _, value in pairs}


def _make(subject: Subject, place: Path, check: Callable[[], None]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, mode=0o700)
    timeline, took = Timeline(), []
    print(f"{subject.strategy}: undisturbed, twice", flush=True)
    for name in ("first", "second"):
        began = time.monotonic()
        log = place / f"{name}.log"
        command = Command(subject.words(place / name), log, {}, check=check)
        try:
            command.watch(lambda: False, _MOST_S, timeline if name == "first" else None, len(subject.roles))
            code = command.code
        finally:
            command.end()
        timeline.finish(time.monotonic())
        took.append(time.monotonic() - began)
        if code == Exit.PREEMPTED:
            raise Preempted(f"the undisturbed run of {subject.strategy} was asked to stop")
        if code != Exit.OK:
            words = log.read_text(errors="replace").splitlines()[-1:] or ["it said nothing"]
            raise (SaveError if code == Exit.IO else ConfigError)(
                f"the run fails by itself, undisturbed, under {subject.strategy}, with exit code {code}: {words[0]}"
            )
    made = {
        "command": list(subject.command),
        "seconds": max(took),
        "repeats": same_bits(RecordedRun.read(place / "first"), RecordedRun.read(place / "second")),
        "timeline": timeline.to_json(),
    }
    how = "equal bit for bit" if made["repeats"] else "their numbers differ, so trials compare samples alone"
    print(f"{subject.strategy}: {made['seconds']:.1f} s, {how}", flush=True)
    shutil.rmtree(place / "second")
    replace_text(place / _NAME, json.dumps(made))
