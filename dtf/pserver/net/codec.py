"""The bytes of a message: a flat header of named scalars and arrays, then the arrays as they lie in memory. Data alone:
nothing in it can name code.

    head     magic, version, how many scalars and arrays, bytes of the header, bytes of the message, crc32 of the header
    scalar   length of the name, type, name; an int64, a float64, or a length and UTF-8
    array    length of the name, dtype, dimensions, name, shape, offset
    arrays   each at the next multiple of 64 from the start of the message, zeros between

All little-endian. There is one way to lay a message out, so that whatever differs from it is refused before an array is
made.
"""

from __future__ import annotations

import math
import re
import struct
import warnings
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

# torch need not warn our servers and trainers of arrays that cannot be written: they read what arrives, and copy it
warnings.filterwarnings("ignore", "The given (NumPy array|buffer) is not writable", module=r"dtf\.")

MAGIC, VERSION = b"DTFW", 1
ALIGNMENT, LONGEST_NAME, LONGEST_TEXT, MOST_DIMENSIONS = 64, 128, 512, 8

_NAME = re.compile(r"[A-Za-z0-9._/-]{1,128}")
_HEAD = struct.Struct("<4sHHHIQ")
_CRC, _INT, _FLOAT, _LENGTH = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<H")
_BODY = _HEAD.size + _CRC.size
_SCALARS: dict[type, int] = {int: 1, float: 2, str: 3}
_DTYPES = {
    name: (code, np.dtype(numpy))
    for code, (name, numpy) in enumerate(
        {
            "u8": "u1",
            "u16": "<u2",
            "u32": "<u4",
            "u64": "<u8",
            "i8": "i1",
            "i16": "<i2",
            "i32": "<i4",
            "i64": "<i8",
            "f16": "<f2",
            "f32": "<f4",
            "f64": "<f8",
            "bf16": "<u2",  # numpy has no bfloat16: its bits
        }.items(),
        1,
    )
}
_ZEROS = bytes(ALIGNMENT)
_MOST_BYTES = 1 << 62

Scalar = int | float | str


class WireError(ValueError):
    """A message that is not of its schema. The text holds no content of the message."""


class Array(NamedTuple):
    """What an array of a message may be: its number of dimensions, and the names of its dtypes (`bf16` travels as
    uint16).
    """

    ndim: int
    dtypes: tuple[str, ...] = ("f32",)


class Named(dict[str, Any]):
    """The scalars or arrays of a message, by name. WireError for a name that the message lacks."""

    def __missing__(self, name: str) -> Any:
        raise WireError(f"{name} is missing")


class Message(NamedTuple):
    """A decoded message; `scalars` and `arrays` are Named.

    `arrays` are read-only views of the bytes; `dtypes` names the dtype with which each array came.
    """

    scalars: dict[str, Scalar]
    arrays: dict[str, np.ndarray]
    dtypes: dict[str, str]


class Schema:
    """The names that a message may hold, and their types. Every name is optional."""

    def __init__(self, scalars: Mapping[str, type] | None = None, arrays: Mapping[str, Array] | None = None) -> None:
        self.scalars, self.arrays = dict(scalars or {}), dict(arrays or {})
        for name in (*self.scalars, *self.arrays):
            if not _NAME.fullmatch(name) or (name in self.scalars and name in self.arrays):
                raise ValueError(f"{name!r} is no name of a message: {_NAME.pattern}, once")
        for name, kind in self.scalars.items():
            if kind not in _SCALARS:
                raise ValueError(f"{name} is a {kind}; scalars are {', '.join(kind.__name__ for kind in _SCALARS)}")
        for name, array in self.arrays.items():
            unknown = set(array.dtypes) - set(_DTYPES)
            if (
                unknown
                or not array.dtypes
                or {"u16", "bf16"} <= set(array.dtypes)
                or not 0 <= array.ndim <= MOST_DIMENSIONS
            ):
                raise ValueError(
                    f"{name}: {array} must have up to {MOST_DIMENSIONS} dimensions and some of {', '.join(_DTYPES)}, "
                    "not both u16 and bf16"
                )
        self._codes = {
            name: {_DTYPES[dtype][1]: _DTYPES[dtype][0] for dtype in array.dtypes}
            for name, array in self.arrays.items()
        }
        self._kinds = {name.encode(): (name, kind, _SCALARS[kind]) for name, kind in self.scalars.items()}
        self._views = {
            name.encode(): (name, array.ndim, {_DTYPES[dtype][0]: (dtype, _DTYPES[dtype][1]) for dtype in array.dtypes})
            for name, array in self.arrays.items()
        }


