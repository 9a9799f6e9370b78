"""What trainers compute for a server, as its engine asks for it."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dtf.api.leased_work import LeasedWork
from dtf.core.types import Evaluated, StepOutput
from dtf.pserver.server.metrics import MetricAccumulator


class WaitingProgram(Protocol):
    """What is asked of the program of a server."""

    metrics: MetricAccumulator
    stopping: bool

    def finish_steps(self) -> StepOutput: ...
    def finish_evaluation(self) -> Evaluated | None: ...
    def release_trainers(self, reason: str) -> None: ...


class TrainersWork(LeasedWork):
    """What trainers compute for a server."""

    def __init__(self, program: WaitingProgram) -> None:
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
