"""The life of one rank that trains: assemble, resume, run, report. Every launcher starts ranks with `work`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from dtf.api.helper_roles import RoleContext
from dtf.api.observer import Probes
from dtf.api.precision import set_switches
from dtf.api.recipe import Dataset
from dtf.api.registry import name_of
from dtf.checkpoint.saves import Saves
from dtf.config.settings import Settings
from dtf.core.errors import BudgetError, ConfigError, OutOfTime, PeerError, Preempted
from dtf.core.run_record import longest_save_s
from dtf.core.types import Ended, Event, Memory, Note, Place, Started, Stepped, Stop
from dtf.distributed.world import World
from dtf.engine.assemble import JoinedRank, TaskInputs, TrainingSetup, assemble, join, prepare_task
from dtf.engine.clock import PlannedClock
from dtf.engine.dry_run import watched
from dtf.engine.guarded_steps import guarded_steps
from dtf.engine.loop import RECENT, Loop, fit
from dtf.engine.mixed_rows import cut_row
from dtf.engine.rank import Rank, peer_is_gone, run_rank
from dtf.engine.resume import Resumed, hyperparameters, identity, resume
from dtf.engine.row_notes import note_left_out, note_skipped
from dtf.engine.saving import Saving, open_saves
from dtf.engine.summary import startup_table
from dtf.host import heartbeat
from dtf.host.allocator import huge_pages, keep_freed_memory
from dtf.model.author_errors import name_author_errors
from dtf.model.memory import MemoryMeter
from dtf.model.perturb import perturb
from dtf.runs import budget
from dtf.runs.record import Record


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """Train as one rank. An entry, see `rank_process.Entry`."""
    return run_rank(_watched_train, config, folder, run_id, place, send)


def _watched_train(rank: Rank) -> None:
    with watched(rank) as (rank, enter):
        _train(rank, enter)


def _train(rank: Rank, enter: Callable[[str], None]) -> None:
    """One rank's life. Collective over the ranks of its role. `enter(part)`: called where parts of the start begin."""
    marks = {"started": monotonic()}
    meter = _set_up_process(rank)
    joined = join(rank)
    marks["met"] = monotonic()
    enter("data")
    with name_author_errors():
        inputs = prepare_task(joined)
    if not joined.trains:
        enter("model")  # the strategy builds one and tries it
        _run_helper(joined, inputs, marks | {"built": monotonic()})
        return
    enter("model")
    with name_author_errors():
        setup = assemble(joined, inputs)
    enter("resume")
    marks["built"] = monotonic()
    resumed = resume(setup)
    marks["loaded"] = monotonic()
    clock = PlannedClock(setup.plan, inputs.epochs, rank.settings.lr, resumed.clock)
    saving = open_saves(setup)
    planned = _report_start(setup, resumed, saving)
    stop, metrics, guarded = _run(setup, resumed, clock, saving.saves, marks)
    _report_end(setup, stop, metrics | _best(clock), meter, planned, guarded)
    setup.program.leased.end(stop.reason)
    joined.world.leave()
    _refuse_early_end(setup, resumed, stop)


def _set_up_process(rank: Rank) -> MemoryMeter:
    """Threads, numerics and the device of this process; the meter counts from here on."""
    place = rank.place
    torch.set_num_threads(place.threads)
    set_switches(rank.settings.precision)
    kind = place.device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(place.device)
    return MemoryMeter(kind)


def _run_helper(joined: JoinedRank, inputs: TaskInputs, marks: dict[str, float]) -> None:
    """What a rank does whose role does not run the engine: the strategy says. `marks`: see `Stepped`."""
    rank = joined.rank

    def say(text: str) -> None:
        rank.send(Note("info", text))

    context = RoleContext(
        rank.place,
        inputs.facts,
        inputs.splits.loader,
        _both(rank.beat, _first_step(rank, marks)) if rank.place.retry else rank.beat,
        rank.stop_requested,
        say,
        rank.folder,
        rank.settings.run.dir,
    )
    rank.settings.strategy.helper_roles.run(inputs.task, context)


