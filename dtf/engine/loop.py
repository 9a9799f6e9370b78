"""The loop: steps a program when the clock says so, measures, evaluates, saves.

Names no strategy and imports contracts only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dtf.api.recipe import Peers, Recipe
from dtf.api.strategy import Program
from dtf.core.errors import DataError, DivergedError, DtfError
from dtf.core.types import (
    Batch,
    Batches,
    Evaluate,
    Event,
    Log,
    Measured,
    Poll,
    Save,
    Saved,
    State,
    StepOutput,
    Stop,
    Train,
)
from dtf.engine.clock import OVER_BUDGET, STEP_SECONDS, STOP_REQUESTS, Clock

RECENT = 256
"""Measurements that a checkpoint repeats: more than are on their way to the observers at any time."""


class Saver(Protocol):
    def save(self, step: int, state: State, scalars: dict[str, Any], value: float | None) -> str:
        """Collective. `value`: the objective evaluated at this very step, if it was."""
        ...


class Window:
    """Sums since the last report, on the device; one small reduction closes it."""

    def __init__(self, carried: list[float] | None = None) -> None:
        self._sums: Tensor | None = None
        self._carried = carried  # totals from before a checkpoint, the same on every rank

    def add(self, output: StepOutput) -> None:
        """No synchronisation. The gradient norm's two numbers go to the end of the metric sums."""
        sums = torch.cat([output.sums, output.grad_norm.to(output.sums)])
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    def total(self, world: Peers, width: int) -> list[float]:
        """Sums over ranks, [metric sums (M), sum of norms, their number]; waits for the device. Collective."""
        mine = torch.zeros(width + 2, dtype=torch.float64)
        if self._sums is not None:
            mine += self._sums.cpu()
        total = world.reduce(mine)
        if self._carried is not None:
            total += torch.tensor(self._carried, dtype=torch.float64)
        return total.tolist()


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
    world: Peers
    saver: Saver | None
    see: Callable[[Event], None]
    scalars: dict[str, Any]  # what identifies the run in its checkpoints: seed, data, batch size
    steps_per_epoch: int
    skip_nonfinite: int = 0
    stop_requested: Callable[[], bool] = lambda: False
    over_budget: Callable[[], bool] = lambda: False
    beat: Callable[[str, int], None] = lambda phase, step: None
    record: Callable[[int, np.ndarray], None] | None = None
    carried: list[float] | None = None  # the window of the checkpoint resumed from
    updated: bool = False  # whether an update was made before it
    averages: bool = False  # evaluate the averages of the weights
    recent: deque[Measured] = field(default_factory=lambda: deque(maxlen=RECENT))

    def report(self, measured: Measured) -> None:
        """To the observers, and into the checkpoints to come: a launcher killed just after a save may not have read it
        yet.
        """
        self.recent.append(measured)
        self.see(measured)


