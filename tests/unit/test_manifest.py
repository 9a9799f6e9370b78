"""What a checkpoint says about itself: JSON that keeps every bit, and a sealed manifest that cannot contradict
itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.checkpoint.manifest import (
    Manifest,
    Objective,
    StoredBox,
    StoredFile,
    StoredTensor,
    decode,
    encode,
    exact_json,
    parse_json,
    partition_fault,
)
from dtf.core.errors import DataError


def bits(value: Any) -> Any:
    """A value in which equal means the same bits."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, list) else (type(value), value)


def any_float() -> st.SearchStrategy[float]:
    return st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0]) | st.floats()


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | any_float() | st.text(),
        lambda item: st.lists(item) | st.dictionaries(st.text().filter(lambda key: key != "$float64"), item),
    )
)
def test_json_gives_back_every_bit(value: Any) -> None:
    assert bits(parse_json(exact_json(value))) == bits(value)


@pytest.mark.parametrize("value", [(1, 2), {1: 2}, {"$float64": "0" * 16}, b"x", {"a": [object()]}])
def test_json_refuses_what_it_would_change(value: Any) -> None:
    with pytest.raises(TypeError, match="value"):
        exact_json(value)


@pytest.mark.parametrize("text", [b"NaN", b"[Infinity]", b"[" * 100_000, b"{", b"\xff"])
def test_json_refuses_what_it_does_not_write(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|nested|property|decode"):
        parse_json(text)


def manifest_of(**changes: Any) -> Manifest:
    files = {"r.bin": StoredFile(100, (1,))}
    tensors = {
        "model/w": StoredTensor(
            "F32", (4, 2), (StoredBox("r.bin", "k", (0, 0), (1, 2)), StoredBox("r.bin", "k#1", (1, 0), (3, 2)))
        )
    }
    return Manifest(
        **{
            "step": 3,
            "run_id": "r",
            "strategy": "ddp",
            "ranks": 2,
            "objective": Objective("loss", "min", float("inf")),
            "files": files,
            "tensors": tensors,
        }
        | changes
    )


def test_a_manifest_is_json_and_comes_back() -> None:
    data = encode(manifest_of())
    assert json.loads(data)["world"] == {"strategy": "ddp", "ranks": 2}
    assert decode(data) == manifest_of()


def test_no_bit_of_a_manifest_can_change() -> None:
    data = encode(manifest_of())
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(DataError):
                decode(bytes(changed))
    for wrong in (b"", data[:-1], data + b"\n", data[1:], data * 2):
        with pytest.raises(DataError):
            decode(wrong)


def sealed(change: Callable[[dict], Any]) -> bytes:
    """A manifest that somebody changed and sealed again."""
    content = json.loads(encode(manifest_of()))
    del content["sha256"]
    change(content)
    body = json.dumps(content).encode()[:-1]
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda m: m.update(format=3), "format"),
        (lambda m: m.update(format=2, base=[1, ["c.bin"]]), "earlier checkpoint"),
        (lambda m: m.update(format=2, base=[-1, []]), "whole number"),
        (lambda m: m.update(step=-1), "whole number"),
        (lambda m: m.update(step=True), "whole number"),
        (lambda m: m.pop("files"), "files"),
        (lambda m: m.update(files=[]), "no attribute"),
        (lambda m: m["files"].update({"../x": {"size": 0, "crc32": []}}), "file name"),
        (lambda m: m["files"].update({"..": {"size": 0, "crc32": []}}), "file name"),
        (lambda m: m["files"].update({"x/y": {"size": 0, "crc32": []}}), "file name"),
        (lambda m: m["files"]["r.bin"].update(size=1 << 60), "digests"),
        (lambda m: m["files"]["r.bin"].update(size=31), "cannot hold"),
        (lambda m: m["tensors"]["model/w"].update(dtype="object"), "dtype"),
        (lambda m: m["tensors"]["model/w"].update(shape=[4, 2, 1]), "does not lie in"),
        (lambda m: m["tensors"]["model/w"].update(shape=[1 << 20, 1 << 20]), "elements"),
        (lambda m: m["tensors"]["model/w"].update(shape=[1 << 40, 1 << 40]), "larger than memory"),
        (lambda m: m["tensors"]["model/w"]["boxes"].pop(), "elements"),
        (lambda m: m["tensors"]["model/w"].update(boxes=[]), "elements"),
        (lambda m: m["tensors"]["model/w"]["boxes"].append(m["tensors"]["model/w"]["boxes"][0]), "elements"),
        (lambda m: m["tensors"]["model/w"]["boxes"][0].__setitem__(0, "/etc/passwd"), "not among"),
        (lambda m: m["tensors"]["model/w"]["boxes"][1].__setitem__(2, [2, 0]), "does not lie in"),
        (lambda m: m["tensors"].update({"model/../w": m["tensors"]["model/w"]}), "tensor name"),
        (lambda m: m["tensors"].update({"deep": {"dtype": "U8", "shape": [1] * 9, "boxes": []}}), "dimensions"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: Callable[[dict], Any], rule: str) -> None:
    with pytest.raises(DataError, match=rule):
        decode(sealed(change))


