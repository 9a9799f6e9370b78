"""What a step takes beside a tracker that hangs: `observer=[wandb]` with a library that never returns.

    python -m bench.trackers
    python -m bench.trackers --rounds 20

Runs without and with it alternate. Each step is reported, and each report is sent at once: the most that a tracker can
be given. A library that waits takes no processor time; what a busy one takes is its own, below the ranks' priority.
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
from bench.rounds import alternating
from dtf.core.types import Measured, Started
from dtf.observers.wandb_observer import Wandb

STEPS, LEFT_OUT, ROWS = 240, 40, 64
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
VARIANTS = {
    "without": "observer=[jsonl]",
    "with a tracker that hangs": "observer=[jsonl,wandb]",
}


def step_ms(folder: Path, observers: str) -> float:
    """The median of the steps of one run, in milliseconds."""
    (folder / "stand_in").mkdir(exist_ok=True)
    (folder / "stand_in" / "wandb.py").write_text(HANGS)
    run = Path(tempfile.mkdtemp(dir=folder))
    keys = [f"train.steps={STEPS}", "train.epochs=null", "train.log_every=1", "train.eval_every=0", "checkpoint=off"]
    if "wandb" in observers:
        keys += ["observer.wandb.live=true", "observer.wandb.close_timeout_s=0"]
    path = os.pathsep.join([str(folder / "stand_in"), str(Path(__file__).parents[1])])
    command = [sys.executable, "-m", "dtf", observers, *keys, f"step.batch_size={ROWS}", f"run.dir={run}"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path}, capture_output=True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    return 1e3 * median(ROWS / line["rows_per_s"] for line in lines[LEFT_OUT:])


def report_us(folder: Path) -> float:
    """What a report costs the launching process: the median of 2000, in microseconds, while the tracker hangs."""
    sys.path.insert(0, str(folder / "stand_in"))
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
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with tempfile.TemporaryDirectory() as scratch:
        for _, name in alternating(rounds, VARIANTS):
            times[name].append(step_ms(Path(scratch), VARIANTS[name]))
        cost = report_us(Path(scratch))
    print(machine())
    for name, values in times.items():
        print(f"{name:<26} {median(values):.2f} ms a step, {min(values):.2f} to {max(values):.2f}")
    plain, beside = times.values()
    ratios = [b / a for a, b in zip(plain, beside, strict=True)]
    print(f"ratio, in pairs: {median(ratios):.3f}, 95 % interval {interval(ratios)}, {rounds} rounds")
    print(f"a report takes {cost:.1f} us of the launching process, of {REPORTS} to a tracker that hangs")


if __name__ == "__main__":
    main()
