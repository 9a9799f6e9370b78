"""What trainers compute for a server, as its engine asks for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dtf.api.leased_work import LeasedWork
from dtf.core.types import Evaluated, StepOutput

if TYPE_CHECKING:
    from dtf.pserver.server.program import ServerProgram


class TrainersWork(LeasedWork):
    """What trainers compute for a server."""

    def __init__(self, program: ServerProgram) -> None:
        self._program = program

    def rest(self) -> StepOutput:
        return self._program.finish_steps()

    def eval_rest(self) -> Evaluated | None:
        return self._program.finish_evaluation()

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        return self._program.metrics.consumed()

    def unread(self, split: str, epoch: int) -> int:
        return self._program.metrics.unread(split, epoch)

    def told_to_stop(self) -> bool:
        return self._program.stopping

    def end(self, reason: str = "finished") -> None:
        self._program.release_trainers(reason)
