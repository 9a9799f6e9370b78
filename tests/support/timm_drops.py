"""A network of timm with dropout and stochastic depth, as a user's own recipe makes it. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dtf
from dtf.recipes.resnet.recipe import ResnetShapes

if TYPE_CHECKING:
    from torch import nn

dtf.torch_optimizer("rmsproptf", "timm.optim:RMSpropTF")


@dtf.register("recipe", "timm_drops")
class TimmDrops(ResnetShapes):
    drop_rate: float = dtf.option(default=0.1, doc="share of the inputs of a dropout that are set to zero")
    drop_path_rate: float = dtf.option(default=0.1, doc="share of the rows that the last residual branch leaves out")

    def build_model(self) -> nn.Module:
        import timm

        name, pixels = self.model.arch.removeprefix("timm/"), self.data.pixels
        sized: dict[str, Any] = {"img_size": pixels} if name.startswith(("vit", "mixer")) else {}
        rates = {"drop_rate": self.drop_rate, "drop_path_rate": self.drop_path_rate}
        return timm.create_model(name, num_classes=self.model.classes, **rates, **sized)
