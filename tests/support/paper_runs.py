"""A job that keeps a run folder as training does and trains nothing: for sweeps, in a tenth of a second."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.core.errors import Exit
from dtf.host.signals import Stop

EVERY = 5
"""Steps of an epoch, after each of which there is an evaluation."""


@register("job", "paper")
class Paper(Job):
    """The objective is better the nearer lr.peak is to 0.1, and the longer it trains."""

    trains = submits = True

    hold: str = option(default="", doc="a file: while it is there, the run waits after its first evaluation")
    dies: float = option(default=0.0, doc="the lr.peak whose process kills itself")

    def __post_init__(self) -> None:
        self.folder: Path | None = None
        self.elsewhere_s: Callable[[], float] = lambda: 0.0
        self.best: tuple[str, float] | None = None

    def run(self, composed: Any) -> int:
        config, settings = composed.config, composed.settings
        self.folder = self.folder or Path(config["run"]["dir"])
        total = EVERY * round(config["train"]["epochs"])
        until = min(config["train"]["until"] or total, total)
        path, peak = self.folder / "run.json", config["lr"]["peak"]
        before = json.loads(path.read_text()) if path.exists() else {"evaluations": {}}
        values = {int(step): value for step, value in before["evaluations"].items()}
        first = max(values, default=0) + EVERY
        self.folder.mkdir(exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config))
        code, cause = Exit.OK, "finished" if until == total else "stopped"
        with Stop() as stop:
            for step in range(first, until + 1, EVERY):
                values[step] = round(step / total - abs(math.log10(peak) + 1) / 3, 4)
                self.best = (settings.objective[0], max(values.values()))
                self._write(path, values, total, None, "")
                if peak == self.dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                while self.hold and Path(self.hold).exists() and not stop.count:
                    time.sleep(0.01)
                if stop.count:
                    code, cause = Exit.PREEMPTED, "preempted"
                    break
        print(f"cores {sorted(os.sched_getaffinity(0))} until {until}", flush=True)
        self._write(path, values, total, int(code), cause)
        return code

    def _write(self, path: Path, values: dict[int, float], total: int, code: int | None, cause: str) -> None:
        record = {
            "id": "paper",
            "started": "",
            "ended": None if code is None else "",
            "identity": {},
            "results": True,
            "exit": code,
            "step": max(values, default=0),
            "world": {"processes": 1, "devices": "cpu"},
            "cause": cause,
            "best": self.best,
            "objective": self.best[0] if self.best else "",
            "evaluations": values,
            "plan": {"steps": total, "steps_per_epoch": EVERY},
        }
        path.with_suffix(".new").write_text(json.dumps(record))
        path.with_suffix(".new").rename(path)
