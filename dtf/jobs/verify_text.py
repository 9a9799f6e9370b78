"""What `job=verify` prints."""

from __future__ import annotations

import math
from typing import Any

from dtf.core.text import count_text, number_text

EXACT = "fp64"
MEASURES = ("loss", "grad_norm", "evaluation", "parameters", "tensor")
AMPLIFIED = 0.1
"""Relative difference of all parameters that rounding may grow to within a few steps."""
VAGUE = 1e-2
"""Relative difference from which on a tensor that rounding moves is hardly compared."""


def replayed(result: dict[str, Any], precision: str, threads: int) -> str:
    """The result of a replay; where it is beyond the bound, also what may be the cause."""
    head = (
        f"replay of {' and '.join(f'{count:,}' for count in result['updates'])} updates from step {result['start']}: "
    )
    apart = f"within {result['tensor']:.1e}, the bound of {precision} is {result['bound']:.0e}"
    if result["ok"]:
        return f"{head}has the run's numbers, {apart} ({result['worst']}); {result['checkpoint']}"
    lines = [
        f"{head}BREAK, {apart}: {result['beyond']} of {count_text(result['tensors'], 'tensor')} after the last update "
        f"beyond it, most of all {result['worst']}; {result['checkpoint']}"
    ]
    if result["losses"] and not result["losses"][-1] <= result["losses"][0]:
        first, last = map(number_text, result["losses"])
        lines.append(
            f"the run's loss grew from {first} to {last}: while it does, rounding is amplified, and a small "
            "difference need not be of the order"
        )
    lines.append(
        "sums are made as in the run on a CPU of its kind with as many threads as its trainers had, here "
        f"launcher.threads={threads}; a difference that stays there is a mistake: please report it"
    )
    return "\n".join(lines)


def explain(rows: list[dict[str, Any]]) -> None:
    """Add a probable cause to the newest row, where it breaks by little, in fp32 and not in fp64."""
    *before, row = rows
    same = ("strategy", "processes", "micro_batch_rows")
    exact = any(
        other["ok"] and other["precision"] == EXACT and all(other[key] == row[key] for key in same) for other in before
    )
    if not row["ok"] and row["precision"] != EXACT and exact and row.get("parameters", math.inf) < AMPLIFIED:
        row["first"] += (
            f"; {EXACT} agrees, so this is probably rounding that the recipe amplifies: start with smaller learning "
            "rates"
        )


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of strategies by number of processes. A cell is the worst of all micro-batch sizes, in the measure that
    has the bound of its precision.
    """
    measures = {EXACT: "tensor", "fp32": "parameters"}
    columns = sorted({row["processes"] for row in rows})
    lines = [
        "| strategy | precision | " + " | ".join(count_text(n, "process") for n in columns) + " |",
        "| --- " * (len(columns) + 2) + "|",
    ]
    for strategy, precision in sorted(
        {(row["strategy"], row["precision"]) for row in rows}, key=lambda key: (key[1] != EXACT, key)
    ):
        cells = []
        for n in columns:
            cell_rows = [
                row for row in rows if (row["strategy"], row["precision"], row["processes"]) == (strategy, precision, n)
            ]
            if not cell_rows:  # refused
                cells.append("")
                continue
            worst = max(row.get(measures[precision], math.inf) for row in cell_rows)
            cells.append(
                ("0" if worst == 0 else f"{worst:.0e}") if all(row["ok"] for row in cell_rows) else "**broken**"
            )
        lines.append(f"| `{strategy}` | {precision} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _rounding(row: dict[str, Any]) -> str:
    """What is allowed beyond the bound, the most of all first."""
    allowed = sorted(row.get("rounding", {}).items(), key=lambda item: -item[1])
    if not allowed:
        return ""
    name, most = allowed[0]
    more = f" and less for {count_text(len(allowed) - 1, 'tensor')} more" if len(allowed) > 1 else ""
    vague = "; its numbers are not determined" if most >= VAGUE else ""
    return (
        f"; rounding: {most:.0e} allowed for {name}{more}, which differs by a tenth of that where the reference starts "
        f"one rounding away{vague}"
    )


def line(row: dict[str, Any], first: bool) -> str:
    head = (
        f"{'strategy':<17} {'procs':>5} {'format':<6} {'micro':>5} {'loss':>8} {'gradient':>8} {'eval':>8} "
        f"{'params':>8} {'tensor':>8}  worst tensor / what breaks"
    )
    numbers = " ".join(f"{row.get(key, math.nan):8.1e}" for key in MEASURES)
    if "refused" in row:
        numbers = ""
    verdict = row["worst"] + _rounding(row) if row["ok"] else f"BREAK: {row['first']}"
    text = (
        f"{row['strategy']:<17} {row['processes']:>5} {row['precision']:<6} {row['micro_batch_rows']:>5} {numbers} "
        f" {verdict}"
    )
    return f"{head}\n{text}" if first else text


def compared(steps: int, asked: int) -> str:
    """How many steps of `job.steps` were compared: a recipe's run may be shorter."""
    return f"{count_text(steps, 'step')}{f', as the run is shorter than job.steps={asked}' if steps < asked else ''}"
