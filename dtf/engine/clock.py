"""What comes next in a run: the contract of clocks, and the clock of a fixed plan."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from dtf.api.lr import Schedule
from dtf.config.settings import Settings
from dtf.core.errors import ConfigError
from dtf.core.text import suggest
from dtf.core.types import Evaluate, Log, Poll, Save, Stop, Ticket, Train
from dtf.data.batches import Epochs
from dtf.engine.dry_run import LEAST_STEPS


class Clock(ABC):
    """Says what to do next. A fixed plan computes it; a coordinator grants it, and may withhold or grant again."""

    @abstractmethod
    def __next__(self) -> Ticket:
        """The next ticket; waits until there is one. The last is a Stop."""

    def __iter__(self) -> Iterator[Ticket]:
        return self

    @abstractmethod
    def ahead(self, count: int) -> list[Train]:
        """Up to `count` train tickets that are known to follow, for fetching their rows early.

        Never waits; may be empty, may be wrong.
        """

    @abstractmethod
    def done(self, ticket: Ticket, values: Mapping[str, float]) -> None:
        """The ticket is finished. `values`: the metrics of a Log or Evaluate, the same on every rank; else empty."""

    @abstractmethod
    def state(self) -> dict:
        """JSON for a checkpoint; given back when the clock of the resuming run is made."""

    @property
    @abstractmethod
    def objective(self) -> str:
        """The metric of the run by which evaluations are ranked."""

    @property
    @abstractmethod
    def best(self) -> tuple[float, int] | None:
        """Best value of the objective so far and the step it was evaluated at."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The fixed plan of a run. `*_every` in steps; 0: never."""

    total: int
    log_every: int
    eval_every: int
    save_every: int
    delta_every: int = 0  # between these, of tables only the rows that changed
    save_best: bool = False
    patience: int = 0
    objective: tuple[str, str] = ("loss", "min")
    until: int | None = None  # stop here, short of `total`

    @property
    def end(self) -> int:
        """The last step of this plan."""
        return self.total if self.until is None else min(self.total, self.until)


@dataclass(slots=True)
class Progress:
    """Where a planned run stands; all of it is in the checkpoint."""

    step: int = 0
    best: float | None = None
    best_step: int = 0
    since_best: int = 0
    fallen: float = 1.0  # factor of the learning rate after evaluations without a new best


STOP_REQUESTS, OVER_BUDGET, STEP_SECONDS = "stop_requests", "over_budget", "step_seconds"
SPARE_SECONDS, EVALUATION_SECONDS = "spare_seconds", "evaluation_seconds"
"""Keys of a Poll's values: how many ranks were asked to stop, how many know that the budget is spent, and the mean time
of a step since the last Poll, infinite where there was none. Then the time until a save has to begin, infinite without
a limit, and how long an evaluation takes."""

POLL_S = 2.0
"""Seconds between two polls of all ranks: short beside the time that schedulers give to stop, and no cost per step."""

POLL_GROWTH = 4
"""How many times as many steps there may be before the next poll as before this one. The first steps of servers take no
time: they are open at once, and trainers have still to make them.
"""


