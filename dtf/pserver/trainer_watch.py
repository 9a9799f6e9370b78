"""On server 0 of a run whose processes are started manually, while it waits for trainers and none is there: it says so,
and ends where waiting is of no use.
"""

from __future__ import annotations

from time import monotonic

from dtf.api.helper_roles import RendezvousContext
from dtf.core.errors import DtfError, Preempted
from dtf.pserver.discovery import Coordinator, RendezvousTimeout, WaitReport
from dtf.pserver.server.program import ServerProgram

HEARD_S = 10.0
"""A trainer that is alive asks server 0 for work more often than this."""


class TrainerWatch:
    """To be called regularly while `program` waits for work of trainers; `program.change` is held."""

    def __init__(self, coordinator: Coordinator, context: RendezvousContext, timeout_s: float) -> None:
        self._coordinator, self._context, self._timeout_s = coordinator, context, timeout_s
        self._report: WaitReport | None = None
        self._start = 0.0

    def __call__(self, program: ServerProgram) -> None:
        """Preempted where a server was asked to stop, as nobody would finish the step; RendezvousTimeout where no
        trainer has come in time. Where all have left it goes on: it holds what they have trained.
        """
        place, stopping = self._context.place, self._coordinator.stop_requested
        # once the run stops, others need time for the leases of a trainer that is gone, before this process is killed
        patience_s = min(max(HEARD_S, place.grace_s / 2), 0.75 * place.grace_s)
        silence_s = patience_s if stopping else place.hang_timeout_s
        if program.ledger.expire(monotonic() - min(silence_s, place.hang_timeout_s)):
            program.change.notify_all()
        if program.ledger.members():
            self._report = None
            return
        self._start, self._report = self._start or monotonic(), self._report or WaitReport(self._context.say)
        came = bool(program.ledger.ever_joined)
        if stopping:
            lost = "what was trained since the last checkpoint is lost" if program.unsaved() else "nothing is lost"
            self._end(
                Preempted(
                    f"asked to stop while no trainer was there to finish the step; {lost}; start again with the same "
                    "run.dir to go on"
                )
            )
        if not came and monotonic() - self._start > self._timeout_s:
            self._end(RendezvousTimeout(f"no trainer came within launcher.timeout_s={self._timeout_s:g}"))
        processes = f"launcher.processes={place.slots}"
        self._report.tell(
            f"server 0 waits for trainers: {'all have left' if came else 'none has come'}, of {processes}"
        )

    def _end(self, why: DtfError) -> None:
        self._coordinator.end(why)
        raise why
