"""Trials of a sweep as jobs of a scheduler. The sweep's own process stays, decides, and computes nothing.

For sweeps that decide as they go. One whose trials are all known is one job, see `submit.submit_sweep`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.trials import TrialEnd, TrialOrder
from dtf.cluster import record
from dtf.cluster.platform import Platform, State, job_name
from dtf.cluster.submit import hand_in, request_of
from dtf.core.errors import STARTED_AGAIN, ConfigError, DtfError, Exit, PeerError, error_line
from dtf.runs.standing import Standing, standing

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_LOOK_S, _ASK_S = 1.0, 10.0
"""Seconds between two looks at the folders of trials, and between two questions to the scheduler about a job."""


@dataclass
class _Running:
    """`silent`: whether the scheduler did not answer when it was asked last."""

    job: record.JobRecord
    folder: Path
    asked: float = 0.0
    silent: bool = False
    cancelled: bool = False

    @property
    def said(self) -> Standing | None:
        """How the run stands, if this job has begun it: the folder may still say how an earlier job ended."""
        found = standing(self.folder)
        return None if found is None or found.id == self.job.launch_before else found

    def exit_code(self, state: State, asked_to_stop: bool) -> int:
        """Of the run, in `state` of its job, which has ended. E_PEER where the job was lost before the run said that it
        is over: as it never began, or as the scheduler gave up to start it again.
        """
        said = self.said
        if said is not None and said.exit is not None and (said.exit, state) != (Exit.PREEMPTED, State.failed):
            return said.exit
        return Exit.PREEMPTED if asked_to_stop else Exit.PEER


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
        self._refused: list[TrialEnd] = []  # trials that could not be submitted

    def start(self, order: TrialOrder) -> None:
        """Submit a trial. One whose job waits or runs, as this process was killed, goes on to be watched. One that the
        scheduler does not take has failed.
        """
        composed: Composed = order.composed  # type: ignore[assignment]
        if order.folder is None:
            raise ConfigError("trials that keep no run folder are not submitted; use launcher=local")
        try:
            known = None if record.intent(order.folder) else record.find(order.folder)
            if known is None or not known.platform.state(known.handle).state.is_live:
                name = job_name(order.folder.parent.name, str(order.number))
                request = request_of(self._platform, [composed], order.folder, str(order.folder), name)
                known = hand_in(self._platform, request)
        except DtfError as error:
            _tell(order.number, error)
            self._refused.append(TrialEnd(order.number, error.exit))
            return
        print(f"dtf: trial {order.number}: {known.title}", flush=True)
        self._running[order.number] = _Running(known, order.folder, time.monotonic())

    def wait(self) -> TrialEnd:
        while not self._refused:
            if self._requested() and not self._stopped:
                self.stop()
            for number, running in self._running.items():
                state = self._ended(number, running)
                if state is not None:
                    del self._running[number]
                    return TrialEnd(number, running.exit_code(state, self._stopped))
            time.sleep(_LOOK_S)
        return self._refused.pop()

    def _ended(self, number: int, running: _Running) -> State | None:
        """What has become of the job of a trial; None: it goes on, as far as is known. A scheduler that does not answer
        is asked again, unless the sweep is to stop: the job is left to it then.
        """
        said, now = running.said, time.monotonic()
        over = said is not None and said.exit is not None and said.exit not in STARTED_AGAIN
        if now - running.asked < (_LOOK_S if over and not running.silent else _ASK_S):
            return None
        running.asked = now
        if self._stopped and not running.cancelled:
            self._cancel(number, running)
        try:
            state = self._platform.state(running.job.handle).state
        except PeerError as error:
            if not running.silent:
                _tell(number, error)
            running.silent = True
            return State.unknown if self._stopped else None
        running.silent = False
        return None if state.is_live else state

    def stop(self) -> None:
        self._stopped = True
        for number, running in self._running.items():
            self._cancel(number, running)

    def _cancel(self, number: int, running: _Running) -> None:
        """Without an answer it is tried once more, when the scheduler is asked about the job."""
        try:
            self._platform.cancel(running.job.handle)
            running.cancelled = True
        except PeerError as error:
            _tell(number, error)

    def close(self) -> None:
        """Jobs that still run, as an error ends this process, are left to the same sweep started again."""
        for number, running in self._running.items():
            print(f"dtf: trial {number}: {running.job.title} goes on", file=sys.stderr, flush=True)
        self._running.clear()


def _tell(number: int, error: DtfError) -> None:
    print(error_line(error.exit, f"trial {number}: {error}"), file=sys.stderr, flush=True)
