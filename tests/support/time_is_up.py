"""A schedule that ends the time of a run at a step, as its clock counts them. A plugin:
`plugins=[tests.support.time_is_up]`.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from dtf.api.lr import Constant
from dtf.api.registry import option, register
from dtf.engine import time_limit


@register("lr", "time_is_up")
class TimeIsUp(Constant):
    """From the step `at` on nothing is left of any allocation, in a launch that begins without the file `marker`."""

    at: int = option(doc="step")
    marker: str = option(doc="file that is made then")

    def __call__(self, step: int, total: int) -> float:
        if self._cuts and step == self.at:
            time_limit.END_S = 1e9
            Path(self.marker).touch()
        return super().__call__(step, total)

    @cached_property
    def _cuts(self) -> bool:
        return not Path(self.marker).exists()  # asked at the first step: another rank may make it later
