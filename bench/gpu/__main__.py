"""Prove dtf's CUDA paths on one GPU and take the figures, in ten minutes.

    python -m bench.gpu                         # all steps; $OUT or outputs/gpu-DATE gets summary.md, results.jsonl
    python -m bench.gpu --minutes 8 --only machine waits resnet50
    python -m bench.gpu --rehearse              # the same without a GPU, at tiny sizes: its figures mean nothing

Nothing is installed. Each step is a process of its own. What a step needs and is not there is said before the first
one. A step that the time does not suffice for is not begun. CIFAR-10 and JPEG files come from $DTF_CIFAR10 and
$DTF_IMAGES.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from bench.gpu.job import ROOT
from bench.gpu.record import FAILED, NOT_RUN, Lines, read, state_of, summary
from bench.gpu.steps import STEPS, Step

RESERVE_S = 15.0
"""Left at the end for the last writes."""

GRACE_S = 5.0
"""A step that goes by its limit has ended by then."""

BESIDE = 4
"""So many steps that measure no time run at once: most of theirs is the start of processes."""


class Kit:
    """Runs steps until the time is up."""

    def __init__(self, folder: Path, minutes: float, rehearsed: bool) -> None:
        self.folder, self.rehearsed = folder, rehearsed
        self.until = time.monotonic() + 60 * minutes - RESERVE_S
        self.path = folder / "results.jsonl"
        self.running: dict[str, tuple[Step, subprocess.Popen, float, float]] = {}

    def note(self, text: str) -> None:
        Lines(self.path, "").write("note", text=text)

    def end(self, step: Step, state: str, reason: str, seconds: float = 0.0) -> None:
        """Record how a step ended."""
        Lines(self.path, step.name).write("end", state=state, reason=reason, seconds=round(seconds, 1))
        self.write_summary()

    def write_summary(self) -> None:
        page = self.folder / "summary.md.part"
        page.write_text(summary(read(self.path), "dtf on one GPU", self.rehearsed))
        page.replace(self.folder / "summary.md")

    def run(self, steps: Sequence[Step]) -> bool:
        """Whether no step failed."""
        able = []
        for step in steps:
            missing, lacks = step.missing(), "" if step.missing() else step.lacks()
            if missing or lacks:
                self.end(step, NOT_RUN, f"not installed: {', '.join(missing)}" if missing else lacks)
            else:
                able.append(step)
        for step in able:
            self.wait(0 if step.alone else BESIDE - 1)
            left = self.until - time.monotonic()
            if left < step.least_s:
                self.end(step, NOT_RUN, f"{max(0, left):.0f} s are left, it needs {step.least_s:.0f}")
                continue
            self.start(step, min(step.limit_s, left))
            self.wait(0 if step.alone else BESIDE - 1)
        self.wait(0)
        self.write_summary()
        return not any(line["kind"] == "end" and line["state"] == FAILED for line in read(self.path))

    def start(self, step: Step, seconds: float) -> None:
        command = [sys.executable, "-m", "bench.gpu.job", step.name, "--lines", str(self.path)]
        until = time.monotonic() + seconds
        command += ["--until", f"{until:.1f}", *(["--rehearse"] if self.rehearsed else [])]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        print(f"-- {step.name}: {step.about} (at most {seconds:.0f} s)", flush=True)
        with (self.folder / "log.txt").open("a") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.running[step.name] = (step, process, time.monotonic(), until + GRACE_S)

    def wait(self, most: int) -> None:
        """Until at most so many steps run."""
        while len(self.running) > most:
            for name, (step, process, began, until) in list(self.running.items()):
                late = time.monotonic() > until
                if late and process.poll() is None:
                    self.stop(process)
                if process.poll() is not None:
                    del self.running[name]
                    self.ended(step, process.returncode, late, time.monotonic() - began)
            if len(self.running) > most:
                time.sleep(0.1)

    def stop(self, process: subprocess.Popen) -> None:
        process.terminate()  # it stops the command of dtf that it has started
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def ended(self, step: Step, code: int, late: bool, seconds: float) -> None:
        state, reason = state_of([line for line in read(self.path) if line["step"] == step.name])
        if late:
            state, reason = FAILED, f"it took more than its {seconds:.0f} s; until then: {state} {reason}"
        elif code and state != FAILED:
            state, reason = FAILED, f"its process ended with {code}, see log.txt"
        self.end(step, state, reason, seconds)


def packages_text(steps: Sequence[Step]) -> str:
    lost = {name: step.missing() for step in steps for name in (step.name,) if step.missing()}
    if not lost:
        return "all packages of these steps are installed"
    names = sorted({package for missing in lost.values() for package in missing})
    return f"not installed: {', '.join(names)}; so these steps cannot run: {', '.join(lost)}. Nothing is installed here"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", default=[], help=", ".join(names))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="folder for the results; default: $OUT, or outputs/gpu-DATE")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at tiny sizes")
    given = parser.parse_args(arguments)
    if not given.rehearse and (reason := _no_gpu()):
        print(f"bench.gpu: {reason}; --rehearse goes through the steps without a GPU", file=sys.stderr)
        return 2
    named = given.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    folder = (named or ROOT / "outputs" / f"gpu-{datetime.now():%Y%m%d-%H%M%S}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    steps = [step for step in STEPS if not given.only or step.name in given.only]
    kit = Kit(folder, given.minutes, given.rehearse)
    kit.note(f"{datetime.now():%Y-%m-%d %H:%M}, {given.minutes:g} minutes, {len(steps)} of {len(STEPS)} steps")
    kit.note(packages_text(steps))
    good = kit.run(steps)
    print(f"{folder / 'summary.md'}")
    return 0 if good else 1


def _no_gpu() -> str:
    """Why there is no GPU; empty where there is one. Another process asks, so that this one holds no memory of it."""
    if find_spec("torch") is None:
        return f"torch is not installed for {sys.executable}; activate its environment, or make gpu PYTHON=PATH"
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    return "" if found else "torch finds no GPU"


if __name__ == "__main__":
    sys.exit(main())
