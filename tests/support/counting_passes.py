"""A model that writes a line into the file `PASSES` of its folder for each forward pass that learns. A plugin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.registry import option, register
from tests.support.toy import Toy

if TYPE_CHECKING:
    from torch import nn

PASSES = "passes"


@register("recipe", "counting")
class Counting(Toy):
    folder: str = option(default="", doc="where to count")

    def build_model(self) -> nn.Module:
        model = super().build_model()
        path = Path(self.folder) / PASSES

        def note(module: nn.Module, inputs: Any) -> None:
            if module.training:
                with path.open("a") as file:
                    file.write("pass\n")

        model.register_forward_pre_hook(note)
        return model
