"""How ranks save, find and load together: a failure on one is raised on all. Torch-free."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dtf.core.errors import BusyError, ConfigError, DataError, DtfError, Exit, Preempted, SaveError, by_all

REMEDY, AGAIN = "make room or mend the disk", "then start again"
"""The end of a SaveError that ends the run."""
_LARGER = "allow larger files (ulimit -f)"
_ERRORS: dict[int, type[DtfError]] = {
    cls.exit: cls for cls in (DtfError, ConfigError, DataError, BusyError, SaveError, Preempted)
}


class Peers(Protocol):
    """The collective operations that a checkpointer uses, on JSON values. See `dtf.World`, which has them."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any] | None: ...
    def broadcast(self, value: Any) -> Any: ...


class Agreement:
    """What the ranks of `world` do together.

    On rank 0 `removed` says which folder of the run is gone, and `kept` which folder holds its checkpoints, and the
    name of the newest; empty where there is none.
    """

    def __init__(self, world: Peers, removed: Callable[[], str], kept: Callable[[], tuple[str, str]]) -> None:
        self.world, self._removed, self._kept = world, removed, kept
        self._cause: Exception | None = None

    def attempt(self, work: Callable[[], Any]) -> dict[str, Any]:
        """The JSON result of `work`, or its failure as JSON, so that no rank is left waiting for one that failed."""
        self._cause = None
        try:
            return {"result": work()}
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            self._cause = error
            if isinstance(error, DtfError):
                return {"error": str(error), "exit": int(error.exit)}
            if isinstance(error, (OSError, MemoryError)):
                return {"error": _reason(error), "exit": None}
            return {"error": f"{type(error).__name__}: {error}; please report this", "exit": int(Exit.BUG)}

    def lead(self, work: Callable[[], Any], failure: type[DtfError], what: str) -> Any:
        """Rank 0's result of `work` on every rank, or its failure: `failure` for what the machine refused.

        Collective.
        """
        return self.tell(self.attempt(work) if self.world.rank == 0 else {}, failure, what)

    def tell(self, answer: dict[str, Any], failure: type[DtfError], what: str) -> Any:
        """The result in rank 0's answer on every rank, see `lead`. Collective."""
        if "error" in answer:
            answer |= {"removed": self._removed(), "kept": self._kept()}
        answer = self.world.broadcast(answer)
        if "error" not in answer:
            return answer["result"]
        kind = failure if answer["exit"] is None else _ERRORS.get(answer["exit"], DtfError)
        text = answer["error"]
        if kind is failure is SaveError:
            folder, newest = answer["kept"]
            if answer["removed"]:
                rest = f": {answer['removed']}; its checkpoints are gone; start again, or with another run.dir"
            else:
                remedy = _LARGER if os.strerror(errno.EFBIG) in text else REMEDY
                rest = f" to {folder}: {text}; {f'{newest} is kept; ' if newest else ''}{remedy}, {AGAIN}"
            text = f"{what} could not be written{rest}"
        elif kind is DtfError or answer["exit"] is None:
            text = f"{what}: {text}"
        raise by_all(kind(text)) from self._cause

    def lead_long(
        self,
        work: Callable[[], Any],
        failure: type[DtfError],
        what: str,
        progress: Callable[[], int],
        alive: Callable[[], None],
    ) -> Any:
        """As `lead`, for work that may take long: every rank calls `alive` whenever `progress`, asked on rank 0, is
        another number. Collective.
        """
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(self.attempt(work)), daemon=True)
        before, state = -1, None
        if self.world.rank == 0:
            thread.start()
        while True:
            if self.world.rank == 0:
                waits = not _has_ended(thread, 1.0)
                state, before = [waits, progress() != before], progress()
            waits, moves = self.world.broadcast(state)
            if not waits:
                break
            if moves:
                alive()
        return self.tell(answers[0] if answers else {}, failure, what)


def _has_ended(thread: threading.Thread, timeout_s: float) -> bool:
    thread.join(timeout_s)
    return not thread.is_alive()


def _reason(error: OSError | MemoryError) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    where = f" ({os.path.basename(error.filename)})" if isinstance(error.filename, str) else ""
    return f"{error.strerror or error}{where}"