Buffer = bytes | memoryview
"""The bytes of a message."""


class Parts:
    """A message whose arrays are where they were, to be written in one piece to where it goes. Until then they must
    not change.
    """

    def __init__(self, parts: list[Any], size: int) -> None:
        self._parts, self._size = parts, size

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def write(self, memory: np.ndarray) -> None:
        """Write the message into memory (bytes,) uint8, from the start on."""
        at = 0
        for part in self._parts:
            flat = part.reshape(-1).view(np.uint8) if isinstance(part, np.ndarray) else np.frombuffer(part, np.uint8)
            memory[at : at + len(flat)] = flat  # numpy lets other threads run meanwhile
            at += len(flat)


def encode(schema: Schema, scalars: Mapping[str, Scalar], arrays: Mapping[str, np.ndarray]) -> bytes:
    """The message as bytes, with one allocation and one copy of the arrays; errors as of `in_parts`."""
    return bytes(in_parts(schema, scalars, arrays))


def in_parts(schema: Schema, scalars: Mapping[str, Scalar], arrays: Mapping[str, np.ndarray]) -> Parts:
    """The message without a copy of its arrays.

    WireError for what the schema does not have, and for scalars that are not finite.
    """
    entries: list[bytes] = [_scalar(schema, name, value) for name, value in scalars.items()]
    heads = [_array(schema, name, array) for name, array in arrays.items()]
    header = _BODY + sum(map(len, entries)) + sum(len(head) + 8 for head in heads)
    parts: list[Any] = []
    end = header
    for head, array in zip(heads, arrays.values(), strict=True):
        start = _aligned(end)
        entries += (head, start.to_bytes(8, "little"))
        parts += (_ZEROS[: start - end], array if array.flags.c_contiguous else array.copy(order="C"))
        end = start + array.nbytes
    try:
        front = _HEAD.pack(MAGIC, VERSION, len(scalars), len(arrays), header, end)
    except struct.error:
        raise WireError("a message holds at most 65535 scalars, 65535 arrays and a header of 4 GiB") from None
    body = b"".join(entries)
    return Parts([front + _CRC.pack(zlib.crc32(body, zlib.crc32(front))) + body, *parts], end)


def decode(schema: Schema, data: Buffer) -> Message:
    """Inverse of `encode`, without a copy of the arrays.

    WireError unless every byte outside the arrays is as `encode` would have it.
    """
    if len(data) < _BODY:
        raise WireError("shorter than the head of a message")
    magic, version, scalars, arrays, header, total = _HEAD.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise WireError(f"no message of version {VERSION}")
    if total != len(data) or not _BODY <= header <= total:
        raise WireError("the message is shorter or longer than it says")
    front = bytes(data[:header])
    if _CRC.unpack_from(front, _HEAD.size)[0] != zlib.crc32(front[_BODY:], zlib.crc32(front[: _HEAD.size])):
        raise WireError("the header of the message was changed on the way")
    try:
        values, at = _read_scalars(schema, front, scalars)
        places, at = _read_places(schema, front, arrays, at)
    except (struct.error, IndexError):
        raise WireError("the header of the message ends within an entry") from None
    if at != header:
        raise WireError("the header of the message is longer than its entries")
    end = header
    for place in places:
        if place.start != _aligned(end) or place.start + place.bytes > total:
            raise WireError(f"array {place.name} does not lie where it must")
        if bytes(data[end : place.start]) != _ZEROS[: place.start - end]:
            raise WireError(f"there is something before array {place.name}")
        end = place.start + place.bytes
    if end != total:
        raise WireError("the message is longer than its arrays")
    return Message(
        Named(values),
        Named({place.name: _view(data, place) for place in places}),
        {place.name: place.dtype for place in places},
    )


