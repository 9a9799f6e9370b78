"""What a checkpoint says about itself: JSON that keeps every bit, and a sealed manifest that cannot contradict
itself.
"""

from __future__ import annotations

import hashlib
import json
import struct
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
        (lambda m: m.update(format=2), "format"),
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
        (lambda m: m["tensors"]["model/w"].update(shape=[1 << 40, 1 << 40]), "elements"),
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
