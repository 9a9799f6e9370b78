"""Parts of JPEG files: what is decoded is what the whole picture shows there, and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import simplejpeg

from dtf.recipes.resnet import jpeg
from dtf.recipes.resnet.crops import Part
from dtf.recipes.resnet.photos import resized
from tests.support.image_files import encode, picture


@pytest.mark.parametrize(
    ("options", "lowered"),
    [
        ({"subsampling": 2}, True),
        ({"subsampling": 0}, True),
        ({"subsampling": 1}, True),
        ({"mode": "L"}, True),
        ({"progressive": True}, False),
        ({"restart_marker_rows": 1}, False),
    ],
    ids=str,
)
def test_a_part_is_what_the_whole_picture_shows_there(options: dict[str, Any], lowered: bool) -> None:
    content = encode(picture(150, 203), **options)
    header = jpeg.read_header(content)
    assert header is not None and (header.height, header.width) == (150, 203) and (header.height_at > 0) == lowered
    whole = simplejpeg.decode_jpeg(content, "RGB", fastupsample=True)
    for top, left, height, width in np.random.default_rng(0).integers(1, [60, 90, 90, 113], (40, 4)).tolist():
        part = jpeg.decode(content, header, Part(top, left, height, width))
        assert part is not None and np.array_equal(part, whole[top : top + height, left : left + width])


def test_rows_below_the_part_are_not_decoded() -> None:
    """Damage below a part does not touch it, and is found where the part reaches it."""
    content = bytearray(encode(picture(400, 300)))
    content[len(content) * 3 // 4] = 0xFF  # a marker in the middle of the data
    content[len(content) * 3 // 4 + 1] = 0xD9
    header = jpeg.read_header(bytes(content))
    assert header is not None
    assert jpeg.decode(bytes(content), header, Part(0, 0, 100, 300)) is not None
    assert jpeg.decode(bytes(content), header, Part(0, 0, 400, 300)) is None


def test_nothing_is_shown_but_what_was_decoded() -> None:
    """A damaged header may end the decoder's work before it has written a row: the memory holds another picture."""
    content = bytearray(encode(picture(300, 200)))
    markers = [at for at in range(len(content)) if content[at] == 0xFF and content[at + 1] in (0xC0, 0xC4, 0xDB, 0xDA)]
    decoded = 0
    for at in markers[: 2 + 1 + 4 + 1]:
        for value in range(256):
            damaged = bytes(content[: at + 1] + bytes([value]) + content[at + 2 :])
            header, shown = jpeg.read_header(damaged), []
            if header is None or header.height * header.width > 10**6:
                continue
            for filled in (0, 255):
                jpeg._room(10**7)[:] = filled
                part = jpeg.decode(damaged, header, Part(0, 0, min(90, header.height), header.width))
                shown.append(None if part is None else part.copy())
            decoded += shown[0] is not None
            assert (shown[0] is None) == (shown[1] is None) and (shown[0] is None or np.array_equal(*shown))  # type: ignore[arg-type]
    assert decoded >= 8, "the intact file, once for each marker"


@pytest.mark.parametrize(
    ("sides", "scale"),
    [((400, 600), 1), ((1100, 1000), 2), ((1900, 2000), 4), pytest.param((3700, 3800), 8, marks=pytest.mark.slow)],
)
def test_large_parts_are_decoded_small_and_look_alike(sides: tuple[int, int], scale: int) -> None:
    image = picture(*sides)
    content = encode(image)
    header = jpeg.read_header(content)
    assert header is not None
    part = Part(10, 20, sides[0] - 37, sides[1] - 51)
    assert jpeg.reduction(part, 2 * 224) == scale
    found = jpeg.decode(content, header, part, scale)
    assert found is not None and found.shape[0] == round(part.height / scale)
    whole = simplejpeg.decode_jpeg(content)[part.top : part.top + part.height, part.left : part.left + part.width]
    apart = (resized(found, 224, 224).int() - resized(whole, 224, 224).int()).abs().float()
    assert apart.mean() <= 1
