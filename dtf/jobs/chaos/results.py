"""What trials gave together: the table, by fault and strategy, and how sure it is."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from dtf.core.files import open_private
from dtf.jobs.chaos.trial import BITS, LAW, SAMPLES, Outcome


def read(path: Path) -> list[Outcome]:
    """All trials of a file, of one or several commands. Half a line, of a command that was killed, is none."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(Outcome(**json.loads(line)))
    return found


def append(path: Path, outcome: Outcome) -> None:
    """Add one trial."""
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    with open_private(path, "a") as file:
        file.write("\n" * bool(torn) + json.dumps(outcome.to_json()) + "\n")


def bound(failures: int, trials: int, sure: float = 0.95) -> float:
    """The largest rate of failures that is not ruled out by `failures` in `trials` (Clopper-Pearson, one-sided).

    3/n, about, without failures.
    """
    if failures >= trials:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        few = sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(failures + 1))
        low, high = (rate, high) if few > 1 - sure else (low, rate)
    return high


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that `share` of them do not exceed, for a half the median; None without values."""
    if values and share == 0.5:
        return median(values)
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else None


ALL = "all"


def rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row for each fault and strategy; then one for each fault and one for each strategy, where there are several
    of both; and one for all.
    """
    counted = [outcome for outcome in outcomes if outcome.wrong or not outcome.missed]
    cells = _grouped(counted, lambda outcome: (outcome.fault, outcome.strategy))
    faults = _grouped(counted, lambda outcome: (outcome.fault, ALL))
    strategies = _grouped(counted, lambda outcome: (ALL, outcome.strategy))
    several = [faults, strategies] if len(faults) > 1 and len(strategies) > 1 else []
    every = [{(ALL, ALL): counted}] if counted else []
    return [_row(*key, cell) for part in [cells, *several, *every] for key, cell in part.items()]


def _grouped(
    outcomes: Iterable[Outcome], key: Callable[[Outcome], tuple[str, str]]
) -> dict[tuple[str, str], list[Outcome]]:
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome)].append(outcome)
    return dict(sorted(found.items()))


def _row(fault: str, strategy: str, cell: Sequence[Outcome]) -> dict[str, Any]:
    timed = cell if fault != ALL else []  # times of several faults are no one thing
    noticed = [outcome.noticed_s for outcome in timed if outcome.noticed_s is not None]
    recovered = [outcome.recovered_s for outcome in timed if outcome.recovered_s is not None]
    broken = sum(bool(outcome.wrong) for outcome in cell)
    return {
        "fault": fault,
        "strategy": strategy,
        "trials": len(cell),
        "recovered": sum(outcome.recovered for outcome in cell),
        "again": sum(not outcome.recovered and not outcome.wrong for outcome in cell),
        "broken": broken,
        "bits": sum(outcome.equal == BITS for outcome in cell),
        "law": sum(outcome.equal == LAW for outcome in cell),
        "samples": sum(outcome.equal == SAMPLES for outcome in cell),
        "lost_steps": max(outcome.lost_steps for outcome in cell),
        "noticed_s": [percentile(noticed, 0.5), percentile(noticed, 0.95)],
        "recovered_s": [percentile(recovered, 0.5), percentile(recovered, 0.95)],
        "timed": len(recovered),
        "bound": bound(broken, len(cell)),
    }


LEGEND = (
    "went on: the disturbed command itself ended well; again: it was started again. bits, law, rows: equal to the\n"
    "undisturbed run bit for bit, within the bounds of job=verify, in its samples. steps: the most that were done\n"
    "again. p50, p95: seconds until the first new step, where the command noticed and went on."
)


def table(found: Sequence[dict[str, Any]]) -> str:
    """The table for a terminal: a row for each fault and each strategy, where there are several of both."""
    if not found:
        return "no trial counts yet"
    totals = [row for row in found if ALL in (row["fault"], row["strategy"])]
    shown = totals if len(totals) > 1 else found
    names = [_name(row) for row in shown]
    width = max(map(len, names))
    heads = ("trials", "went on", "again", "broken", "bits", "law", "rows", "steps", " p50", " p95")
    lines = [" ".join([" " * width, *heads])]
    for name, row in zip(names, shown, strict=True):
        cells = zip([*_counts(row), *_times(row["recovered_s"])], heads, strict=True)
        lines.append(" ".join([f"{name:<{width}}", *(f"{cell:>{len(head)}}" for cell, head in cells)]))
    return "\n".join(lines)


def _name(row: dict[str, Any]) -> str:
    names = [row[key] for key in ("fault", "strategy") if row[key] != ALL]
    return ", ".join(names) or ALL


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """All rows."""
    heads = [
        *("fault", "strategy", "trials", "went on", "started again", "broken", "equal in bits", "within the law"),
        *("in its samples", "most steps lost", "noticed after, median, s", "95th percentile"),
        *("recovered after, median, s", "95th percentile", "broken, 95 % sure"),
    ]
    lines = [heads, ["---"] * len(heads)]
    for row in found:
        times = [*_times(row["noticed_s"]), *_times(row["recovered_s"])]
        lines.append([row["fault"], row["strategy"], *_counts(row), *times, f"< {rate(row['bound'])}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _counts(row: dict[str, Any]) -> list[str]:
    keys = ("trials", "recovered", "again", "broken", "bits", "law", "samples", "lost_steps")
    return [str(row[key]) for key in keys]


def _times(found: Sequence[float | None]) -> list[str]:
    return ["" if value is None else f"{value:.2f}" for value in found]


def rate(share: float) -> str:
    """`0.2 %`, `53 %`."""
    return f"{share:.{1 if share < 0.1 else 0}%}".replace("%", " %")
