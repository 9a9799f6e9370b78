"""job=export: a trained model as files that need no dtf."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DataError, Exit

if TYPE_CHECKING:
    from dtf.config.compose import Composed


class Form(Enum):
    pt2 = "pt2"
    safetensors = "safetensors"


@register("job", "export")
class ExportJob(Job):
    """Write model.pt2 (torch.export), model.safetensors and model.json to a run folder, read them back, and compare
    what they say with the model itself.

    model.json holds class names, preprocessing, how to call the program and where the numbers come from; both files
    hold it too. One process does it.
    """

    uses_model = True

    model: str = option(
        default="",
        doc="as in job=evaluate: a run folder, a checkpoint or a file of weights; empty: recipe.model.weights",
    )
    input: str = option(
        default="", doc="inputs to try the exported model on, as in job=predict; empty: rows of the evaluation split"
    )
    forms: list[Form] = option(factory=lambda: [Form.pt2, Form.safetensors], doc="which files to write")

    def run(self, composed: Composed) -> int:
        from dtf.jobs.use_model import RanksEnded, launch

        if not self.forms:
            raise ConfigError("job.forms=[] must hold at least one; use pt2 or safetensors")
        if self.input and not Path(self.input).expanduser().exists():
            raise DataError(f"job.input={self.input} does not exist")
        try:
            folder = launch(composed, "dtf.jobs.rank_export:work", [] if self.input else [Split.eval], one_rank=True)
        except RanksEnded as ended:
            return ended.exit
        if folder is None:
            return Exit.OK
        metadata = json.loads((folder / "model.json").read_text())
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
