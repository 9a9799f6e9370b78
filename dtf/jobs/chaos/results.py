"""What trials gave together: the table, by fault and strategy, and how sure it is."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtf.jobs.chaos.trial import BITS, LAW, Outcome


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
    with path.open("a") as file:
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
    """The value that `share` of them do not exceed; None without values."""
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
        "lost_steps": max(outcome.lost_steps for outcome in cell),
        "noticed_s": [percentile(noticed, 0.5), percentile(noticed, 0.95)],
        "recovered_s": [percentile(recovered, 0.5), percentile(recovered, 0.95)],
        "timed": len(recovered),
        "bound": bound(broken, len(cell)),
    }


_HEAD = (
    f"{'fault':<17} {'strategy':<26} {'trials':>6} {'went on':>7} {'again':>6} {'broken':>6} {'bits':>5} {'law':>4} "
    f"{'steps':>5} {'noticed s':>11} {'recovered s':>11} {'bound':>6}"
)


def table(found: Sequence[dict[str, Any]], markdown: bool = False) -> str:
    """The table as text. `steps`: the most that one trial did again. Times: the median and the 95th percentile."""
    if markdown:
        head = "| fault | strategy | trials | went on | started again | broken | equal in bits | within the law | "
        head += "most steps lost | noticed, s | recovered, s | bound |\n|" + " --- |" * 12
        return "\n".join([head, *("| " + " | ".join(_cells(row)) + " |" for row in found)])
    widths = (17, 26, 6, 7, 6, 6, 5, 4, 5, 11, 11, 6)
    lines = [_HEAD]
    for row in found:
        cells = _cells(row)
        lines.append(
            " ".join(
                f"{cell:<{w}}" if at < 2 else f"{cell:>{w}}"
                for at, (cell, w) in enumerate(zip(cells, widths, strict=True))
            )
        )
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["fault"],
        row["strategy"],
        *(str(row[key]) for key in ("trials", "recovered", "again", "broken", "bits", "law", "lost_steps")),
        *(" ".join(f"{value:.2f}" for value in row[key] if value is not None) for key in ("noticed_s", "recovered_s")),
        f"{row['bound']:.1%}",
    ]
