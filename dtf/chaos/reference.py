"""The run that trials are compared with: undisturbed, and once more to see whether its numbers repeat."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.chaos.command import Command
from dtf.chaos.timeline import Timeline
from dtf.chaos.trial import Subject, same_bits
from dtf.core.errors import DtfError, Exit, Preempted
from dtf.runs.recorded_run import RecordedRun

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.config.settings import Settings

_MOST_S = 1800.0
"""For one undisturbed run."""
_NAME = "reference.json"


def make_subject(composed: Composed, settings: Settings, text: str, folder: Path) -> Subject:
    """Run a strategy undisturbed, twice, unless `folder` has that from an earlier command.

    DtfError when a run does not end well.
    """
    roles = settings.strategy.roles(settings.launcher.count())
    ranks = tuple(role for role, number in roles.items() for _ in range(number))
    shown = _shown(composed.config, text, roles)
    place = folder / "references" / re.sub(r"[^A-Za-z0-9.-]+", "_", shown)
    subject = Subject(
        strategy=shown,
        command=tuple(composed.command),
        roles=ranks,
        exact=composed.config["precision"]["param"] == "fp64",
        hang_s=_MOST_S,
        reference=place / "first",
    )
    if not (place / _NAME).exists():
        _make(subject, place)
    made = json.loads((place / _NAME).read_text())
    limits = composed.config["launcher"]
    # each start, a hang that is noticed in a step, a stop that is refused, and the run itself a few times over
    hang_s = 60.0 + 5 * made["seconds"] + 2 * limits["hang_timeout_s"] + limits["grace_s"]
    return replace(subject, hang_s=hang_s, timeline=Timeline.from_json(made["timeline"]), repeats=made["repeats"])


def _shown(config: dict[str, Any], text: str, roles: dict[str, int]) -> str:
    """`ddp processes=2`, as in a list of strategies."""
    if not text:
        text = config["strategy"]["name"]
    words = [word for word in text.split() if not word.startswith(("processes=", "servers="))]
    world = (
        [f"{role}s={number}" for role, number in roles.items()]
        if len(roles) > 1
        else [f"processes={sum(roles.values())}"]
    )
    return " ".join([*words, *world])


def _make(subject: Subject, place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, mode=0o700)
    timeline, took = Timeline(), []
    print(f"{subject.strategy}: undisturbed, twice", flush=True)
    for name in ("first", "second"):
        began = time.monotonic()
        log = place / f"{name}.log"
        command = Command(subject.words(place / name), log, {})
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
            raise DtfError(f"the undisturbed run of {subject.strategy} ended with exit code {code}: {words[0]}")
    made = {
        "seconds": max(took),
        "repeats": same_bits(RecordedRun.read(place / "first"), RecordedRun.read(place / "second")),
        "timeline": timeline.to_json(),
    }
    shutil.rmtree(place / "second")
    (place / _NAME).write_text(json.dumps(made))
