"""Decodes image files of any kind that Pillow knows, upright and in RGB: the one place that says what a picture is."""

from __future__ import annotations

import contextlib
import io
import re

import numpy as np
import simplejpeg
from PIL import Image, ImageOps

from dtf.data.image_formats import formats

MOST_PIXELS = 1 << 27
"""Larger pictures are not decoded: a small file can claim to be enormous."""

CONVERSION = {
    "frame": "the first one of an animation or of several pages; the largest picture of an icon",
    "turn": "as the Exif or XMP tag Orientation says (1 to 8), before anything else: PIL.ImageOps.exif_transpose",
    "colour": "PIL.Image.Image.convert('RGB'): grey is repeated, a palette is looked up, CMYK and YCbCr are converted "
    "without colour management; embedded colour profiles are ignored",
    "alpha": "dropped: the colours below it stay, nothing is blended",
    "bits": "8; of 16 bits the high byte, value >> 8 (of grey TIFF files with b bits, value >> (b - 8)); other numbers "
    "are refused",
}
"""What `decode_any` does to a file, for people who do it without dtf."""

_UNSCALED = "numbers of 32 bits, and nothing says which of them is white"
_LOST = re.compile(
    "[Pp]remature end|bad Huffman code|bad arithmetic code|Inconsistent progression|instead of RST"
    "|extraneous bytes before marker 0x(?:c4|d[0-7]|da)"
)
"""Of libjpeg's warnings those that say that pixels are lost. What is left over before the end of a file is none:
cameras write such files.
"""
_BITS_PER_SAMPLE, _WHITE_IS_ZERO, _SUBFILE, _SAMPLE_FORMAT = 258, 262, 254, 339  # tags of TIFF


def decode_any(content: bytes) -> np.ndarray:
    """(H, W, 3) bytes, as `CONVERSION` says; the name of the file does not matter.

    ValueError, with the reason, for what cannot be decoded whole.
    """
    if not content:
        raise ValueError("it is empty")
    try:
        with Image.open(io.BytesIO(content), formats=formats()) as file:
            if file.width * file.height > MOST_PIXELS:
                raise ValueError(f"it claims {file.width} x {file.height} pixels, more than {MOST_PIXELS}")
            bits = _bits(file)
            picture = _whole(content, file)
            _turn(picture)
            pixels = _in_bytes(picture, bits)
            if not pixels.size:
                raise ValueError("it has no pixels")
            return pixels
    except ValueError:
        raise
    except Image.UnidentifiedImageError:
        raise ValueError(f"{len(content)} bytes that are no image, or one whose beginning is damaged") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # a broken file makes Pillow raise whatever its parser stumbles on
        raise ValueError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from error


def _bits(file: Image.Image) -> int:
    """Bits of a number where it has more than 8. ValueError for what Pillow shows as another picture."""
    tags = getattr(file, "tag_v2", {})
    if tags.get(_SUBFILE, 0) & 1:
        raise ValueError("its first picture is a preview, as in raw files of cameras, and Pillow reads no other")
    bits = int(tags.get(_BITS_PER_SAMPLE, (16,))[0])
    if tags and bits > 8 and tags.get(_WHITE_IS_ZERO) == 0:
        raise ValueError(f"white is 0 in it, and Pillow shows {bits} bits as if black were")
    if 2 in tags.get(_SAMPLE_FORMAT, ()):
        raise ValueError("its pixels have a sign, which Pillow takes for a part of the number")
    return bits


def _whole(content: bytes, file: Image.Image) -> Image.Image:
    """The picture, decoded. Raises for damage that Pillow passes over: lost pixels of JPEG files, which it shows grey,
    or others in their place, and wrong checksums of PNG files.
    """
    if file.format == "PNG":
        Image.open(io.BytesIO(content), formats=("PNG",)).verify()
    if file.format in ("JPEG", "MPO"):
        try:
            if simplejpeg.decode_jpeg_header(content)[2] not in ("CMYK", "YCCK"):
                picture = Image.fromarray(simplejpeg.decode_jpeg(content, "RGB"))
                picture.info = file.info  # says how it is to be turned
                return picture
            # at an eighth of its size: all data are read, and few pixels written
            simplejpeg.decode_jpeg(content, "CMYK", min_height=1, min_width=1, min_factor=8)
        except ValueError as error:
            if _LOST.search(str(error)):
                raise ValueError(f"a part of it is lost: {error}") from error
    file.load()
    return file


def _turn(file: Image.Image) -> None:
    """Turn the picture as its tag says, in place; leave it where its Exif data are damaged."""
    with contextlib.suppress(Exception):  # as every viewer does
        ImageOps.exif_transpose(file, in_place=True)


def _in_bytes(image: Image.Image, bits: int) -> np.ndarray:
    """(H, W, 3) bytes."""
    if image.mode == "F":
        raise ValueError(f"its pixels are {_UNSCALED}")
    if image.mode.startswith("I"):  # grey of more than 8 bits, which `convert` would cut off at 255
        numbers = np.asarray(image, np.int64)
        shift = bits - 8 if 8 < bits < 16 else 8
        if image.mode == "I" and (image.format == "TIFF" or numbers.min() < 0 or numbers.max() >> shift > 255):
            raise ValueError(f"its pixels are {_UNSCALED}")
        return np.repeat((numbers >> shift).astype(np.uint8)[..., None], 3, axis=2)
    straight = {"RGBa": "RGBA", "La": "LA"}.get(image.mode)  # colours that are multiplied by alpha
    return np.asarray((image.convert(straight) if straight else image).convert("RGB"))
