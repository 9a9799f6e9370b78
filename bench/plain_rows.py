"""The images of the default recipe in a file, for `bench.plain_script`: drawn before anything is timed. A recipe of dtf
reads the same file, where steps are compared: dtf's own recipe draws images as it trains.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from bench.peers import folder
from dtf.api.registry import option, register
from dtf.recipes.resnet.recipe import ResnetShapes

if TYPE_CHECKING:
    from dtf.recipes.resnet.images import Images

CLASSES, PIXELS, ROWS = 8, 24, 8192


@cache
def rows_file() -> Path:
    """Bytes (ROWS, PIXELS, PIXELS, 3) uint8, written anew by each process that asks."""
    import numpy as np

    from dtf.recipes.resnet.shapes import draw

    path, draft = folder() / "shapes.npy", folder() / f"shapes-{os.getpid()}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(draft, draw(np.arange(ROWS), PIXELS, CLASSES, 0, "train")[0])
    os.replace(draft, path)
    return path


def from_file() -> list[str]:
    """Settings of a run of dtf that trains what recipe=resnet_shapes does, on the rows of the file."""
    return [
        "plugins=[bench.plain_rows]", "recipe=shapes_file", f"recipe.file={rows_file()}", "recipe.model.arch=resnet8",
        f"recipe.data.pixels={PIXELS}", "optimizer.weight_decay=5e-4", "train.epochs=10",
    ]  # fmt: skip


@register("recipe", "shapes_file")
class ShapesFile(ResnetShapes):
    """As `resnet_shapes`, with images of a file."""

    file: str = option(default="", doc="that `rows_file` wrote")

    def open_data(self, split: str, seed: int) -> Images:
        import numpy as np

        from dtf.recipes.resnet.images import Images
        from dtf.recipes.resnet.shapes import MEAN, STD

        return Images(np.load(self.file, mmap_mode="r"), np.arange(ROWS) % CLASSES, MEAN, STD, digest=self.file)
