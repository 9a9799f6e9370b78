"""What one rank needs before its first step: its place among the others, data, model, program, plan."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtf.api.helper_roles import RendezvousContext
from dtf.api.name_patterns import check_used
from dtf.api.options import MemoryFormat, Remat
from dtf.api.recipe import Recipe
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.core.consistency import check_consistent, config_facts
from dtf.core.errors import ConfigError, DataError, Preempted
from dtf.core.own_code import CODE, own_code
from dtf.core.types import Event, Note, Saved, Started
from dtf.core.version import __version__
from dtf.data.answers import refuse_varying
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.splits import Splits
from dtf.distributed.world import World
from dtf.engine.clock import Plan, plan_of
from dtf.engine.first_rows import check_first_rows
from dtf.engine.initial_numbers import agree_on_start
from dtf.engine.mixed_rows import mixed_rows
from dtf.engine.model_flops import ModelFlops
from dtf.engine.preparing import prepare_once
from dtf.engine.program_check import check_program
from dtf.engine.rank import Rank, ignore
from dtf.engine.start_record import StartRecord, start_digest
from dtf.engine.table_plan import placements, table_plan, table_plan_row
from dtf.engine.turns import Turns, build
from dtf.host import heartbeat, starting
from dtf.model.compiled_parts import choose_parts
from dtf.model.draw_by_name import draws_by_name
from dtf.model.ema import with_ema
from dtf.model.found_blocks import blocks_row
from dtf.model.init import construct, layout_of, refuse_untrainable, start_from
from dtf.model.memory_format import convolves, objection, objection_of_format
from dtf.model.metric_checks import TRIAL_ROWS, check_evaluated, check_names
from dtf.model.pretrained import WeightMatch, Weights, match_weights, open_weights

_FORMAT = "memory format"


@dataclass(frozen=True)
class JoinedRank:
    """A rank that has joined the others of its role."""

    rank: Rank
    """With the place, folder and id of the run as the rendezvous gave them."""

    world: World
    trains: bool
    """Whether it has the role that runs the engine; ranks of the others run `HelperRoles.run`."""

    facts: dict[str, Any]
    """What must be the same on all ranks and is known before the data is open."""

    @cached_property
    def see(self) -> Callable[[Event], None]:
        """Reports to the observers: rank 0 everything, others nothing.

        The first rank of another launching process tells that one whether starting again may help.
        """
        if self.world.rank == 0:
            return self.rank.send
        send, first = self.rank.send, self.rank.place.local_rank == 0
        return (lambda event: send(event) if isinstance(event, Saved | Started) else None) if first else ignore


@dataclass(frozen=True)
class TaskInputs:
    """The task, and what it was made from."""

    task: Task
    splits: Splits
    epochs: Epochs
    facts: dict[str, Any]
    """What must be the same on all ranks."""

    parameters: tuple[int, int]
    """Numbers in the parameters of the model, and how many of them learn."""

    weights: Weights | None
    weights_digest: str
    weights_fit: WeightMatch | None
    start: StartRecord
    """Where the outcome of the check at the start is remembered."""

    turns: Turns | None
    """How ranks built the model, where they did so one after another."""

    memory_format: str
    """For the start-up table: the format of images, and why; empty where there is nothing to tell."""

    compiled: str
    """For the start-up table: what is compiled; empty: nothing."""

    mixed: list[str]
    """See `mixed_rows`."""

    parts: dict[str, str]
    """For the start-up table: the blocks, where they were found in the model and are used; how tables were placed."""


@dataclass(frozen=True)
class TrainingSetup:
    """Everything a rank trains with, before a checkpoint is loaded."""

    joined: JoinedRank
    inputs: TaskInputs
    program: Program
    train: Loader
    evaluation: Loader
    plan: Plan
    checkpointer: Checkpointer
    flops: ModelFlops


def join(rank: Rank) -> JoinedRank:
    """Find the other ranks and form a world with those of the same role. Collective."""
    strategy, place = rank.settings.strategy, rank.place
    kind = place.device.partition(":")[0]
    engine_role, count = next(iter(strategy.roles(place.slots).items()))
    trains = place.role == engine_role
    facts = {"config": config_facts(rank.config)}  # so that an error names the keys that differ
    if trains:
        rank = _rendezvous(rank, facts)
        with starting.at_once():  # torch's code waits for the others in it
            _refuse_stop(rank)
            world = World.join(replace(rank.place, size=count), strategy.communication(kind))
    else:
        world = World(replace(place, size=1))
    return JoinedRank(rank, world, trains, facts)


def _rendezvous(rank: Rank, facts: dict[str, Any]) -> Rank:
    """The rank with the place, folder and id that the strategy's rendezvous gives. Preempted when told to stop."""

    def wait() -> None:
        rank.beat("rendezvous", 0)
        _refuse_stop(rank)

    def say(text: str) -> None:
        rank.send(Note("info", text))

    context = rank.settings.strategy.helper_roles.rendezvous(
        RendezvousContext(rank.place, rank.folder, rank.run_id, facts, wait, say, rank.stop_requested)
    )
    rank.beat("start", 0)
    return replace(rank, place=context.place, folder=context.folder, run_id=context.run_id)