def _report_start(setup: TrainingSetup, resumed: Resumed, saving: Saving) -> list[Memory]:
    """Report what is about to run; returns the planned memory of each rank, on rank 0. Collective."""
    joined, inputs, program, plan = setup.joined, setup.inputs, setup.program, setup.plan
    rank, world, splits = joined.rank, joined.world, inputs.splits
    planned = [Memory(*needs) for needs in world.gather(saving.needs or ()) or () if needs]
    rank.time_limit.agree(world, bool(plan.save_every), longest_save_s(rank.folder))
    if world.rank == 0:
        inputs.start.write(inputs.task.start_check)  # all ranks have passed it: their needs are here
    table = startup_table(
        rank.settings,
        rank.config,
        rank.folder,
        inputs.parameters,
        program,
        world,
        plan,
        planned,
        len(splits.train),
        len(splits.eval),
    )
    table |= cut_row(inputs.mixed, rank.settings.step, program.micro_batch_rows)
    if inputs.turns is not None:
        table |= inputs.turns.row(planned)
    table |= saving.row | rank.time_limit.row() | setup.flops.row()
    table |= _best_possible(splits.eval, world)
    table["allocator"] = f"{keep_freed_memory()}; {huge_pages()}"
    if inputs.memory_format:
        table["memory format"] = inputs.memory_format
    table |= inputs.parts
    if inputs.compiled:
        table["compile"] = inputs.compiled
    if inputs.weights and inputs.weights_fit:
        digest = inputs.weights_digest[:19]
        table["weights"] = f"{inputs.weights.about}, {digest}: {inputs.weights_fit.text()}"
    joined.see(Started(resumed.step, plan.total, inputs.epochs.batches, table, rank.place.attempt, resumed.recent))
    if world.rank == 0 and not rank.place.attempt and (note := note_left_out([splits.train, splits.eval], rank.folder)):
        joined.see(note)
    return planned


def _run(
    setup: TrainingSetup, resumed: Resumed, clock: PlannedClock, saves: Saves, marks: dict[str, float]
) -> tuple[Stop, dict[str, float], int]:
    """Follow the clock to its end; returns that, the last evaluation and how many steps were guarded. Collective.

    `marks`: see `Stepped`.
    """
    joined, program = setup.joined, setup.program
    rank, world, recipe = joined.rank, joined.world, joined.rank.settings.recipe
    options = rank.settings.train
    record = None
    if options.record:
        watched = program.watch_outputs() if not resumed.step else []
        record = Record(rank.folder, world.rank, world.size, resumed.step, watched, program.shard is not None)
    _perturb(setup, resumed)
    probes = _probes(rank.settings, rank.place, rank.folder, rank.send)
    loop = Loop(
        program=program,
        clock=clock,
        train=setup.train,
        evaluation=setup.evaluation,
        evaluation_rows=len(setup.inputs.splits.eval),
        recipe=recipe,
        world=world,
        saver=saves,
        see=joined.see,
        scalars=identity(setup) | {"course": hyperparameters(setup), "classes": list(recipe.class_names())},
        steps_per_epoch=setup.inputs.epochs.batches,
        skip_nonfinite=options.skip_nonfinite,
        stop_requested=rank.stop_requested,
        over_budget=lambda: world.rank == 0 and budget.is_spent(rank.folder),
        time_limit=rank.time_limit,
        beat=_beat(setup, resumed, probes, marks),
        record=record.write if record else None,
        compares_replicas=record is None,  # who reads a record compares all of it, and tells more
        carried=resumed.carried,
        updated=resumed.updated,
        skipped=resumed.skipped,
        recent=deque(resumed.recent, maxlen=RECENT),
        averages=bool(rank.settings.step.ema),
        speed=setup.flops.values,
        guard=guarded_steps(
            program, options.guard_every, resumed.clean, saves, lambda text: joined.see(Note("warning", text))
        ),
    )
    try:
        stop, metrics = fit(loop)
        if record:
            record.close(program.replicated(), stop.step)
        return stop, metrics, loop.guard.count if loop.guard else 0
    except Exception as error:
        if saves.under_way and not isinstance(error, PeerError) and not peer_is_gone(error):
            heartbeat.beat("save", clock.state()["step"])
            saves.settle()  # all ranks are there, and the state of that step is good
        raise
    finally:
        probes.close()
        saves.close()
        for loader in (setup.train, setup.evaluation):
            loader.close()


def _perturb(setup: TrainingSetup, resumed: Resumed) -> None:
    """Let the parameters start one rounding away, where `train.perturb` says so. ConfigError where others hold them."""
    settings = setup.joined.rank.settings
    if not settings.train.perturb:
        return
    copies = setup.program.replicated()
    name = name_of("strategy", settings.strategy)
    if not copies:
        raise ConfigError(
            f"train.perturb={settings.train.perturb} changes the parameters that ranks hold, and with "
            f"strategy={name} servers hold them; use train.perturb=0, or another strategy"
        )
    for copy in () if resumed.step else copies:
        perturb(copy, settings.train.perturb)


