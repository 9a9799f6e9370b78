"""A data set of image files of any size: read, decoded, cropped and augmented row by row in threads, assembled as
bytes. Knows nothing of the model.
"""

from __future__ import annotations

import copy
import itertools
import logging
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from dtf.api.recipe import Dataset
from dtf.core.errors import DataError
from dtf.core.seeding import draws
from dtf.recipes.resnet import augment, jpeg
from dtf.recipes.resnet.crops import CROP_DRAWS, Part, random_part, shorter_side
from dtf.recipes.resnet.decode_any import MOST_PIXELS, decode_any
from dtf.recipes.resnet.store import Store

_MARGIN = 2
"""How much larger than wanted a part stays that is decoded at a fraction: then the resampling that follows decides what
is seen.
"""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Look:
    """How training images are looked at.

    `jitter`: see `augment.jitter`; `grow_from`, `grow_epochs`: pixels in the first epoch, until all are there.
    """

    area: tuple[float, float]
    ratio: tuple[float, float]
    mirror: bool
    jitter: tuple[float, ...]
    policy: str  # "", or as `augment.apply_policy`
    mixup: float
    cutmix: float
    grow_from: int
    grow_epochs: int


class Photos(Dataset):
    """Files as `{"pixels": (B, H, W, 3) uint8, "mirror": (B,) bool[, "mix": (B, 5)]}` and classes (B,) int64, or (B, 3)
    when mixed; see `augment.Mix`.

    `look=None` is for evaluation: the shorter side becomes `whole` pixels, the central `pixels` of it are seen. Every
    draw is a function of (seed, epoch, id) alone, so threads, ranks and restarts see the same. `allowed`: unreadable
    files a run may meet, over all ranks; such a row is black and counts for nothing.
    """

    repeats = True

    def __init__(
        self,
        store: Store,
        labels: np.ndarray,
        pixels: int,
        whole: int,
        look: Look | None,
        seed: int,
        threads: int,
        allowed: int,
    ) -> None:
        self._store, self._labels, self._pixels, self._whole, self._look, self._seed = (
            store,
            labels.astype(np.int64),
            pixels,
            whole,
            look,
            seed,
        )
        self._threads, self.allowed = threads, allowed
        self.bad: dict[int, str] = {}
        self._mix = augment.Mix(look.mixup, look.cutmix) if look is not None and (look.mixup or look.cutmix) else None
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        rows, look = ids % len(self), self._look
        side = self._side(epoch)
        pixels = torch.zeros((len(ids), side, side, 3), dtype=torch.uint8)
        mirror = torch.zeros(len(ids), dtype=torch.bool)
        labels = self._labels[rows]
        if look is None:
            self._each(len(ids), lambda i: self._fill(pixels[i], int(rows[i]), self._centre))
            return {"pixels": pixels, "mirror": mirror}, torch.from_numpy(labels)
        uniform = draws(
            self._seed, epoch, ids, CROP_DRAWS + 1 + augment.JITTER_DRAWS + augment.POLICY_DRAWS + augment.MIX_DRAWS
        )
        if look.mirror:
            mirror = torch.from_numpy(uniform[:, CROP_DRAWS] < 0.5)
        self._each(
            len(ids),
            lambda i: self._fill(pixels[i], int(rows[i]), lambda content: self._crop(content, side, look, uniform[i])),
        )
        inputs = {"pixels": pixels, "mirror": mirror}
        if self._mix is None:
            return inputs, torch.from_numpy(labels)
        mixing, targets = self._mix.draw(uniform[:, -augment.MIX_DRAWS :], labels, side, side)
        # nobody is mixed with what is not there
        for i in np.flatnonzero([int(row) in self.bad for row in rows]).tolist():
            pair = [i, i ^ 1] if i ^ 1 < len(rows) else [i]
            mixing[pair], targets[pair, 2] = torch.tensor([1.0, 0, 0, 0, 0]), 1.0
        return inputs | {"mix": mixing}, targets

    def unaugmented(self) -> Photos:
        plain = copy.copy(self)
        plain._look = plain._mix = None
        return plain

    def fingerprint(self) -> str:
        """Rows, names of the files and classes: contents are not read for it."""
        return f"{len(self)} files {self._store.digest}, classes {zlib.crc32(self._labels.data):08x}"

    def groups(self) -> np.ndarray:
        return self._labels

    def _side(self, epoch: int) -> int:
        look = self._look
        if look is None or epoch >= look.grow_epochs:
            return self._pixels
        grown = look.grow_from + (self._pixels - look.grow_from) * epoch / look.grow_epochs
        return min(self._pixels, max(look.grow_from, round(grown / 16) * 16))  # what the strides of a network divide

    def _each(self, count: int, work: Callable[[int], None]) -> None:
        """`work(i)` for all i below `count`, by whichever thread is free; the first error is raised when all have
        stopped.
        """
        if self._threads == 1:
            for i in range(count):
                work(i)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, "decode", initializer=torch.set_num_threads, initargs=(1,))
        numbers = itertools.count()

        def run() -> None:
            while (i := next(numbers)) < count:
                work(i)

        for future in [self._pool.submit(run) for _ in range(min(self._threads, count))]:
            future.result()

    def _fill(self, out: Tensor, row: int, view: Callable[[bytes], Tensor]) -> None:
        """Put the view (h, w, 3) of a row into `out`; leave it black where the row cannot be read."""
        try:
            out.copy_(view(self._store[row]))
        except (OSError, ValueError) as error:
            name = self._store.names[row]
            if not self.allowed:
                raise DataError(
                    f"recipe.data.root: {name} cannot be used: {error}; replace or remove it, or set "
                    "recipe.data.bad_records=skip"
                ) from error
            if row not in self.bad:
                _log.warning("%s cannot be used and is skipped: %s", name, error)
            self.bad[row] = f"{name}: {error}"

    def _crop(self, content: bytes, side: int, look: Look, uniform: np.ndarray) -> Tensor:
        header = jpeg.read_header(content)
        if header is not None and header.height * header.width <= MOST_PIXELS:
            part = random_part(header.height, header.width, look.area, look.ratio, uniform[:CROP_DRAWS])
            picture = jpeg.decode(content, header, part, _MARGIN * side)
        else:
            picture = None
        if picture is None:
            whole = decode_any(content)
            part = random_part(len(whole), whole.shape[1], look.area, look.ratio, uniform[:CROP_DRAWS])
            picture = whole[part.top : part.top + part.height, part.left : part.left + part.width]
        image = resized(picture, side, side)
        if any(look.jitter):
            image = augment.jitter(image, look.jitter, uniform[CROP_DRAWS + 1 :][: augment.JITTER_DRAWS])
        if look.policy:
            image = augment.apply_policy(
                image, look.policy, uniform[CROP_DRAWS + 1 + augment.JITTER_DRAWS :][: augment.POLICY_DRAWS]
            )
        return image.permute(1, 2, 0)

    def _centre(self, content: bytes) -> Tensor:
        header = jpeg.read_header(content)
        picture = None
        if header is not None and header.height * header.width <= MOST_PIXELS:
            picture = jpeg.decode(
                content, header, Part(0, 0, header.height, header.width), _MARGIN * self._whole, fast=False
            )
        if picture is None:
            picture = decode_any(content)
        height, width = shorter_side(len(picture), picture.shape[1], self._whole)
        if height * width > MOST_PIXELS:
            raise ValueError(
                f"{picture.shape[1]} x {len(picture)} pixels are too long and thin to be looked at with the shorter "
                f"side at {self._whole}"
            )
        image = resized(picture, height, width)
        top, left = round((height - self._pixels) / 2), round((width - self._pixels) / 2)
        return image[:, top : top + self._pixels, left : left + self._pixels].permute(1, 2, 0)


def resized(picture: np.ndarray, height: int, width: int) -> Tensor:
    """(h, w, 3) bytes as (3, height, width) bytes: bilinear and anti-aliased, torchvision's default, by the same
    kernel.
    """
    if picture.shape[:2] == (height, width):
        return torch.from_numpy(picture.copy()).permute(2, 0, 1)
    if not picture.flags.writeable:
        picture = picture.copy()  # from_numpy warns of what cannot be written to
    # As a batch first: torch then sees that channels come last, and leaves them there.
    return interpolate(
        torch.from_numpy(picture)[None].permute(0, 3, 1, 2), (height, width), mode="bilinear", antialias=True
    )[0]


def to_floats(inputs: dict[str, Tensor], mean: Tensor, scale: Tensor) -> Tensor:
    """What `Photos` delivers as normalised float32 (B, 3, H, W), channels last in memory, on whatever device it lies.

    `mean`, `scale`: (3, 1, 1), of bytes.
    """
    images = inputs["pixels"].permute(0, 3, 1, 2)
    images = torch.where(inputs["mirror"][:, None, None, None], images.flip(3), images)
    images = images.float().sub_(mean).mul_(scale)
    return augment.mix(images, inputs["mix"]) if "mix" in inputs else images
