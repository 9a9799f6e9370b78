"""The manifest of a checkpoint: its files, their digests, and which box of which tensor is where.

Turns it into text and back, and checks it. Opens no file and needs no torch. The format: docs/checkpoints.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dtf.core.errors import DataError

FORMAT, LAYERED = 1, 2
"""Of checkpoints, and of those that have files of an earlier one: older readers would miss what changed since."""
BLOCK_BYTES = 1 << 20
"""Digests cover files block by block, so that a part can be read and checked without the rest."""

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
ITEM_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
"""Number formats by their names in safetensors."""
MAX_BYTES = 1 << 28
"""Largest manifest, and largest JSON of scalars: a reader holds all of either in memory."""

NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,128}")
_FLOAT = "$float64"
_MAX_DIMENSIONS = 8
_MAX_TENSOR_NAME = 1024
_MAX_TENSOR_BYTES = 1 << 62  # also of an empty tensor without its axes of length 0: torch multiplies the others
_FACES_PER_BOX = 16


class StoredBox(NamedTuple):
    """A part of a global tensor, and the file that holds it."""

    file: str
    key: str  # in that file
    offset: tuple[int, ...]  # in the global tensor
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A global tensor: dtype, shape, and the boxes that cover it."""

    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The size and the digests of a file."""

    size: int  # bytes
    crc32: tuple[int, ...]  # of each block


@dataclass(frozen=True, slots=True)
class Objective:
    """The evaluation by which this checkpoint is compared with others. `mode`: `max` or `min`."""

    metric: str
    mode: str
    value: float


class Base(NamedTuple):
    """The checkpoint of an earlier step some of whose files another one has too, see `dtf.checkpoint.layers`."""

    step: int
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that the manifest of a checkpoint says."""

    step: int
    run_id: str
    strategy: str  # that wrote it
    ranks: int
    objective: Objective | None
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]
    base: Base | None = None


# ---------------------------------------------------------------- JSON that gives back what it was given


def exact_json(value: Any) -> bytes:
    """JSON whose `parse_json` equals `value` bit for bit, infinities and NaN payloads included.

    TypeError for what JSON would change: keys that are no text, tuples, other classes.
    """
    return json.dumps(_encodable(value, "value"), separators=(",", ":"), allow_nan=False).encode()


