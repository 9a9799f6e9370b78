"""dtf: declarative, config-driven distributed training on PyTorch.

This module is the public interface: what users subclass and call. Every other module is private and may change.
Importing it imports no torch; a name that needs torch imports it when it is first asked for. Each name is documented
where it is defined: shapes, units, errors, and whether a call is collective.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dtf.core.renamed import find_old_modules
from dtf.core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from dtf.adapters.lightning import lightning_recipe
    from dtf.adapters.transformers_recipe import transformers_recipe
    from dtf.api.evaluator import Evaluator, Peers
    from dtf.api.helper_roles import HelperRoles, RendezvousContext, RoleContext
    from dtf.api.job import ComposedConfig, Job
    from dtf.api.launcher import WORK, LaunchedRun, Launcher, check_environment, check_one_role, log_folder, report
    from dtf.api.layout import BufferUpdate, Layout, Split, SplitBy
    from dtf.api.leased_work import LeasedWork
    from dtf.api.lr import Schedule
    from dtf.api.observer import Observer, Probe, Probes
    from dtf.api.optimizer import Group, Optimizer
    from dtf.api.options import FineTuning
    from dtf.api.precision import Precision
    from dtf.api.recipe import Dataset, Recipe
    from dtf.api.recipe import Split as DataSplit
    from dtf.api.registry import option, register, with_default
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.api.sampler import RowTrait, Sampler, Tail
    from dtf.api.sparse_table import Placement, Pooling, Table
    from dtf.api.strategy import Program, Strategy, check_divides, check_layout, check_tables
    from dtf.api.task import Source, Task, Weights
    from dtf.config.python_compose import compose
    from dtf.core.errors import (
        AuthError,
        BudgetError,
        BusyError,
        ConfigError,
        DataError,
        DivergedError,
        DtfError,
        Exit,
        PeerError,
        Preempted,
    )
    from dtf.core.nest import Bags
    from dtf.core.seeding import draws, seed_of
    from dtf.core.types import (
        Batch,
        Box,
        Ended,
        Evaluated,
        Event,
        Failed,
        ManualStart,
        Measured,
        Memory,
        Names,
        Note,
        Place,
        Saved,
        Shard,
        Started,
        State,
        StepOutput,
        Train,
        event_from_json,
        event_to_json,
    )
    from dtf.data.map_style import map_style
    from dtf.data.parquet_rows import parquet_rows
    from dtf.data.samples import decoded, folder_samples, tar_samples
    from dtf.data.spooled import write_samples
    from dtf.data.table_rows import table_rows
    from dtf.distributed.world import World
    from dtf.jobs.calls import evaluate, load_model, predict, train
    from dtf.jobs.outcome import Best, Evaluation, Predictions, Result
    from dtf.model.auc import AucEvaluator, auc, grouped_auc
    from dtf.model.init import cast, init_model, model_of
    from dtf.model.losses import cross_entropy, target_rank
    from dtf.model.metrics import weighted_sums
    from dtf.optim.sharding import ParamShard, Sharding, full_params
    from dtf.optim.torch_class import torch_optimizer
    from dtf.optim.update import LocalUpdate
    from dtf.pserver.placement import placing
    from dtf.sparse.make_tables import tables_of
    from dtf.sparse.row_reader import RowReader
    from dtf.strategies.replica import Replica
    from dtf.strategies.spmd import Spmd

_PUBLIC = {
    "auc": "model.auc",
    "AucEvaluator": "model.auc",
    "AuthError": "core.errors",
    "Bags": "core.nest",
    "Batch": "core.types",
    "Best": "jobs.outcome",
    "Box": "core.types",
    "BudgetError": "core.errors",
    "BusyError": "core.errors",
    "cast": "model.init",
    "check_divides": "api.strategy",
    "check_environment": "api.launcher",
    "check_layout": "api.strategy",
    "check_one_role": "api.launcher",
    "check_tables": "api.strategy",
    "compose": "config.python_compose",
    "ComposedConfig": "api.job",
    "ConfigError": "core.errors",
    "cross_entropy": "model.losses",
    "DataError": "core.errors",
    "Dataset": "api.recipe",
    "DataSplit": "api.recipe:Split",
    "DivergedError": "core.errors",
    "draws": "core.seeding",
    "DtfError": "core.errors",
    "Ended": "core.types",
    "evaluate": "jobs.calls",
    "Evaluated": "core.types",
    "Evaluation": "jobs.outcome",
    "Evaluator": "api.evaluator",
    "Event": "core.types",
    "event_from_json": "core.types",
    "event_to_json": "core.types",
    "Exit": "core.errors",
    "Failed": "core.types",
    "FineTuning": "api.options",
    "full_params": "optim.sharding",
    "Group": "api.optimizer",
    "grouped_auc": "model.auc",
    "HelperRoles": "api.helper_roles",
    "init_model": "model.init",
    "Job": "api.job",
    "LaunchedRun": "api.launcher",
    "Launcher": "api.launcher",
    "lightning_recipe": "adapters.lightning",
    "BufferUpdate": "api.layout",
    "Layout": "api.layout",
    "LeasedWork": "api.leased_work",
    "load_model": "jobs.calls",
    "LocalUpdate": "optim.update",
    "log_folder": "api.launcher",
    "map_style": "data.map_style",
    "Measured": "core.types",
    "Memory": "core.types",
    "model_of": "model.init",
    "Names": "core.types",
    "Note": "core.types",
    "Observer": "api.observer",
    "Optimizer": "api.optimizer",
    "option": "api.registry",
    "ParamShard": "optim.sharding",
    "PeerError": "core.errors",
    "Peers": "api.evaluator",
    "ManualStart": "core.types",
    "Place": "core.types",
    "Placement": "api.sparse_table",
    "Pooling": "api.sparse_table",
    "placing": "pserver.placement",
    "Precision": "api.precision",
    "predict": "jobs.calls",
    "Predictions": "jobs.outcome",
    "Preempted": "core.errors",
    "Probe": "api.observer",
    "Probes": "api.observer",
    "Program": "api.strategy",
    "Recipe": "api.recipe",
    "register": "api.registry",
    "RendezvousContext": "api.helper_roles",
    "Replica": "strategies.replica",
    "report": "api.launcher",
    "Result": "jobs.outcome",
    "RoleContext": "api.helper_roles",
    "RowOptimizer": "api.row_optimizer",
    "RowReader": "sparse.row_reader",
    "RowTrait": "api.sampler",
    "Sampler": "api.sampler",
    "Saved": "core.types",
    "Schedule": "api.lr",
    "seed_of": "core.seeding",
    "Shard": "core.types",
    "Sharding": "optim.sharding",
    "Source": "api.task",
    "Split": "api.layout",
    "SplitBy": "api.layout",
    "Spmd": "strategies.spmd",
    "Started": "core.types",
    "State": "core.types",
    "StepOutput": "core.types",
    "Strategy": "api.strategy",
    "Table": "api.sparse_table",
    "Tail": "api.sampler",
    "tables_of": "sparse.make_tables",
    "target_rank": "model.losses",
    "Task": "api.task",
    "torch_optimizer": "optim.torch_class",
    "transformers_recipe": "adapters.transformers_recipe",
    "Train": "core.types",
    "train": "jobs.calls",
    "weighted_sums": "model.metrics",
    "Weights": "api.task",
    "with_default": "api.registry",
    "WORK": "api.launcher",
    "World": "distributed.world",
    "tar_samples": "data.samples",
    "folder_samples": "data.samples",
    "decoded": "data.samples",
    "write_samples": "data.spooled",
    "parquet_rows": "data.parquet_rows",
    "table_rows": "data.table_rows",
}
"""Public name -> where it is defined: `module`, or `module:name` if it has another name there."""

_CALLED_LATER = frozenset(
    {
        "cross_entropy",
        "decoded",
        "folder_samples",
        "map_style",
        "parquet_rows",
        "table_rows",
        "tar_samples",
        "target_rank",
        "write_samples",
    }
)
"""Functions that need torch, and that a recipe's file imports at its top, which the command line reads."""


