"""What every rank needs before its first step, imported once by the fork server, which starts before it is known what
recipe they train.

Must not touch CUDA: a forked process cannot use it after that.
"""

# ruff: noqa: F401
from __future__ import annotations

import torch._dynamo  # which torch's optimizers import when the first one is made

import dtf.engine.train
import dtf.jobs.rank_evaluate
import dtf.jobs.rank_export
import dtf.jobs.rank_predict
import dtf.launch.rank_process
import dtf.model.init
import dtf.model.losses
import dtf.model.metrics
import dtf.optim.update
import dtf.strategies.dp_program
import dtf.strategies.spmd
from dtf.config.settings import load_parts

load_parts([])
