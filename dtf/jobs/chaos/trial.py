"""One trial: a run that is disturbed once or twice, started again until it is done, and judged."""

from __future__ import annotations

import json
import math
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtf.core.errors import STARTED_AGAIN, DtfError, Exit
from dtf.core.text import count_text, quoted
from dtf.jobs.chaos.command import OUTLIVE_S, Command
from dtf.jobs.chaos.faults import ANY, FAULTS, FORK_SERVER, LAUNCHER, RUN, Disk, Fault, Target
from dtf.jobs.chaos.preload import Control
from dtf.jobs.chaos.timeline import Moment, Timeline
from dtf.runs.compare import compare
from dtf.runs.recorded_run import RecordedRun

_TRIES = 3
STARTS = 4
"""Of one command, the disturbed one included."""
TWICE = 0.15
"""Of trials are disturbed a second time, soon after the first."""
BITS, LAW, SAMPLES = "bits", "law", "samples"
"""How equal a run is to the reference: bit for bit, within the bounds of `job=verify`, or in its samples alone, where
two undisturbed runs differ too.
"""


@dataclass(frozen=True)
class Subject:
    """What trials of one strategy have in common."""

    strategy: str  # as the table shows it
    command: tuple[str, ...]  # arguments of dtf but run.dir
    roles: tuple[str, ...]  # of each rank
    exact: bool  # numbers are in fp64
    limits: tuple[float, ...]  # seconds of silence that mean a hang, in a step and elsewhere, and of grace
    hang_s: float = 0.0  # after which a command that has not ended hangs
    reference: Path = Path()  # run folder
    timeline: Timeline = field(default_factory=Timeline)
    repeats: bool = True  # two undisturbed runs are equal bit for bit
    rows: Path | None = None  # sparse.disk

    def words(self, folder: Path) -> list[str]:
        return [*self.command, f"run.dir={quoted(folder)}"]


@dataclass
class Outcome:
    """What a trial gave. Times in seconds; None where there is nothing to measure."""

    seed: int
    number: int
    fault: str
    strategy: str
    phase: str = ""
    step: int = -1
    done: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # of each start of the command
    equal: str = ""
    wrong: str = ""  # what broke a promise; empty where nothing did
    lost_steps: int = 0
    noticed_s: float | None = None
    recovered_s: float | None = None  # within the same command, until the next new step
    outlived_s: float = 0.0  # by the slowest process of the run, its launcher
    seconds: float = 0.0
    missed: bool = False  # nothing was disturbed: the run was over before, or did not meet the fault

    @property
    def recovered(self) -> bool:
        """Whether the disturbed command itself went on to the end."""
        return self.codes[:1] == [Exit.OK]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_trial(
    subject: Subject,
    name: str,
    seed: int,
    number: int,
    folder: Path,
    library: Path | None,
    check: Callable[[], None] = lambda: None,
    heirs: Sequence[Subject] = (),
) -> Outcome:
    """Run one trial in an empty folder. What it draws follows from `seed` and `number`, and from the phases of the
    reference. `check` is called all the time; what it raises ends the trial and its processes. `heirs`: the strategies
    that a run may go on under.
    """
    rng = random.Random(f"chaos {seed} {number} {subject.strategy} {name}")
    outcome, began = Outcome(seed, number, name, subject.strategy), time.monotonic()
    fault, run, struck = FAULTS[name], folder / "run", 0.0
    control = Control(folder, library) if fault.needs_control and library is not None else None
    victims = [rank for rank, role in enumerate(subject.roles) if fault.whom in (ANY, role, *_NOBODY)]
    target = Target(0, run, rng, rng.choice(victims), subject.rows, control)
    for _ in range(_TRIES):  # a moment close to the end may come too late
        shutil.rmtree(run, ignore_errors=True)
        outcome.codes.clear()
        moment = subject.timeline.draw(rng, target.rank, before=fault.whom in _NOBODY)
        outcome.phase, outcome.step = moment.phase, moment.step
        struck = _disturbed(subject, fault, moment, target, folder, outcome, check)
        if struck or outcome.wrong:
            break
    outcome.missed = not outcome.wrong and (not struck or _met_nothing(fault, control))
    _finish(heirs if fault.hands_over else [subject], fault, target, folder, outcome, check)
    outcome.done = target.done + ([count_text(control.hits, "call")] if control is not None and control.hits else [])
    if struck:
        _measure(run / "events.jsonl", struck, fault, len(target.done) == 1, outcome)
    if not outcome.wrong:
        _compare(subject, run, outcome)
    outcome.seconds = round(time.monotonic() - began, 2)
    if control is not None:
        control.close()
    return outcome


_NOBODY = (LAUNCHER, FORK_SERVER, RUN)


def _met_nothing(fault: Fault, control: Control | None) -> bool:
    """Whether a disk was disturbed while nothing was written."""
    return isinstance(fault, Disk) and control is not None and not control.hits


