"""The life of one rank: typed settings from the resolved config, a world, a program, the loop.

The other end of every launcher.
"""

from __future__ import annotations

import json
import platform
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtf.api.name_patterns import check_used
from dtf.api.observer import Probes
from dtf.api.precision import set_switches
from dtf.api.recipe import Dataset, Recipe
from dtf.api.strategy import Program, RendezvousContext, RoleContext
from dtf.api.task import Task
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.config.settings import Settings
from dtf.core.consistency import check_consistent, digest, keys_of_all_commands
from dtf.core.errors import BudgetError, ConfigError, DataError, Preempted
from dtf.core.files import flat
from dtf.core.types import Ended, Event, Measured, Memory, Note, Place, Saved, Started
from dtf.core.version import __version__
from dtf.data.splits import Splits
from dtf.distributed.world import World
from dtf.engine.clock import Plan, PlannedClock
from dtf.engine.loop import RECENT, Loop, fit
from dtf.engine.rank import Rank, nobody, run_rank
from dtf.engine.summary import startup_table
from dtf.model.ema import with_ema
from dtf.model.init import build_on_meta
from dtf.model.memory import MemoryMeter
from dtf.model.pretrained import WeightMatch, Weights, match_weights, open_weights
from dtf.runs import budget
from dtf.runs.record import Record
from dtf.runs.run_folder import redact

RECENT_BYTES = 65536
"""Of the measurements sent again: as much as a pipe holds, and half of what a message may."""


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """Train as one rank. An entry, see `rank_process.Entry`."""
    return run_rank(_train, config, folder, run_id, place, send)


