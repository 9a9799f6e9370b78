"""The wanted part of a JPEG file, decoded no further than needed. Knows nothing of augmentation and of other formats.

What is saved: rows below the part are not decoded, for the height in a copy of the file's header is lowered to where
the part ends, and in a baseline file without restart markers nothing above depends on what follows. A part that will be
shrunk to a quarter or less is decoded at half its size, and so on, by a smaller inverse transform. And the decoder
lets go of the interpreter's lock, so that threads share the cores.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

import numpy as np
import simplejpeg

from dtf.recipes.resnet.crops import Part

_BEYOND = "extraneous bytes before marker 0xd9"
"""The decoder's warning about rows beyond a lowered height: more than it needed lies before the end. Of bytes before
another marker it complains as it reads a damaged header, when it has decoded nothing.
"""

_EXIF = b"Exif\0\0"
_XMP_TURN = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_SHORT = 3  # the type of a number in Exif data
_MCU = 16  # rows of the largest unit of a file; one more is decoded, since chroma is interpolated across units
_WORTHWHILE = 1 << 13
"""Pixels below a part that are left out from: for fewer, a changed copy of the file and the decoder's complaint cost
more than they save.
"""
_here = threading.local()


@dataclass(frozen=True, slots=True)
class Header:
    """What the markers before the picture say.

    `height_at`: where the header has the height, 0 where it must stay as it is.
    """

    height: int
    width: int
    height_at: int


def read_header(content: bytes) -> Header | None:
    """The header of a complete, upright grey or colour file of 8 bits; None for others, which `decode_any` takes."""
    if not content.startswith(b"\xff\xd8") or not content.endswith(b"\xff\xd9"):
        return None  # no JPEG file, or one that breaks off or has something behind it
    at, frame, lowerable, exif = 2, None, True, 0
    while at + 9 < len(content):
        if content[at] != 0xFF:
            return None
        marker, length = content[at + 1], content[at + 2] << 8 | content[at + 3]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if 0xC0 <= marker <= 0xC2:
            if content[at + 4] != 8 or content[at + 9] not in (1, 3):
                return None
            frame = (
                content[at + 5] << 8 | content[at + 6],
                content[at + 7] << 8 | content[at + 8],
                at + 5,
                content[at + 9],
            )
            lowerable &= marker != 0xC2  # progressive: every scan goes over the whole picture
        elif marker == 0xE1:
            segment = content[at + 4 : at + 2 + length]
            exif += segment.startswith(_EXIF)
            if exif > 1 or not _upright(segment):
                return None
        elif marker == 0xDD:
            lowerable = False  # restart markers: what is left over would be taken for damage
        elif marker == 0xDA:
            if frame is None or not frame[0] or not frame[1]:
                return None
            height, width, height_at, channels = frame
            # all channels in one scan
            return Header(height, width, height_at if lowerable and content[at + 4] == channels else 0)
        elif 0xC3 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return None  # lossless, arithmetic or hierarchical
        at += 2 + length
    return None


def reduction(part: Part, least: int) -> int:
    """By what the sides of a part may be divided as it is decoded: 8, 4 or 2 where both stay at least `least`, else
    1.
    """
    return next((scale for scale in (8, 4, 2) if min(part.height, part.width) >= scale * least), 1)


def decode(content: bytes, header: Header, part: Part, scale: int = 1, fast: bool = True) -> np.ndarray | None:
    """The part, (h, w, 3) bytes, at 1/`scale` of its size: 1, 1/2, 1/4 or 1/8. None where the data is damaged.

    Its place and its size are rounded to pixels of what is decoded, and so to `scale` pixels of the picture. Valid
    until this thread decodes again. `fast`: colour is repeated, not interpolated; after resampling 0.1 of 255 apart on
    photographs.
    """
    height, data = header.height, content
    end = part.top + part.height
    bottom = (-(-end // _MCU) + 1) * _MCU
    if header.height_at and (height - bottom) * header.width >= _WORTHWHILE:
        height, data = bottom, bytearray(content)
        data[header.height_at], data[header.height_at + 1] = height >> 8, height & 255
    rows, columns = -(-height // scale), -(-header.width // scale)
    room = _room(rows * columns * 3)
    try:
        least_height, least_width = (rows, columns) if scale > 1 else (0, 0)
        picture = simplejpeg.decode_jpeg(
            data, "RGB", fastupsample=fast, min_height=least_height, min_width=least_width, buffer=room
        )
    except ValueError as error:
        if height == header.height or _BEYOND not in str(error):  # the decoder tells its first complaint
            return None
        picture = room.reshape(rows, columns, 3)
    top, left = round(part.top / scale), round(part.left / scale)
    return picture[top : top + max(1, round(part.height / scale)), left : left + max(1, round(part.width / scale))]


def _room(size: int) -> np.ndarray:
    """Bytes of this thread to decode into. They begin at an odd address: the decoder writes rows that begin at a
    multiple of 32 past the caches of the processor, and what follows would wait for them.
    """
    room = getattr(_here, "room", None)
    if room is None or len(room) < size:
        block = np.empty(size * 5 // 4 + 1, np.uint8)
        _here.room = room = block[1 - block.ctypes.data % 2 :]
    return room[:size]


def _upright(segment: bytes) -> bool:
    """Whether nothing in the segment of a marker APP1, Exif or XMP, says that the picture is to be turned."""
    if not segment.startswith(_EXIF):
        turn = _XMP_TURN.search(segment)
        return turn is None or turn[1] not in b"2345678"
    tiff = segment[6:]
    order = {b"II": "little", b"MM": "big"}.get(tiff[:2])
    if order is None:
        return True

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)  # type: ignore[arg-type]

    directory = number(4, 4)
    room = (len(tiff) - directory - 2) // 12
    entries = (directory + 2 + 12 * i for i in range(min(number(directory, 2), room)))
    return all(
        number(at, 2) != 0x0112 or (number(at + 2, 2) == _SHORT and number(at + 8, 2) in (0, 1)) for at in entries
    )
