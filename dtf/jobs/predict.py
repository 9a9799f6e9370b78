"""`job=predict`: writes the predictions of a model for each row of a split, or for inputs without labels."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DataError, Exit
from dtf.jobs.use_model import RanksEnded, check_split, launch

if TYPE_CHECKING:
    from dtf.config.compose import Composed


class Form(Enum):
    jsonl = "jsonl"
    csv = "csv"


@register("job", "predict")
class PredictJob(Job):
    """Write a line for each row, in order of rows, to predictions.jsonl in a run folder: the classes and their
    probabilities, or that of the event; an error for a row that cannot be read.

    Killed and started again with the same run.dir, under any strategy and number of processes, it goes on after the
    last line.
    """

    uses_model = True
    submits = True

    model: str = option(
        default="",
        doc="as in job=evaluate: a run folder, a checkpoint or a file of weights; empty: recipe.model.weights",
    )
    input: str = option(
        default="",
        doc="rows that need no labels: a folder of images, files of a click log, or whatever else the "
        "recipe opens; empty: job.split",
    )
    split: Split = option(
        default=Split.eval, doc="which rows of the recipe's data, without job.input; as in job=evaluate"
    )
    top: int = option(default=5, least=1, most=1000, doc="most probable classes to write for each row")
    bad_share: float = option(
        default=1.0,
        least=0,
        most=1,
        doc="share of the rows that may be unreadable; each gets a line with an error, and more of them end the job "
        "(it may be another number when the job goes on)",
        unit="share of the rows",
    )
    format: Form = option(default=Form.jsonl, doc="`jsonl`: a JSON object a line; `csv`: a table with a line of names")

    def run(self, composed: Composed) -> int:
        try:
            path = self.predict(composed)
        except RanksEnded as ended:
            return ended.exit
        if path is not None:
            print(path, flush=True)
            found = json.loads(path.with_name("predictions.json").read_text())
            rows, errors = found["rows"], found["errors"]
            text = f"{rows:,} rows: {rows - errors:,} predicted, {errors:,} error{'s' * (errors != 1)}"
            print(f"dtf: {text}", file=sys.stderr)
        return Exit.OK

    def predict(self, composed: Composed) -> Path | None:
        """Predict on new ranks, and return the file; None in a process for which another one reports. As
        `use_model.launch`.
        """
        check_split(composed.settings.recipe, self.split)
        if self.input and self.split is not Split.eval:
            raise ConfigError(
                f"job.input={self.input} and job.split={self.split.value} are two sources of rows; leave one of them "
                "out"
            )
        if self.input and not Path(self.input).expanduser().exists():
            raise DataError(f"job.input={self.input} does not exist")
        folder = launch(composed, "dtf.jobs.rank_predict:work", [] if self.input else [self.split])
        return None if folder is None else folder / f"predictions.{self.format.value}"
