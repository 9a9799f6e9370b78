"""What the engine costs per optimizer step, beside a loop written by hand, Fabric, Accelerate and Lightning.

    python -m bench.overhead                # a toy MLP of 32 rows a step, one process and two ddp ranks

The smaller the network, the more of a step is the framework's. All compute the same metrics and the norm of the
gradient in each step, on the same rows, with torch's fused SGD, one thread a rank, and keep freed memory as dtf's
ranks do. Contestants take turns. One whose loss is not dtf's is a row that says so.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.contest import KEPT, KEPT_MEMORY, Contestant, apart, contest, shortest_rows, step_rows
from bench.rows import Row, table, with_ratios
from bench.toy import Work

BAREBONES = "Trainer(barebones=True): no logger, bar or checkpoint"
VIEW = ", gradient_as_bucket_view"


def contestants(work: Work, ranks: int) -> list[Contestant]:
    text, view = json.dumps(work), VIEW if ranks > 1 else ""
    common: dict[str, Any] = {"ranks": ranks, "threads": work.threads}
    dtf = Contestant("dtf", "bench.engine", [text], settings="strategy=ddp, defaults", **common)

    def other(who: str, loop: str, settings: str) -> Contestant:
        peer = "" if loop == "by_hand" else "trainers"
        return Contestant(
            who, "bench.toy", [loop, text], peer, settings=f"{settings}{view}, {KEPT_MEMORY}", variables=KEPT, **common
        )

    return [
        dtf,
        other("by hand", "by_hand", "torch alone"),
        other("Fabric", "fabric", "setup and backward"),
        other("Accelerate", "accelerate", "prepare and backward"),
        other("Lightning", "lightning", BAREBONES),
    ]


def measure(quick: bool) -> list[Row]:
    found: list[Row] = []
    rounds, steps = (2, 20) if quick else (24, 200)
    for ranks in (1, 2):
        name = "one process" if ranks == 1 else "two ranks"
        work = f"toy MLP, 32 rows, {name}: mean of {steps} steps"
        those = contestants(Work("mlp", 32), ranks)
        turns, absent = contest(work, those, rounds, steps, warm=2 * steps)
        absent += apart(work, turns, those, 1e-5)
        found += with_ratios([*step_rows(work, those, turns, steps, "us", 1e6), *absent])
        least = f"toy MLP, 32 rows, {name}: the shortest of {steps} steps"
        found += with_ratios(shortest_rows(least, those, turns, "us", 1e6))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a trial of seconds")
    print(table(measure(parser.parse_args().quick)))


if __name__ == "__main__":
    main()
