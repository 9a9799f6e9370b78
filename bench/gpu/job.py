"""What a step gets to work with, and the process that a step is."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from bench.gpu.record import Lines, NotRun
from bench.gpu.steps import BY_NAME

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Done:
    """A command of dtf that ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def last(self) -> str:
        """The last line that it said on standard error, for a reason."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        return lines[-1][:500] if lines else ""


@dataclass(frozen=True)
class Job:
    lines: Lines
    rehearsed: bool
    until: float  # time.monotonic()
    scratch: Path

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def dtf(self, *overrides: str, folder: str, most_s: float = 600.0) -> Done:
        """Run a command of dtf in the run folder `folder` of this step. NotRun where no time is left for it."""
        seconds = min(most_s, self.left_s - 5)
        if seconds < 5:
            raise NotRun("the time is up")
        place = self.scratch / re.sub("[^a-z0-9]+", "-", folder.lower())
        command = [sys.executable, "-m", "dtf", *overrides, f"run.dir={place}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            out, err = _stopped(process)
            print(" ".join(command), out, err, sep="\n", flush=True)
            if seconds < most_s:
                raise NotRun(f"the time was up after {seconds:.0f} s of {folder}") from None
            err += f"\nstopped after {seconds:.0f} s"
        except BaseException:  # this process is told to end
            _stopped(process)
            raise
        print(" ".join(command), out, err, sep="\n", flush=True)  # the log keeps all of it
        return Done(process.returncode, out, err, place)

    def check(self, name: str, *overrides: str, most_s: float = 600.0) -> Done | None:
        """A command that must end with 0, as a part of the step. None where there was no time."""
        try:
            done = self.dtf(*overrides, folder=name, most_s=most_s)
        except NotRun as reason:
            self.lines.not_run(name, str(reason))
            return None
        self.lines.part(name, done.code == 0, f"exit code {done.code}: {done.last}" if done.code else "")
        return done


def _stopped(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Stop a command of dtf, whose ranks end with it; what it has said."""
    process.terminate()
    try:
        return process.communicate(timeout=4)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def main() -> int:
    """The process of one step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=BY_NAME)
    parser.add_argument("--lines", type=Path, required=True)
    parser.add_argument("--until", type=float, required=True, help="time.monotonic(), which is that of the host")
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that its commands are stopped
    lines = Lines(given.lines, given.step)
    module, _, function = BY_NAME[given.step].entry.partition(":")
    with tempfile.TemporaryDirectory(prefix="dtf-gpu-") as scratch:
        job = Job(lines, given.rehearse, given.until, Path(scratch))
        try:
            getattr(importlib.import_module(module), function)(job)
        except NotRun as reason:
            lines.not_run("the rest", str(reason))
        except Exception as error:  # noqa: BLE001 (it is recorded)
            traceback.print_exc()
            lines.part("the step", False, f"{type(error).__name__}: {error}"[:1000])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
