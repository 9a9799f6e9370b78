"""Samples of a stream, written once to tar archives, so that each has a number. Arrays and JSON only, no pickle."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtf.core.errors import ConfigError, DataError
from dtf.core.nest import is_named_tuple
from dtf.data.made_once import made_once

KIND = "sample.npz"
"""The extension of a written sample: its arrays by number, and `form`, which says as JSON what they are part of."""

SHARD_BYTES = 256 << 20


def write_samples(
    samples: Iterable[Any] | Callable[[], Iterable[Any]], folder: str | Path, *, shard_bytes: int = SHARD_BYTES
) -> str:
    """Write the samples of a stream once, into tar archives in `folder`, and return the folder for `tar_samples`.

    A sample: tensors, arrays, numbers, texts and bytes, in dicts, lists, tuples and named tuples (read back as tuples).
    A folder that is there is taken for written and left as it is: remove it to write it anew. While one process writes,
    others wait; one that is killed leaves no folder. So a stream must give all samples in any process, not the part of
    a rank. `samples` may be a function that opens the stream, called only where it is to be written.

    ConfigError for a sample with something else in it, DataError for a stream without samples.
    """
    path = Path(folder).expanduser()

    def make(building: Path) -> None:
        building.mkdir()
        stream = samples() if callable(samples) and not hasattr(samples, "__iter__") else samples
        _write(iter(stream), building, shard_bytes)  # type: ignore[arg-type]

    made_once(path, lambda there: there.is_dir() or None, make)
    return str(path)


def _write(samples: Any, folder: Path, shard_bytes: int) -> None:
    number, archive, full = 0, None, 0
    try:
        for sample in samples:
            content = packed(sample, number)
            if archive is None or full + len(content) > shard_bytes:
                if archive is not None:
                    archive.close()
                shard = len(list(folder.iterdir()))
                archive, full = tarfile.open(folder / f"shard-{shard:06d}.tar", "w"), 0  # noqa: SIM115 - closed below
            member = tarfile.TarInfo(f"{number:09d}.{KIND}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            number, full = number + 1, full + len(content)
    finally:
        if archive is not None:
            archive.close()
    if not number:
        raise DataError(f"the stream has no samples; nothing is written to {folder.with_suffix('')}")


def packed(sample: Any, number: int) -> bytes:
    """A sample as the bytes of an .npz file."""
    arrays: list[np.ndarray] = []
    form = _form(sample, "sample", number, arrays)
    out = io.BytesIO()
    named = {str(place): array for place, array in enumerate(arrays)}
    np.savez(out, allow_pickle=False, form=np.frombuffer(json.dumps(form).encode(), np.uint8), **named)
    return out.getvalue()


def read(content: bytes) -> Any:
    """The inverse of `packed`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as stored:
        return _value(json.loads(stored["form"].tobytes()), stored)


def _form(value: Any, name: str, number: int, arrays: list[np.ndarray]) -> Any:
    """[kind, what it holds] as JSON."""
    if value is None or isinstance(value, bool | int | float | str):
        return ["json", value]
    if isinstance(value, Tensor | np.ndarray | np.generic | bytes):
        kind = "tensor" if isinstance(value, Tensor) else "bytes" if isinstance(value, bytes) else "array"
        try:
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            array = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else array
        except (TypeError, RuntimeError) as error:
            raise ConfigError(f"sample {number}: {name} cannot be written: {error}") from error
        if array.dtype.kind in "biufcSU":
            arrays.append(array)
            return [kind, str(len(arrays) - 1)]
    if isinstance(value, Mapping) and all(isinstance(key, str | int) for key in value):
        return ["dict", [[key, _form(inside, f"{name}[{key!r}]", number, arrays)] for key, inside in value.items()]]
    if isinstance(value, list | tuple) and (type(value) in (list, tuple) or is_named_tuple(value)):
        inside = [_form(item, f"{name}[{place}]", number, arrays) for place, item in enumerate(value)]
        return ["list" if isinstance(value, list) else "tuple", inside]
    raise ConfigError(
        f"sample {number}: {name} is a {type(value).__module__}.{type(value).__qualname__}, which is not written; make "
        "tensors, arrays, numbers, texts or bytes of it in the stream"
    )


def _value(form: Any, stored: Any) -> Any:
    kind, inside = form
    if kind == "json":
        return inside
    if kind == "dict":
        return {key: _value(value, stored) for key, value in inside}
    if kind in ("list", "tuple"):
        values = [_value(value, stored) for value in inside]
        return values if kind == "list" else tuple(values)
    array = stored[inside]
    return torch.from_numpy(array) if kind == "tensor" else array.tobytes() if kind == "bytes" else array
