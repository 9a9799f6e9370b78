"""Which files are images: by the first bytes, whatever the name says. Needs Pillow and no torch; decodes only where a
format has no signature. Pillow is imported where a file is looked into: most names say enough.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import lru_cache

SUFFIXES = frozenset(
    (
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".gif", ".bmp", ".dib", ".webp", ".tif", ".tiff"),
        *(".avif", ".avifs", ".jp2", ".j2k", ".j2c", ".jpc", ".jpx", ".ppm", ".pgm", ".pbm", ".pnm", ".pfm", ".tga"),
        *(".ico", ".icns", ".pcx", ".dcx", ".psd", ".dds", ".qoi", ".sgi"),
    )
)
"""A file with such a name is an image, or a bad one. Into all others one has to look."""

HEAD = 1 << 16
"""Bytes of a file that are looked at."""

_FIRST = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
"""Formats that are tried before the others: most files are of these."""

_NOT_READ = frozenset({"EPS", "BUFR", "GRIB", "HDF5", "MPEG", "WMF"})
"""What Pillow opens and does not decode, and EPS, which is a program: Pillow lets Ghostscript run it."""

_SIGNATURES = (
    b"\xff\xd8\xff",  # JPEG, MPO
    b"\x89PNG\r\n\x1a\n",
    b"GIF87a",
    b"GIF89a",
    b"II*\0",  # TIFF
    b"MM\0*",
    b"II+\0",
    b"MM\0+",
    b"\0\0\0\x0cjP  \r\n\x87\n",  # JPEG 2000
    b"\xff\x4f\xff\x51",
    b"8BPS\0\x01",  # PSD
    b"DDS ",
    b"qoif",
    b"icns",
)


@lru_cache(maxsize=1)
def formats() -> tuple[str, ...]:
    """The formats that the installed Pillow decodes, those of its plugins included."""
    from PIL import Image

    Image.init()
    known = [name for name in Image.ID if name in Image.OPEN and name not in _NOT_READ]
    return tuple(sorted(known, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)))


def is_image(head: bytes, content: Callable[[], bytes]) -> bool:
    """Whether a file is meant as an image, if perhaps a damaged one. `head`: its first HEAD bytes; `content()`: all.

    Where a format has no signature, such as TGA, only a file that can be decoded is one.
    """
    if head.startswith(_SIGNATURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        return True
    if head[4:8] == b"ftyp" and head[8:12] in (b"avif", b"avis"):
        return "AVIF" in formats()
    from PIL import Image

    with contextlib.suppress(Exception):  # what is no image makes Pillow's parsers stumble over anything
        with Image.open(io.BytesIO(head), formats=formats()) as file:
            kind = file.format or ""
        if kind in Image.OPEN and Image.OPEN[kind][1] is not None:
            return True
        with Image.open(io.BytesIO(content()), formats=(kind,)) as file:
            file.load()
        return True
    return False
