"""An evaluation: metrics over a whole split, each row once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from dtf.api.evaluator import Peers
from dtf.api.recipe import Recipe
from dtf.api.strategy import Program
from dtf.core.errors import DtfError
from dtf.core.types import Batches
from dtf.engine.divergence import Everyone
from dtf.engine.unreadable_rows import refuse_unreadable

SKIPPED, SKIPPED_TRAIN = "skipped_rows", "skipped_train_rows"
"""Values of a measurement, where rows may be unreadable: how many were so in this stretch of training, or in this
evaluation; at the end of a run, in all of its training. A row counts in each epoch.
"""


class Evaluating(Protocol):
    """What an evaluation needs. See `dtf.engine.loop.Loop`."""

    program: Program
    evaluation: Batches
    evaluation_rows: int
    recipe: Recipe
    world: Everyone
    averages: bool
    beat: Callable[[str, int], None]


@torch.no_grad()
def evaluate(loop: Evaluating, step: int) -> dict[str, float]:
    """Metrics over the whole evaluation split, each row once. Collective."""
    loop.program.sync()
    if loop.averages:
        loop.program.swap_ema(True)
    total = torch.zeros(1 + len(loop.recipe.train_metrics), dtype=torch.float64)
    sums, evaluator = None, loop.recipe.evaluator(loop.evaluation_rows)
    last = loop.evaluation.batches
    for index in range(last):
        loop.beat("evaluate", step)
        loop.evaluation.ahead([(0, i) for i in range(index, min(index + 1 + loop.evaluation.prefetch, last))])
        batch = loop.program.prepare(loop.evaluation.get(0, index))
        batch_sums, rows = loop.program.eval_step(batch)
        sums = batch_sums if sums is None else sums + batch_sums
        if evaluator is not None and rows is not None:
            evaluator.add(rows)
    rest = loop.program.leased.eval_rest()
    if rest is not None:
        total += rest.sums.cpu()
        if evaluator is not None and rest.rows is not None:
            evaluator.add(rest.rows)
    if sums is not None:
        total += sums.cpu()
    if loop.averages:
        loop.program.swap_ema(False)
    bad = loop.evaluation.bad(0) + loop.program.leased.unread("eval", 0)
    values, skipped = counted(loop.world, total, loop.recipe, loop.evaluation_rows, bad, loop.evaluation.allowed)
    if loop.evaluation.allowed:
        values[SKIPPED] = skipped
    return values | (evaluator.values(loop.world) if evaluator is not None else {})


def counted(
    world: Peers, sums: Tensor, recipe: Recipe, rows: int, bad: int, allowed: int
) -> tuple[dict[str, float], int]:
    """Metric values over all ranks from this rank's sums, shape (M,), and how many rows could not be read. Collective.

    `rows`: of the split. `bad`: those that this rank could not read; `allowed`: how many all ranks together may skip.
    DtfError when the ranks together did not count each row once, DataError when more than `allowed` are unreadable.
    """
    *values, unread = world.reduce(torch.cat([sums.cpu().double(), torch.tensor([bad], dtype=torch.float64)])).tolist()
    refuse_unreadable(unread, allowed, "evaluation")
    if values[0] + unread != rows:
        raise DtfError(
            f"evaluation counted {values[0]:g} of {rows - unread:g} rows; a row was lost or counted twice; please "
            "report this"
        )
    return recipe.summarise(values), int(unread)
