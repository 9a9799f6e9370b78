"""What the ranks of `job=predict` do: write the predictions for each row into a file, in order."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtf.api.recipe import Dataset, Recipe
from dtf.core.errors import BusyError, DataError, by_all
from dtf.core.files import replace_text
from dtf.core.types import Event, Names, Place
from dtf.engine.inference import Inference, Pace
from dtf.engine.predictions import Kind, Predictions
from dtf.engine.rank import Rank, run_rank
from dtf.engine.row_notes import note_left_out
from dtf.jobs.predict import PredictJob


def work(config: dict[str, Any], folder: str, run_id: str, place: Place, send: Callable[[Event], None]) -> int:
    """An entry, see `rank_process.Entry`."""
    return run_rank(_predict, config, folder, run_id, place, send)


def _predict(rank: Rank) -> None:
    """Append the predictions for each row to a file in the run folder, in order, from the first row that is not in it
    yet.
    """
    settings, folder = rank.settings, rank.folder
    job: PredictJob = settings.job  # type: ignore[assignment]
    inputs: Names | None = None

    def data(recipe: Recipe) -> Dataset:
        nonlocal inputs
        if not job.input:
            return recipe.open_data(job.split.value, settings.seed).unaugmented()
        inputs, rows = recipe.open_inputs(Path(job.input).expanduser())
        return rows

    inference = Inference(settings, rank.place, job.model, data, job.top, whole=True)
    file = Kind[job.format.name].file(folder, inference.names, job.top)
    rank_0 = inference.world.rank == 0
    if rank_0 and (note := note_left_out([inference.rows], folder)):
        rank.report(note)
    rows = len(inference.rows)
    identity = {"model": inference.digest, "rows": rows, "inputs": inference.rows.fingerprint()}
    first, bad, difference = inference.world.broadcast(
        _begin(folder / "predictions.json", file, identity) if rank_0 else None
    )
    if difference:
        raise BusyError(f"{folder} holds predictions of {difference}; choose another run.dir")
    pace = Pace(rank.report, "rows", rows)
    if first < rows:
        most_bad = math.floor(job.bad_share * rows)
        for done, _, predictions in inference.batches(first, rank.beat, rank.stop_requested, bad, most_bad):
            if rank_0:
                file.append(predictions, inputs)
                bad += sum(bool(row.error) for row in predictions)
            pace.report(done)
    bad = inference.world.broadcast(bad if rank_0 else None)
    if rank_0:
        replace_text(folder / "predictions.json", json.dumps(identity | {"errors": bad}, indent=1) + "\n")
    if bad == rows:
        raise by_all(DataError(f"none of the {rows} rows can be read; {file.path.name} says why of each"))
    inference.world.leave()


def _begin(path: Path, file: Predictions, identity: dict[str, Any]) -> tuple[int, int, str]:
    """Rank 0's part: the first row to predict, how many before it cannot be read, and what differs where the folder
    holds other predictions.
    """
    if path.exists():
        try:
            earlier = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read, so what {file.path.name} answers is not known; move both away, or choose "
                "another run.dir"
            ) from error
        different = [key for key in identity if earlier.get(key) != identity[key]]
        if different:
            return 0, 0, f"other {' and '.join(different)}"
    else:
        replace_text(path, json.dumps(identity, indent=1) + "\n")
    return *file.open(), ""