class PlannedClock(Clock):
    """The clock of collective strategies: a pure function of the plan and of the metrics that all ranks agree on.

    Every rank has one, and they need not communicate.
    """

    def __init__(self, plan: Plan, epochs: Epochs, schedule: Schedule, state: Mapping | None = None) -> None:
        self._plan, self._epochs, self._schedule = plan, epochs, schedule
        self._at = Progress(**state) if state else Progress()
        self._stop_reason, self._poll_at, self._polled = "", 0, self._at.step
        self._known: dict[int, Train] = {}  # tickets that were made ahead
        self._tickets = self._all_tickets()

    def __next__(self) -> Ticket:
        return next(self._tickets)

    def ahead(self, count: int) -> list[Train]:
        first = self._at.step
        return [self._train(step) for step in range(first, min(first + count, self._plan.end))]

    def done(self, ticket: Ticket, values: Mapping[str, float]) -> None:
        match ticket:
            case Train():
                self._at.step = ticket.step + 1
                self._known.pop(ticket.step, None)
            case Poll(step):
                steps = min(int(POLL_S / max(values[STEP_SECONDS], 1e-6)), POLL_GROWTH * (step - self._polled))
                self._polled, self._poll_at = step, step + max(1, steps)
                self._stop_reason = self._reason_to_stop(step, values)
            case Evaluate(step):
                name, mode = self._plan.objective
                if name not in values:
                    raise ConfigError(f"the objective {name} is no metric of the recipe; {suggest(name, values)}")
                value = values[name]
                best = self._at.best
                if math.isfinite(value) and (best is None or (value > best if mode == "max" else value < best)):
                    self._at.best, self._at.best_step, self._at.since_best = value, step, 0
                else:
                    self._at.since_best += 1
                    self._at.fallen *= self._schedule.fall(self._at.since_best)
                    self._known.clear()  # their learning rates

    def state(self) -> dict:
        return asdict(self._at)

    @property
    def objective(self) -> str:
        return self._plan.objective[0]

    @property
    def best(self) -> tuple[float, int] | None:
        return None if self._at.best is None else (self._at.best, self._at.best_step)

    def _reason_to_stop(self, step: int, values: Mapping[str, float]) -> str:
        if values[SPARE_SECONDS] < self._until_next_poll(step, values):
            return "time_limit"
        return "preempted" if values[STOP_REQUESTS] else "budget" if values[OVER_BUDGET] else ""

    def _until_next_poll(self, step: int, values: Mapping[str, float]) -> float:
        """Seconds until the run can stop next, once it goes on after the Poll of `step`."""
        plan, pace = self._plan, values[STEP_SECONDS]
        if math.isinf(pace):  # no step was made that could be lost
            return 0.0
        polls = [self._poll_at, plan.end]
        polls += [
            step - step % every + every for every in (plan.eval_every, plan.save_every, plan.delta_every) if every
        ]
        evaluations = sum(_due(at, plan.eval_every) for at in {step, min(polls)})
        return (min(polls) - step) * pace + evaluations * values[EVALUATION_SECONDS]

    def _train(self, step: int) -> Train:
        ticket = self._known.get(step)
        if ticket is None:
            epoch, index = divmod(step, self._epochs.batches)
            lr = self._schedule(step, self._plan.total) * self._at.fallen
            ticket = self._known[step] = Train(step, epoch, index, self._epochs.size(index), lr)
        return ticket

    def _all_tickets(self) -> Iterator[Ticket]:
        """The tickets in order, the same on every rank, as `values` given to `done` are the same bits on all."""
        plan, at = self._plan, self._at
        # it was saved when it stopped early
        if plan.patience and at.since_best >= plan.patience and at.step < plan.end:
            yield Stop(at.step, "early_stop")
            return
        if at.step < plan.end:
            yield Poll(at.step)
            if self._stop_reason:  # while it started: its state is the checkpoint it has loaded, if any
                yield Stop(at.step, self._stop_reason)
                return
        while at.step < plan.end:
            yield self._train(at.step)
            # stopping short of the whole leaves no trace but a checkpoint
            step, last, whole = at.step, at.step == plan.end, at.step == plan.total
            # before what keeps or judges this step: an evaluation may end the run
            saved = _due(step, plan.save_every) or last
            due = saved or _due(step, plan.delta_every)
            judged = _due(step, plan.eval_every) or due
            if step >= self._poll_at or judged:
                yield Poll(step)
            if _due(step, plan.log_every) or (whole and plan.log_every):
                yield Log(step)
            evaluated = bool(_due(step, plan.eval_every) or (whole and plan.eval_every))
            if evaluated:
                yield Evaluate(step)
            improved = evaluated and at.best_step == step and at.best is not None
            stopping = self._stop_reason or (
                "early_stop" if plan.patience and evaluated and at.since_best >= plan.patience else ""
            )
            if plan.save_every and (due or stopping or (improved and plan.save_best)):
                yield Save(step, whole=saved or not plan.delta_every)
            if stopping and not last:
                yield Stop(step, stopping)
                return
        yield Stop(at.step, "finished" if at.step >= plan.total else "stopped")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def plan_of(settings: Settings, batches: int) -> Plan:
    """The plan of the run in steps. `batches`: of an epoch; an interval of `None` means each end of an epoch."""
    options = settings.train
    total = options.steps if options.steps is not None else max(1, round((options.epochs or 0) * batches))
    if options.dry_run:
        total = max(total, LEAST_STEPS)
    return Plan(
        total=total,
        log_every=options.log_every,
        eval_every=batches if options.eval_every is None else options.eval_every,
        save_every=batches if settings.checkpoint.every_steps is None else settings.checkpoint.every_steps,
        delta_every=settings.checkpoint.delta_every or 0,
        save_best=settings.checkpoint.keep_best > 0,
        patience=options.early_stop,
        objective=settings.objective,
        until=options.until,
    )
