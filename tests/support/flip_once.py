"""A plugin for tests: an observer that flips a bit of each weight in the memory of one rank, in the first attempt."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

from dtf.api.observer import Observer, Probe
from dtf.api.registry import option, register
from dtf.core.types import Event, Place


@register("observer", "flip_once")
class FlipOnce(Observer):
    """Flip a bit of each weight of linear layers on the last rank."""

    step: int = option(doc="before which step", unit="steps")
    attempts: int = option(default=1, doc="in how many attempts")

    def see(self, event: Event) -> None: ...

    def probe(self, place: Place, folder: Path, say: Callable[[str], None]) -> Probe | None:
        return _Flip(self.step) if place.rank == place.size - 1 and place.attempt < self.attempts else None


class _Flip(Probe):
    def __init__(self, step: int) -> None:
        self.step, self.done = step, False

    def enter(self, phase: str, step: int) -> None:
        from torch import nn

        from tests.support.flips import flip

        if phase == "fetch" and step == self.step and not self.done:
            self.done = True
            for linear in [each for each in gc.get_objects() if type(each) is nn.Linear]:
                flip(linear.weight, random.Random(0))
