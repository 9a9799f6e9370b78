"""Everything a rank needs before its first step, imported once by the fork server.

Must not touch CUDA: a forked process cannot use it after that.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil

import dtf.engine.train
import dtf.jobs.rank_evaluate
import dtf.jobs.rank_export
import dtf.jobs.rank_predict
import dtf.launch.rank_process
import dtf.model.init
import dtf.model.losses
import dtf.model.metrics
import dtf.optim.update
import dtf.recipes
import dtf.strategies.dp_program
import dtf.strategies.spmd
from dtf.config.settings import load_parts

load_parts([])
for module in pkgutil.walk_packages(dtf.recipes.__path__, "dtf.recipes."):
    with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed; a recipe that needs it says so
        importlib.import_module(module.name)
