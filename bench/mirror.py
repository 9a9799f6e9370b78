"""What a mirror costs the steps: processor seconds of all ranks with `checkpoint.mirror` and without it.

    python -m bench.mirror [--rounds 5] [--speed 20e6] [--width 1024]

Two ranks train a multilayer perceptron under ddp and save it every few steps. The mirror is an S3 server on loopback
behind a line of `--speed` bytes a second, which is busy all the time. Counted is what the ranks' processes use from the
first save to the last step, whichever of their threads uses it; the server and the line are other processes. Runs with
and without the mirror take turns, and each pair is compared. The losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from bench.processes import PATIENCE_S, ROOT
from bench.rows import Row, table
from bench.saves import Wide
from dtf.api.registry import register, with_default

STEPS, EVERY, ROWS = 240, 20, 256


@register("recipe", "mirrored")
class Mirrored(Wide):
    """Says in the log of a rank what its steps took."""

    rows: int = with_default(Wide, "rows", ROWS * STEPS)

    def build_model(self) -> Any:
        from dtf.checkpoint.saves import Saves
        from dtf.engine import saving

        class Timed(Saves):
            began = 0.0

            def save(self, *rest: Any) -> None:
                self.began = self.began or time.process_time()
                super().save(*rest)

            def finish(self) -> None:
                print(json.dumps({"cpu_s": time.process_time() - self.began}), file=sys.stderr, flush=True)
                super().finish()

        saving.Saves = Timed  # type: ignore[misc]
        return self.layers()


class Measured(NamedTuple):
    """One run."""

    cpu_s: float
    wall_s: float
    mirrored: int  # bytes
    losses: list[str]


def run(width: int, environment: dict[str, str], steps: int = STEPS) -> Measured:
    with TemporaryDirectory(prefix="dtf-bench-mirror-") as folder:
        command = [
            *(sys.executable, "-m", "dtf", "recipe=mirrored", "plugins=[bench.mirror]", f"recipe.width={width}"),
            *("strategy=ddp", "launcher.processes=2", "optimizer=adamw", f"run.dir={folder}/run"),
            *(f"step.batch_size={ROWS}", f"train.steps={steps}", "train.eval_every=0", "observer=[console]"),
            *(f"checkpoint.every_steps={EVERY}", "checkpoint.keep_last=1", "checkpoint.keep_best=0"),
            *([f"checkpoint.mirror=s3://bucket/{Path(folder).name}"] if environment else []),
        ]
        variables = os.environ | environment | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        logs = [log.read_text() for log in Path(folder).glob("run/rank_*.log")]
    told = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith('{"cpu_s"')]
    sizes = re.findall(r"mirrored .*: ([\d.]+) MB in", done.stdout)
    wall = re.findall(r"wall=(\d+):(\d+)", done.stdout)[0]
    return Measured(
        sum(rank["cpu_s"] for rank in told),
        60 * int(wall[0]) + int(wall[1]),
        round(1e6 * sum(map(float, sizes))),
        re.findall(r" loss=(\S+)", done.stdout),
    )


def measure(quick: bool, rounds: int = 5, speed: float = 20e6, width: int = 1024) -> list[Row]:
    from tests.support.object_store import object_store

    if quick:
        rounds, width = 1, 64
    found: dict[str, list[Measured]] = {"without": [], "with": []}
    with object_store(speed) as environment:
        for number in range(rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                given = environment if name == "with" else {}
                found[name].append(run(width, given, 2 * EVERY if quick else STEPS))
            if found["with"][-1].losses != found["without"][-1].losses:
                raise SystemExit("the losses differ")
    work = f"two ddp ranks, a save at every {EVERY}th step, a line of {speed / 1e6:.0f} MB/s"
    rows = []
    for name, runs in found.items():
        sent = f"{runs[-1].mirrored / 1e6:.0f} MB mirrored" if name == "with" else ""
        rows.append(Row(work, f"{name} a mirror", "s of processor", [one.cpu_s for one in runs], settings=sent))
    pairs = zip(found["with"], found["without"], strict=True)
    ratios = [one.cpu_s / other.cpu_s for one, other in pairs]
    return [*rows, Row(f"{work}: processor time", "with / without", "", ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speed", type=float, default=20e6)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    print(table(measure(False, options.rounds, options.speed, options.width)))


if __name__ == "__main__":
    main()
