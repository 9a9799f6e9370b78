"""What `preprocessing` in the model.json of an export says is what is done to an image."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from dtf.recipes.resnet.options import FolderOptions
from dtf.recipes.resnet.recipe import ResnetFolder
from tests.support.image_files import tree
from tests.support.odd_images import saved, turned
from tests.unit.test_photos import recipe


def prepared(content: bytes, told: dict[str, Any]) -> np.ndarray:
    """What `preprocessing` of a model.json says, by Pillow and numpy alone. (3, H, W) float32."""
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    image = image.convert("RGB")
    pixels, resize = told["pixels"], told["resize"]
    if "shorter" in resize:
        shorter = resize["shorter"]
        width, height = image.size
        longer = int(shorter * max(width, height) / min(width, height))
        size = (shorter, longer) if width < height else (longer, shorter)
        image = image.resize(size, Image.Resampling.BILINEAR) if image.size != size else image
        left, top = round((image.width - pixels) / 2), round((image.height - pixels) / 2)
        image = image.crop((left, top, left + pixels, top + pixels))
    elif image.size != (pixels, pixels):
        image = ImageOps.fit(image, (pixels, pixels), Image.Resampling.BILINEAR)
    numbers = np.asarray(image, np.float32) / 255
    numbers = (numbers - np.array(told["mean"], np.float32)) / np.array(told["std"], np.float32)
    return numbers.transpose(2, 0, 1)


@pytest.mark.parametrize("who", ["photos", "squares"])
def test_an_image_is_prepared_from_model_json_alone(who: str, tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    contents = {
        "plain.png": saved("PNG", "RGB", (150, 203)),
        "tall.png": saved("PNG", "RGBA", (203, 90)),
        "grey.png": saved("PNG", "L", (64, 64)),
        "palette.gif": saved("GIF", "P", (100, 120)),
        "deep.png": saved("PNG", "I;16", (70, 90)),
        "cmyk.jpg": saved("JPEG", "CMYK", (150, 203), quality=95),
        "photo.jpg": saved("JPEG", "RGB", (150, 203), quality=95),
        "large.jpg": saved("JPEG", "RGB", (700, 600), quality=95),
        "small.jpg": saved("JPEG", "RGB", (33, 40), quality=95),
        **{f"turned_{n}.jpg": turned("JPEG", n) for n in range(1, 9)},
        **{f"turned_{n}.png": turned("PNG", n) for n in range(1, 9)},
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    task = recipe(tree(tmp_path / "t"), pixels=64)
    if who == "squares":
        task = ResnetFolder(data=FolderOptions(root=str(tmp_path), pixels=64))
    told = json.loads(json.dumps(task.preprocessing()))
    names, rows = task.open_inputs(folder)
    inputs = task.receive(rows.fetch(np.arange(len(rows)), 0)[0])
    levels = 255 * np.array(told["std"], np.float32)[:, None, None]
    for name, found in zip(names, inputs.numpy(), strict=True):
        apart, most = np.abs(found - prepared(contents[name], told)) * levels, told["tolerance"]
        if name == "large.jpg" and who == "photos":
            assert apart.mean() <= most["mean_levels_of_large_jpegs"], (name, apart.mean())
        else:
            assert apart.max() <= most["levels"], (name, apart.max())
