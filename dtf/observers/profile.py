"""Traces a few steps with torch.profiler in the ranks, and shows which share of a step each of its parts takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.observer import Observer, Probe
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError
from dtf.core.types import Event

if TYPE_CHECKING:
    from dtf.core.types import Place


@register("observer", "profile")
class Profile(Observer):
    """Write profile/rank_<r>.pt.trace.json for Perfetto and TensorBoard, and say what shares of a step its parts have.
    Costs nothing outside the window.

    Taking a trace slows its steps down, those of small kernels most; it is written between two steps, while the other
    ranks wait.
    """

    skip: int = option(
        default=20, least=1, doc="left out after each start, as the first steps build buckets and kernels", unit="steps"
    )
    steps: int = option(
        default=10,
        least=1,
        most=1000,
        doc="length of the window; a trace of the default recipe has 300 kB for each",
        unit="steps",
    )
    ranks: list[int] = option(factory=lambda: [0], least=0, doc="which ranks take a trace")

    def check(self) -> None:
        if not self.ranks:
            raise ConfigError(
                "observer.profile.ranks=[] must hold at least one; leave profile out of observer=[...] for no trace"
            )

    def see(self, event: Event) -> None:
        """All there is to see is in the ranks."""

    def probe(self, place: Place, folder: Path, say: Callable[[str], None]) -> Probe | None:
        if max(self.ranks) >= place.size:
            raise ConfigError(
                f"observer.profile.ranks={self.ranks} names rank {max(self.ranks)}; there are {place.size}, 0 to "
                f"{place.size - 1}"
            )
        if place.rank not in self.ranks:
            return None
        from dtf.observers.step_profiler import StepProfiler

        return StepProfiler(folder / "profile", place.rank, place.device.partition(":")[0], self.skip, self.steps, say)