def fit(loop: Loop) -> tuple[Stop, dict[str, float]]:
    """Follow the clock to its Stop; returns it with the last evaluation's values. Collective.

    Raises DivergedError on all ranks alike: before a save, when more updates were skipped than allowed; at the end,
    when a loss scale let none be made.
    """
    program, clock, train = loop.program, loop.clock, loop.train
    width = 1 + len(loop.recipe.train_metrics)
    window, seconds, updated = Window(loop.carried), _Stopwatch(), loop.updated
    ready: tuple[tuple[int, int], Batch | None] | None = None  # prepared one batch ahead, by (epoch, index)
    evaluated = next((measured.values for measured in reversed(loop.recent) if measured.split == "eval"), {})
    evaluated_at, lr, epoch = -1, 0.0, 0
    before = loop.carried[0] if loop.carried else 0.0  # rows in the window that were computed before this process
    polled, since_poll = time.perf_counter(), 0  # steps, whatever their numbers: a resumed run does not start at 0
    for ticket in clock:
        values: dict[str, float] = {}
        match ticket:
            case Train():
                key = (ticket.epoch, ticket.index)
                if ready is None or ready[0] != key:
                    loop.beat("fetch", ticket.step)
                    ready = key, program.prepare(train.get(*key))
                batch = ready[1]
                loop.beat("step", ticket.step)
                window.add(program.step(ticket, batch))
                if loop.record is not None and program.shard is not None and batch is not None:
                    loop.record(ticket.step, batch.ids)
                _record_consumed(loop)
                lr, since_poll, epoch = ticket.lr, since_poll + 1, ticket.epoch
                clock.done(ticket, values)
                coming = [(t.epoch, t.index) for t in clock.ahead(1 + train.prefetch)]
                if train.prefetch:
                    train.ahead(coming)
                ready = None
                if coming:
                    loop.beat("fetch", ticket.step + 1)
                    ready = coming[0], program.prepare(train.get(*coming[0]))
                continue
            case Log(step):
                loop.beat("log", step)
                if not clock.ahead(1):
                    program.sync()  # the last line tells of all steps
                _take_rest(loop, window)
                total = window.total(loop.world, width)
                updated = updated or total[-1] > 0
                _refuse_divergence(loop, step)
                if not total[0]:  # no step has told of a row since the last line: the next one has it all
                    clock.done(ticket, values)
                    continue
                window = Window()
                values = {**loop.recipe.summarise(total[:width]), "grad_norm": _ratio(total[width], total[width + 1])}
                shown = {**values, "lr": lr, "rows_per_s": (total[0] - before) / seconds.lap(), **train.reading()}
                loop.report(Measured("train", step, step / loop.steps_per_epoch, seconds.total(), shown))
                before = 0.0
            case Poll(step):
                loop.beat("log", step)
                _refuse_divergence(loop, step)
                now = time.perf_counter()
                took = (now - polled) / since_poll if since_poll else math.inf
                bad_rows = train.bad(epoch) + program.unread("train", epoch)
                told = [loop.stop_requested() or program.told_to_stop(), loop.over_budget(), 1.0, took, bad_rows]
                polled, since_poll = now, 0
                stop, over, ranks, pace, bad = loop.world.reduce(torch.tensor(told, dtype=torch.float64)).tolist()
                _refuse_bad(bad, train.allowed, "training")
                values = {STOP_REQUESTS: stop, OVER_BUDGET: over, STEP_SECONDS: pace / ranks}
            case Evaluate(step):
                _refuse_divergence(loop, step)
                with seconds.paused():
                    values = evaluated = evaluate(loop, step)
                evaluated_at = step
                clock.done(ticket, values)
                new = clock.best is not None and clock.best[1] == step
                loop.report(Measured("eval", step, step / loop.steps_per_epoch, seconds.total(), values, new))
                continue
            case Save(step):
                _refuse_divergence(loop, step)
                with seconds.paused():
                    loop.beat("save", step)
                    started = time.perf_counter()
                    program.sync()
                    _take_rest(loop, window)
                    carried = window.total(loop.world, width)
                    window, updated = Window(carried), updated or carried[-1] > 0
                    state = program.state()
                    best = clock.best
                    new = best is not None and evaluated_at == step and best[1] == step
                    if loop.saver is not None:
                        scalars = {
                            **loop.scalars,
                            "program": state.scalars,
                            "clock": clock.state(),
                            "window": carried,
                            "updated": updated,
                        }
                        scalars["recent"] = [asdict(measured) for measured in loop.recent]
                        value = evaluated.get(clock.objective) if evaluated_at == step else None
                        path = loop.saver.save(step, state, scalars, value)
                        loop.see(Saved(step, path, new, time.perf_counter() - started))
            case Stop():
                program.sync()
                _take_rest(loop, window)
                _refuse_divergence(loop, ticket.step)
                if (
                    ticket.step
                    and ticket.reason in ("finished", "early_stop")
                    and not updated
                    and not window.total(loop.world, width)[-1]
                ):
                    raise DivergedError(
                        f"gradients overflowed in each of the {ticket.step} steps, which halved precision.loss_scale "
                        "every time, and no update was made; "
                        "set a smaller precision.loss_scale, train longer or use precision=bf16"
                    )
                return ticket, evaluated
        clock.done(ticket, values)
    raise AssertionError("a clock ends with a Stop")


