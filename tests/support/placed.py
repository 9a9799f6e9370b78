"""Models of images that draw, or read memory, by places in memory. A plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.api.layout import Layout, Split
from dtf.api.registry import option, register
from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.recipes.resnet.recipe import ResnetShapes, ShapesOptions
from dtf.strategies.ddp import Ddp

if TYPE_CHECKING:
    from torch import nn

    from dtf.distributed.world import World


@register("strategy", "own_passes")
class OwnPasses(Ddp):
    """A program of which nothing says that it computes images in the format of the task."""

    def setup(self, task: Task, world: World) -> Program:
        program = Ddp.setup(self, task, world)
        program.follows_memory_format = False
        return program


@register("recipe", "placed")
class Placed(ResnetShapes):
    """Drawn shapes of 8 pixels each way."""

    kind: str = option(default="drawn_modules", doc="which of `placed_model.KINDS`")

    def __post_init__(self) -> None:
        self.data = ShapesOptions(train_rows=24, eval_rows=8, pixels=8)

    def build_model(self) -> nn.Module:
        from tests.support.placed_model import KINDS

        return KINDS[self.kind]()

    def layout(self, model: nn.Module) -> Layout:
        cut = {
            "first": Split.column,
            "norm": Split.local,
            "drops.0": Split.local,
            "drops.1": Split.local,
            "second": Split.row,
        }
        return Layout((("first", "norm"), ("drops", "second"), ("head",)), cut)
