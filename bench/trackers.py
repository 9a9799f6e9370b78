"""What a step takes while its reports go to a tracker that hangs: `observer=[wandb]` with a library that never returns.

    python -m bench.trackers
    python -m bench.trackers --blocks 160

In one run blocks of steps alternate: their reports, one a step and sent at once, go to the tracker, or do not. A
library that waits takes no processor time; what a busy one takes is its own, below the ranks' priority.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.medians import interval, machine
from dtf.core.types import Measured, Started
from dtf.observers.wandb_observer import Wandb

BLOCK, LEFT_OUT, ROWS = 20, 2, 64
"""Steps of a block, those of them that do not count, and rows of a step."""
REPORTS = 2000
HANGS = """
import threading
class Settings:
    def __init__(self, **values): pass
class config:
    update = staticmethod(lambda values, allow_val_change: None)
class Run:
    id, url, config = "x", None, config
    def log(self, values, step): threading.Event().wait()
def init(**given): return Run()
"""
IN_BLOCKS = f"""
from dtf import Measured, register
from dtf.observers.wandb_observer import Wandb

@register("observer", "in_blocks")
class InBlocks(Wandb):
    def open(self, folder, config):
        super().open(folder, config)
        self._name = "wandb"

    def see(self, event):
        if not isinstance(event, Measured) or event.step // {BLOCK} % 2:
            super().see(event)
"""


def step_ms(folder: Path, blocks: int) -> tuple[list[float], list[float]]:
    """The median step of each block without the tracker and with it, in milliseconds."""
    run, steps = folder / "run", (blocks + 1) * BLOCK
    keys = [f"train.steps={steps}", "train.epochs=null", "train.log_every=1", "train.eval_every=0", "checkpoint=off"]
    keys += ["observer=[jsonl,in_blocks]", "observer.in_blocks.live=true", "observer.in_blocks.close_timeout_s=0"]
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "dtf", "plugins=[in_blocks]", *keys, f"step.batch_size={ROWS}", f"run.dir={run}"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    found = {line["step"]: 1e3 * ROWS / line["rows_per_s"] for line in map(json.loads, (run / "metrics.jsonl").open())}
    times = [median(found[block * BLOCK + step] for step in range(LEFT_OUT, BLOCK)) for block in range(1, blocks + 1)]
    return times[1::2], times[::2]


def report_us(folder: Path) -> float:
    """What a report costs the launching process: the median of 2000, in microseconds, while the tracker hangs."""
    sys.path.insert(0, str(folder))
    observer = Wandb(live=True, close_timeout_s=0)
    observer.open(folder, {"recipe": {"name": "bench"}})
    observer.see(Started(0, REPORTS, REPORTS, {}))
    times = []
    for step in range(1, REPORTS + 1):
        began = time.perf_counter()
        observer.see(Measured("train", step, 0.1, 1.0, {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "rows_per_s": 1e3}))
        times.append(time.perf_counter() - began)
    with contextlib.redirect_stderr(io.StringIO()):
        observer.close()
    return 1e6 * median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=120, help="an even number")
    blocks = parser.parse_args().blocks // 2 * 2
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "wandb.py").write_text(HANGS)
        (folder / "in_blocks.py").write_text(IN_BLOCKS)
        plain, beside = step_ms(folder, blocks)
        cost = report_us(folder)
    print(machine())
    for name, values in (("without", plain), ("to a tracker that hangs", beside)):
        print(f"{name:<24} {median(values):.2f} ms a step, {min(values):.2f} to {max(values):.2f}")
    ratios = [b / a for a, b in zip(plain, beside, strict=True)]
    low_high = interval(ratios)
    print(f"ratio, of neighbouring blocks: {median(ratios):.3f}, 95 % interval {low_high}, {len(ratios)} pairs")
    print(f"a report takes {cost:.1f} us of the launching process, of {REPORTS} to a tracker that hangs")


if __name__ == "__main__":
    main()
