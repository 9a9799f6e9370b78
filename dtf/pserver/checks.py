"""Which options of parameter servers go together, and which tasks they can run.

Torch-free and without gRPC: all that can be known before a process starts.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from dtf.api.precision import Format
from dtf.api.registry import name_of
from dtf.api.schema import KeyProblem
from dtf.core.errors import ConfigError
from dtf.pserver.options import Device, Mode, Wire, averaging
from dtf.pserver.placement import check_placement

if TYPE_CHECKING:
    from dtf.api.task import Task
    from dtf.pserver.options import PserverOptions

_FOLDER, _TAKEN = re.compile(r"[A-Za-z0-9_-]{1,128}"), ("checkpoints", "profile", "seconds")
_SWITCHES = ("yes", "no", "on", "off")  # true and false are no text


def check(strategy: PserverOptions, task: Task, devices: str) -> None:
    """Raise ConfigError for what cannot run. `devices`: `cpu` or `cuda`."""
    if strategy.server_device is Device.cuda and devices == "cpu":
        raise ConfigError(
            "strategy.server_device=cuda needs a GPU, and launcher.devices has none here; use "
            "strategy.server_device=cpu"
        )
    if strategy.rows_alone:
        _check_rows_alone(strategy, task)
    if strategy.hogwild_threads > 1:
        _check_hogwild(strategy, devices)
    _check_service(strategy)
    _check_mode(strategy)
    _check_task(strategy, task)


def _check_service(strategy: PserverOptions) -> None:
    """Options of a server that hold in every mode."""
    check_placement(strategy.placement)
    if strategy.record.lower() in _SWITCHES:
        raise ConfigError(
            f"strategy.record={strategy.record} is no switch but names a folder in the run folder; use "
            "strategy.record=order, or leave it out"
        )
    if strategy.record and (not _FOLDER.fullmatch(strategy.record) or strategy.record in _TAKEN):
        raise ConfigError(
            f"strategy.record={strategy.record} must name a folder of its own in the run folder: letters, digits, '_' "
            f"and '-', not {' or '.join(_TAKEN)}; use strategy.record=order"
        )


def _check_mode(strategy: PserverOptions) -> None:
    """Options that are for another mode."""
    mode = strategy.mode
    if strategy.geo_steps is not None and mode is not Mode.geo:
        raise ConfigError(
            f"strategy.geo_steps={strategy.geo_steps} is for strategy.mode=geo, this is {mode.value}; leave it at null"
        )
    if strategy.staleness is not None and mode is Mode.sync:
        raise ConfigError(
            f"strategy.staleness={strategy.staleness} is for modes other than sync, which has none; leave it at null"
        )


def _check_task(strategy: PserverOptions, task: Task) -> None:
    """What the task asks for and a mode, or several servers, cannot do."""
    mode, several = strategy.mode, strategy.servers > 1 and not strategy.rows_alone
    tables = task.rows is not None and bool(task.recipe.table_widths())
    if task.precision.loss_scale and mode is not Mode.sync:
        raise ConfigError(
            f"a loss scale is found step by step, and strategy.mode={mode.value} has none that all share; use "
            "precision=bf16, or sync"
        )
    if several and task.step.clip_norm and mode is Mode.half_async and not strategy.sync_mode(task).collective:
        raise ConfigError(
            f"step.clip_norm={task.step.clip_norm:g} needs the norm of what is merged, and with "
            "strategy.mode=half_async no server has all of it; use strategy.servers=1, or strategy.staleness=0"
        )
    if strategy.wire is not Wire.same and (mode is Mode.geo or task.precision.param is not Format.fp32):
        what = (
            "strategy.mode=geo, which exchanges the optimizer's state"
            if mode is Mode.geo
            else f"precision.param={task.precision.param.value}"
        )
        raise ConfigError(
            f"strategy.wire={strategy.wire.value} narrows gradients and parameters of fp32, not those of {what}; use "
            "strategy.wire=same"
        )
    for group in averaging(task) if mode is Mode.geo and strategy.staleness else ():
        rule = task.optimizer if group == "optimizer" else task.rows
        raise KeyProblem(
            "strategy.staleness",
            f"strategy.staleness={strategy.staleness}: strategy.mode=geo adds up what trainers learnt from states of "
            f"different age, and averages of squares, as {group}={name_of(group, rule)} keeps them, may become "
            f"negative; leave it at null, with which all exchange at once, or use {group}=sgd or adagrad",
        )
    if mode is Mode.geo and tables and task.rows is not None and task.rows.lives:
        raise ConfigError(
            "strategy.mode=geo adds up rows that trainers made by themselves, and with sparse.admit_..., "
            "sparse.evict_... or sparse.when_full a server decides with each gradient which rows there are; use sync, "
            "async or half_async"
        )
    if mode is Mode.geo and tables and task.rows is not None and task.rows.shrinkage(1.0):
        raise ConfigError(
            "strategy.mode=geo exchanges the rows that a trainer met, and sparse.weight_decay shrinks all others too; "
            "set it to 0"
        )


def _check_hogwild(strategy: PserverOptions, devices: str) -> None:
    option = f"strategy.hogwild_threads={strategy.hogwild_threads}"
    if strategy.mode is Mode.sync:
        raise ConfigError(
            f"{option}: threads refresh the parameters while others compute, and with strategy.mode=sync all gradients "
            "of a step are of the same ones; use async or half_async, or more launcher.processes"
        )
    if strategy.mode is Mode.geo:
        raise ConfigError(
            f"{option}: threads share their parameters, and with strategy.mode=geo each trainer learns by itself; use "
            "more launcher.processes"
        )
    if strategy.record:
        raise ConfigError(
            f"{option}: threads compute with parameters of which some are newer than others, and nothing records "
            "which, so that strategy.record cannot be replayed; leave one of them out"
        )
    if strategy.team > 1:
        raise ConfigError(
            f"{option}: threads are trainers, and with strategy.team={strategy.team} a trainer is several processes; "
            "leave one of them at 1"
        )
    if devices != "cpu":
        raise ConfigError(
            f"{option} is for trainers on CPU: on a GPU the passes of threads follow each other; use more "
            "launcher.processes"
        )


def _check_rows_alone(strategy: PserverOptions, task: Task) -> None:
    option, plain = "strategy.dense=allreduce", type(strategy)()
    if not task.recipe.table_widths():
        because, name = task.recipe.inactive_keys().get("sparse"), name_of("recipe", task.recipe)
        none = (
            f"this recipe has none as {because} is set; use {because}=sparse"
            if because
            else f"{name} has none; use recipe=ctr_clicks_sparse"
        )
        raise ConfigError(f"{option} leaves sparse tables to servers, and {none}, or strategy=ddp")
    if strategy.mode is not Mode.sync:
        raise ConfigError(
            f"{option} makes one update of all gradients, which is strategy.mode=sync, this is {strategy.mode.value}; "
            "use sync, or dense=pserver"
        )
    used = {"mode", "dense", "servers"}
    for key in (field.name for field in fields(strategy) if field.name not in used):
        if getattr(strategy, key) != getattr(plain, key):
            raise ConfigError(f"strategy.{key} is of no account with {option}; leave it out")
