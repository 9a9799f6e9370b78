"""The safetensors layout, to stream tensors into a file and to find them again. No torch; opens no file.

The safetensors library wants all bytes of a file in memory at once, and reads what it likes from a mapped file. Here a
tensor is written while its digest is taken, and a reader hands out only bytes whose digest was compared. Files are
ordinary safetensors files. Source: the format section of https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dtf.checkpoint.manifest import ITEM_BYTES, volume
from dtf.core.errors import DataError

_MAX_HEADER_BYTES = 100_000_000  # as in the library


class Slot(NamedTuple):
    """Where a tensor lies in a file: bytes [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], multiple: int = 8) -> bytes:
    """First bytes of a file that holds tensors (key, dtype, shape) in this order, without gaps. There are a multiple of
    `multiple` of them.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for key, dtype, shape in tensors:
        size = volume(shape) * ITEM_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


def slots(read: Callable[[int, int], bytes | memoryview], size: int) -> dict[str, Slot]:
    """Tensors of a file of `size` bytes by key; `read(start, stop)` gives its bytes.

    DataError when the header is not what it should be.
    """
    try:
        length = int.from_bytes(read(0, 8), "little") if size >= 8 else size
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes does not fit")
        entries = json.loads(bytes(read(8, 8 + length)))
        entries.pop("__metadata__", None)
        by_key = {key: _slot(entry, 8 + length) for key, entry in entries.items()}
        if any(slot.stop > size for slot in by_key.values()):
            raise ValueError("a tensor ends behind the end of the file")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"not a safetensors file: {ascii(str(error))[:120]}") from None
    return by_key


def _slot(entry: dict, base: int) -> Slot:
    dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(number) is not int or number < 0 for number in (*shape, first, last)):
        raise ValueError("shapes and offsets are whole numbers")
    if last - first != volume(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{last - first} bytes for shape {shape} of {dtype}")
    return Slot(dtype, shape, base + first, base + last)
