"""A model that hands what it has computed from one module to the next in a place that all copies of the model in a
process share. Copies that compute at the same time meet between the two, and read what the other has written. A plugin.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dtf.api.layout import Layout
from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import Tensor, nn

MEET_S = 0.02
_GATES: dict[str, Any] = {}
_meeting = threading.Barrier(2)


def _meet() -> None:
    """Wait for another thread that computes, for a moment."""
    with suppress(threading.BrokenBarrierError):
        _meeting.wait(MEET_S)
    if _meeting.broken:
        _meeting.reset()


@register("recipe", "sharing")
class Sharing(Toy):
    place: str = option(default="module", doc="module or recipe: where it is kept")

    def build_model(self) -> nn.Module:
        from torch import nn

        recipe = self

        class Gate(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                gate = self.layer(x).sigmoid()
                if recipe.place == "module":
                    _GATES["last"] = gate
                else:
                    recipe.gate = gate
                _meet()
                return self.layer(x * gate)

        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.layer(x * (_GATES["last"] if recipe.place == "module" else recipe.gate))

        return nn.Sequential(Gate(), Gated())

    gate: Any = None

    def layout(self, model: nn.Module) -> Layout:
        return Layout((("0",), ("1",)))
