"""What is done to an image file until it is an input of a model, as JSON for users of an exported model. Says what
`decode_any`, `decode` and `photos` do; a test does as it says, with Pillow and numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtf.data.decode_any import CONVERSION

_SAME = {"levels": 0.01, "with": "Pillow of the version that dtf ran with"}
"""How far what one prepares by these words may be from the model's input, in levels of a byte. This is fp32's rounding.
"""

_NEAR = {"levels": 1.01, "mean_levels_of_large_jpegs": 2.0, "with": "Pillow, which rounds otherwise than torch"}
"""Where torch's kernel resamples. A JPEG file that is decoded at a fraction of its size is as near on average."""


def of_squares(pixels: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """For images whose largest centred square is used."""
    return {
        "steps": [
            "decode to RGB bytes, as `decoding` says",
            f"unless the image has {pixels} x {pixels} pixels: cut out the largest centred square and resize it, as "
            "`resize` says",
            *_NUMBERS,
        ],
        "pixels": pixels,
        "channels": "RGB",
        "decoding": _decoding(False),
        "resize": {
            "call": f"PIL.ImageOps.fit(image, ({pixels}, {pixels}), PIL.Image.Resampling.BILINEAR)",
            "square": "centred, its corners in floating point",
            "filter": "bilinear, antialiased: a triangle as wide as two pixels of the smaller image",
            "rounding": "to the nearest byte, by Pillow",
        },
        "mean": [*mean],
        "std": [*std],
        "tolerance": _SAME,
    }


def of_photos(pixels: int, shorter: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """For images whose shorter side is resized before the centre is cut out."""
    return {
        "steps": [
            "decode to RGB bytes, as `decoding` says",
            f"resize the shorter side to {shorter} pixels, as `resize` says",
            f"cut out the central {pixels} x {pixels}, as `crop` says",
            *_NUMBERS,
        ],
        "pixels": pixels,
        "channels": "RGB",
        "decoding": _decoding(True),
        "resize": {
            "shorter": shorter,
            "longer": f"int({shorter} * longer / shorter): rounded down",
            "filter": "bilinear, antialiased: a triangle as wide as two pixels of the smaller image; torchvision's "
            "resize(antialias=True), PIL.Image.Resampling.BILINEAR",
            "rounding": "to the nearest byte after each axis",
            "unchanged": "an image that has this size already",
        },
        "crop": {
            "height": pixels,
            "width": pixels,
            "top": f"round((height - {pixels}) / 2), halves to the even number",
            "left": f"round((width - {pixels}) / 2), likewise",
        },
        "mean": [*mean],
        "std": [*std],
        "tolerance": _NEAR,
    }


_NUMBERS = (
    "as float32: divide by 255, subtract mean, divide by std, for each channel",
    "order as (batch, channel, row, column)",
)


def _decoding(photos: bool) -> dict[str, str]:
    small = (
        "an upright JPEG file of 8 bits, grey or in colour, is decoded by libjpeg-turbo with its default transform and "
        "interpolated chroma; where both sides are at least 4, 8 or 16 times as long as the shorter side will be, at a "
        "half, a quarter or an eighth of its size; everything else by Pillow"
    )
    return {"by": small if photos else "Pillow", "kind": "by content, whatever the name says"} | CONVERSION