class Counted(int):
    """A coordinate that counts how often it is looked at."""

    looks = 0

    def __hash__(self) -> int:
        Counted.looks += 1
        return int.__hash__(self)

    def __lt__(self, other: int) -> bool:
        Counted.looks += 1
        return int.__lt__(self, other)

    def __gt__(self, other: int) -> bool:
        Counted.looks += 1
        return int.__gt__(self, other)

    def __add__(self, other: int) -> Counted:
        Counted.looks += 1
        return Counted(int.__add__(self, other))

    __radd__ = __add__


def staircase(rows: int, number: type[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Columns that are cut in two, each at another row: nearly all boxes are beside all others on either axis."""
    return [
        box
        for i in range(rows)
        for box in (
            ((number(0), number(i)), (number(i + 1), number(1))),
            ((number(i + 1), number(i)), (number(rows - i), number(1))),
        )
    ]


def test_twice_the_boxes_take_twice_the_work_to_judge() -> None:
    looks = []
    for rows in (200, 400, 800):
        Counted.looks = 0
        assert partition_fault((rows + 1, rows), staircase(rows, Counted)) == ""
        looks.append(Counted.looks)
    assert looks[1] < 2.1 * looks[0] and looks[2] < 2.1 * looks[1] and looks[2] < 50 * 1600


@pytest.mark.slow
def test_160_000_boxes_are_judged() -> None:
    boxes = staircase(80_000, int)
    assert partition_fault((80_001, 80_000), boxes) == ""
    (row, column), (height, width) = boxes[-1]
    boxes[-1] = (row - 1, column), (height, width)
    assert "overlaps" in partition_fault((80_001, 80_000), boxes)


@settings(deadline=None)
@given(st.data())
def test_a_partition_is_what_covers_each_element_once(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 3), max_size=3).map(tuple))
    boxes = data.draw(
        st.lists(st.tuples(*(st.tuples(*(st.integers(0, n) for n in shape)) for _ in range(2))), max_size=6)
    )
    covered = Counter(
        element
        for offset, size in boxes
        for element in itertools.product(*(range(a, a + n) for a, n in zip(offset, size, strict=True)))
    )
    inside = all(a + n <= m for offset, size in boxes for a, n, m in zip(offset, size, shape, strict=True))
    once = bool(boxes) and inside and covered == Counter(itertools.product(*map(range, shape)))
    assert (partition_fault(shape, boxes) == "") == once


def test_boxes_staggered_along_many_axes_are_refused_before_they_fill_memory() -> None:
    draw = random.Random(0)
    boxes = [(tuple(draw.randrange(51) for _ in range(8)), (50,) * 8) for _ in range(2**8)]
    assert "more than four axes" in partition_fault((100,) * 8, boxes)
    grid: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        (offset, (50,) * 8) for offset in itertools.product((0, 50), repeat=8)
    ]
    assert partition_fault((100,) * 8, grid) == ""


def test_a_manifest_too_large_to_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtf.checkpoint.manifest.MAX_BYTES", len(encode(manifest_of())))
    assert decode(encode(manifest_of()))
    with pytest.raises(ValueError, match="limit"):
        encode(manifest_of(run_id="rr"))


def test_overlapping_boxes_of_the_right_volume_are_no_partition() -> None:
    assert partition_fault((4, 4), [((0, 0), (2, 4)), ((2, 0), (2, 4))]) == ""
    assert "overlaps" in partition_fault((4, 4), [((0, 0), (2, 4)), ((1, 0), (2, 4))])
    assert "overlaps" in partition_fault((2, 4), [((0, 0), (2, 2)), ((0, 1), (2, 2))])
    # a pinwheel
    assert (
        partition_fault(
            (3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
        )
        == ""
    )
    assert partition_fault((), [((), ())]) == ""
    assert partition_fault((0, 3), [((0, 0), (0, 3))]) == ""
    assert "0 boxes" in partition_fault((0, 3), [])