__all__ = [
    "WORK",
    "AucEvaluator",
    "AuthError",
    "Bags",
    "Batch",
    "Best",
    "Box",
    "BudgetError",
    "BufferUpdate",
    "BusyError",
    "ComposedConfig",
    "ConfigError",
    "DataError",
    "DataSplit",
    "Dataset",
    "DivergedError",
    "DtfError",
    "Ended",
    "Evaluated",
    "Evaluation",
    "Evaluator",
    "Event",
    "Exit",
    "Failed",
    "FineTuning",
    "Group",
    "HelperRoles",
    "Job",
    "LaunchedRun",
    "Launcher",
    "Layout",
    "LeasedWork",
    "LocalUpdate",
    "ManualStart",
    "Measured",
    "Memory",
    "Names",
    "Note",
    "Observer",
    "Optimizer",
    "ParamShard",
    "PeerError",
    "Peers",
    "Place",
    "Placement",
    "Pooling",
    "Precision",
    "Predictions",
    "Preempted",
    "Probe",
    "Probes",
    "Program",
    "Recipe",
    "RendezvousContext",
    "Replica",
    "Result",
    "RoleContext",
    "RowOptimizer",
    "RowReader",
    "RowTrait",
    "Sampler",
    "Saved",
    "Schedule",
    "Shard",
    "Sharding",
    "Source",
    "Split",
    "SplitBy",
    "Spmd",
    "Started",
    "State",
    "StepOutput",
    "Strategy",
    "Table",
    "Tail",
    "Task",
    "Train",
    "Weights",
    "World",
    "__version__",
    "auc",
    "cast",
    "check_divides",
    "check_environment",
    "check_layout",
    "check_one_role",
    "check_tables",
    "compose",
    "cross_entropy",
    "decoded",
    "draws",
    "evaluate",
    "event_from_json",
    "event_to_json",
    "folder_samples",
    "full_params",
    "grouped_auc",
    "init_model",
    "lightning_recipe",
    "load_model",
    "log_folder",
    "map_style",
    "model_of",
    "option",
    "parquet_rows",
    "placing",
    "predict",
    "register",
    "report",
    "seed_of",
    "table_rows",
    "tables_of",
    "tar_samples",
    "target_rank",
    "torch_optimizer",
    "train",
    "transformers_recipe",
    "weighted_sums",
    "with_default",
    "write_samples",
]

find_old_modules()


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dtf' has no attribute {name!r}")
    where, _, original = _PUBLIC[name].partition(":")
    if name in _CALLED_LATER and "torch" not in sys.modules:
        return _imported_when_called(f"dtf.{where}", name)
    module = importlib.import_module(f"dtf.{where}")
    value = getattr(module, original or name)
    globals()[name] = value
    return value


def _imported_when_called(module: str, name: str) -> Callable[..., Any]:
    def _call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    _call.__module__, _call.__name__, _call.__qualname__ = module, name, name
    _call.__doc__ = f"See `{module}.{name}`; its module, which needs torch, is imported when it is called."
    return _call


def __dir__() -> list[str]:
    return sorted(__all__)
