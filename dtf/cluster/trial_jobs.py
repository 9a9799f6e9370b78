"""Trials of a sweep as jobs of a scheduler. The sweep's own process stays, decides, and computes nothing.

For sweeps that decide as they go. One whose trials are all known is one job, see `submit.submit_sweep`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.trials import TrialEnd, TrialOrder
from dtf.cluster import record
from dtf.cluster.platform import Platform, job_name
from dtf.cluster.submit import hand_in, request_of
from dtf.core.errors import STARTED_AGAIN, ConfigError, Exit
from dtf.runs.standing import standing

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_LOOK_S, _ASK_S = 1.0, 10.0
"""Seconds between two looks at the folders of trials, and between two questions to the scheduler about a job."""


@dataclass
class _Running:
    job: record.JobRecord
    folder: Path
    asked: float = 0.0


class TrialJobs:
    """A `dtf.api.trials.TrialExecutor`. `places`: trials at once. `requested`: whether a signal to stop has come; each
    trial is cancelled once then, and saves.
    """

    def __init__(self, platform: Platform, places: int, requested: Callable[[], bool]) -> None:
        if not platform.sees_folder:
            raise ConfigError(
                "this sweep decides by what is in the folders of its trials, which are not seen from here; sweep over "
                "given values without sweep.prune, or use a launcher whose nodes share storage with this machine"
            )
        self.places = places
        self._platform, self._requested, self._stopped = platform, requested, False
        self._running: dict[int, _Running] = {}

    def start(self, order: TrialOrder) -> None:
        """Submit a trial. One whose job waits or runs, as this process was killed, goes on to be watched."""
        composed: Composed = order.composed  # type: ignore[assignment]
        if order.folder is None:
            raise ConfigError("trials that keep no run folder are not submitted; use launcher=local")
        known = None if record.intent(order.folder) else record.find(order.folder)
        if known is None or not known.platform.state(known.handle).state.is_live:
            name = job_name(order.folder.parent.name, str(order.number))
            request = request_of(self._platform, [composed], order.folder, str(order.folder), name)
            known = hand_in(self._platform, request)
        print(f"dtf: trial {order.number}: {known.title}", flush=True)
        self._running[order.number] = _Running(known, order.folder, time.monotonic())

    def wait(self) -> TrialEnd:
        while True:
            if self._requested() and not self._stopped:
                self.stop()
            for number, running in self._running.items():
                if self._has_ended(running):
                    del self._running[number]
                    return TrialEnd(number, _exit_code(running))
            time.sleep(_LOOK_S)

    def _has_ended(self, running: _Running) -> bool:
        found, now = standing(running.folder), time.monotonic()
        over = found is not None and found.exit is not None and found.exit not in STARTED_AGAIN
        if not over and now - running.asked < _ASK_S:
            return False
        running.asked = now
        return not self._platform.state(running.job.handle).state.is_live

    def stop(self) -> None:
        self._stopped = True
        for running in self._running.values():
            self._platform.cancel(running.job.handle)

    def close(self) -> None:
        self.stop()


def _exit_code(running: _Running) -> int:
    """Of the run; E_PEER where its job ended before it said anything."""
    found = standing(running.folder)
    return Exit.PEER if found is None or found.exit is None else found.exit
