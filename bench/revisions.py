"""What a step takes in this checkout and in another one, in turn: fsdp, tensor and pipeline on two ranks.

    git worktree add ../before REVISION
    python -m bench.revisions ../before                     # 24 rounds of 40 steps; alone on the machine
    python -m bench.revisions ../before --rounds 2 --steps 5

Median and range over rounds, and the ratio of the two. A ResNet-8 at 16 pixels: most of a step is the framework's. Both
have to end with the same losses.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.contest import KEPT, Running, apart, contest, step_rows
from bench.processes import ROOT, Process
from bench.rows import Row, table, with_ratios

SIDE = Path(__file__).with_name("revision_side.py")
RANKS = 2
WORK = ("--arch", "resnet8", "--pixels", "16", "--rows", "16", "--micro-batch-rows", "4")


@dataclass(frozen=True)
class Revision:
    """A strategy of the checkout in `folder`."""

    who: str
    strategy: str
    folder: Path
    settings: str = "one thread a rank, gloo on loopback"
    alone = True  # its ranks choose a port

    def start(self) -> Running:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        common = {
            "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS),
            "GLOO_SOCKET_IFNAME": "lo", **KEPT,
        }  # fmt: skip
        command = [sys.executable, "-P", str(SIDE), self.strategy, *WORK]
        return Running([Process(command, common | {"RANK": str(rank)}, code=self.folder) for rank in range(RANKS)])


def compare(before: Path, strategies: Sequence[str], rounds: int, steps: int) -> list[Row]:
    found: list[Row] = []
    for strategy in strategies:
        work = f"{strategy}, ResNet-8 at 16 pixels, 16 rows in micro-batches of 4, {RANKS} ranks"
        those = [Revision("this checkout", strategy, ROOT), Revision("the other one", strategy, before)]
        turns, absent = contest(work, those, rounds, steps, warm=steps)
        absent += apart(work, turns, those, 1e-5)
        found += with_ratios([*step_rows(work, those, turns, steps, "ms", 1e3), *absent])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--strategies", nargs="+", default=["fsdp", "tensor", "pipeline"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    before = given.before.resolve()
    if not (before / "dtf").is_dir():
        parser.error(f"{given.before} is no checkout of dtf: it has no folder dtf")
    os.chdir(ROOT)
    print(table(compare(before, given.strategies, given.rounds, given.steps)))


if __name__ == "__main__":
    main()