class _Place(NamedTuple):
    name: str
    dtype: str
    numpy: np.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT) * ALIGNMENT


def _view(data: Buffer, place: _Place) -> np.ndarray:
    view = (
        np.ndarray(place.shape, place.numpy, data, place.start) if place.bytes else np.empty(place.shape, place.numpy)
    )
    view.flags.writeable = False
    return view


def _scalar(schema: Schema, name: str, value: Scalar) -> bytes:
    kind = schema.scalars.get(name)
    if kind is None or type(value) is not kind:
        raise WireError(f"{_shown(name)} must be a scalar of the schema and of its type, not {type(value).__name__}")
    start = bytes((len(name), _SCALARS[kind])) + name.encode()
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError:
            raise WireError(f"scalar {name} is no text") from None
        if len(text) > LONGEST_TEXT:
            raise WireError(f"scalar {name} has {len(text)} bytes, more than {LONGEST_TEXT}")
        return start + _LENGTH.pack(len(text)) + text
    if kind is float and not math.isfinite(value):
        raise WireError(f"scalar {name} is not finite")
    try:
        return start + (_INT if kind is int else _FLOAT).pack(value)
    except struct.error:
        raise WireError(f"scalar {name} does not fit into 64 bits") from None


def _array(schema: Schema, name: str, array: np.ndarray) -> bytes:
    code = schema._codes.get(name, {}).get(array.dtype)
    if code is None or array.ndim != schema.arrays[name].ndim:
        raise WireError(
            f"{_shown(name)} must be an array of the schema and as it has it, not {array.dtype} with {array.ndim} "
            "dimensions"
        )
    return bytes((len(name), code, array.ndim)) + name.encode() + struct.pack(f"<{array.ndim}Q", *array.shape)


def _read_scalars(schema: Schema, front: bytes, count: int) -> tuple[dict[str, Scalar], int]:
    scalars: dict[str, Scalar] = {}
    at = _BODY
    for _ in range(count):
        length, code = front[at], front[at + 1]
        raw = front[at + 2 : at + 2 + length]
        name, kind, known = schema._kinds.get(raw, ("", None, 0))
        at += 2 + length
        if kind is None or code != known or name in scalars:
            raise WireError(f"scalar {_shown(raw)} is unknown, of another type, or there twice")
        if kind is str:
            (size,) = _LENGTH.unpack_from(front, at)
            text = front[at + 2 : at + 2 + size]
            at += 2 + size
            if size > LONGEST_TEXT or len(text) < size:
                raise WireError(f"scalar {name} is too long")
            try:
                scalars[name] = text.decode()
            except UnicodeDecodeError:
                raise WireError(f"scalar {name} is no text") from None
        else:
            (value,) = (_INT if kind is int else _FLOAT).unpack_from(front, at)
            at += 8
            if not math.isfinite(value):
                raise WireError(f"scalar {name} is not finite")
            scalars[name] = value
    return scalars, at


def _read_places(schema: Schema, front: bytes, count: int, at: int) -> tuple[list[_Place], int]:
    places: list[_Place] = []
    names: set[str] = set()
    for _ in range(count):
        length, code, dimensions = front[at], front[at + 1], front[at + 2]
        raw = front[at + 3 : at + 3 + length]
        name, ndim, dtypes = schema._views.get(raw, ("", -1, {}))
        at += 3 + length
        if dimensions != ndim or code not in dtypes or name in names:
            raise WireError(f"array {_shown(raw)} is unknown, of another dtype or number of dimensions, or there twice")
        *shape, start = struct.unpack_from(f"<{ndim + 1}Q", front, at)
        at += 8 * (ndim + 1)
        dtype, numpy = dtypes[code]
        # also where one is 0: numpy multiplies the others
        if math.prod(max(1, size) for size in shape) * numpy.itemsize >= _MOST_BYTES:
            raise WireError(f"array {name} is larger than memory can be")
        names.add(name)
        places.append(_Place(name, dtype, numpy, tuple(shape), start, math.prod(shape) * numpy.itemsize))
    return places, at


def _shown(name: str | bytes) -> str:
    """A name from elsewhere, fit for a log."""
    return ascii(name[:LONGEST_NAME])