def _report_end(
    setup: TrainingSetup,
    stop: Stop,
    metrics: dict[str, float],
    meter: MemoryMeter,
    planned: list[Memory],
    guarded: int,
) -> None:
    """Report how the run ended, with the measured peaks of memory. Collective."""
    splits, world = setup.inputs.splits, setup.joined.world
    if (splits.train.allowed or splits.eval.allowed) and (note := note_skipped(world, [splits.train, splits.eval])):
        setup.joined.see(note)
    peaks = world.gather(meter.peak())
    setup.joined.see(Ended(stop.step, stop.reason, metrics, meter.summary(planned, peaks) if peaks else {}, guarded))
    setup.joined.rank.beat("stop", stop.step)


def _refuse_early_end(setup: TrainingSetup, resumed: Resumed, stop: Stop) -> None:
    """Raise BudgetError or Preempted when the run ended before its plan, and say what is lost."""
    if stop.step == resumed.step:
        kept = "nothing is lost"
    elif setup.plan.save_every:
        kept = "the state is saved"
    else:
        kept = "checkpoint=off, so nothing was saved"
    if stop.reason == "budget":
        key = budget.key(setup.joined.rank.settings.budget)
        raise BudgetError(f"the budget is spent after step {stop.step}; {kept}; raise {key} and start again to go on")
    if stop.reason == "time_limit" and stop.step == resumed.step:
        raise OutOfTime(
            "the time limit of the allocation leaves no time for a step; nothing is lost; start again with more time"
        )
    if stop.reason == "time_limit":
        raise Preempted(
            f"the time limit of the allocation is near after step {stop.step}; {kept}; start again with the same "
            "run.dir to go on"
        )
    if stop.reason == "preempted":
        raise Preempted(f"asked to stop after step {stop.step}; {kept}; start again with the same run.dir to go on")


def _best(clock: PlannedClock) -> dict[str, float]:
    """The best evaluation of the run, if there was one, and its step."""
    return {f"best_{clock.objective}": clock.best[0], "best_step": float(clock.best[1])} if clock.best else {}


def _best_possible(data: Dataset, world: World) -> dict[str, str]:
    """For the start-up table, which rank 0 shows."""
    best = data.best_possible() if world.rank == 0 else {}
    return {"best possible": " ".join(f"{name}={value:.4f}" for name, value in best.items())} if best else {}


def _probes(settings: Settings, place: Place, folder: Path, send: Callable[[Event], None]) -> Probes:
    """The observers' probes, which run inside this rank."""
    probes = {
        name: observer.probe(place, folder, lambda text: send(Note("info", text)))
        for name, observer in settings.observer.items()
    }
    return Probes(
        {name: probe for name, probe in probes.items() if probe is not None}, lambda text: send(Note("warning", text))
    )


def _beat(
    setup: TrainingSetup, resumed: Resumed, probes: Probes, marks: dict[str, float]
) -> Callable[[str, int], None]:
    """What the loop calls in each phase. After a restart rank 0 reports its first step."""
    joined = setup.joined
    beat = _both(joined.rank.beat, probes.enter) if probes else joined.rank.beat
    if not joined.rank.place.attempt or joined.world.rank:
        return beat
    pending = [resumed.step]

    def report(phase: str, step: int) -> None:
        if pending and step > pending[0]:
            pending.clear()
            joined.see(Stepped(marks | {"stepped": monotonic()}))

    return _both(beat, report)


def _first_step(rank: Rank, marks: dict[str, float]) -> Callable[[str, int], None]:
    """What a rank that was started again alone calls in each phase: it reports its first step."""
    phases: list[str] = []

    def report(phase: str, step: int) -> None:
        if phase == "step" and not phases:
            phases.append(phase)
        elif phases == ["step"]:
            phases.append(phase)
            rank.send(Stepped(marks | {"stepped": monotonic()}))

    return report


def _both(first: Callable[[str, int], None], second: Callable[[str, int], None]) -> Callable[[str, int], None]:
    def beat(phase: str, step: int) -> None:
        first(phase, step)
        second(phase, step)

    return beat
