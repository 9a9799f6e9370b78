"""Whole steps of a ResNet on images of 224 pixels in fp32: dtf beside loops written by hand and Lightning.

    python -m bench.end_to_end resnet18                # 16 rows a step, one process and two ddp ranks
    python -m bench.end_to_end resnet50 --ranks 1      # 8 rows

Two cores: two threads in one process, one in each of two ranks. All compute the same metrics and the norm of the
gradient in each step, with torch's fused SGD, on noise in memory: reading images is `bench.images`. dtf's ranks keep
freed memory by default; the loop by hand has that, too, as a contestant of its own. One whose loss is another is a row
that says so.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.contest import KEPT, KEPT_MEMORY, Contestant, Turn, apart, contest, step_rows
from bench.rows import Row, table, with_ratios
from bench.toy import Work

APART = 0.05
OTHERWISE = f"rounds otherwise, loss within {APART:.0%}"
ROWS = {"resnet18": 16, "resnet50": 8}


def contestants(model: str, ranks: int, pixels: int) -> list[Contestant]:
    threads = 2 // ranks
    work = Work(model, ROWS[model], pixels, threads=threads)
    last = work._replace(channels_last=True)
    common: dict[str, Any] = {"ranks": ranks, "threads": threads}
    view = "gradient_as_bucket_view, " if ranks > 1 else ""
    fixed = work._replace(static_graph=True), last._replace(static_graph=True)

    def dtf(who: str, work: Work, settings: str) -> Contestant:
        return Contestant(who, "bench.engine", [json.dumps(work)], settings=settings, **common)

    def other(who: str, loop: str, work: Work, settings: str, kept: bool = False) -> Contestant:
        peer, variables = "trainers" if loop == "lightning" else "", KEPT if kept else {}
        settings = f"{view}{settings}{f', {KEPT_MEMORY}' if kept else ''}"
        return Contestant(
            who, "bench.toy", [loop, json.dumps(work)], peer, settings=settings, variables=variables, **common
        )

    found = [
        dtf("dtf", last, "channels last, as step.memory_format=auto takes at 224 pixels"),
        dtf("dtf, channels first", work, f"step.memory_format=contiguous; {OTHERWISE}"),
        other("by hand", "by_hand", work, f"channels first; {OTHERWISE}"),
        other("by hand, channels last", "by_hand", last, "channels last"),
        other("by hand, channels last, kept memory", "by_hand", last, "channels last", True),
    ]
    if ranks == 1:
        settings = f"torch.compile, channels last; {OTHERWISE}"
        found.append(other("by hand, compiled", "by_hand", last._replace(compiled=True), settings, True))
    else:
        found.append(dtf("dtf, static graph", fixed[1], "strategy.static_graph=true, channels last"))
        found.append(other("by hand, static graph", "by_hand", fixed[1], "static_graph, channels last", True))
    found.append(other("Lightning", "lightning", last, "Trainer(barebones=True), channels last", True))
    return found


def measure_of(model: str, quick: bool, sizes: tuple[int, ...] = (1, 2)) -> list[Row]:
    found: list[Row] = []
    for ranks in sizes:
        pixels, size = 64 if quick else 224, "one process" if ranks == 1 else "two ranks"
        work = f"{model}, {pixels} pixels, {ROWS[model]} rows a step, {size}, turns of a step"
        those = contestants(model, ranks, pixels)
        if quick:
            those = [one for one in those if "compiled" not in one.who]
        turns, absent = contest(work, those, rounds=2 if quick else 20, steps=1, warm=1 if quick else 3)
        absent += unlike(work, turns, those)
        found += with_ratios([*step_rows(work, those, turns, 1, "ms", 1e3), *absent])
    return found


def unlike(work: str, turns: dict[str, list[Turn]], those: list[Contestant]) -> list[Row]:
    """Losses are alike where memory has the same format. Another one rounds otherwise in each step, and so do compiled
    kernels: theirs are near dtf's, `APART` at most.
    """
    first = [one for one in those if one.who in ("dtf, channels first", "by hand")]
    last = [one for one in those if one not in first and one.who != "by hand, compiled"]
    groups = (first, 1e-4), (last, 1e-4), (those, APART)
    return [row for some, most in groups for row in apart(work, turns, some, most)]


def measure(quick: bool) -> list[Row]:
    """ResNet-18."""
    return measure_of("resnet18", quick)


def measure_resnet50(quick: bool) -> list[Row]:
    return measure_of("resnet50", quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=ROWS)
    parser.add_argument("--ranks", type=int, choices=(1, 2), nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="a trial")
    given = parser.parse_args()
    print(table(measure_of(given.model, given.quick, tuple(given.ranks))))


if __name__ == "__main__":
    main()
