"""job=export: a trained model as files that need no dtf."""

from __future__ import annotations

import importlib.util
import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.precision import Format
from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DataError, Exit
from dtf.core.text import number_text

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.config.settings import Settings


class Form(Enum):
    pt2 = "pt2"
    safetensors = "safetensors"
    onnx = "onnx"


@register("job", "export")
class ExportJob(Job):
    """Write a model to a run folder in the forms that are asked for, read them back, and compare what they say with the
    model itself.

    model.json holds class names, preprocessing, how to call the program and where the numbers come from; each of the
    files holds it too. One process does it.
    """

    uses_model = True
    # all of sparse, which says what scores of rows mean
    keys_of_run = (*(key for key in Job.keys_of_run if not key.startswith("sparse.")), "sparse")

    model: str = option(
        default="",
        doc="as in job=evaluate: a run folder, a checkpoint or a file of weights; empty: recipe.model.weights",
    )
    input: str = option(
        default="", doc="inputs to try the exported model on, as in job=predict; empty: rows of the evaluation split"
    )
    forms: list[Form] = option(
        factory=lambda: [Form.pt2, Form.safetensors],
        doc="which files to write: `pt2` for torch.export, `safetensors` for the tensors, `onnx` for ONNX Runtime",
    )
    min_score: float = option(
        default=0.0,
        least=0,
        doc="rows of sparse tables whose score is less stay out; 0: none does. A score is the sum of the row's shows, "
        "and of its clicks, see sparse.evict_score, which runs keep where rows leave by it",
    )
    max_rows: int = option(
        default=0,
        least=0,
        doc="the most rows of each sparse table that go along: those of highest score, or of largest norm where the "
        "run kept no scores; 0: all, and refused for a program with a table of more than 1 GiB",
        unit="rows",
    )

    def run(self, composed: Composed) -> int:
        from dtf.jobs.use_model import RanksEnded, launch

        if not self.forms:
            raise ConfigError("job.forms=[] must hold at least one; use pt2, safetensors or onnx")
        if Form.onnx in self.forms:
            check_onnx(composed.settings)
        if (self.min_score or self.max_rows) and not composed.settings.recipe.table_widths():
            key = "min_score" if self.min_score else "max_rows"
            raise ConfigError(
                f"job.{key}={getattr(self, key):g} says which rows of sparse tables go along, and "
                f"{type(composed.settings.recipe).__name__} has none; leave it out"
            )
        if self.input and not Path(self.input).expanduser().exists():
            raise DataError(f"job.input={self.input} does not exist")
        try:
            folder = launch(composed, "dtf.jobs.rank_export:work", [] if self.input else [Split.eval], one_rank=True)
        except RanksEnded as ended:
            return ended.exit
        if folder is None:
            return Exit.OK
        metadata = json.loads((folder / "model.json").read_text())
        for name, rows in metadata.get("rows", {}).items():
            print(rows_text(name, rows["kept"], rows["left_out"], self.min_score))
        for which, metrics in metadata.get("evaluation", {}).items():
            values = " ".join(f"{name}={number_text(value)}" for name, value in metrics.items())
            print(f"evaluation with {which.replace('_', ' ')}: {values}")
        for name, difference in metadata["largest_difference"].items():
            print(f"{folder / name}  differs by at most {difference:.1e} on {metadata['tried_rows']} rows")
        print(
            *(
                folder / name
                for name in [*([metadata["arrays"]["file"]] if "arrays" in metadata else []), "model.json"]
            ),
            sep="\n",
        )
        return Exit.OK


def rows_text(table: str, kept: int, left_out: int, min_score: float) -> str:
    """How many rows of a table went along."""
    why = f", as no score is job.min_score={min_score:g} or more" if min_score and left_out and not kept else ""
    return f"table {table}: {kept:,} rows went along, {left_out:,} stayed out{why}"


def check_onnx(settings: Settings) -> None:
    """Raise ConfigError for what no ONNX file can be made of, or where the packages are missing."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"job.forms=[onnx] needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            "python -m pip install 'dtf[onnx]'"
        )
    if tables := settings.recipe.table_widths():
        raise ConfigError(
            f"job.forms=[onnx]: {type(settings.recipe).__name__} has sparse tables ({', '.join(sorted(tables))}), and "
            "ONNX has no rows by 64-bit id; use job.forms=[pt2,safetensors]"
        )
    if settings.precision.param is not Format.fp32:
        raise ConfigError(
            f"job.forms=[onnx] is compared with ONNX Runtime in fp32, and precision.param="
            f"{settings.precision.param.value}; give precision=fp32, which converts the weights"
        )