@torch.no_grad()
def evaluate(loop: Loop, step: int) -> dict[str, float]:
    """Metrics over the whole evaluation split, each row once. Collective."""
    loop.program.sync()
    if loop.averages:
        loop.program.swap_ema(True)
    total = torch.zeros(1 + len(loop.recipe.train_metrics), dtype=torch.float64)
    sums, judge = None, loop.recipe.evaluator(loop.evaluation_rows)
    last = loop.evaluation.batches
    for index in range(last):
        loop.beat("evaluate", step)
        loop.evaluation.ahead([(0, i) for i in range(index, min(index + 1 + loop.evaluation.prefetch, last))])
        batch = loop.program.prepare(loop.evaluation.get(0, index))
        more, rows = loop.program.eval_step(batch)
        sums = more if sums is None else sums + more
        if judge is not None and rows is not None:
            judge.add(rows)
    rest = loop.program.eval_rest()
    if rest is not None:
        total += rest.sums.cpu()
        if judge is not None and rest.rows is not None:
            judge.add(rest.rows)
    if sums is not None:
        total += sums.cpu()
    if loop.averages:
        loop.program.swap_ema(False)
    values = counted(
        loop.world,
        total,
        loop.recipe,
        loop.evaluation_rows,
        loop.evaluation.bad(0) + loop.program.unread("eval", 0),
        loop.evaluation.allowed,
    )
    return values | (judge.values(loop.world) if judge is not None else {})


def counted(world: Peers, sums: Tensor, recipe: Recipe, rows: int, bad: int, allowed: int) -> dict[str, float]:
    """Metric values from this rank's sums (M,), once it is sure that the ranks together saw each of the rows once.
    Collective.

    `bad`: rows that this rank could not read; `allowed`: how many all ranks may.
    """
    *values, unread = world.reduce(torch.cat([sums.cpu().double(), torch.tensor([bad], dtype=torch.float64)])).tolist()
    _refuse_bad(unread, allowed, "evaluation")
    if values[0] + unread != rows:
        raise DtfError(
            f"evaluation counted {values[0]:g} of {rows - unread:g} rows; a row was lost or counted twice; please "
            "report this"
        )
    return recipe.summarise(values)


def _take_rest(loop: Loop, window: Window) -> None:
    """Add to the window what the program has not yet told."""
    rest = loop.program.rest()
    if rest is not None:
        window.add(rest)
    _record_consumed(loop)


def _record_consumed(loop: Loop) -> None:
    for step, ids in loop.program.consumed():  # asked in any case: who keeps them until then keeps them no longer
        if loop.record is not None:
            loop.record(step, ids)


def _refuse_divergence(loop: Loop, step: int) -> None:
    skipped = loop.program.skipped()
    if skipped > loop.skip_nonfinite:
        raise DivergedError(
            f"loss or gradient was not finite in {skipped} of the first {step} steps, "
            f"train.skip_nonfinite={loop.skip_nonfinite} allows no more; "
            "no such update was made; lower lr.peak, set step.clip_norm or use a wider precision"
        )


def _refuse_bad(bad: float, allowed: int, split: str) -> None:
    """Raise DataError on all ranks alike when more rows are unreadable than allowed."""
    if bad > allowed:
        raise DataError(
            f"{bad:g} {split} rows cannot be read, recipe.data.bad_share allows {allowed}; the logs of the ranks name "
            "them; repair the data"
        )


def _ratio(total: float, count: float) -> float:
    return total / count if count else float("nan")


class _Stopwatch:
    """Wall time, total and between reports; pauses for what is not training."""

    def __init__(self) -> None:
        self._start = self._lap = time.perf_counter()

    def total(self) -> float:
        return time.perf_counter() - self._start

    def lap(self) -> float:
        now = time.perf_counter()
        passed, self._lap = now - self._lap, now
        return max(passed, 1e-9)

    def paused(self) -> _Pause:
        return _Pause(self)

    def shift(self, seconds: float) -> None:
        self._lap += seconds


class _Pause:
    def __init__(self, watch: _Stopwatch) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._watch.shift(time.perf_counter() - self._started)
