"""What the rank of the last part of a dry run does: it predicts a few rows with the model that was saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtf.core.types import Event, Place, Tried
from dtf.data.splits import FirstRows
from dtf.engine.inference import Inference
from dtf.engine.predictions import named
from dtf.engine.rank import Rank, run_rank
from dtf.model.author_errors import name_author_errors

ROWS = 4


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    return run_rank(_predict, config, folder, run_id, place, send)


def _predict(rank: Rank) -> None:
    """Predict the first rows of the evaluation data. `rank.folder` is the run whose model is used."""
    began, settings = time.perf_counter(), rank.settings
    try:
        with name_author_errors():
            inference = Inference(
                settings,
                rank.place,
                str(rank.folder),
                lambda recipe: _first(recipe.open_data("eval", settings.seed).unaugmented()),
                1,
                whole=False,
            )
            rows = [row for _, _, some in inference.batches(0, rank.beat, rank.stop_requested) for row in some]
    except Exception:
        rank.send(Tried("predict", time.perf_counter() - began, failed=True))
        raise
    first = rows[0]
    name = f"class {named(inference.names, first.classes[0])}" if first.width else "the event"
    text = f"{len(rows)} rows; the first: {name} with probability {first.probabilities[0]:.3f}"
    rank.send(Tried("predict", time.perf_counter() - began, text))
    inference.world.leave()


def _first(rows: Any) -> Any:
    return FirstRows(rows, min(ROWS, len(rows)))
