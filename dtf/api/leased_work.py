"""What a program adds whose steps are computed by other processes, on leases. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dtf.core.types import Evaluated, StepOutput


class LeasedWork:
    """What other processes compute for the rank of a program: the optional part of `Program`, see `Program.leased`.

    Such a program grants pieces of a step (leases) to processes of other roles, and its `step` and `eval_step` return
    before these are done. This class is the part of all other programs: nothing is outstanding, and nobody else works.
    """

    def rest(self) -> StepOutput | None:
        """The sums of steps that were begun and not yet returned by `step`; None: there are none. Where the numbers of
        a step are to be exact, they are finished first. May be collective.

        Called before measurements are reported, and after `sync` before a save.
        """
        return None

    def eval_rest(self) -> Evaluated | None:
        """What `eval_step` has begun and not yet returned; None: nothing. May be collective."""
        return None

    def consumed(self) -> list[tuple[int, np.ndarray]]:
        """(step, sample ids) of rows that other processes read for finished steps. Each pair is returned once."""
        return []

    def unread(self, split: str, epoch: int) -> int:
        """How many rows of an epoch other processes have failed to read so far. `split`: `train` or `eval`."""
        return 0

    def told_to_stop(self) -> bool:
        """Whether a process that works for this rank got a signal to stop."""
        return False

    def end(self, reason: str = "finished") -> None:
        """The run has ended: release the processes that work for this rank. `reason`: that of the clock's Stop. May be
        collective.
        """
