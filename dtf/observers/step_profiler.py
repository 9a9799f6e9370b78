"""Traces a window of steps with torch.profiler in one rank, and reports the shares of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from dtf.api.observer import Probe
from dtf.core.files import replace_text
from dtf.model.annotate import section
from dtf.observers.trace_shares import Shares, shares


class StepProfiler(Probe):
    """Leaves out `skip` steps, then records `steps` whole ones, from the start of one to the start of the next.

    `device`: `cpu` or `cuda`.
    """

    def __init__(self, folder: Path, rank: int, device: str, skip: int, steps: int, say: Callable[[str], None]) -> None:
        self._folder, self._rank, self._say = folder, rank, say
        self._skip, self._steps = skip, steps
        self._seen = 0  # steps begun
        self._first = 0  # of the window
        self._section: AbstractContextManager[object] | None = None
        self._done = False
        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=self._keep,
            # gloo's messages, and replicas of dp, have threads of their own
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )

    def enter(self, phase: str, step: int) -> None:
        if self._done:
            return
        if self._section is not None:
            self._section.__exit__(None, None, None)
            self._section = None
        if phase == "step":
            if self._seen == self._skip - 1:
                self._profiler.start()  # the step before the window is the profiler's own first one
            elif self._seen >= self._skip:
                self._first = self._first or step
                self._profiler.step()
            self._seen += 1
        elif self._seen >= self._skip:
            self._section = section("data" if phase == "fetch" else phase)
            self._section.__enter__()
        if self._done:
            self._profiler.stop()

    def close(self) -> None:
        if self._done:
            return
        if self._seen >= self._skip:
            self.enter("stop", 0)
            self._profiler.stop()  # keeps what there is of the window
        if not self._done:
            self._say(
                f"profile: rank {self._rank} ended after {self._seen} steps, the window begins after {self._skip}; "
                "lower observer.profile.skip"
            )
        self._done = True

    def _keep(self, profiler: profile) -> None:
        self._done = True
        self._folder.mkdir(mode=0o700, exist_ok=True)
        # the end of the name is what TensorBoard's plugin looks for
        path = self._folder / f"rank_{self._rank}.pt.trace.json"
        path.touch(mode=0o600)
        profiler.export_chrome_trace(str(path))
        window = shares(json.loads(path.read_text())["traceEvents"])
        if window is None:
            return
        kept = {"rank": self._rank, "first_step": self._first, **window._asdict()}
        summary = self._folder / f"rank_{self._rank}.json"
        replace_text(summary, json.dumps(kept, indent=1) + "\n")
        self._say(
            f"profile of rank {self._rank}, steps {self._first} to {self._first + window.steps - 1}: "
            f"{sentence(window)}; {path.name}"
        )


def sentence(window: Shares) -> str:
    """`12.3 ms a step: data 2 %, forward 31 %, ...`."""
    parts = ", ".join(f"{name} {share:.0%}".replace("%", " %") for name, share in window.parts.items())
    beside = f" ({window.hidden:.0%}".replace("%", " %") + " more beside computation)" if window.hidden >= 0.005 else ""
    return f"{1000 * window.step_s:.1f} ms a step: {parts.replace(', optimizer', f'{beside}, optimizer')}"