def _refuse_stop(rank: Rank) -> None:
    if rank.stop_requested():
        raise Preempted(
            "asked to stop before the others were there; nothing is lost; start again with the same command"
        )


def prepare_task(joined: JoinedRank) -> TaskInputs:
    """Open the data and the weights, check that all ranks have the same, and describe the task. Collective."""
    rank, world, settings = joined.rank, joined.world, joined.rank.settings
    recipe, kind = settings.recipe, rank.place.device.partition(":")[0]
    rows = settings.step.batch_size, settings.seed, kind == "cuda", settings.train.eval_rows
    prepare_once(recipe, rank.run_id, rank.place.attempt)
    splits = Splits(recipe, settings.sampler, *rows)
    facts = {"versions": _versions(settings.strategy.communication(kind) == "nccl"), **joined.facts}
    facts |= {"training data": splits.fingerprint, "evaluation data": splits.eval.fingerprint()}
    if joined.trains:
        world.facts, world.folder = facts, rank.folder
        check_consistent(world, facts | {"finds the run folder": _finds(rank.folder, rank.run_id)})
    epochs = splits.cut()
    check_first_rows(splits, rank.config["recipe"]["name"], world)
    model, turns = _build(joined)
    _compare_code(joined, facts)
    parameters = dict(model.named_parameters())
    refuse_untrainable(recipe, model, turns is None or turns.holds)
    frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
    check_used("recipe.model.freeze", recipe.fine_tuning.freeze, parameters)
    check_used("optimizer.lr_factors", settings.optimizer.lr_factors, parameters, frozen)
    check_used("optimizer.weight_decays", settings.optimizer.weight_decays, parameters, frozen)
    weights, weights_digest, weights_fit = _weights(recipe, model, world)
    parts = settings.precision, settings.step, settings.seed, splits.sample, weights, settings.sparse
    task = Task(recipe, with_ema(settings.optimizer, settings.step.ema), *parts)
    if not draws_by_name(recipe):
        holds = turns is None or turns.holds
        if joined.trains:
            agree_on_start(world, model, lambda text: joined.see(Note("warning", text)), holds)
        if weights is not None and holds:
            start_from(model, weights)
        if turns is not None:
            turns.share(model)
        task.built.append(model)
    chosen, compiled = choose_parts(settings.step.compile, recipe, model)
    compiles = settings.step.compile.value if chosen else ""
    for split in (splits.train, splits.eval):
        refuse_varying(split, rank.config["recipe"]["name"], bool(recipe.tables()), compiles)
    start = _recall_start_check(joined, task, model, facts["training data"])
    last, memory_format = _choose_memory_format(joined, task, model)
    placed = table_plan(task, settings.strategy, splits, epochs, world) if joined.trains else {}
    task = replace(task, channels_last=last, compiled=chosen, placements=placements(placed))
    numbers = sum(p.numel() for p in parameters.values())
    learning = sum(p.numel() for name, p in parameters.items() if name not in frozen)
    return TaskInputs(
        task,
        splits,
        epochs,
        facts,
        (numbers, learning),
        weights,
        weights_digest,
        weights_fit,
        start,
        turns,
        memory_format,
        compiled,
        mixed_rows(model, splits.train),
        (blocks_row(model, layout_of(recipe, model)) if _uses_blocks(rank) else {}) | table_plan_row(placed),
    )