def _disturbed(
    subject: Subject,
    fault: Fault,
    moment: Moment,
    target: Target,
    folder: Path,
    outcome: Outcome,
    check: Callable[[], None],
) -> float:
    """Start the command and disturb it. Returns when it was disturbed; 0: nobody was there to hit, or it had ended."""
    control, struck = target.control, 0.0
    environment = control.environment if control else {}
    command = Command(subject.words(target.folder), folder / "output.log", environment, fault.needs_network, check)
    target.launcher, target.switch = command.pid, command.switch
    try:
        command.watch(lambda: moment.has_come(command.beats.read(target.rank)), subject.hang_s)
        command.watch(lambda: False, moment.after_s)
        if command.code is None:
            struck = time.monotonic()
            for again in (False, True):
                held_s = fault.strike(target)
                if 0 < held_s < math.inf and not command.watch(lambda: False, held_s):
                    fault.release(target)
                if again or target.rng.random() >= TWICE:
                    break
                command.watch(lambda: False, target.rng.uniform(0.0, 0.6))
                if command.code is not None:
                    break
        _end(command, subject, fault.codes, outcome)
        fault.release(target)
    finally:
        command.end()
    return struck if target.done else 0.0


def _end(command: Command, subject: Subject, codes: frozenset[int], outcome: Outcome) -> None:
    """Wait for the end of a command, and judge it."""
    if not command.watch(lambda: False, subject.hang_s):
        outcome.wrong = outcome.wrong or f"hangs: it has not ended within {subject.hang_s:.0f} s"
        command.end()
    code = command.code
    assert code is not None
    outcome.codes.append(code)
    outlived_s, left = command.left_behind()
    outcome.outlived_s = max(outcome.outlived_s, round(outlived_s, 3))
    if left and not outcome.wrong:
        outcome.wrong = f"left behind: {'; '.join(left)}"
    if code not in codes and not outcome.wrong:
        outcome.wrong = f"exit code {code}, expected one of {sorted(codes)}: {_last_words(command.log)}"


def _finish(
    heirs: Sequence[Subject], fault: Fault, target: Target, folder: Path, outcome: Outcome, check: Callable[[], None]
) -> None:
    """Start the command again, undisturbed, until it has ended well, each time under one of `heirs`."""
    while not outcome.wrong and outcome.codes[-1] != Exit.OK:
        if len(outcome.codes) == STARTS:
            outcome.wrong = f"lost: exit codes {outcome.codes}: {_last_words(folder / 'output.log')}"
            return
        fault.between(target) if len(outcome.codes) == 1 else None
        heir = target.rng.choice(heirs)
        if fault.hands_over:
            target.done.append(f"on under {heir.strategy}")
        command = Command(heir.words(target.folder), folder / "output.log", {}, check=check)
        try:
            _end(command, heir, frozenset({Exit.OK, *STARTED_AGAIN}), outcome)
        finally:
            command.end()


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "error[" in line), lines[-1] if lines else "it said nothing")[:400]


def _measure(path: Path, struck: float, fault: Fault, once: bool, outcome: Outcome) -> None:
    """How many steps were done again, and when the disturbance was noticed and mended."""
    events = list(_events(path))
    before = max((e["step"] for e in events if e["event"] == "Measured" and e["monotonic"] <= struck), default=0)
    after = [event for event in events if event["monotonic"] > struck]
    noticed = next(
        (e for e in after if e["event"] == "Failed" or (e["event"] == "Note" and e["level"] == "warning")), None
    )
    reached = before
    for event in after:
        if event["event"] == "Measured" and event["split"] == "train":
            reached = max(reached, event["step"])
        if event["event"] == "Started":
            outcome.lost_steps += max(0, reached - event["step"])
            reached = event["step"]
    if noticed is None or not fault.recovers or not outcome.recovered or not once:
        return
    outcome.noticed_s = round(noticed["monotonic"] - struck, 3)
    new = next(
        (
            event
            for event in after
            if event["monotonic"] > noticed["monotonic"] and event["event"] == "Measured" and event["split"] == "train"
        ),
        None,
    )
    if new is not None:
        outcome.recovered_s = round(new["monotonic"] - struck, 3)


def _events(path: Path) -> Sequence[dict[str, Any]]:
    """Whole lines: a killed launcher leaves a half one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _compare(subject: Subject, run: Path, outcome: Outcome) -> None:
    """Compare the run with the reference, and check what it may not leave behind."""
    try:
        reference, done = RecordedRun.read(subject.reference), RecordedRun.read(run)
    except (DtfError, OSError, ValueError, KeyError) as error:
        outcome.wrong = f"the run cannot be read: {error}"
        return
    if outcome.outlived_s > OUTLIVE_S:
        outcome.wrong = f"a process outlived the launcher by {outcome.outlived_s:.1f} s"
        return
    outcome.wrong, outcome.equal = _equal(subject, reference, done)


def _equal(subject: Subject, reference: RecordedRun, done: RecordedRun) -> tuple[str, str]:
    """(what differs, how equal they are)."""
    if not subject.repeats:
        expected, actual = (
            sorted(i for ranks in run.ids.values() for ids in ranks for i in ids) for run in (reference, done)
        )
        return ("", SAMPLES) if expected == actual else ("samples: not each as often as in the reference", "")
    if same_bits(reference, done):
        return "", BITS
    verdict = compare(reference, done, exact=subject.exact)
    return ("", LAW) if verdict.ok else (f"differs: {verdict.first}", "")


def same_bits(one: RecordedRun, two: RecordedRun) -> bool:
    """Whether two runs visited the same rows in the same order and ended with the same bits."""
    rows = [{step: [i for ids in ranks for i in ids] for step, ranks in run.ids.items()} for run in (one, two)]
    return (
        rows[0] == rows[1]
        and one.tensors.keys() == two.tensors.keys()
        and all(np.array_equal(tensor, two.tensors[name], equal_nan=True) for name, tensor in one.tensors.items())
    )
