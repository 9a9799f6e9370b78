"""The loop: steps a program when the clock says so, measures, evaluates, saves.

Names no strategy and imports contracts only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dtf.api.recipe import Recipe
from dtf.api.strategy import Program
from dtf.core.errors import DivergedError
from dtf.core.types import (
    Batch,
    Batches,
    Evaluate,
    Event,
    Log,
    Measured,
    Note,
    Poll,
    Save,
    Saved,
    Stop,
    Train,
)
from dtf.engine.clock import EVALUATION_SECONDS, OVER_BUDGET, SPARE_SECONDS, STEP_SECONDS, STOP_REQUESTS, Clock
from dtf.engine.divergence import Everyone, diverged
from dtf.engine.evaluation import SKIPPED, SKIPPED_TRAIN, evaluate
from dtf.engine.guarded_steps import GuardedSteps
from dtf.engine.stopwatch import Stopwatch
from dtf.engine.time_limit import TimeLimit
from dtf.engine.unreadable_rows import UnreadableRows
from dtf.engine.window import Window

if TYPE_CHECKING:
    from dtf.checkpoint.saves import Saves

RECENT = 256
"""Measurements that a checkpoint holds and a resumed run sends again: more than are on their way at any time."""


NO_IDS = np.empty(0, np.int64)


@dataclass
class Loop:
    """Everything one rank needs to follow a clock.

    `beat(phase, step)` marks that the rank is alive; `record(step, ids)` keeps sample ids.
    """

    program: Program
    clock: Clock
    train: Batches
    evaluation: Batches
    evaluation_rows: int
    recipe: Recipe
    world: Everyone
    saver: Saves | None
    see: Callable[[Event], None]
    scalars: dict[str, Any]  # what identifies the run in its checkpoints: seed, data, batch size
    steps_per_epoch: int
    skip_nonfinite: int = 0
    stop_requested: Callable[[], bool] = lambda: False
    over_budget: Callable[[], bool] = lambda: False
    time_limit: TimeLimit = field(default_factory=TimeLimit)
    beat: Callable[[str, int], None] = lambda phase, step: None
    record: Callable[[int, np.ndarray], None] | None = None
    carried: list[float] | None = None  # the window of the checkpoint resumed from
    updated: bool = False  # whether an update was made before it
    skipped: int = 0  # training rows that could not be read before its window
    averages: bool = False  # evaluate the averages of the weights
    compares_replicas: bool = True  # before a save
    guard: GuardedSteps | None = None
    speed: Callable[[float], dict[str, float]] = lambda rows_per_s: {}  # what else to report of a rate
    recent: deque[Measured] = field(default_factory=lambda: deque(maxlen=RECENT))

    def report(self, measured: Measured) -> None:
        """Send it to the observers, and keep it for the next checkpoints.

        A launching process that is killed just after a save may not have read it yet.
        """
        self.recent.append(measured)
        self.see(measured)


def fit(loop: Loop) -> tuple[Stop, dict[str, float]]:
    """Follow the clock to its Stop; returns it with the last evaluation's values and, where rows may be unreadable, how
    many of training were. Collective.

    Raises DivergedError on all ranks alike: before a save, when more updates were skipped than allowed; at the end,
    when a loss scale let none be made.
    """
    handler = _TicketHandler(loop)
    for ticket in loop.clock:
        match ticket:
            case Train():
                handler.train(ticket)
            case Log():
                handler.log(ticket)
            case Poll():
                handler.poll(ticket)
            case Evaluate():
                handler.evaluate(ticket)
            case Save():
                handler.save(ticket)
            case Stop():
                handler.stop(ticket)
                return ticket, handler.evaluated | handler.skipped_values(SKIPPED_TRAIN, handler.skipped)
    raise AssertionError("a clock ends with a Stop")


class _TicketHandler:
    """What is done for each kind of ticket, and the state that lives between tickets. Every method is collective."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.program, self.clock = loop, loop.program, loop.clock
        self.width = 1 + len(loop.recipe.train_metrics)
        self.window, self.stopwatch = Window(loop.carried), Stopwatch()
        self.updated = loop.updated  # whether an update was ever made
        # batches prepared ahead, by (epoch, index), and how many of their rows this rank could not read
        self.ready: dict[tuple[int, int], tuple[Batch | None, int]] = {}
        self.skipped = loop.skipped  # rows of closed windows that could not be read, over all ranks
        self.leased_skipped: dict[int, int] = {}  # epoch -> rows that other processes could not read, as counted so far
        self.evaluated = next((measured.values for measured in reversed(loop.recent) if measured.split == "eval"), {})
        self.evaluated_at = -1  # the step of that evaluation, if this process made it
        self.lr = 0.0  # of the last step
        self.unreadable = UnreadableRows(loop.train, loop.program.leased)
        # rows in the window that were computed before this process
        self.rows_before = loop.carried[0] if loop.carried else 0.0
        # steps since the last poll, whatever their numbers: a resumed run does not start at 0
        self.polled_at, self.steps_since_poll = time.perf_counter(), 0
        self.evaluation_s = 0.0  # the longest; 0: none was made
        self.counted: list[str] = []  # names of what the program counts

    def train(self, ticket: Train) -> None:
        """One step, without waiting for the device; then the next batch is prepared while the device computes."""
        loop, program, train = self.loop, self.program, self.loop.train
        key = (ticket.epoch, ticket.index)
        coming = [(t.epoch, t.index) for t in self.clock.ahead(2)][1:] if program.reads_ahead else []
        for wanted in (key, *coming):
            if wanted not in self.ready:
                loop.beat("fetch", ticket.step)
                self.ready[wanted] = self._prepared(wanted)
        batch, skipped = self.ready.pop(key)
        for wanted in coming:
            program.expect(self.ready[wanted][0])
        loop.beat("step", ticket.step)
        guarded = loop.guard is not None and loop.guard.due(ticket.step)
        self.window.add(loop.guard.step(ticket, batch) if loop.guard and guarded else program.step(ticket, batch))
        if loop.record is not None:
            loop.record(ticket.step, batch.ids if program.shard is not None and batch is not None else NO_IDS)
        self.window.skip(skipped)
        self.leased_skipped.setdefault(ticket.epoch, 0)
        _record_consumed(loop)
        self.lr = ticket.lr
        self.unreadable.trained(ticket.epoch)
        self.steps_since_poll += 1
        self.clock.done(ticket, {})
        coming = [(t.epoch, t.index) for t in self.clock.ahead(1 + train.prefetch)]
        if train.prefetch:
            train.ahead(coming)
        self.ready = {key: self.ready[key] for key in coming[:1] if key in self.ready}
        if coming and not self.ready:
            loop.beat("fetch", ticket.step + 1)
            self.ready[coming[0]] = self._prepared(coming[0])

    def _prepared(self, key: tuple[int, int]) -> tuple[Batch | None, int]:
        batch, skipped = self.loop.train.get(*key), 0
        if self.loop.train.allowed and batch is not None:
            skipped = int(((batch.weight == 0).numpy() & (batch.ids >= 0)).sum())
        return self.program.prepare(batch), skipped

    def skipped_values(self, name: str, rows: float) -> dict[str, float]:
        """What a measurement says of rows that could not be read: nothing where none may be so."""
        return {name: int(rows)} if self.loop.train.allowed or self.loop.evaluation.allowed else {}

    def log(self, ticket: Log) -> None:
        """Report the window and open a new one. DivergedError when too many updates were skipped."""
        loop, step = self.loop, ticket.step
        loop.beat("log", step)
        if not self.clock.ahead(1):
            self.program.sync()  # the last line covers all steps
        total = self._close_window()
        self._refuse_divergence(step, total)
        if not total[0]:  # no step has reported a row since the last line: the next line has them all
            self.clock.done(ticket, {})
            return
        self.window = Window()
        metrics = loop.recipe.summarise(total[: self.width])
        values = {**metrics, "grad_norm": _ratio(total[self.width], total[self.width + 1])}
        self.skipped += int(total[self.width + 2])
        shown_counts = dict(zip(self.counted, map(int, total[self.width + 3 :]), strict=True))
        rows_per_s = (total[0] - self.rows_before) / self.stopwatch.lap()
        shown = {**values, "lr": self.lr, "rows_per_s": rows_per_s, **loop.speed(rows_per_s), **loop.train.reading()}
        shown |= self.skipped_values(SKIPPED, total[self.width + 2]) | shown_counts
        loop.report(Measured("train", step, step / loop.steps_per_epoch, self.stopwatch.total(), shown))
        self.rows_before = 0.0
        self.clock.done(ticket, values)

    def poll(self, ticket: Poll) -> None:
        """Agree on requests to stop, the budget, the time that is left, the pace and the unreadable rows of each epoch.

        DivergedError when too many updates were skipped, DataError when too many rows cannot be read.
        """
        loop, program, step = self.loop, self.program, ticket.step
        loop.beat("log", step)
        self._refuse_divergence(step)
        now = time.perf_counter()
        step_s = (now - self.polled_at) / self.steps_since_poll if self.steps_since_poll else math.inf
        here = {
            STOP_REQUESTS: loop.stop_requested() or program.leased.told_to_stop(),
            OVER_BUDGET: loop.over_budget(),
            STEP_SECONDS: step_s,
            SPARE_SECONDS: self._spare_s(),
            EVALUATION_SECONDS: self._evaluation_s(step_s),
        }
        self.polled_at, self.steps_since_poll = now, 0
        local = torch.tensor([1.0, *here.values(), *self.unreadable.here()], dtype=torch.float64)
        ranks, *sums = loop.world.reduce(local).tolist()
        self.unreadable.judge(sums[len(here) :])
        agreed = dict(zip(here, sums, strict=False))
        means = {key: agreed[key] / ranks for key in (STEP_SECONDS, EVALUATION_SECONDS)}
        self.clock.done(ticket, agreed | means)

    def _spare_s(self) -> float:
        """Until a save has to begin, as rank 0 knows it, which hears of the whole save."""
        loop = self.loop
        return 0.0 if loop.world.rank else loop.time_limit.spare_s(loop.saver.mirror_s if loop.saver else 0.0)

    def _evaluation_s(self, step_s: float) -> float:
        """How long an evaluation takes. Before the first one: a batch of it no longer than a step."""
        guess = self.loop.evaluation.batches * step_s if math.isfinite(step_s) else 0.0
        return self.evaluation_s or guess

    def evaluate(self, ticket: Evaluate) -> None:
        """Evaluate and report; the clock hears of it first, as it decides whether this is the best so far."""
        loop, step = self.loop, ticket.step
        self._refuse_divergence(step)
        with self.stopwatch.paused():
            started = time.perf_counter()
            self.evaluated = evaluate(loop, step)
            self.evaluation_s = max(self.evaluation_s, time.perf_counter() - started)
        self.evaluated_at = step
        self.clock.done(ticket, self.evaluated)
        is_best = self.clock.best is not None and self.clock.best[1] == step
        seconds = self.stopwatch.total()
        loop.report(Measured("eval", step, step / loop.steps_per_epoch, seconds, self.evaluated, is_best))

    def save(self, ticket: Save) -> None:
        """Save, with the open window. Training goes on once the state is copied; whoever writes it reports it."""
        loop, step = self.loop, ticket.step
        self._refuse_divergence(step)
        with self.stopwatch.paused():
            loop.beat("save", step)
            if loop.saver is not None:
                loop.saver.ready()
            started = time.perf_counter()
            if loop.guard is not None:
                loop.guard.compare_state()
            self.program.sync()
            carried = self._close_window()
            self.window = Window(carried)
            layer = loop.saver.layer(ticket.whole) if loop.saver is not None else None
            if layer is not None and self.program.tables is not None:
                self.program.tables.keep_changes(layer)
            state = self.program.state()
            best = self.clock.best
            evaluated_here = self.evaluated_at == step
            is_best = best is not None and evaluated_here and best[1] == step
            if loop.saver is not None:
                scalars = {
                    **loop.scalars,
                    "program": deepcopy(state.scalars),
                    "clock": self.clock.state(),
                    "window": carried,
                    "updated": self.updated,
                    "skipped": self.skipped,
                    "clean": loop.guard.clean if loop.guard else None,
                    "recent": [asdict(measured) for measured in loop.recent],
                }
                value = self.evaluated.get(self.clock.objective) if evaluated_here else None
                before = time.perf_counter() - started

                def told(path: str, seconds: float, held: float) -> None:
                    loop.time_limit.saved(before + seconds)
                    loop.see(Saved(step, path, is_best, before + seconds, before + held))

                loop.saver.save(step, state, scalars, value, told, self._compare_replicas)
            else:
                self._compare_replicas()
        self.clock.done(ticket, {})

    def stop(self, ticket: Stop) -> None:
        """Wait for what is under way. DivergedError when too many updates were skipped, or none was ever made."""
        if self.loop.guard is not None:
            self.loop.guard.compare_state()
        if ticket.reason == "time_limit":
            self.loop.see(Note("info", self.loop.time_limit.stop()))
        if self.loop.saver is not None:
            self.loop.beat("save", ticket.step)
            self.loop.saver.finish()
        self.program.sync()
        total = self._close_window()
        self.unreadable.judge(self.loop.world.reduce(torch.tensor([0.0, *self.unreadable.here()]).double()).tolist())
        self.skipped += int(total[self.width + 2])
        self._refuse_divergence(ticket.step)
        at_the_end = ticket.step and ticket.reason in ("finished", "early_stop")
        if at_the_end and not self.updated:
            raise DivergedError(
                f"gradients overflowed in each of the {ticket.step} steps, which halved precision.loss_scale every "
                "time, and no update was made; set a smaller precision.loss_scale, train longer or use precision=bf16"
            )

    def _refuse_divergence(self, step: int, total: list[float] | None = None) -> None:
        """DivergedError when too many updates were skipped. `total`: of the window, where it is known already."""
        loop, skipped = self.loop, self.program.skipped()
        if skipped > loop.skip_nonfinite:
            raise diverged(loop, step, skipped, (total or self.window.total(loop.world, self.width))[: self.width])

    def _compare_replicas(self) -> None:
        if self.loop.compares_replicas and (warning := self.program.check_replicas()):
            self.loop.see(Note("warning", warning))

    def _close_window(self) -> list[float]:
        """The window's sums over ranks, with what the program had not yet reported. Waits for the device."""
        _add_rest(self.loop, self.window)
        for epoch, counted_before in self.leased_skipped.items():
            self.leased_skipped[epoch] = self.program.leased.unread("train", epoch)
            self.window.skip(self.leased_skipped[epoch] - counted_before)
        self.leased_skipped = dict(list(self.leased_skipped.items())[-2:])  # nothing comes in for earlier epochs
        counts = self.program.counts()
        self.counted = list(counts)
        self.window.count(counts)
        total = self.window.total(self.loop.world, self.width)
        self.updated = self.updated or total[self.width + 1] > 0
        return total


def _add_rest(loop: Loop, window: Window) -> None:
    """Add to the window the steps that the program has not yet reported."""
    rest = loop.program.leased.rest()
    if rest is not None:
        window.add(rest)
    _record_consumed(loop)


def _record_consumed(loop: Loop) -> None:
    for step, ids in loop.program.leased.consumed():  # asked in any case: the program keeps them until then
        if loop.record is not None:
            loop.record(step, ids)


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")
