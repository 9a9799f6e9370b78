"""A small network of convolutions on drawn shapes, for the tests' runs."""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.recipes.resnet.recipe import ResnetShapes, ShapesOptions


@register("recipe", "shapes_toy")
class ShapesToy(ResnetShapes):
    """Few rows, of 16 pixels each way."""

    rows: int = option(default=42, doc="of training and of evaluation")

    def __post_init__(self) -> None:
        self.data = ShapesOptions(train_rows=self.rows, eval_rows=self.rows, pixels=16)
