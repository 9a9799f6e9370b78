"""job=evaluate: how good a model is on a split, as a whole and, where there are classes, class by class."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job
from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import Exit
from dtf.core.text import number_text, plain_text

if TYPE_CHECKING:
    from dtf.config.compose import Composed

NAMED = 10
"""Rows that cannot be read in the printed text."""

SHOWN = 40
"""Classes in the printed table; of more, those with the lowest recall."""


class Output(Enum):
    text = "text"
    json = "json"


@register("job", "evaluate")
class EvaluateJob(Job):
    """Evaluate a run, a checkpoint or a file of weights: metrics and a table of the recipe's classes, printed and kept
    in evaluation.json in a run folder.
    """

    uses_model = True

    model: str = option(
        default="",
        doc="a run folder, which means its newest checkpoint, RUN/best, which means its best, a checkpoint, or a "
        ".ckpt, .pth, .pt or .safetensors file; "
        "recipe, precision, step and seed are the run's, but for keys given here; empty: recipe.model.weights",
    )
    split: Split = option(
        default=Split.eval,
        doc="which rows: `eval`, `train`, which are looked at as in evaluation: no augmentation, no mixing; or "
        "`test`, where the recipe has such rows",
    )
    format: Output = option(default=Output.text, doc="what is printed: `text` to read, `json` for programs")

    def run(self, composed: Composed) -> int:
        from dtf.jobs.use_model import RanksEnded, check_split, launch

        check_split(composed.settings.recipe, self.split)
        try:
            folder = launch(composed, "dtf.jobs.rank_evaluate:work", [self.split])
        except RanksEnded as ended:
            return ended.exit
        if folder is None:
            return Exit.OK
        file = folder / "evaluation.json"
        print(file.read_text(), end="") if self.format is Output.json else print(
            _text(json.loads(file.read_text())), file, sep="\n"
        )
        return Exit.OK


def _text(result: dict[str, Any]) -> str:
    """For people."""
    values = " ".join(f"{name}={number_text(value)}" for name, value in result["metrics"].items())
    unread = f" of which {result['unread']:,} cannot be read" if result["unread"] else ""
    lines = [result["model"], f"{result['split']} split, {result['rows']:,} rows{unread}: {values}"]
    named = result["unread_rows"][:NAMED]
    lines += [f"  skipped {plain_text(why)}" for why in named]
    if len(named) < result["unread"]:
        lines.append(f"  and {result['unread'] - len(named):,} more, named in evaluation.json")
    classes = result["classes"]
    if classes:
        worst = (
            sorted(classes, key=lambda row: (row["recall"] is None, row["recall"]))[:SHOWN]
            if len(classes) > SHOWN
            else classes
        )
        names = [plain_text(row["class"], 40) for row in worst]
        width = max(map(len, [*names, "class"]))
        lines += ["", f"{'class':<{width}}  {'rows':>8}  {'predicted':>9}  {'recall':>7}  {'precision':>9}"]
        for name, row in zip(names, worst, strict=True):
            recall, precision = (f"{row[key]:.4f}" if row[key] is not None else "-" for key in ("recall", "precision"))
            lines.append(f"{name:<{width}}  {row['rows']:>8,}  {row['predicted']:>9,}  {recall:>7}  {precision:>9}")
        if len(classes) > SHOWN:
            lines.append(f"the {SHOWN} of {len(classes)} classes with the lowest recall")
    return "\n".join(lines)