def _compare_code(joined: JoinedRank, facts: dict[str, Any]) -> None:
    """Now that it is loaded, where ranks are not forks of one process. Collective."""
    place = joined.rank.place
    if place.local_size < place.size or place.manual:
        facts[CODE] = own_code()
        check_consistent(joined.world, {CODE: facts[CODE]})


def _uses_blocks(rank: Rank) -> bool:
    """Whether the run gathers, cuts or computes again by the blocks of the model."""
    settings = rank.settings
    return settings.step.remat is not Remat.none or (settings.strategy.uses_blocks and rank.place.slots > 1)


def _build(joined: JoinedRank) -> tuple[nn.Module, Turns | None]:
    """The recipe's model, see `construct`; built in turn where ranks of a host have no memory for all. Collective."""
    rank, recipe = joined.rank, joined.rank.settings.recipe

    def make() -> nn.Module:
        return construct(recipe, rank.settings.seed)

    if not joined.trains or draws_by_name(recipe):
        return make(), None
    return build(make, joined.world, min(rank.place.local_size, joined.world.size), lambda: rank.beat("start", 0))


def _recall_start_check(joined: JoinedRank, task: Task, model: nn.Module, data: Any) -> StartRecord:
    """Take what earlier runs found into `task.start_check`. Ranks that run the engine get what rank 0 reads, all
    others read by themselves. Collective.
    """
    rank, world = joined.rank, joined.world
    # one process has nothing to check, but may have plans
    needed = rank.place.slots > 1 or (task.step.memory_format is MemoryFormat.auto and convolves(model))
    reads = needed and (world.rank == 0 or not joined.trains)
    kind = rank.place.device.partition(":")[0]
    digest = start_digest(rank.config, task.recipe, model, kind, data) if reads else ""
    record = StartRecord(digest, rank.place.slots, rank.folder)
    found, plans = record.read(rank.settings.checkpoint.resume) if reads else (None, {})
    if joined.trains:
        found, plans = world.broadcast([found, plans])
    else:
        task.start_check.keep = record.write
    task.start_check.found, task.start_check.plans = found, plans
    return record


def _choose_memory_format(joined: JoinedRank, task: Task, model: nn.Module) -> tuple[bool | None, str]:
    """`Task.channels_last`, and a text for people, which depend on no number of processes. Ranks that run the engine do
    as rank 0 finds, all others find it by themselves. A run that goes on does as it began where its record of the start
    fits, see `StartRecord`; else it is tried again. Collective.
    """
    chosen, plans = task.step.memory_format, task.start_check.plans
    if chosen is not MemoryFormat.auto:
        return chosen is MemoryFormat.channels_last, chosen.value.replace("_", " ")
    if not convolves(model):
        return None, ""
    reason = plans.get(_FORMAT)
    if reason is None and (not joined.trains or joined.world.rank == 0):
        if draws_by_name(task.recipe):
            reason = "its parameters are drawn by name"
        elif why := objection_of_format(task.precision, joined.rank.place.device):
            reason = why
        else:
            reason = objection(task, model, task.step.micro_batch_rows or task.step.batch_size)
    plans[_FORMAT] = reason = joined.world.broadcast(reason) if joined.trains else reason or ""
    return not reason, f"contiguous: {reason}" if reason else "channels last"