def parse_json(data: bytes) -> Any:
    """Inverse of `exact_json`; ValueError for anything else."""
    try:
        return json.loads(data, object_hook=_decoded, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _encodable(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: struct.pack(">d", value).hex()}
    if isinstance(value, list):
        return [_encodable(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        if any(not isinstance(key, str) or key == _FLOAT for key in value):
            raise TypeError(f"{where} has a key that JSON cannot hold; use text, but not {_FLOAT!r}")
        return {key: _encodable(item, f"{where}.{key}") for key, item in value.items()}
    raise TypeError(
        f"{where} is a {type(value).__name__}, which does not survive JSON; use numbers, text, lists and dicts"
    )


def _decoded(item: dict[str, Any]) -> Any:
    if _FLOAT not in item:
        return item
    digits = item[_FLOAT]
    if len(item) > 1 or not isinstance(digits, str) or not re.fullmatch("[0-9a-f]{16}", digits):
        raise ValueError(f"{_FLOAT} needs 16 hexadecimal digits")
    return struct.unpack(">d", bytes.fromhex(digits))[0]


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


# ---------------------------------------------------------------- manifest to text and back


def encode(manifest: Manifest) -> bytes:
    """The bytes of manifest.json: one JSON object whose last member is the SHA-256 of every byte before it.

    ValueError when the boxes do not cover every tensor exactly once, or are too many.
    """
    _check(manifest)
    goal = manifest.objective
    body = exact_json(
        {
            "format": FORMAT if manifest.base is None else LAYERED,
            "step": manifest.step,
            "run": manifest.run_id,
            "world": {"strategy": manifest.strategy, "ranks": manifest.ranks},
            "objective": [goal.metric, goal.mode, goal.value] if goal else None,
            **({} if manifest.base is None else {"base": [manifest.base.step, list(manifest.base.files)]}),
            "files": {name: {"size": file.size, "crc32": list(file.crc32)} for name, file in manifest.files.items()},
            "tensors": {
                name: {
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "boxes": [[box.file, box.key, list(box.offset), list(box.shape)] for box in tensor.boxes],
                }
                for name, tensor in manifest.tensors.items()
            },
        }
    )[:-1]
    if len(body) > MAX_BYTES - len(_seal(b"")):
        raise ValueError(f"a manifest of {len(body)} bytes; {MAX_BYTES} is the limit")
    return body + _seal(body)


def decode(data: bytes) -> Manifest:
    """Inverse of `encode`. DataError when a byte differs, the format is unknown, or the content contradicts itself."""
    body, seal = data[: -len(_seal(b""))], data[-len(_seal(b"")) :]
    if seal != _seal(body):
        raise DataError("manifest.json is damaged: its bytes do not have the SHA-256 written at its end")
    try:
        return _parse(parse_json(data))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise DataError(f"manifest.json makes no sense: {_short(error)}") from None


def _seal(body: bytes) -> bytes:
    return b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def _parse(data: dict[str, Any]) -> Manifest:
    if data["format"] not in (FORMAT, LAYERED):
        raise DataError(
            f"manifest.json has format {_short(data['format'])}, this version of dtf reads formats {FORMAT} and "
            f"{LAYERED}; use the version that wrote it"
        )
    goal = data["objective"]
    manifest = Manifest(
        step=_count(data["step"]),
        run_id=_text(data["run"]),
        strategy=_text(data["world"]["strategy"]),
        ranks=_count(data["world"]["ranks"]),
        objective=Objective(_text(goal[0]), _text(goal[1]), _number(goal[2])) if goal is not None else None,
        files={name: StoredFile(_count(file["size"]), _counts(file["crc32"])) for name, file in data["files"].items()},
        tensors={
            name: StoredTensor(
                _text(tensor["dtype"]),
                _counts(tensor["shape"]),
                tuple(
                    StoredBox(_text(file), _text(key), _counts(offset), _counts(shape))
                    for file, key, offset, shape in tensor["boxes"]
                ),
            )
            for name, tensor in data["tensors"].items()
        },
        base=_base(*data["base"]) if data["format"] == LAYERED else None,
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """ValueError unless every name, size and box fits the others; afterwards the files bound what a reader
    allocates.
    """
    if not NAME.fullmatch(manifest.run_id) or not NAME.fullmatch(manifest.strategy):
        raise ValueError("the run id or the name of the strategy is no usable name")
    if manifest.objective is not None and manifest.objective.mode not in ("max", "min"):
        raise ValueError(f"unknown mode {_short(manifest.objective.mode)} of the objective")
    for name, file in manifest.files.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"unusable file name {_short(name)}")
        if len(file.crc32) != blocks(file.size):
            raise ValueError(f"{name} has {file.size} bytes but {len(file.crc32)} digests")
    if manifest.base is not None and not set(manifest.base.files) <= manifest.files.keys():
        raise ValueError("files of an earlier checkpoint are not among the files")
    stored = dict.fromkeys(manifest.files, 0)
    for name, tensor in manifest.tensors.items():
        if len(name) > _MAX_TENSOR_NAME or not all(NAME.fullmatch(part) for part in name.split("/")):
            raise ValueError(f"unusable tensor name {_short(name)}")
        if tensor.dtype not in ITEM_BYTES:
            raise ValueError(f"{name} has the unknown dtype {_short(tensor.dtype)}")
        if len(tensor.shape) > _MAX_DIMENSIONS:
            raise ValueError(f"{name} has {len(tensor.shape)} dimensions; {_MAX_DIMENSIONS} is the limit")
        if volume(max(1, length) for length in tensor.shape) * ITEM_BYTES[tensor.dtype] > _MAX_TENSOR_BYTES:
            raise ValueError(f"{name} is larger than memory can be")
        fault = partition_fault(tensor.shape, [(box.offset, box.shape) for box in tensor.boxes])
        if fault:
            raise ValueError(f"{name}: {fault}")
        for box in tensor.boxes:
            if box.file not in stored:
                raise ValueError(f"{name} lies in {_short(box.file)}, which is not among the files")
            stored[box.file] += volume(box.shape) * ITEM_BYTES[tensor.dtype]
    for name, total in stored.items():
        if total > manifest.files[name].size:
            raise ValueError(f"{name} has {manifest.files[name].size} bytes and cannot hold {total} bytes of tensors")


def _base(step: Any, files: Any) -> Base:
    return Base(_count(step), tuple(_text(name) for name in files))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{_short(value)} should be text")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{_short(value)} should be a whole number >= 0")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{_short(value)} should be a number")
    return float(value)


def _counts(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{_short(values)} should be a list of numbers")
    return tuple(_count(value) for value in values)


def _short(value: object) -> str:
    """Text of a stranger's value: escaped and cut, fit for a log."""
    return ascii(str(value))[:120]


# ---------------------------------------------------------------- boxes


def volume(shape: Iterable[int]) -> int:
    """Elements of a shape."""
    return math.prod(shape)


def blocks(size: int) -> int:
    """Digests that a file of `size` bytes has."""
    return -(-size // BLOCK_BYTES)


def intersect(
    offset: tuple[int, ...], shape: tuple[int, ...], other_offset: tuple[int, ...], other_shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offset and shape of what two boxes of one tensor share; None when that is nothing."""
    first = tuple(max(a, b) for a, b in zip(offset, other_offset, strict=True))
    lasts = (min(a + n, b + m) for a, n, b, m in zip(offset, shape, other_offset, other_shape, strict=True))
    size = tuple(last - start for start, last in zip(first, lasts, strict=True))
    return (first, size) if all(n > 0 for n in size) else None


def partition_fault(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """Why boxes (offset, shape) do not cover a tensor exactly once; "" when they do."""
    for offset, size in boxes:
        if not len(offset) == len(size) == len(shape) or any(
            a + n > length for a, n, length in zip(offset, size, shape, strict=True)
        ):
            return f"box {size} at {offset} does not lie in shape {shape}"
    held = sum(volume(size) for _, size in boxes)
    if held != volume(shape) or not boxes:
        return f"{len(boxes)} boxes hold {held} of {volume(shape)} elements"
    return _overlap(shape, [box for box in boxes if volume(box[1])]) if held else ""


def _overlap(shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> str:
    """As `partition_fault`, of boxes inside a tensor that hold as many elements as it; in time linear in their number.

    Where they do, the sum of their indicator functions is that of the tensor, and so are its derivatives. The
    derivative along an axis puts a face at each end of a box, with opposite signs; faces of neighbours cancel.
    """
    axes = [i for i in range(len(shape)) if any(size[i] != shape[i] for _, size in boxes)]
    faces: dict[tuple, int] = {}

    def add(face: tuple, weight: int) -> None:
        faces[face] = faces.get(face, 0) + weight

    add(tuple((0, shape[i]) for i in axes), -1)
    for offset, size in boxes:
        add(tuple((offset[i], offset[i] + size[i]) for i in axes), 1)
    for axis in range(len(axes)):
        intervals, faces = faces, {}
        for face, weight in intervals.items():
            (first, last), before, after = face[axis], face[:axis], face[axis + 1 :]
            add((*before, first, *after), weight)
            add((*before, last, *after), -weight)
        faces = {face: weight for face, weight in faces.items() if weight}
        if len(faces) > _FACES_PER_BOX * (len(boxes) + 1):
            return f"{len(boxes)} boxes are staggered along more than four axes, which no strategy does"
    return f"of {len(boxes)} boxes one overlaps another" if any(faces.values()) else ""
