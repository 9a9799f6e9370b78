"""What the ranks of `job=evaluate` do: compute the metrics of a split, with each row once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dtf.core.files import replace_text
from dtf.core.types import Event, Place
from dtf.engine.evaluation import counted
from dtf.engine.inference import Inference, Pace
from dtf.engine.predictions import ConfusionTable
from dtf.engine.rank import Rank, run_rank
from dtf.engine.row_notes import note_left_out
from dtf.jobs.evaluate import EvaluateJob

LISTED = 1000
"""Rows that cannot be read that evaluation.json names."""


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    return run_rank(_evaluate, config, folder, run_id, place, send)


def _evaluate(rank: Rank) -> None:
    """Write evaluation.json: metrics over a split, each row once, a table of classes, and what was taken for what."""
    settings = rank.settings
    job: EvaluateJob = settings.job  # type: ignore[assignment]
    inference = Inference(
        settings,
        rank.place,
        job.model,
        lambda recipe: recipe.open_data(job.split.value, settings.seed).unaugmented(),
        top=1,
        whole=False,
    )
    if inference.world.rank == 0 and (note := note_left_out([inference.rows], rank.folder)):
        rank.report(note)
    pace, total, table = Pace(rank.report, "rows", len(inference.rows)), None, ConfusionTable(inference.names)
    evaluator = inference.recipe.evaluator(len(inference.rows))
    for done, (sums, outputs), rows in inference.batches(0, rank.beat, rank.stop_requested):
        total = sums if total is None else total + sums
        if evaluator is not None and outputs is not None:
            evaluator.add(outputs)
        table.add(rows)
        pace.report(done)
    assert total is not None
    world, unread_here = inference.world, inference.rows.bad
    values, unread = counted(
        world, total, inference.recipe, len(inference.rows), inference.unread, inference.rows.allowed
    )
    values |= evaluator.values(world) if evaluator is not None else {}
    named = world.gather(sorted(unread_here.items())[:LISTED])
    if named is not None:
        reasons = {int(row): why for part in named for row, why in part}
        result = {
            "model": inference.weights.about,
            "digest": inference.digest,
            "split": job.split.value,
            "rows": len(inference.rows),
            "unread": unread,
            "unread_rows": [why for _, why in sorted(reasons.items())][:LISTED],
            "metrics": values,
            "classes": table.classes(),
        }
        # a line for all pairs: there may be many
        text = f'{json.dumps(result, indent=1)[:-2]},\n "confusions": {json.dumps(table.confusions())}\n}}\n'
        replace_text(rank.folder / "evaluation.json", text)
    inference.world.leave()
