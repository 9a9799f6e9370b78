"""A data set of image files of any size: read, decoded, cropped and augmented row by row in threads, assembled as
bytes. Knows nothing of the model.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._nn import _upsample_bilinear2d_aa

from dtf.api.recipe import Dataset
from dtf.core.errors import DataError
from dtf.core.seeding import draws
from dtf.core.text import plain_text
from dtf.data.decode_any import MOST_PIXELS, decode_any
from dtf.recipes.resnet import augment, jpeg
from dtf.recipes.resnet.buffers import Buffers
from dtf.recipes.resnet.crops import CROP_DRAWS, Part, random_part, shorter_side
from dtf.recipes.resnet.store import Store, reason

_MARGIN = 2
"""How much larger than wanted a part stays that is decoded at a fraction: then the resampling that follows decides what
is seen.
"""
_resample: Callable[..., Tensor] = _upsample_bilinear2d_aa
"""The kernel of `torch.nn.functional.interpolate(antialias=True)`, which has no `out`."""
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
    """Files as `{"pixels": (B, H, W, 3) uint8[, "mix": (B, 5)]}` and classes (B,) int64, or (B, 3) when mixed; see
    `augment.Mix`.

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
        self._decoders, self.allowed = threads, allowed
        # The next batch is begun while the last images of this one are decoded: no thread waits for them.
        self.threads = min(2, threads)
        self.bad: dict[int, str] = {}
        self._mix = augment.Mix(look.mixup, look.cutmix) if look is not None and (look.mixup or look.cutmix) else None
        self._pool: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._buffers = Buffers()

    def __len__(self) -> int:
        return len(self._labels)

    def fetch(self, ids: np.ndarray, epoch: int) -> tuple[Any, Tensor]:
        rows, look = ids % len(self), self._look
        side = self._side(epoch)
        pixels = self._buffers.take((len(ids), side, side, 3), torch.uint8)
        places = pixels.permute(0, 3, 1, 2).split(1)
        labels = self._labels[rows]
        if look is None:
            self._each(len(ids), lambda i: self._fill(places[i], int(rows[i]), self._centre))
            return {"pixels": pixels}, torch.from_numpy(labels)
        uniform = draws(
            self._seed, epoch, ids, CROP_DRAWS + 1 + augment.JITTER_DRAWS + augment.POLICY_DRAWS + augment.MIX_DRAWS
        )
        self._each(
            len(ids), lambda i: self._fill(places[i], int(rows[i]), partial(_crop, look=look, uniform=uniform[i]))
        )
        inputs = {"pixels": pixels}
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
        if self._decoders == 1:
            for i in range(count):
                work(i)
            return
        with self._starting:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    self._decoders, "decode", initializer=torch.set_num_threads, initargs=(1,)
                )
        numbers = itertools.count()

        def run() -> None:
            while (i := next(numbers)) < count:
                work(i)

        for future in [self._pool.submit(run) for _ in range(min(self._decoders, count))]:
            future.result()

    def _fill(self, out: Tensor, row: int, see: Callable[[bytes, Tensor], None]) -> None:
        """`see` a row into its place (1, 3, H, W) of a batch; leave it black where the row cannot be read."""
        try:
            see(self._store[row], out)
        except (OSError, ValueError) as error:
            name, why = self._store.names[row], reason(error)
            if not self.allowed:
                raise DataError(
                    f"recipe.data.root: {name} cannot be used: {why}; replace or remove it, or set "
                    "recipe.data.bad_records=skip"
                ) from error
            if row not in self.bad:
                _log.warning("%s cannot be used and is skipped: %s", plain_text(name), why)
            self.bad[row] = f"{name}: {why}"
            out.zero_()

    def _centre(self, content: bytes, out: Tensor) -> None:
        header, scale = jpeg.read_header(content), 1
        picture = None
        if header is not None and header.height * header.width <= MOST_PIXELS:
            everything = Part(0, 0, header.height, header.width)
            scale = jpeg.reduction(everything, _MARGIN * self._whole)
            picture = jpeg.decode(content, header, everything, scale, fast=False)
        if picture is None or header is None:
            picture, scale = decode_any(content), 1
        rows, columns = (header.height, header.width) if scale > 1 and header else picture.shape[:2]
        height, width = shorter_side(rows, columns, self._whole)
        if height * width > MOST_PIXELS:
            raise ValueError(
                f"{columns} x {rows} pixels are too long and thin to be looked at with the shorter side at "
                f"{self._whole}"
            )
        # what is decoded at a fraction of its size is filled up to whole pixels, which are not in the picture
        image = resized(picture, height, width, source=(rows / scale, columns / scale) if scale > 1 else None)
        top, left = round((height - self._pixels) / 2), round((width - self._pixels) / 2)
        out.copy_(image[..., top : top + self._pixels, left : left + self._pixels])