def assemble(joined: JoinedRank, inputs: TaskInputs) -> TrainingSetup:
    """Set up the program and try it once. Collective.

    ConfigError when the program's micro-batches do not suit the recipe, or the model cannot compute the smallest batch.
    """
    rank, splits, epochs = joined.rank, inputs.splits, inputs.epochs
    settings, config = rank.settings, rank.config
    check_names(settings.recipe)
    strategy = settings.strategy
    program = check_program(strategy.setup(inputs.task, joined.world), config["strategy"]["name"], joined.world)
    if not type(strategy).__module__.startswith("dtf."):
        program.plugin = f"strategy={config['strategy']['name']} ({type(strategy).__qualname__})"
    inputs = _check_memory_format(inputs, program)
    if settings.recipe.pairs and settings.step.parts_pairs(program.micro_batch_rows):
        raise ConfigError(
            f"recipe={config['recipe']['name']} mixes pairs of rows, and micro-batches of {program.micro_batch_rows} "
            "rows, as strategy="
            f"{config['strategy']['name']} chooses them, part them; set step.micro_batch_rows to an even number"
        )
    train = splits.loader("train", program.shard, program.micro_batch_rows)
    evaluation = splits.loader("eval", program.shard, settings.step.evaluation_rows, program.evaluation_micro_batches)
    plan = plan_of(settings, epochs.batches)
    checkpointer = Checkpointer(
        rank.folder / "checkpoints",
        settings.checkpoint,
        joined.world,
        rank.run_id,
        plan.objective,
        config["strategy"]["name"],
        note=lambda text: joined.see(Note("warning", text)),
        say=lambda text: joined.see(Note("info", text)),
        alive=heartbeat.still_alive,
        left_s=rank.left_s,
    )
    # The last global batch of an epoch may be a single row, which not every model can compute: find out now.
    last = epochs.batches - 1
    rows = splits.first_rows(last if epochs.size(last) == 1 else 0) if program.shard is not None else None
    copy_context().run(program.warmup, program.prepare(rows))  # passes leave no trace in context variables
    if plan.eval_every:
        count = min(TRIAL_ROWS, settings.step.evaluation_rows, len(splits.eval))
        batch = program.prepare(splits.first_eval_rows(count) if rows is not None else None)
        check_evaluated(settings.recipe, program.trial_eval(batch), batch, plan.objective[0])
    flops = ModelFlops(program, settings.precision, joined.world, splits.train.shapes_vary)
    return TrainingSetup(joined, inputs, program, train, evaluation, plan, checkpointer, flops)


def _check_memory_format(inputs: TaskInputs, program: Program) -> TaskInputs:
    """The inputs with what the start-up table can say of the memory format. ConfigError where a program was asked for
    one, and does not say that it follows.
    """
    if inputs.task.channels_last is None or program.follows_memory_format:
        return inputs
    chosen, name = inputs.task.step.memory_format, type(program).__name__
    if chosen is not MemoryFormat.auto:
        raise ConfigError(
            f"step.memory_format={chosen.value}: nothing says that the passes of {name} follow it; let it be a "
            "dtf.Spmd, set follows_memory_format in it where it does as task.channels_last says, or use "
            "step.memory_format=auto"
        )
    return replace(inputs, memory_format=f"that of {name}, which does not say that it follows step.memory_format")


def _weights(recipe: Recipe, model: nn.Module, world: World) -> tuple[Weights | None, str, WeightMatch | None]:
    """The weights to start from, their digest, and how they fit the model; (None, "", None) when none were given.

    Collective. DataError on all ranks when two hosts have different files.
    """
    place, key = recipe.fine_tuning.weights, "recipe.model.weights"
    if not place:
        return None, "", None
    weights, weights_fit = match_weights(open_weights(place, key), recipe, model, key)
    digests = world.gather(weights.digest() if world.place.local_rank == 0 else "") or []  # once for each host
    other = next((rank for rank, digest in enumerate(digests) if digest not in ("", digests[0])), None)
    digest, other = world.broadcast([*digests[:1], other])
    if other is not None:
        raise DataError(f"{key}={place} is another file on rank {other} than on rank 0; copy one to all hosts")
    return weights, digest, weights_fit


def _versions(nccl_is_used: bool) -> dict[str, str]:
    """Of the libraries that this process has loaded."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if nccl_is_used else ""  # type: ignore[attr-defined]
    return {"dtf": __version__, "python": platform.python_version(), "torch": torch.__version__, "nccl": nccl}


def _finds(folder: Path, run_id: str) -> bool:
    """Whether this rank sees the folder that the launching process made.

    With several hosts it does so only on shared storage.
    """
    try:
        return json.loads((folder / "run.json").read_text())["id"] == run_id
    except (OSError, ValueError, KeyError, TypeError):
        return False
