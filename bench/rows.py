"""What a bench finds: rows of figures, each with what it was measured beside.

A part of `python -m bench` is a module with `measure(quick) -> list[Row]` and `main()`. `quick` is a trial of seconds
that nobody should quote: few rounds of small sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from bench.medians import bounds

NO_SPEED = ("MB", "steps")
"""Units of what is neither a time nor a rate."""


@dataclass(frozen=True)
class Row:
    """One contestant in one piece of work. `values` has one number per round; contestants of a round ran in turn."""

    work: str
    who: str
    unit: str = ""
    values: list[float] = field(default_factory=list)
    more_is_better: bool = False
    cpu: list[float] = field(default_factory=list)  # processor time of all its processes, one per round
    cpu_unit: str = ""
    ratios: list[float] = field(default_factory=list)  # its time over that of the row `against`, round by round
    against: str = ""
    loss: float | None = None
    settings: str = ""
    not_run: str = ""  # why there are no values

    def __post_init__(self) -> None:
        if bool(self.values) == bool(self.not_run):
            raise ValueError(f"{self.work}, {self.who}: a row has values, or says why it has none")


def row_of(found: dict[str, Any]) -> Row:
    """From `asdict`, as it lies in a file. ValueError where a key is missing or unknown."""
    try:
        return Row(**found)
    except TypeError as error:
        raise ValueError(f"no row of figures: {error}") from error


def with_ratios(rows: Sequence[Row], base: str = "dtf") -> list[Row]:
    """The same rows with `ratios`: of each round, the time of a row over that of the row `base` of the same work, or
    `base`'s rate over its own. More than 1: `base` was faster. Rows of other units or numbers of rounds than its get
    none, nor do those of NO_SPEED.
    """
    own = {row.work: row for row in rows if row.who == base and row.values}
    found = []
    for row in rows:
        one = own.get(row.work)
        if one is None or row is one or not row.values or row.unit in NO_SPEED:
            found.append(row)
            continue
        if (one.unit, len(one.values)) != (row.unit, len(row.values)):
            found.append(row)
            continue
        pairs = zip(row.values, one.values, strict=True)
        ratios = [b / a if row.more_is_better else a / b for a, b in pairs]
        found.append(replace(row, ratios=ratios, against=base))
    return found


def figure(value: float) -> str:
    """Three digits that count."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def cells(row: Row) -> list[str]:
    """Of a table: who, median with unit, range, rounds, processor time, ratio, loss, settings."""
    if row.not_run:
        return [row.who, "not run", "", "", "", "", "", " ".join(row.not_run.split())]
    spread = f"{figure(min(row.values))} to {figure(max(row.values))}" if len(row.values) > 1 else "one run"
    cpu = f"{figure(median(row.cpu))} {row.cpu_unit}" if row.cpu else ""
    ratio = ""
    if len(row.ratios) in range(1, 6):  # too few for an interval
        ratio = f"{median(row.ratios):.2f}"
    elif row.ratios:
        low, high = bounds(row.ratios)
        ratio = f"{median(row.ratios):.2f} ({low:.2f} to {high:.2f})"
    loss = "" if row.loss is None else f"{row.loss:.6f}"
    middle, rounds = f"{figure(median(row.values))} {row.unit}", str(len(row.values))
    return [row.who, middle, spread, rounds, cpu, ratio, loss, row.settings]


def heads(rows: Sequence[Row]) -> list[str]:
    """Of one piece of work. A ratio is to one row alone, whose name its heading has."""
    (base,) = {row.against for row in rows if row.against} or {""}
    return [rows[0].work, "median", "range", "rounds", "processor", f"time / that of {base} (95 %)", "loss", "settings"]


def table(rows: Sequence[Row]) -> str:
    """Markdown: one table for each piece of work. Columns that are empty in all of its rows are left out."""
    texts = []
    for work in dict.fromkeys(row.work for row in rows):
        some = [row for row in rows if row.work == work]
        lines, names = [cells(row) for row in some], heads(some)
        kept = [index for index in range(len(names)) if any(line[index] for line in lines)]
        shown = [names, ["---"] * len(names), *lines]
        texts.append("\n".join(f"| {' | '.join(line[index] for index in kept)} |" for line in shown))
    return "\n\n".join(texts)


def as_json(row: Row) -> dict[str, Any]:
    """Without what is empty; numbers with six digits."""
    plain = {key: value for key, value in asdict(row).items() if value not in ("", [], None, False)}
    for key in ("values", "cpu", "ratios"):
        if key in plain:
            plain[key] = [float(f"{value:.6g}") for value in plain[key]]
    return plain


def print_measured(measure: Callable[[bool, int], list[Row]], about: str | None) -> None:
    """The main function of a part that takes rounds alone. `about`: of its module."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    print(table(measure(False, parser.parse_args().rounds)))
