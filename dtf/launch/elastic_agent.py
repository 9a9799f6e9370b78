"""torch's elastic agent, which does not restart ranks after an error that would only come again.

Imports torch: this process is an agent, no rank.
"""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from dtf.core.errors import Exit

_RETRIED = {Exit.PEER, Exit.BUG}
"""Exit codes of a rank after which a restart may help, as after a death by signal."""

_LEAVE_S = 30.0
"""Time for ranks to end, as long as torch's agent gives them."""


class Agent(LocalElasticAgent):
    """Starts this host's ranks, and restarts them when one is lost or hosts come and go."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)  # type: ignore[misc]
        if result.state is WorkerState.FAILED and _final(result.failures):
            self._remaining_restarts = 0
        return result

    def exit_code(self, result: RunResult | None) -> int:
        """The exit code of a finished run: that of the first rank of this host that failed.

        E_PEER when a signal ended that rank.
        """
        if result is None or not result.is_failed():
            return Exit.OK
        first = min(result.failures.values(), key=lambda failure: failure.timestamp)
        return first.exitcode if first.exitcode in list(Exit) else Exit.PEER

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        try:
            return super()._invoke_run(role)
        except RendezvousConnectionError:
            # the host that served it has left: ranks find out from each other whether the run ended, and save
            for process in self._processes():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LEAVE_S)
            raise

    def left(self) -> int:
        """The exit code when the agents' store is gone: that of this host's ranks if all saved or finished."""
        codes = {process.poll() for process in self._processes()}
        return Exit(codes.pop()) if len(codes) == 1 and codes <= {Exit.OK, Exit.PREEMPTED} else Exit.PEER

    def _processes(self) -> list[subprocess.Popen[bytes]]:
        return [handler.proc for handler in getattr(self._pcontext, "subprocess_handlers", {}).values()]


def _final(failures: dict[int, Any]) -> bool:
    return any(failure.exitcode in list(Exit) and failure.exitcode not in _RETRIED for failure in failures.values())
