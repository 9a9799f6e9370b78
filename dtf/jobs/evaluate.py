"""job=evaluate: how good a model is on a split, as a whole and, where there are classes, class by class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.job import Job, Output
from dtf.api.recipe import Split
from dtf.api.registry import option, register
from dtf.core.errors import Exit
from dtf.core.text import plain_text
from dtf.jobs.outcome import FILE, Evaluation
from dtf.jobs.use_model import RanksEnded, check_split, launch

if TYPE_CHECKING:
    from dtf.config.compose import Composed

MATRIX, PAIRS = 20, 20
"""Classes of which all pairs are printed; and how many pairs of more."""

NAMED = 10
"""Rows that cannot be read in the printed text."""

SHOWN = 40
"""Classes in the printed table; of more, those with the lowest recall."""


@register("job", "evaluate")
class EvaluateJob(Job):
    """Evaluate a run, a checkpoint or a file of weights: metrics and a table of the recipe's classes, printed and kept
    in evaluation.json in a run folder.
    """

    uses_model = True
    submits = True

    model: str = option(
        default="",
        doc="a run folder, which means its newest checkpoint, RUN/best, which means its best, a checkpoint, or a "
        ".ckpt, .pth, .pt or .safetensors file; "
        "recipe, precision, step, seed and sparse.values are the run's, but for keys given here; empty: "
        "recipe.model.weights",
    )
    split: Split = option(
        default=Split.eval,
        doc="which rows: `eval`, `train`, which are looked at as in evaluation: no augmentation, no mixing; or "
        "`test`, where the recipe has such rows",
    )
    format: Output = option(default=Output.text, doc="what is printed: `text` to read, `json` for programs")

    def run(self, composed: Composed) -> int:
        try:
            evaluation = self.evaluate(composed)
        except RanksEnded as ended:
            return ended.exit
        if evaluation is not None:
            file = evaluation.folder / FILE
            print(
                *([file.read_text().rstrip("\n")] if self.format is Output.json else [_text(evaluation), file]),
                sep="\n",
            )
        return Exit.OK

    def evaluate(self, composed: Composed) -> Evaluation | None:
        """Evaluate on new ranks; None in a process for which another one reports. As `use_model.launch`."""
        check_split(composed.settings.recipe, self.split)
        folder = launch(composed, "dtf.jobs.rank_evaluate:work", [self.split])
        return None if folder is None else Evaluation.read(folder)


def _text(evaluation: Evaluation) -> str:
    """For people."""
    lines = [evaluation.model, str(evaluation)]
    named = evaluation.unread_rows[:NAMED]
    lines += [f"  skipped {plain_text(why)}" for why in named]
    if len(named) < evaluation.unread:
        lines.append(f"  and {evaluation.unread - len(named):,} more, named in evaluation.json")
    classes = evaluation.classes
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
        lines += ["", *_confusions([plain_text(row["class"], 40) for row in classes], evaluation)]
    return "\n".join(lines)


def _confusions(names: list[str], evaluation: Evaluation) -> list[str]:
    """What was taken for what: a matrix of few classes, the most frequent mistakes of many."""
    pairs = evaluation.confusions
    if not pairs:
        return ["no row was taken for another class"]
    if len(names) > MATRIX:
        width = max(len(names[label]) for label, _, _ in pairs[:PAIRS])
        lines = [
            f"{rows:>8,}  {names[label]:<{width}}  taken for {names[guess]}" for label, guess, rows in pairs[:PAIRS]
        ]
        return [f"the most frequent of {len(pairs):,} pairs that were confused:", *lines]
    counts = {(label, guess): rows for label, guess, rows in pairs}
    rights = [
        row["rows"] - sum(counts.get((c, g), 0) for g in range(len(names))) for c, row in enumerate(evaluation.classes)
    ]
    width, cell = max(map(len, names)), max(4, *(len(f"{rows:,}") for rows in [*counts.values(), *rights]))
    lines = [f"{'':>{width}}      " + " ".join(f"{number:>{cell}}" for number in range(len(names)))]
    for label, name in enumerate(names):
        named = "" if name == str(label) else name
        cells = [rights[label] if label == guess else counts.get((label, guess), 0) for guess in range(len(names))]
        lines.append(f"{named:<{width}}  {label:>2}  " + " ".join(f"{rows or '.':>{cell}}" for rows in cells))
    return ["rows of each class, by what they were taken for:", *lines]
