"""Image files for tests: smooth pictures of any size, encoded in any way, in trees of classes."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(height: int, width: int, seed: int = 0, detail: int = 0) -> np.ndarray:
    """A picture with edges and slopes, (H, W, 3) bytes. `detail`: pixels of its further bright and dark squares."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / max(height, width)
    waves = [np.sin(2 * np.pi * (a * x + b * y + c)) for a, b, c in random.uniform(0.5, 3, (3, 3))]
    colours = np.stack(waves, axis=2)
    image = 127.5 + 60 * colours.mean(axis=2, keepdims=True) + 30 * colours  # mostly light and shade, as photographs
    image[height // 3 : height // 2, width // 4 : width // 2] = random.uniform(60, 190) + random.uniform(-30, 30, 3)
    if detail:
        squares = random.uniform(-60, 60, (-(-height // detail), -(-width // detail)))
        image += np.kron(squares, np.ones((detail, detail)))[:height, :width, None]
    return image.clip(0, 255).astype(np.uint8)


def encode(image: np.ndarray, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    """The file's bytes; options as Pillow's."""
    out = io.BytesIO()
    Image.fromarray(image).convert(mode).save(out, kind, **({"quality": 90} if kind == "JPEG" else {}), **options)
    return out.getvalue()


def tree(folder: Path, classes: int = 2, train: int = 4, val: int = 2, side: int = 40) -> Path:
    """`folder/{train,val}/<class>/<n>.jpg`, all of different sizes."""
    for split, count in (("train", train), ("val", val)):
        for label in range(classes):
            for n in range(count):
                path = folder / split / f"c{label}" / f"{n}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encode(picture(side + 3 * n + label, side + 20 - 2 * n, seed=100 * label + n)))
    return folder


def packed(folder: Path, archive: Path) -> Path:
    """A tree as a tar archive, compressed as its name says."""
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as file:
        file.add(folder, arcname="top")
    return archive
