"""What the ranks of `job=evaluate` do: metrics over a split, each row once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from dtf.core.files import replace_text
from dtf.core.types import Event, Place
from dtf.engine.inference import Inference, Pace
from dtf.engine.loop import counted
from dtf.engine.predictions import ConfusionTable
from dtf.engine.rank import Rank, run_rank
from dtf.jobs.evaluate import EvaluateJob


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    return run_rank(_evaluate, config, folder, run_id, place, send)


def _evaluate(rank: Rank) -> None:
    """Write evaluation.json: metrics over a split, each row once, and a table of classes."""
    settings = rank.settings
    job: EvaluateJob = settings.job  # type: ignore[assignment]
    used = Inference(
        settings,
        rank.place,
        job.model,
        lambda recipe: recipe.open_data(job.split.value, settings.seed).unaugmented(),
        top=1,
        whole=False,
    )
    pace, total, table = Pace(rank.report, "rows", len(used.rows)), None, ConfusionTable(used.names)
    judge = used.recipe.evaluator(len(used.rows))
    for done, (sums, judged), rows in used.batches(0, rank.beat, rank.stop_requested):
        total = sums if total is None else total + sums
        if judge is not None and judged is not None:
            judge.add(judged)
        table.add(rows)
        pace.report(done)
    assert total is not None
    unread = int(used.world.reduce(torch.tensor([used.unread], dtype=torch.float64)).item())
    values = counted(used.world, total, used.recipe, len(used.rows), used.unread, used.rows.allowed)
    values |= judge.values(used.world) if judge is not None else {}
    if used.world.rank == 0:
        found = {
            "model": used.weights.about,
            "digest": used.digest,
            "split": job.split.value,
            "rows": len(used.rows),
            "unread": unread,
            "metrics": values,
        }
        replace_text(rank.folder / "evaluation.json", json.dumps(found | {"classes": table.classes()}, indent=1) + "\n")
    used.world.leave()
