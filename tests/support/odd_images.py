"""Image files as the world has them: every format that Pillow writes, every mode and orientation, under right and wrong
names, whole and damaged, and what is no image at all.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, features

from tests.support.image_files import picture

USED, BAD, LEFT_OUT = "used", "bad", "left out"
"""What dtf must do with a file."""

MODES = {
    "JPEG": ("RGB", "L", "CMYK", "YCbCr"),
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "1", "I;16"),
    "TIFF": ("RGB", "RGBA", "L", "CMYK", "I;16", "LAB", "YCbCr", "1", "P"),
    "GIF": ("P", "L", "1"),
    "BMP": ("RGB", "L", "1", "P"),
    "WEBP": ("RGB", "RGBA"),
    "AVIF": ("RGB", "RGBA"),
    "JPEG2000": ("RGB", "RGBA", "L", "I;16"),
    "TGA": ("RGB", "RGBA", "L", "P"),
    "PCX": ("RGB", "L", "P", "1"),
    "PPM": ("RGB", "L", "1"),
    "ICO": ("RGB", "RGBA"),
    "DDS": ("RGB", "RGBA", "L"),
    "SGI": ("RGB", "L"),
    "MSP": ("1",),
    "XBM": ("1",),
    "ICNS": ("RGBA",),
    "QOI": ("RGB", "RGBA"),
    "DIB": ("RGB",),
    "MPO": ("RGB",),
}
"""Formats that Pillow writes, with modes that it reads back."""

LOSSLESS = ("PNG", "TIFF", "BMP", "TGA", "PCX", "PPM", "DDS", "SGI", "QOI", "DIB")
_SUFFIX = {"JPEG": ".jpg", "TIFF": ".tif", "JPEG2000": ".jp2", "PPM": ".ppm"}
_WITHOUT_SIGNATURE = ("TGA", "DIB")


class Odd(NamedTuple):
    """A file by name. `make`: puts it there, where it is no plain file."""

    name: str
    fate: str
    content: bytes = b""
    make: Callable[[Path], None] | None = None


def known(kind: str) -> bool:
    """Whether this Pillow writes the format."""
    Image.init()
    needs = {"AVIF": "avif", "WEBP": "webp", "JPEG2000": "jpg_2000"}
    return kind in Image.SAVE and (kind not in needs or bool(features.check(needs[kind])))


def saved(kind: str, mode: str, size: tuple[int, int] = (40, 60), **options: Any) -> bytes:
    """A picture as a file of this kind and mode."""
    image = Image.fromarray(picture(*size))
    if mode == "I;16":
        image = Image.fromarray((np.asarray(image.convert("L"), np.uint16) << 8) + 7)
    out = io.BytesIO()
    (image if mode == "I;16" else image.convert(mode)).save(out, kind, **options)
    return out.getvalue()


def suffix_of(kind: str) -> str:
    return _SUFFIX.get(kind, f".{kind.lower()}")


def turned(kind: str, orientation: int) -> bytes:
    """A picture with this Exif orientation, and the same picture as people are to see it."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(kind, "RGB", exif=exif)


def odd_files() -> Iterator[Odd]:
    """At least 332 of them, each with its fate."""
    yield from _formats()
    yield from _jpegs()
    yield from _orientations()
    yield from _damaged()
    yield from _bombs()
    yield from _no_images()
    yield from _names()
    yield from _no_files()


def write(folder: Path, files: list[Odd]) -> None:
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        file.make(path) if file.make else path.write_bytes(file.content)


