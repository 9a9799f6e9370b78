"""Which trial of a sweep runs when: as many at once as the executor has places, each to its end or to its next rung.

Knows neither Hydra nor Optuna, nor how a trial is run. All that it decides by is in the trials' folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dtf.api.options import Prune, SweepOptions
from dtf.api.schema import to_plain
from dtf.api.trials import TrialEnd, TrialExecutor, TrialOrder
from dtf.checkpoint.storage import checkpoints, step_of
from dtf.cli.pruning import Phase, Standing, champion, is_out, next_of, rungs
from dtf.cli.trials import ENDS, NOT_STARTED, Found, Trial, find
from dtf.core.errors import ConfigError, DtfError, Exit
from dtf.core.text import number_text
from dtf.runs.objective_log import MOST_EVALUATIONS, evaluations, plan_of
from dtf.runs.sweep_record import SweepRecord

if TYPE_CHECKING:
    from dtf.config.compose import Composed


class SweepStopped(BaseException):
    """A trial was asked to stop, and so is the sweep. No Exception: a sweeper of Hydra would go on with others."""


class Source(Protocol):
    """Where the overrides of trials come from."""

    @property
    def given(self) -> Sequence[tuple[int, list[str]]]:
        """Number and overrides of the trials that are known at the start."""
        ...

    def more(self, trials: Mapping[int, ScheduledTrial]) -> tuple[int, list[str]] | None:
        """One more trial, after all that are given; None: there is none. `trials`: those so far."""
        ...


class Batch:
    """Trials that are all known at the start. `first`: the number of the first one."""

    def __init__(self, trials: Sequence[Sequence[str]], first: int) -> None:
        self.given = [(number, list(overrides)) for number, overrides in enumerate(trials, first)]

    def more(self, trials: Mapping[int, ScheduledTrial]) -> None:
        return None


@dataclass(frozen=True)
class Rules:
    """What a sweep does with its trials. `name`: of the objective; `trials`: how many there will be, where it is known.
    `folder_of`: the folder of the trial with these overrides; None: the job keeps none. No rung lies in the `rise`:
    trials differ little there, whatever their rates.
    """

    options: SweepOptions
    objective: tuple[str, str]
    trials: int | None
    of_all: str  # ` of N`, for counting
    title_of: Callable[[Sequence[str]], str]
    folder_of: Callable[[Sequence[str]], Path | None]
    rise: Callable[[int], int] = lambda total: 0  # steps of a run of `total` in which the learning rate still rises


@dataclass
class ScheduledTrial:
    """A trial that has been begun, here or before."""

    number: int
    shown: Trial
    phase: Phase = Phase.cut
    composed: Composed | None = None
    evaluations: dict[int, float] = field(default_factory=dict)  # step -> objective
    plan: tuple[int, int] | None = None  # steps of the whole run, and of an epoch

    @property
    def steps(self) -> Sequence[int]:
        """The step of each evaluation, by the plan, which is known."""
        assert self.composed is not None and self.plan is not None
        total, epoch = self.plan
        every = self.composed.config["train"]["eval_every"] or epoch
        return [*range(every, total, every), total]

    @property
    def standing(self) -> Standing:
        steps = [step for step in self.steps if step <= self.step] if self.plan else []
        return Standing(self.phase, [self.evaluations.get(step, math.nan) for step in steps])

    @property
    def step(self) -> int:
        """Of the newest evaluation."""
        return max(self.evaluations, default=0)


class Schedule:
    """Runs trials. `compose(number, overrides)`: the config of one; `reported(action)`: calls a function, reports what
    it raises and returns an exit code; `requested()`: whether a signal to stop has come.
    """

    def __init__(
        self,
        rules: Rules,
        executor: TrialExecutor,
        compose: Callable[[int, list[str]], Composed],
        reported: Callable[[Callable[[], int]], int],
        requested: Callable[[], bool],
        record: SweepRecord | None,
    ) -> None:
        self.trials: dict[int, ScheduledTrial] = {}
        self.stopped = 0  # the exit code of the trial that stopped the sweep
        self._rules, self._executor, self._compose, self._reported = rules, executor, compose, reported
        self._requested, self._record = requested, record
        self._rule, self._maximise = rules.options.prune, rules.objective[1] == "max"
        self._rungs: list[int] = []  # in evaluations; empty before the first trial has said how many it has

    def run(self, source: Source) -> None:
        """Run the trials of a source, and those that wait, to their ends. Raises SweepStopped."""
        waiting = iter(source.given)
        if self._rule is not Prune.none:  # whoever is promoted is so among all that have begun
            begun = [(number, words) for number, words in source.given if self._has_begun(words)]
            for number, words in begun:
                self._admit(number, words)
            waiting = iter([one for one in source.given if one not in begun])
        running = 0
        while True:
            while running < self._executor.places and not self._stopping:
                trial = self._next(waiting, source, alone=not running)
                if trial is None:
                    break
                self._start(trial)
                running += 1
            if not running:
                break
            self._settle(self._executor.wait())
            running -= 1
        if self._stopping:
            raise SweepStopped

    @property
    def pruned(self) -> dict[str, int]:
        """Name of a trial's folder -> the step at which it stopped for good."""
        out = [trial for trial in self.trials.values() if trial.phase is Phase.pruned and trial.shown.folder]
        return {trial.shown.folder.name: trial.step for trial in out if trial.shown.folder}

    def close(self) -> None:
        """Trials that still wait, where the sweep is done, are pruned. One that ended a part of its way well, and did
        not come to go on, was stopped.
        """
        for trial in self.trials.values():
            if trial.phase is Phase.waiting and not self._stopping:
                trial.phase = Phase.pruned
            if trial.phase in (Phase.waiting, Phase.pruned):
                trial.shown.rung, trial.shown.pruned = trial.step, trial.phase is Phase.pruned
            if trial.phase is Phase.cut and trial.shown.code == Exit.OK:
                trial.shown.code = Exit.PREEMPTED
        if self._record:
            self._record.prune(self.pruned)

    @property
    def _stopping(self) -> bool:
        return bool(self.stopped) or self._requested()

    @property
    def _standings(self) -> dict[int, Standing]:
        return {number: trial.standing for number, trial in sorted(self.trials.items())}

    def _has_begun(self, overrides: Sequence[str]) -> bool:
        folder = self._rules.folder_of(overrides)
        return folder is not None and (folder / "run.json").exists()

    def _next(self, waiting: Iterator[tuple[int, list[str]]], source: Source, alone: bool) -> ScheduledTrial | None:
        """The trial to run now: one that was cut, one that goes on from a rung, a new one. `alone`: nothing runs.

        Under `asha` trials that are known come before promotions: all come to the first rung in any case, and the best
        are better known after that.
        """
        while True:
            for trial in self.trials.values():
                if trial.phase is Phase.cut:
                    return trial
            new = next(waiting, None) if self._rule is Prune.asha else None
            if new is None and (chosen := self._chosen()) is not None:
                return self.trials[chosen]
            if new is None:
                new = next(waiting, None) or source.more(self.trials)
            if new is None:
                best = champion(self._standings, self._rungs, self._maximise) if alone and self._rungs else None
                return None if best is None else self.trials[best]
            self._admit(*new)

    def _chosen(self) -> int | None:
        """The trial that goes on from its rung; None: none does now."""
        self._prune()
        if not self._rungs:
            return None
        return next_of(self._rule, self._standings, self._rungs, self._rules.options.factor, self._maximise)

    def _prune(self) -> None:
        """Mark those that will not go on whatever happens."""
        standings = self._standings
        for number, trial in self.trials.items():
            if trial.phase is Phase.waiting and is_out(self._rule, number, standings, self._maximise):
                trial.phase = Phase.pruned
                print(f"dtf: trial {number}: pruned at step {trial.step}", flush=True)
        if self._record and self._rule is Prune.median:
            self._record.prune(self.pruned)

    def _admit(self, number: int, overrides: list[str]) -> None:
        """Compose a trial and see what its folder has. It is `cut`, or whatever it has come to."""
        shown = Trial(title=self._rules.title_of(overrides), folder=None)
        trial = self.trials[number] = ScheduledTrial(number, shown)
        found: Found | None = None
        print(f"dtf: trial {number}{self._rules.of_all}: {shown.title}", flush=True)

        def look() -> int:
            nonlocal found
            folder = self._rules.folder_of(overrides)
            trial.composed = as_trial(self._compose(number, overrides), folder)
            if folder is None:
                return Exit.OK
            shown.folder = folder
            if (found := find(folder, trial.composed.config)) is not None:
                self._take(trial, found, before=True)
            return Exit.OK

        shown.code = self._reported(look)
        if shown.code != Exit.OK:
            trial.phase = Phase.failed
            if shown.code in ENDS:
                self.stopped = shown.code
        elif trial.phase is Phase.cut:
            shown.code = found.code if found else NOT_STARTED
        elif trial.phase is Phase.finished:
            shown.before = True
            print("dtf: it was finished before", flush=True)

    def _take(self, trial: ScheduledTrial, found: Found, before: bool) -> None:
        """Set what a trial has come to by its folder. `before`: as it was at the start of the sweep."""
        trial.shown.best = found.best
        if found.finished:
            trial.phase = Phase.finished
        if self._rule is Prune.none:
            return
        trial.evaluations, trial.plan = evaluations(found.record), plan_of(found.record) if found.same_plan else None
        if trial.plan is not None:
            self._agree(trial)
        reached = found.until is not None and found.until in trial.evaluations
        if trial.phase is not Phase.finished:  # before its first rung it only told how long its plan is
            trial.phase = Phase.waiting if reached and trial.standing.passed(self._rungs) else Phase.cut
        if before and trial.phase is Phase.waiting and self._rule is Prune.median and self._was_pruned(trial):
            trial.phase = Phase.pruned

    def _was_pruned(self, trial: ScheduledTrial) -> bool:
        folder = trial.shown.folder
        return folder is not None and self._record is not None and self._record.pruned.get(folder.name) == trial.step

    def _agree(self, trial: ScheduledTrial) -> None:
        """Learn from the first trial how many evaluations there are. ConfigError where it has too few, or another one
        has another number: they could not be compared.
        """
        count = len(trial.steps)
        if not self._rungs:
            factor = self._rules.options.factor
            of = self._rules.trials if self._rule is Prune.asha else None
            assert trial.plan is not None
            rise = self._rules.rise(trial.plan[0])
            found = rungs(count, factor, of, first=1 + sum(step <= rise for step in trial.steps))
            if count > MOST_EVALUATIONS or len(found) < 2:
                raise ConfigError(
                    f"sweep.prune={self._rule.name} needs {factor} (sweep.factor) to {MOST_EVALUATIONS} evaluations in "
                    f"a trial, trial {trial.number} has {count}; change train.eval_every"
                )
            self._rungs = found
            print(f"dtf: rungs after {', '.join(map(str, found[:-1]))} of {count} evaluations", flush=True)
        elif count != self._rungs[-1]:
            raise ConfigError(
                f"sweep.prune={self._rule.name} compares trials after equally many evaluations, trial {trial.number} "
                f"has {count} and others have {self._rungs[-1]}; give all the same train.epochs, or the same "
                "train.steps and train.eval_every"
            )

    def _until(self, trial: ScheduledTrial) -> int | None:
        """The step at which a trial stops next; None: at its end."""
        assert trial.composed is not None
        if self._rule is Prune.none:
            return trial.composed.config["train"]["until"]
        if trial.plan is None:  # only its data say how long an epoch is: after one step it is known
            assert trial.shown.folder is not None
            newest = next(iter(checkpoints(trial.shown.folder / "checkpoints")), None)
            saved = (step_of(newest.name) if newest else 0) or 0
            return max(trial.composed.config["train"]["eval_every"] or 1, saved + 1)
        passed = trial.standing.passed(self._rungs)
        return None if passed >= len(self._rungs) - 1 else trial.steps[self._rungs[passed] - 1]

    def _start(self, trial: ScheduledTrial) -> None:
        assert trial.composed is not None
        if trial.phase is not Phase.cut:
            print(f"dtf: trial {trial.number} goes on from step {trial.step}", flush=True)
        trial.phase = Phase.running
        config = dict(trial.composed.config)
        config["train"] = config["train"] | {"until": self._until(trial)}
        composed = replace(trial.composed, config=config)
        self._executor.start(TrialOrder(trial.number, trial.shown.title, composed, trial.shown.folder))

    def _settle(self, end: TrialEnd) -> None:
        """A trial has ended, or come to its rung. One that lost its ranks after a request to stop was stopped: whoever
        insists has them killed.
        """
        if self._requested() and end.code == Exit.PEER:
            end = end._replace(code=Exit.PREEMPTED)
        trial = self.trials[end.number]
        shown = trial.shown
        shown.code, shown.best = end.code, end.best or shown.best
        if end.code in ENDS or self._requested():
            self.stopped = self.stopped or end.code or Exit.PREEMPTED
            if end.code != Exit.BUDGET:  # that ends the others too
                self._executor.stop()
        trial.phase = Phase.finished if end.code == Exit.OK else Phase.failed
        if self._rule is not Prune.none and shown.folder is not None:
            self._place(trial)
        if trial.phase in (Phase.finished, Phase.failed):
            best = f", best {shown.best[0]}={number_text(shown.best[1])}" if shown.best else ""
            print(f"dtf: trial {trial.number}: {shown.outcome}{best}", flush=True)

    def _place(self, trial: ScheduledTrial) -> None:
        """See by the folder of a trial which rung it has come to."""
        shown = trial.shown
        failed, composed = trial.phase is Phase.failed, trial.composed
        assert composed is not None

        def look() -> int:
            trial.phase = Phase.running
            if (found := find(shown.folder, composed.config)) is not None:  # type: ignore[arg-type]
                self._take(trial, found, before=False)
            return Exit.OK

        if not failed:
            shown.code = self._reported(look)
            failed = shown.code != Exit.OK
        else:
            with suppress(DtfError):
                look()
        if failed or trial.phase is Phase.running:
            trial.phase = Phase.failed
            self.stopped = self.stopped or (shown.code if trial.plan and not self._rungs else 0)  # as all others would
        elif trial.phase is Phase.waiting:
            value = number_text(trial.evaluations[trial.step])
            print(
                f"dtf: trial {trial.number}: {self._rules.objective[0]}={value} at step {trial.step}, a rung",
                flush=True,
            )

    def value_of(self, number: int) -> float:
        """The best objective of a trial, NaN where it has none or failed; the exit code where runs are not kept."""
        shown = self.trials[number].shown
        if self._record is None:
            return float(shown.code)
        return shown.best[1] if shown.code == Exit.OK and shown.best else math.nan


def as_trial(composed: Composed, folder: Path | None) -> Composed:
    """The config of one run of a sweep: without the sweep's own options, and with a mirror of its own."""
    config = composed.config | {"sweep": to_plain(SweepOptions())}
    if folder and (mirror := config["checkpoint"].get("mirror")):  # it belongs to one run, as a run folder does
        place = f"{mirror.rstrip('/')}/{folder.parent.name}/{folder.name}"
        config["checkpoint"] = config["checkpoint"] | {"mirror": place}
    return replace(composed, config=config)
