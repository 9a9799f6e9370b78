"""Decodes image files of any kind that Pillow knows, upright and in RGB. It is used for all files that
`jpeg.read_header` refuses.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MOST_PIXELS = 1 << 27
"""Larger pictures are not decoded: a small file can claim to be enormous."""


def decode_any(content: bytes) -> np.ndarray:
    """(H, W, 3) bytes; the name of the file does not matter. Turned as Exif says, 16 bits to 8, transparency dropped.

    ValueError, with the reason, for what cannot be decoded whole.
    """
    if not content:
        raise ValueError("it is empty")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            if file.width * file.height > MOST_PIXELS:
                raise ValueError(f"it claims {file.width} x {file.height} pixels, more than {MOST_PIXELS}")
            image = ImageOps.exif_transpose(file)
            if image.mode.startswith("I"):  # 16 bits of grey, which `convert` would cut off at 255
                return np.repeat((np.asarray(image, np.uint32) >> 8).astype(np.uint8)[..., None], 3, axis=2)
            return np.asarray(image.convert("RGB"))
    except ValueError:
        raise
    except Image.UnidentifiedImageError:
        raise ValueError(f"{len(content)} bytes that are none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    except Exception as error:  # a broken file makes Pillow raise whatever its parser stumbles on
        raise ValueError(str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from error
