"""What a mirror costs the steps: processor seconds of all ranks with `checkpoint.mirror` and without it.

    python bench/mirror.py [--rounds 5] [--speed 20e6] [--width 1024]

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
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from saves import Wide, processor

from dtf.api.registry import register, with_default

ROOT = Path(__file__).parents[1]
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


def run(width: int, environment: dict[str, str]) -> Measured:
    with TemporaryDirectory(prefix="dtf-bench-mirror-") as folder:
        command = [
            *(sys.executable, "-m", "dtf", "recipe=mirrored", "plugins=[mirror]", f"recipe.width={width}"),
            *("strategy=ddp", "launcher.processes=2", "optimizer=adamw", f"run.dir={folder}/run"),
            *(f"step.batch_size={ROWS}", f"train.steps={STEPS}", "train.eval_every=0", "observer=[console]"),
            *(f"checkpoint.every_steps={EVERY}", "checkpoint.keep_last=1", "checkpoint.keep_best=0"),
            *([f"checkpoint.mirror=s3://bucket/{Path(folder).name}"] if environment else []),
        ]
        variables = os.environ | environment | {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
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


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tests.support.object_store import object_store

    parser = argparse.ArgumentParser(description="What a mirror costs.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--speed", type=float, default=20e6)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    print(f"{processor()}, {len(os.sched_getaffinity(0))} cores")
    ratios = []
    with object_store(options.speed) as environment:
        for number in range(options.rounds):
            pair = {}
            for name in ("without", "with")[:: -1 if number % 2 else 1]:
                pair[name] = run(options.width, environment if name == "with" else {})
            if pair["with"].losses != pair["without"].losses:
                raise SystemExit("the losses differ")
            ratios.append(pair["with"].cpu_s / pair["without"].cpu_s)
            for name, one in pair.items():
                print(
                    f"{name:<8} CPU {one.cpu_s:6.2f} s, wall {one.wall_s:.0f} s, mirrored {one.mirrored / 1e6:.0f} MB"
                )
    print(f"with / without: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