def _crop(content: bytes, out: Tensor, look: Look, uniform: np.ndarray) -> None:
    """What training sees of a file, into `out` (1, 3, side, side). `uniform`: the row's draws."""
    header, side = jpeg.read_header(content), out.shape[-1]
    picture = None
    if header is not None and header.height * header.width <= MOST_PIXELS:
        part = random_part(header.height, header.width, look.area, look.ratio, uniform[:CROP_DRAWS])
        picture = jpeg.decode(content, header, part, jpeg.reduction(part, _MARGIN * side))
    if picture is None:
        whole = decode_any(content)
        part = random_part(len(whole), whole.shape[1], look.area, look.ratio, uniform[:CROP_DRAWS])
        picture = whole[part.top : part.top + part.height, part.left : part.left + part.width]
    mirrored = look.mirror and uniform[CROP_DRAWS] < 0.5
    if not (look.policy or any(look.jitter)):
        resized(picture, side, side, out, mirrored)
        return
    image = resized(picture, side, side)
    if any(look.jitter):
        image = augment.jitter(image[0], look.jitter, uniform[CROP_DRAWS + 1 :][: augment.JITTER_DRAWS])[None]
    if look.policy:
        image = augment.apply_policy(
            image[0], look.policy, uniform[CROP_DRAWS + 1 + augment.JITTER_DRAWS :][: augment.POLICY_DRAWS]
        )[None]
    out.copy_(image.flip(3) if mirrored else image)


def resized(
    picture: np.ndarray,
    height: int,
    width: int,
    out: Tensor | None = None,
    mirrored: bool = False,
    source: tuple[float, float] | None = None,
) -> Tensor:
    """(h, w, 3) bytes as (1, 3, height, width) bytes, channels last in memory: bilinear and anti-aliased, torchvision's
    default, by the same kernel. `out`: where to put it; otherwise a tensor of its own. `source`: how many rows and
    columns, not always whole ones, become those of the result; None: all.
    """
    if not picture.flags.writeable:
        picture = picture.copy()  # from_numpy warns of what cannot be written to
    # As a batch: torch then sees that channels come last, and leaves them there. In one operation, since a thread lets
    # go of the interpreter's lock in each, and waits for it then.
    (rows, columns, channels), (row, column, channel) = picture.shape, picture.strides
    image = torch.from_numpy(picture).as_strided((1, channels, rows, columns), (rows * row, channel, row, column))
    size = height, width
    factors = (height / source[0], width / source[1]) if source else (None, None)
    if mirrored and picture.shape[0] * picture.shape[1] < height * width:  # turned while it is small
        image, mirrored = image.flip(3), False
    if picture.shape[:2] != size or source:
        if out is not None and not mirrored:
            return _resample(image, size, False, *factors, out=out)
        image = _resample(image, size, False, *factors)
    elif out is None and not mirrored:
        image = image.clone()  # it lies where the next picture is decoded
    if mirrored:
        image = image.flip(3)
    return image if out is None else out.copy_(image)


def to_floats(inputs: dict[str, Tensor], scale: Tensor, shift: Tensor, buffers: Buffers) -> Tensor:
    """What `Photos` delivers as normalised float32 (B, 3, H, W), channels last in memory, on whatever device it lies:
    bytes * scale + shift.

    `scale`, `shift`: (3,), of bytes. `buffers`: where memory of the host comes from.
    """
    pixels = inputs["pixels"]
    if pixels.device.type == "cpu":
        floats = buffers.take(tuple(pixels.shape), torch.float32)
    else:
        floats = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    # An image at a time for each thread of a processor: it stays in the cache between the operations, so that memory is
    # passed over once.
    together = torch.get_num_threads() if pixels.device.type == "cpu" else max(1, len(pixels))
    # A row of the picture at a time, not a pixel: long runs for the processor's vectors.
    scale, shift = (colours.repeat(pixels.shape[2]) for colours in (scale, shift))
    for some, out in zip(pixels.flatten(2).split(together), floats.flatten(2).split(together), strict=True):
        torch.addcmul(shift, out.copy_(some), scale, out=out)
    images = floats.permute(0, 3, 1, 2)
    return augment.mix(images, inputs["mix"]) if "mix" in inputs else images
