"""dtf: declarative, config-driven distributed training on PyTorch.

This module is the public interface: what users subclass and call. Every other module is private and may change.
Importing it imports no torch; a name that needs torch imports it when it is first asked for. Each name is documented
where it is defined: shapes, units, errors, and whether a call is collective.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dtf.core.renamed import find_old_modules
from dtf.core.version import __version__

if TYPE_CHECKING:
    from dtf.api.job import Job
    from dtf.api.launcher import Launcher
    from dtf.api.layout import Layout, Split
    from dtf.api.lr import Schedule
    from dtf.api.observer import Observer, Probe, Probes
    from dtf.api.optimizer import Group, Optimizer
    from dtf.api.options import FineTuning
    from dtf.api.precision import Precision
    from dtf.api.recipe import Dataset, Evaluator, Peers, Recipe
    from dtf.api.recipe import Split as DataSplit
    from dtf.api.registry import option, register
    from dtf.api.row_optimizer import RowOptimizer
    from dtf.api.sampler import Sampler, Tail
    from dtf.api.sparse_table import Placement, Table
    from dtf.api.strategy import Program, Strategy, Update, check_divides, check_layout, check_tables
    from dtf.api.task import Source, Task, Weights
    from dtf.core.errors import ConfigError, DataError, DtfError, Exit, PeerError, Preempted
    from dtf.core.seeding import draws, seed_of
    from dtf.core.types import (
        Batch,
        Box,
        Ended,
        Evaluate,
        Evaluated,
        Event,
        Failed,
        Log,
        Measured,
        Memory,
        Names,
        Note,
        Place,
        Poll,
        Save,
        Saved,
        Shard,
        Started,
        State,
        StepOutput,
        Stop,
        Train,
        event_from_json,
        event_to_json,
    )
    from dtf.distributed.world import World
    from dtf.model import losses
    from dtf.model.auc import AucEvaluator, auc, grouped_auc
    from dtf.model.init import cast, init_model
    from dtf.model.losses import cross_entropy, rank
    from dtf.model.metrics import weighted_sums
    from dtf.optim.update import LocalUpdate, full_params
    from dtf.pserver.placement import placing
    from dtf.strategies.spmd import Replica, Spmd

_PUBLIC = {
    # Parts: what users subclass
    "Dataset": "api.recipe",
    "Evaluator": "api.recipe",
    "Job": "api.job",
    "Launcher": "api.launcher",
    "Observer": "api.observer",
    "Optimizer": "api.optimizer",
    "Precision": "api.precision",
    "Probe": "api.observer",
    "Program": "api.strategy",
    "Recipe": "api.recipe",
    "RowOptimizer": "api.row_optimizer",
    "Sampler": "api.sampler",
    "Schedule": "api.lr",
    "Strategy": "api.strategy",
    "Update": "api.strategy",
    # Names and options
    "FineTuning": "api.options",
    "option": "api.registry",
    "register": "api.registry",
    # What a recipe says of its model and data
    "DataSplit": "api.recipe:Split",
    "Layout": "api.layout",
    "Placement": "api.sparse_table",
    "Split": "api.layout",
    "Table": "api.sparse_table",
    "Tail": "api.sampler",
    "draws": "core.seeding",
    "seed_of": "core.seeding",
    # Losses and metrics
    "AucEvaluator": "model.auc",
    "auc": "model.auc",
    "cross_entropy": "model.losses",
    "grouped_auc": "model.auc",
    "losses": "model.losses:",
    "rank": "model.losses",
    "weighted_sums": "model.metrics",
    # Values that parts get and give
    "Batch": "core.types",
    "Box": "core.types",
    "Evaluated": "core.types",
    "Memory": "core.types",
    "Names": "core.types",
    "Peers": "api.recipe",
    "Place": "core.types",
    "Group": "api.optimizer",
    "Probes": "api.observer",
    "Shard": "core.types",
    "Source": "api.task",
    "State": "core.types",
    "StepOutput": "core.types",
    "Task": "api.task",
    "Weights": "api.task",
    "World": "distributed.world",
    # Tickets of the clock
    "Evaluate": "core.types",
    "Log": "core.types",
    "Poll": "core.types",
    "Save": "core.types",
    "Stop": "core.types",
    "Train": "core.types",
    # Events that observers see
    "Ended": "core.types",
    "Event": "core.types",
    "Failed": "core.types",
    "Measured": "core.types",
    "Note": "core.types",
    "Saved": "core.types",
    "Started": "core.types",
    "event_from_json": "core.types",
    "event_to_json": "core.types",
    # Errors and exit codes
    "ConfigError": "core.errors",
    "DataError": "core.errors",
    "DtfError": "core.errors",
    "Exit": "core.errors",
    "PeerError": "core.errors",
    "Preempted": "core.errors",
    # To build a strategy from
    "LocalUpdate": "optim.update",
    "Replica": "strategies.spmd",
    "Spmd": "strategies.spmd",
    "cast": "model.init",
    "check_divides": "api.strategy",
    "check_layout": "api.strategy",
    "check_tables": "api.strategy",
    "full_params": "optim.update",
    "init_model": "model.init",
    "placing": "pserver.placement",
}
"""Public name -> where it is defined: `module`, `module:name` if it has another name there, `module:` is itself."""


__all__ = [
    "AucEvaluator",
    "Batch",
    "Box",
    "ConfigError",
    "DataError",
    "DataSplit",
    "Dataset",
    "DtfError",
    "Ended",
    "Evaluate",
    "Evaluated",
    "Evaluator",
    "Event",
    "Exit",
    "Failed",
    "FineTuning",
    "Group",
    "Job",
    "Launcher",
    "Layout",
    "LocalUpdate",
    "Log",
    "Measured",
    "Memory",
    "Names",
    "Note",
    "Observer",
    "Optimizer",
    "PeerError",
    "Peers",
    "Place",
    "Placement",
    "Poll",
    "Precision",
    "Preempted",
    "Probe",
    "Probes",
    "Program",
    "Recipe",
    "Replica",
    "RowOptimizer",
    "Sampler",
    "Save",
    "Saved",
    "Schedule",
    "Shard",
    "Source",
    "Split",
    "Spmd",
    "Started",
    "State",
    "StepOutput",
    "Stop",
    "Strategy",
    "Table",
    "Tail",
    "Task",
    "Train",
    "Update",
    "Weights",
    "World",
    "__version__",
    "auc",
    "cast",
    "check_divides",
    "check_layout",
    "check_tables",
    "cross_entropy",
    "draws",
    "event_from_json",
    "event_to_json",
    "full_params",
    "grouped_auc",
    "init_model",
    "losses",
    "option",
    "placing",
    "rank",
    "register",
    "seed_of",
    "weighted_sums",
]

find_old_modules()


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dtf' has no attribute {name!r}")
    where, renamed, original = _PUBLIC[name].partition(":")
    module = importlib.import_module(f"dtf.{where}")
    value = module if renamed and not original else getattr(module, original or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