def _formats() -> Iterator[Odd]:
    for kind, modes in MODES.items():
        for mode in modes if known(kind) else ():
            content, stem = saved(kind, mode), f"formats/{kind}_{mode.replace(';', '')}"
            yield Odd(f"{stem}{suffix_of(kind)}", USED, content)
            yield Odd(f"{stem}.JPEG", USED, content)
            if kind not in _WITHOUT_SIGNATURE:
                yield Odd(stem, USED, content)
                yield Odd(f"{stem}.dat", USED, content)
    for kind, mode in (("TIFF", "F"), ("TIFF", "I")):
        yield Odd(f"formats/{kind}_{mode}.tif", BAD, saved(kind, mode))
    yield Odd("formats/white_is_zero.tif", BAD, saved("TIFF", "I;16", tiffinfo={262: 0}))
    yield Odd("formats/signed.tif", BAD, saved("TIFF", "L", tiffinfo={339: 2}))
    frames = [Image.fromarray(picture(30, 40, seed)) for seed in range(3)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF", "AVIF", "MPO"):
        if known(kind):
            out = io.BytesIO()
            frames[0].save(out, kind, save_all=True, append_images=frames[1:])
            yield Odd(f"formats/animated_{kind}{suffix_of(kind)}", USED, out.getvalue())
    yield Odd("formats/plain.ppm", USED, b"P3\n2 2\n255\n255 0 0  0 255 0\n0 0 255  9 9 9\n")
    yield Odd("formats/plain.pgm", USED, b"P2\n# made by hand\n2 2\n15\n0 5\n10 15\n")
    yield Odd("formats/deep.pgm", USED, b"P5 2 2 65535\n" + struct.pack(">4H", 0, 20000, 40000, 65535))
    yield Odd(
        "formats/drawn.xpm",
        USED,
        b'/* XPM */\nstatic char *x[] = {\n"2 1 2 1",\n"a c #ff0000",\n"b c #00ff00",\n"ab"};\n',
    )
    yield Odd("formats/flat.psd", USED, _psd())
    yield Odd("formats/clear.png", USED, saved("PNG", "P", transparency=0))


def _psd() -> bytes:
    head = struct.pack(">4sH6xHIIHH", b"8BPS", 1, 3, 2, 3, 8, 3) + struct.pack(">III", 0, 0, 0)
    return head + struct.pack(">H", 0) + bytes(range(18))


def _jpegs() -> Iterator[Odd]:
    options = {
        "progressive": {"progressive": True},
        "420": {"subsampling": "4:2:0"},
        "422": {"subsampling": "4:2:2"},
        "444": {"subsampling": "4:4:4"},
        "411": {"subsampling": "4:1:1"},
        "restarts": {"restart_marker_rows": 1},
        "optimized": {"optimize": True},
        "worst": {"quality": 1},
        "best": {"quality": 100, "subsampling": 0},
        "rgb": {"keep_rgb": True},
        "comment": {"comment": b"what a picture"},
        "profile": {"icc_profile": b"no profile at all"},
    }
    for name, some in options.items():
        yield Odd(f"jpeg/{name}.jpg", USED, saved("JPEG", "RGB", **some))
    for size in ((1, 1), (1, 200), (200, 1), (7, 9), (17, 33), (500, 700)):
        yield Odd(f"jpeg/{size[0]}x{size[1]}.jpg", USED, saved("JPEG", "RGB", size))
    whole = saved("JPEG", "RGB")
    yield Odd("jpeg/behind.jpg", USED, whole + b"\0" * 100)
    yield Odd("jpeg/twice.jpg", USED, whole + whole)
    yield Odd("jpeg/before_the_end.jpg", USED, whole[:-2] + b"\0\0garbage\0" + whole[-2:])
    yield Odd("jpeg/filled.jpg", USED, whole[:2] + b"\xff\xff" + whole[2:])


def _orientations() -> Iterator[Odd]:
    for kind in ("JPEG", "PNG", "TIFF", "WEBP", "AVIF", "MPO"):
        for orientation in range(10) if known(kind) else ():
            yield Odd(f"turned/{kind}_{orientation}{suffix_of(kind)}", USED, turned(kind, orientation))
    for order in ("II", "MM"):
        for kind in (3, 4):  # short and long
            exif = _exif(order, kind, 6)
            yield Odd(f"turned/{order}_{kind}.jpg", USED, saved("JPEG", "RGB", exif=b"Exif\0\0" + exif))
    yield Odd("turned/damaged.jpg", USED, saved("JPEG", "RGB", exif=b"Exif\0\0XX*\0\0\0\0"))
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    yield Odd("turned/xmp.jpg", USED, saved("JPEG", "RGB", xmp=xmp))


def _exif(order: str, kind: int, value: int) -> bytes:
    """Exif data with an orientation as a number of two or four bytes."""
    mark = "<" if order == "II" else ">"
    number = struct.pack(f"{mark}H2x" if kind == 3 else f"{mark}I", value)
    head = order.encode() + struct.pack(f"{mark}HIH", 42, 8, 1)
    return head + struct.pack(f"{mark}HHI", 0x0112, kind, 1) + number + bytes(4)


def _damaged() -> Iterator[Odd]:
    for kind in ("JPEG", "PNG", "TIFF", "BMP", "WEBP", "AVIF", "JPEG2000", "PSD", "DDS", "QOI"):
        if kind == "PSD" or known(kind):
            content = _psd() if kind == "PSD" else saved(kind, "RGB")
            suffix = suffix_of(kind)
            yield Odd(f"damaged/half_{kind}{suffix}", BAD, content[: len(content) // 2])
            yield Odd(f"damaged/head_{kind}{suffix}", BAD, content[:9])
            yield Odd(f"damaged/one_byte_{kind}{suffix}", BAD, content[:1])
            yield Odd(f"damaged/empty_{kind}{suffix}", BAD)
            yield Odd(f"damaged/text_{kind}{suffix}", BAD, b"this is no picture at all\n" * 9)
            yield Odd(f"damaged/zeros_{kind}{suffix}", BAD, bytes(5000))
    whole = saved("JPEG", "RGB")
    yield Odd("damaged/half", BAD, whole[: len(whole) // 2])
    yield Odd("damaged/half.txt", BAD, saved("PNG", "RGB")[:200])
    for kind in ("GIF", "PPM", "TGA", "PCX", "ICO", "SGI"):
        content = saved(kind, "L" if kind == "GIF" else "RGB")
        yield Odd(f"damaged/cut_{kind}{suffix_of(kind)}", BAD, content[: len(content) * 3 // 5])
    yield Odd("damaged/no_pixels.ppm", BAD, b"P6 0 0 255\n")
    yield Odd("damaged/no_rows.png", BAD, _png_head(5, 0))
    yield Odd("damaged/no_columns.gif", BAD, b"GIF89a\0\0\5\0\0\0\0,\0\0\0\0\0\0\5\0\0\2\2L\1\0;")
    for at in (18, 22):
        bmp = bytearray(saved("BMP", "RGB"))
        bmp[at : at + 4] = bytes(4)
        yield Odd(f"damaged/no_side_{at}.bmp", BAD, bytes(bmp))
    for share in (30, 60, 90):
        cut = saved("JPEG", "RGB", progressive=True)
        yield Odd(f"damaged/progressive_{share}.jpg", BAD, cut[: len(cut) * share // 100])
    png = bytearray(saved("PNG", "RGB"))
    png[len(png) // 2] ^= 0xFF
    yield Odd("damaged/flipped.png", BAD, bytes(png))
    yield from _lost()


def _lost() -> Iterator[Odd]:
    """Files that Pillow shows, with pixels that are not the picture's."""
    inks = bytearray(saved("JPEG", "CMYK"))
    inks[inks.index(b"Adobe") + 11] = 2  # YCCK
    yield Odd("jpeg/ycck.jpg", USED, bytes(inks))
    yield Odd("damaged/without_end.jpg", BAD, saved("JPEG", "L")[:-2])
    files = {
        "baseline": saved("JPEG", "RGB"),
        "progressive": saved("JPEG", "RGB", progressive=True),
        "restarts": saved("JPEG", "L", restart_marker_rows=1),
        "cmyk": saved("JPEG", "CMYK"),
        "ycck": bytes(inks),
        "mpo": saved("MPO", "RGB"),
        "turned": turned("JPEG", 6),
    }
    for name, content in files.items():
        yield Odd(f"damaged/lost_{name}.jpg", BAD, content[: len(content) * 4 // 5] + b"\xff\xd9" + bytes(9))
    marker = files["baseline"].index(b"\xff\xda") + 90
    yield Odd("damaged/restart_in_data.jpg", BAD, files["baseline"][:marker] + b"\xff\xd3" + files["baseline"][marker:])
    png = saved("PNG", "RGB")
    yield Odd("damaged/wrong_sum.png", BAD, png[:-20] + bytes([png[-20] ^ 1]) + png[-19:])


def _png_head(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")


def _bombs() -> Iterator[Odd]:
    for width, height in ((60_000, 60_000), (2_000_000_000, 1), (20_000, 9_000)):
        yield Odd(f"bombs/{width}x{height}.png", BAD, _png_head(width, height))
    whole = bytearray(saved("JPEG", "RGB"))
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 4] = b"\xff\xff\xff\xff"
    yield Odd("bombs/sides.jpg", BAD, bytes(whole))
    bmp = bytearray(saved("BMP", "RGB"))
    bmp[18:26] = struct.pack("<ii", 100_000, 100_000)
    yield Odd("bombs/sides.bmp", BAD, bytes(bmp))
    gif = bytearray(saved("GIF", "P"))
    gif[6:10] = b"\xff\xff\xff\xff"
    yield Odd("bombs/sides.gif", BAD, bytes(gif))
    yield Odd("bombs/sides.ppm", BAD, b"P6 99999 99999 255\n" + bytes(100))
    yield Odd("bombs/sides.tga", BAD, struct.pack("<3B9x2H2B", 0, 0, 2, 65535, 65535, 24, 0))


def _no_images() -> Iterator[Odd]:
    contents = {
        "notes.txt": b"six pictures of cats\n" * 20,
        "README": b"# What this is\n",
        "BMW.txt": b"BMW is a maker of cars\n" * 9,
        "P1.md": b"P1 is the first plan\n" * 9,
        "labels.csv": b"file,label\na.jpg,1\n",
        "about.json": b'{"a": 1}',
        "form.xml": b"<?xml version='1.0'?><annotation/>",
        "drawing.svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "page.pdf": b"%PDF-1.4\n" + bytes(200),
        "print.eps": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n",
        "film.mp4": b"\0\0\0\x20ftypisom" + bytes(300),
        "phone.heic": b"\0\0\0\x20ftypheic" + bytes(300),
        "array.npy": b"\x93NUMPY\x01\0v\0{}" + b" " * 200,
        "packed.zip": b"PK\x03\x04" + bytes(range(200)),
        "code.py": b"#define = 3\nimport os\n",
        "nothing.dat": b"",
        "nothing": b"",
        "zeros.bin": bytes(2000),
        "noise.bin": np.random.default_rng(5).bytes(3000),
        "data.h5": b"\x89HDF\r\n\x1a\n" + bytes(500),
        "Thumbs.db": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(500),
        ".DS_Store": b"\0\0\0\x01Bud1" + bytes(50),
        "._photo.jpg": b"\0\x05\x16\x07" + bytes(50),
    }
    for name, content in contents.items():
        yield Odd(f"other/{name}", LEFT_OUT, content)


def _names() -> Iterator[Odd]:
    content = saved("JPEG", "RGB", (20, 20))
    for name in (
        "with space",
        "new\nline",
        "tab\there",
        "quote\"'",
        "comma,semicolon;",
        "ümlaut",
        "写真",
        "🙂",
        "-dash",
    ):
        yield Odd(f"names/{name}.jpg", USED, content)
    yield Odd("names/" + os.fsdecode(b"latin_\xe9\xff.jpg"), USED, content)
    yield Odd("names/" + "long" * 62 + ".jpg", USED, content)
    yield Odd("names/UPPER.JPG", USED, content)
    yield Odd("names/two.dots.png", USED, content)
    yield Odd("names/ends.with.dot.", USED, content)
    yield Odd("names/" + os.fsdecode(b"bad_\xff\n.jpg"), BAD)


def _no_files() -> Iterator[Odd]:
    yield Odd("no_files/pipe.jpg", BAD, make=os.mkfifo)
    yield Odd("no_files/pipe", LEFT_OUT, make=os.mkfifo)
    yield Odd("no_files/folder.jpg/", LEFT_OUT, make=lambda path: path.mkdir())
    yield Odd("no_files/nowhere.png", BAD, make=lambda path: path.symlink_to("nothing"))
    yield Odd("no_files/nowhere", LEFT_OUT, make=lambda path: path.symlink_to("nothing"))
    yield Odd("no_files/itself.gif", BAD, make=lambda path: path.symlink_to(path.name))
    yield Odd("no_files/device.jpg", BAD, make=lambda path: path.symlink_to("/dev/zero"))
    yield Odd("no_files/link.bmp", USED, make=lambda path: path.symlink_to("../jpeg/420.jpg"))
    yield Odd("no_files/up/", LEFT_OUT, make=lambda path: path.symlink_to(".."))