def _train(rank: Rank) -> None:
    settings, config, folder, run_id, place = rank.settings, rank.config, rank.folder, rank.run_id, rank.place
    send, beat, stop_requested = rank.send, rank.beat, rank.stop_requested
    recipe, strategy, options = settings.recipe, settings.strategy, settings.train
    torch.set_num_threads(place.threads)
    set_switches(settings.precision)
    kind = place.device.partition(":")[0]
    if kind == "cuda":
        torch.cuda.set_device(place.device)
    meter = MemoryMeter(kind)
    leading, count = next(iter(strategy.roles(place.slots).items()))
    leads = place.role == leading
    alone = strategy.external_process() is not None
    # Who composed a config of its own is told in which key it differs; ranks of one launching process have the same
    # one.
    config_facts = (
        {"config": redact(keys_of_all_commands(config))} if alone else {"digest of the config": digest(config)}
    )
    if leads:

        def wait() -> None:
            beat("start", 0)
            if stop_requested():
                raise Preempted(
                    "asked to stop before the others were there; nothing is lost; start again with the same command"
                )

        standing = strategy.rendezvous(
            RendezvousContext(place, folder, run_id, config_facts, wait, lambda text: send(Note("info", text)))
        )
        place, folder, run_id = standing.place, standing.folder, standing.run_id
    world = (
        World.join(replace(place, size=count), strategy.communication(kind)) if leads else World(replace(place, size=1))
    )
    rows = Splits(settings.recipe, settings.sampler, settings.step.batch_size, settings.seed, pin=kind == "cuda")
    facts = {"versions": _versions(strategy.communication(kind) == "nccl"), **config_facts}
    facts |= {"training data": rows.fingerprint, "evaluation data": rows.eval.fingerprint()}
    batch = settings.step.batch_size
    if leads:
        world.facts, world.folder = facts, folder
        check_consistent(world, facts | {"finds the run folder": _finds(folder, run_id)})
    epochs = rows.cut()
    model = build_on_meta(recipe)
    parameters = dict(model.named_parameters())
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    check_used("recipe.model.freeze", recipe.fine_tuning.freeze, parameters)
    check_used("optimizer.lr_factors", settings.optimizer.lr_factors, parameters, frozen)
    check_used("optimizer.weight_decays", settings.optimizer.weight_decays, parameters, frozen)
    weights, weights_digest, found = _weights(recipe, model, world)
    optimizer = with_ema(settings.optimizer, settings.step.ema)
    task = Task(
        recipe, optimizer, settings.precision, settings.step, settings.seed, rows.sample, weights, settings.sparse
    )
    if not leads:
        strategy.run_helper(
            task,
            RoleContext(place, facts, rows.loader, beat, stop_requested, lambda text: send(Note("info", text)), folder),
        )
        return
    program = strategy.setup(task, world)
    if recipe.pairs and settings.step.parts_pairs(program.micro_batch_rows):
        raise ConfigError(
            f"recipe={config['recipe']['name']} mixes pairs of rows, and micro-batches of {program.micro_batch_rows} "
            "rows, as strategy="
            f"{config['strategy']['name']} chooses them, part them; set step.micro_batch_rows to an even number"
        )
    loaders = [
        rows.loader("train", program.shard, program.micro_batch_rows),
        rows.loader("eval", program.shard, -(-batch // program.shares)),
    ]
    plan = _plan(settings, epochs.batches)
    identity = {
        "recipe": config["recipe"]["name"],
        "seed": settings.seed,
        "batch_size": batch,
        "data": rows.fingerprint,
        "sampler": config["sampler"],
        "optimizer": config["optimizer"]["name"],
        "objective": list(plan.objective),
        "recipe.model.weights": weights_digest,
        "recipe.model.freeze": recipe.fine_tuning.freeze,
        "averaged weights (step.ema)": bool(settings.step.ema),
        "sparse": config["sparse"]["name"] if recipe.tables() else "",
        **{f"sparse.{key}": config["sparse"][key] for key in (settings.sparse.bound if recipe.tables() else ())},
    }
    course = {
        group: config[group]
        for group in ("precision", "optimizer", "lr", "step", *(("sparse",) if recipe.tables() else ()))
    } | {"train": {"steps": plan.total}}  # may change on the way
    # 0 is another number under another strategy
    course["step"] = course["step"] | {"micro_batch_rows": program.micro_batch_rows}
    see = send if world.rank == 0 else _progress(send) if alone else nobody
    checkpointer = Checkpointer(
        folder / "checkpoints",
        settings.checkpoint,
        world,
        run_id,
        plan.objective,
        config["strategy"]["name"],
        note=lambda text: see(Note("warning", text)),
    )
    # The last global batch of an epoch may be a single row, which not every model can compute: better to know it now.
    program.warmup(
        program.prepare(loaders[0].get(0, epochs.batches - 1 if epochs.size(epochs.batches - 1) == 1 else 0))
    )
    state, carried, updated, recent = _resume(checkpointer, program, identity, course, place.attempt, see)
    clock = PlannedClock(plan, epochs, settings.lr, state)
    start = state["step"] if state else 0
    if start > plan.end:
        key = f"train.until={plan.until}" if plan.end < plan.total else f"a run of {plan.total} steps"
        raise ConfigError(
            f"{key} ends before step {start}, where the checkpoint is; train on, or go to another run.dir"
        )
    if state:
        checkpointer.retain()  # now that this run is known to go on from here
    planned = [Memory(*needs) for needs in world.gather(program.memory() or ()) or () if needs]
    see(
        Started(
            start,
            plan.total,
            epochs.batches,
            startup_table(
                settings, config, folder, model, program, world, plan, planned, len(rows.train), len(rows.eval)
            )
            | _ceiling(rows.eval, world)
            | ({"weights": f"{weights.about}, {weights_digest[:19]}: {found.text()}"} if weights and found else {}),
            place.attempt,
            recent,
        )
    )
    record = Record(folder, world.rank, start) if options.record else None
    probes = _probes(settings, place, folder, send)
    loop = Loop(
        program=program,
        clock=clock,
        train=loaders[0],
        evaluation=loaders[1],
        evaluation_rows=len(rows.eval),
        recipe=recipe,
        world=world,
        saver=checkpointer,
        see=see,
        scalars=identity | {"course": course, "classes": list(recipe.class_names())},
        steps_per_epoch=epochs.batches,
        skip_nonfinite=options.skip_nonfinite,
        stop_requested=stop_requested,
        over_budget=lambda: world.rank == 0 and budget.is_spent(folder),
        beat=_both(beat, probes.enter) if probes else beat,
        record=record.write if record else None,
        carried=carried,
        updated=updated,
        recent=deque(recent, maxlen=RECENT),
        averages=bool(settings.step.ema),
    )
    try:
        ended, evaluated = fit(loop)
        if record:
            record.close(program.replicated(), ended.step)
    finally:
        probes.close()
        for loader in loaders:
            loader.close()
    best = {f"best_{plan.objective[0]}": clock.best[0], "best_step": float(clock.best[1])} if clock.best else {}
    peaks = world.gather(meter.peak())
    see(Ended(ended.step, ended.reason, {**evaluated, **best}, meter.summary(planned, peaks) if peaks else {}))
    beat("stop", ended.step)
    program.end(ended.reason)
    world.leave()
    kept = (
        "nothing is lost"
        if ended.step == start
        else "the state is saved"
        if plan.save_every
        else "checkpoint.every_steps=0, so nothing was saved"
    )
    if ended.reason == "budget":
        raise BudgetError(
            f"the budget is spent after step {ended.step}; {kept}; raise {budget.key(settings.budget)} and start "
            "again to go on"
        )
    if ended.reason == "preempted":
        raise Preempted(f"asked to stop after step {ended.step}; {kept}; start again with the same run.dir to go on")


def _weights(recipe: Recipe, model: nn.Module, world: World) -> tuple[Weights | None, str, WeightMatch | None]:
    """The numbers to start from, if any, and their digest; the same on all hosts, else DataError on all ranks alike.

    Collective.
    """
    place, key = recipe.fine_tuning.weights, "recipe.model.weights"
    if not place:
        return None, "", None
    weights, found = match_weights(open_weights(place, key), recipe, model, key)
    digests = world.gather(weights.digest() if world.place.local_rank == 0 else "") or []  # once for each host
    other = next((rank for rank, digest in enumerate(digests) if digest not in ("", digests[0])), None)
    digest, other = world.broadcast([*digests[:1], other])
    if other is not None:
        raise DataError(f"{key}={place} is another file on rank {other} than on rank 0; copy one to all hosts")
    return weights, digest, found


def _ceiling(rows: Dataset, world: World) -> dict[str, str]:
    """For the start-up table, which rank 0 shows."""
    best = rows.best_possible() if world.rank == 0 else {}
    return {"best possible": " ".join(f"{name}={value:.4f}" for name, value in best.items())} if best else {}


def _versions(nccl_is_used: bool) -> dict[str, str]:
    """Of what this process has really loaded."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if nccl_is_used else ""  # type: ignore[attr-defined]
    return {"dtf": __version__, "python": platform.python_version(), "torch": torch.__version__, "nccl": nccl}


def _finds(folder: Path, run_id: str) -> bool:
    """Whether this rank sees the folder that the launching process made: on several hosts it has to be on shared
    storage.
    """
    try:
        return json.loads((folder / "run.json").read_text())["id"] == run_id
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _plan(settings: Settings, batches: int) -> Plan:
    """The course of the run in steps; `None` means each end of an epoch."""
    options, recipe = settings.train, settings.recipe
    objective = (
        (settings.run.objective, recipe.direction(settings.run.objective))
        if settings.run.objective
        else recipe.objective
    )
    total = options.steps if options.steps is not None else max(1, round((options.epochs or 0) * batches))
    return Plan(
        total=total,
        log_every=options.log_every,
        eval_every=batches if options.eval_every is None else options.eval_every,
        save_every=batches if settings.checkpoint.every_steps is None else settings.checkpoint.every_steps,
        save_best=settings.checkpoint.keep_best > 0,
        patience=options.early_stop,
        objective=objective,
        until=options.until,
    )


def _resume(
    checkpointer: Checkpointer,
    program: Program,
    identity: dict[str, Any],
    course: dict[str, Any],
    attempt: int,
    see: Callable[[Event], None],
) -> tuple[dict[str, Any] | None, list[float] | None, bool, tuple[Measured, ...]]:
    """Load the newest checkpoint, if there is one to go on from.

    Returns the clock's state, the open metric window, whether an update was ever made, and the last measurements.
    """
    path = checkpointer.find(attempt)
    if path is None:
        return None, None, False, ()
    source = checkpointer.load(path)
    for key, value in identity.items():
        if source.scalars.get(key) != value:
            raise ConfigError(
                f"checkpoint {path} was written with {key}={source.scalars.get(key)!r}, this run has {key}={value!r}; "
                "data position and "
                "numbers would not continue; use the "
                f"same{', or start anew in another run.dir' if checkpointer.owns(path) else ''}"
            )
    scalars = source.scalars
    now, then = dict(flat(course, "")), dict(flat(scalars["course"], ""))  # what makes the numbers and yet may change
    changed = [
        f"{key}={now.get(key)} (was {then.get(key)})"
        for key in sorted(now.keys() | then.keys())
        if now.get(key) != then.get(key)
    ]
    if changed:
        see(Note("warning", f"from step {scalars['clock']['step']} on with {', '.join(changed)}"))
    source.scalars = scalars["program"]
    program.load(source)
    recent = [Measured(**one) for one in scalars["recent"]] if checkpointer.owns(path) else []
    while len(json.dumps([asdict(one) for one in recent])) > RECENT_BYTES:
        recent = recent[len(recent) // 2 + 1 :]
    return scalars["clock"], scalars["window"], scalars.get("updated", True), tuple(recent)


def _probes(settings: Settings, place: Place, folder: Path, send: Callable[[Event], None]) -> Probes:
    """What the observers want to see from inside this rank."""
    found = {
        name: observer.probe(place, folder, lambda text: send(Note("info", text)))
        for name, observer in settings.observer.items()
    }
    return Probes(
        {name: probe for name, probe in found.items() if probe is not None}, lambda text: send(Note("warning", text))
    )


def _both(first: Callable[[str, int], None], second: Callable[[str, int], None]) -> Callable[[str, int], None]:
    def beat(phase: str, step: int) -> None:
        first(phase, step)
        second(phase, step)

    return beat


def _progress(send: Callable[[Event], None]) -> Callable[[Event], None]:
    """Of a rank other than 0 whose launching process has no other: only what tells it whether starting again may
    help.
    """
    return lambda event: send(event) if isinstance(event, Saved | Started) else None
