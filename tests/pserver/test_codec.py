"""Messages: there and back, and nothing but WireError for what is no message."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from dtf.pserver.net import codec
from dtf.pserver.net.codec import Array, Message, Schema, WireError, decode, encode

SCHEMA = Schema(
    {"step": int, "lr": float, "table": str},
    {
        "ids": Array(1, ("i64",)),
        "rows/user": Array(2, ("f32", "f16", "bf16")),
        "one": Array(0, ("f64",)),
        "mask": Array(3, ("u8", "u16")),
    },
)
NUMPY = {"f32": "<f4", "f16": "<f2", "bf16": "<u2", "f64": "<f8", "i64": "<i8", "u8": "u1", "u16": "<u2"}
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    "step": st.integers(-(2**63), 2**63 - 1),
    "lr": st.floats(allow_nan=False, allow_infinity=False),
    "table": st.text(st.characters(exclude_categories=["Cs"]), max_size=128),
}


def array(kind: Array) -> st.SearchStrategy[np.ndarray]:
    shape = (
        arrays_of.array_shapes(min_dims=kind.ndim, max_dims=kind.ndim, min_side=0, max_side=5)
        if kind.ndim
        else st.just(())
    )
    return st.sampled_from(kind.dtypes).flatmap(lambda name: arrays_of.arrays(NUMPY[name], shape))


SOME = st.tuples(
    st.fixed_dictionaries({}, optional=SCALARS),
    st.fixed_dictionaries({}, optional={name: array(kind) for name, kind in SCHEMA.arrays.items()}),
)
FULL = encode(
    SCHEMA,
    {"step": 7, "lr": 0.5, "table": "user"},
    {"ids": np.arange(5), "rows/user": np.ones((5, 4), "f4"), "one": np.array(2.0)},
)


def payload(data: bytes) -> set[int]:
    """Places of the bytes that lie in an array."""
    start = np.frombuffer(data, np.uint8).ctypes.data
    views = decode(SCHEMA, data).arrays.values()
    return {
        at
        for view in views
        for at in range(view.ctypes.data - start, view.ctypes.data - start + view.nbytes)
        if view.nbytes
    }


def same(one: Message, scalars: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    assert one.scalars == scalars and list(one.arrays) == list(arrays)
    for name, array in one.arrays.items():
        assert (
            array.dtype == arrays[name].dtype
            and array.shape == arrays[name].shape
            and array.tobytes() == arrays[name].tobytes()
        )


@given(SOME)
def test_there_and_back(parts: tuple[dict[str, Any], dict[str, np.ndarray]]) -> None:
    data = encode(SCHEMA, *parts)
    same(decode(SCHEMA, data), *parts)
    assert encode(SCHEMA, *decode(SCHEMA, data)[:2]) == data


def test_arrays_are_read_only_views_and_aligned() -> None:
    rows = np.ones((1000, 16), "f4")
    data = encode(SCHEMA, {}, {"ids": np.arange(3), "rows/user": rows})
    start = np.frombuffer(data, np.uint8).ctypes.data
    for view in decode(SCHEMA, data).arrays.values():
        assert not view.flags.writeable and view.flags.c_contiguous
        assert (view.ctypes.data - start) % 64 == 0 and 0 <= view.ctypes.data - start <= len(data) - view.nbytes


def test_the_dtype_of_a_compressed_array_is_told() -> None:
    for numpy, name in (("f4", "f32"), ("f2", "f16"), ("u2", "bf16")):
        assert decode(SCHEMA, encode(SCHEMA, {}, {"rows/user": np.zeros((1, 2), numpy)})).dtypes == {"rows/user": name}


def test_what_is_not_contiguous_travels_as_it_looks() -> None:
    rows = np.arange(12, dtype="f4").reshape(3, 4).T
    assert np.array_equal(decode(SCHEMA, encode(SCHEMA, {}, {"rows/user": rows})).arrays["rows/user"], rows)


def test_one_allocation_of_a_large_message() -> None:
    rows = np.ones((1 << 16, 16), "f4")
    tracemalloc.start()
    try:
        data = encode(SCHEMA, {}, {"rows/user": rows})
        assert tracemalloc.get_traced_memory()[1] < 1.01 * len(data)
        tracemalloc.reset_peak()
        decode(SCHEMA, data)
        assert tracemalloc.get_traced_memory()[1] < 1.01 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("scalars", "arrays"),
    [
        ({"other": 1}, {}),
        ({"step": 1.0}, {}),
        ({"step": True}, {}),
        ({"step": 2**63}, {}),
        ({"step": 10**400}, {}),
        ({"lr": 1}, {}),
        ({"lr": float("nan")}, {}),
        ({"lr": float("-inf")}, {}),
        ({"table": "x" * 513}, {}),
        ({"table": "\ud800"}, {}),
        ({}, {"other": np.zeros(1)}),
        ({}, {"ids": np.zeros(1, "i4")}),
        ({}, {"ids": np.zeros(1, ">i8")}),
        ({}, {"ids": np.zeros((1, 1), "i8")}),
    ],
)
def test_what_the_schema_does_not_have_is_not_sent(scalars: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    with pytest.raises(WireError):
        encode(SCHEMA, scalars, arrays)


@pytest.mark.parametrize(
    ("scalars", "arrays"),
    [
        ({"a b": int}, {}),
        ({"": int}, {}),
        ({"a" * 129: int}, {}),
        ({"a": bytes}, {}),
        ({"a": int}, {"a": Array(1)}),
        ({}, {"a": Array(9)}),
        ({}, {"a": Array(1, ())}),
        ({}, {"a": Array(1, ("c64",))}),
        ({}, {"a": Array(1, ("u16", "bf16"))}),
    ],
)
def test_what_is_no_schema(scalars: dict[str, type], arrays: dict[str, Array]) -> None:
    with pytest.raises(ValueError):
        Schema(scalars, arrays)


# ---------------------------------------------------------------- what is no message


@given(SOME, st.data())
def test_shorter_and_longer_messages_are_refused(
    parts: tuple[dict[str, Any], dict[str, np.ndarray]], data: st.DataObject
) -> None:
    good = encode(SCHEMA, *parts)
    for bad in (good[: data.draw(st.integers(0, len(good) - 1))], good + data.draw(st.binary(min_size=1, max_size=70))):
        with pytest.raises(WireError):
            decode(SCHEMA, bad)


def test_every_flip_outside_the_arrays_is_refused() -> None:
    inside = payload(FULL)
    assert len(inside) == 5 * 8 + 5 * 4 * 4 + 8
    for at in range(len(FULL)):
        for bit in range(8):
            bad = FULL[:at] + bytes([FULL[at] ^ 1 << bit]) + FULL[at + 1 :]
            if at in inside:
                assert {name: view.shape for name, view in decode(SCHEMA, bad).arrays.items()} == {
                    "ids": (5,),
                    "rows/user": (5, 4),
                    "one": (),
                }
            else:
                with pytest.raises(WireError):
                    decode(SCHEMA, bad)


def sealed(data: bytes) -> bytes:
    """The message with the checksum that its header would have, so that what is behind it is reached."""
    if len(data) < codec._BODY:
        return data
    header = codec._HEAD.unpack_from(data)[4]
    crc = zlib.crc32(data[codec._BODY : header], zlib.crc32(data[: codec._HEAD.size]))
    return data[: codec._HEAD.size] + struct.pack("<I", crc) + data[codec._BODY :]


def fuzz_one(data: bytes) -> None:
    """For a fuzzer of bytes: WireError or a message that is laid out as `encode` would; no other exception, no memory
    beyond the bytes.
    """
    for each in (data, sealed(data)):
        try:
            message = decode(SCHEMA, each)
        except WireError as error:
            assert len(str(error)) < 700 and str(error).isprintable()
        else:
            assert sum(view.nbytes for view in message.arrays.values()) <= len(each)
            assert encode(SCHEMA, message.scalars, message.arrays) == each


@given(st.binary(max_size=300))
@example(b"")
@example(b"DTFW")
def test_random_bytes(data: bytes) -> None:
    fuzz_one(data)
    fuzz_one(FULL[: codec._BODY] + data)


@given(SOME, st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=300)
def test_changed_messages_with_a_fitting_checksum(
    parts: tuple[dict[str, Any], dict[str, np.ndarray]], changes: list[tuple[int, int]]
) -> None:
    data = bytearray(encode(SCHEMA, *parts))
    for at, value in changes:
        data[at % len(data)] = value
    fuzz_one(bytes(data))


def entry(name: bytes, code: int, shape: tuple[int, ...], offset: int) -> bytes:
    return bytes((len(name), code, len(shape))) + name + struct.pack(f"<{len(shape) + 1}Q", *shape, offset)


def message(*entries: bytes, arrays: int = 0, tail: bytes = b"") -> bytes:
    body = b"".join(entries)
    header = codec._BODY + len(body)
    head = codec._HEAD.pack(codec.MAGIC, codec.VERSION, len(entries) - arrays, arrays, header, header + len(tail))
    return sealed(head + bytes(4) + body + tail)


I64 = codec._DTYPES["i64"][0]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (message(entry(b"ids", I64, (1 << 40,), 128), arrays=1), "does not lie"),
        (message(entry(b"ids", I64, (1 << 61,), 128), arrays=1), "larger than memory"),
        (message(entry(b"ids", I64, (1 << 63,), 128), arrays=1), "larger than memory"),
        (message(entry(b"rows/user", codec._DTYPES["f32"][0], (0, 1 << 63), 128), arrays=1), "larger than memory"),
        (
            message(entry(b"rows/user", codec._DTYPES["f32"][0], (1 << 32, 1 << 32), 128), arrays=1),
            "larger than memory",
        ),
        (message(entry(b"ids", I64, (1,), 0), arrays=1, tail=bytes(100)), "does not lie"),
        (message(entry(b"ids", I64, (1,), 64), arrays=1, tail=bytes(16 + 8 + 1)), "longer than its arrays"),
        (message(entry(b"ids", I64, (1, 1), 64), arrays=1), "another dtype or number"),
        (message(entry(b"ids", 200, (1,), 64), arrays=1), "another dtype or number"),
        (message(entry(b"ids", I64, (0,), 64), entry(b"ids", I64, (0,), 64), arrays=2), "twice"),
        (message(b"\x04\x01step" + bytes(8), b"\x04\x01step" + bytes(8)), "twice"),
        (message(b"\x04\x02step" + bytes(8)), "another type"),
        (message(b"\x02\x02lr" + struct.pack("<d", float("inf"))), "not finite"),
        (message(b"\x05\x03table" + struct.pack("<H", 600) + b"x" * 600), "too long"),
        (message(b"\x05\x03table" + struct.pack("<H", 4) + b"x"), "too long"),
        (message(b"\x05\x03table" + struct.pack("<H", 1) + b"\xff"), "no text"),
        (message(b"\xff\x03tables"), "unknown"),
        (message(b"\x04\x01step"), "ends within"),
        (message(b""), "ends within"),
        (message(b"\x04\x01step" + bytes(9)), "longer than its entries"),
        (message(b"\x03\x01\n\x1b[" + bytes(8)), r"b'\\n\\x1b\['"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_lie_of_a_header(data: bytes, text: str) -> None:
    with pytest.raises(WireError, match=text):
        decode(SCHEMA, data)


def test_nothing_is_made_by_what_a_header_claims() -> None:
    data = message(entry(b"ids", I64, (1 << 40,), 128), arrays=1)
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(SCHEMA, data)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
