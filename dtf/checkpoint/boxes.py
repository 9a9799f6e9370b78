"""The tensors of a checkpoint: each rank writes the boxes it owns, any rank reads the boxes it wants.

A box is an axis-aligned part of a global tensor. Torch is imported only by what touches tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.checkpoint import storage
from dtf.checkpoint.blocks import Blocks
from dtf.checkpoint.layers import file_name
from dtf.checkpoint.manifest import (
    ITEM_BYTES,
    MAX_BYTES,
    Manifest,
    StoredBox,
    StoredFile,
    exact_json,
    intersect,
    parse_json,
    volume,
)
from dtf.checkpoint.safetensors_format import Slot, header, slots
from dtf.core.errors import DataError
from dtf.core.types import Box

if TYPE_CHECKING:
    from torch import Tensor


STATE = "state.json"
"""The file of a checkpoint that holds what is no tensor."""
_MAX_STATE_DEPTH = 64
TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Number formats: safetensors' name -> torch's name."""
_STORED_DTYPES = {f"torch.{name}": stored for stored, name in TORCH_DTYPES.items()}


def write_boxes(path: Path, boxes: list[Box]) -> dict[str, Any]:
    """Write boxes to a new file of a checkpoint. Returns its name, size, digests and boxes as JSON. Not collective.
    OSError when it cannot be written.
    """
    counts: dict[str, int] = {}
    entries: list[tuple[str, str, Box]] = []
    for box in sorted(boxes, key=lambda box: -box.tensor.element_size()):  # wide formats first keep all of them aligned
        number = counts[box.name] = counts.get(box.name, -1) + 1
        dtype = _STORED_DTYPES.get(str(box.tensor.dtype))
        if dtype is None:
            raise TypeError(
                f"{box.name} is {box.tensor.dtype}, which checkpoints cannot hold; use "
                f"{', '.join(TORCH_DTYPES.values())}"
            )
        entries.append((f"{box.name}#{number}" if number else box.name, dtype, box))

    def pieces() -> Iterator[bytes | memoryview]:
        yield header((key, dtype, tuple(box.tensor.shape)) for key, dtype, box in entries)
        for _, _, box in entries:
            yield _bytes(box.tensor)

    stored = storage.write(path, pieces())
    listed = [[box.name, dtype, box.shape, key, box.offset, tuple(box.tensor.shape)] for key, dtype, box in entries]
    return {"file": path.name, "size": stored.size, "crc32": stored.crc32, "boxes": listed}


def write_rank(folder: Path, rank: int, boxes: list[Box]) -> list[dict[str, Any]]:
    """Write all boxes of a rank to files of a checkpoint, those of a layer to one of their own. As `write_boxes`."""
    layers = sorted({box.layer for box in boxes}, key=lambda layer: -1 if layer is None else layer)
    return [
        write_boxes(folder / file_name(rank, layer), [box for box in boxes if box.layer == layer]) for layer in layers
    ]


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _is_flat(tensor: Tensor, dtype: str) -> bool:
    """Whether its bytes lie in the memory of this host as in a file of this number format."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and _STORED_DTYPES.get(str(tensor.dtype)) == dtype


def write_scalars(folder: Path, scalars: dict[str, Any]) -> StoredFile:
    """Inverse of `read_scalars`. ValueError for what that would refuse."""
    data = exact_json(scalars)
    if len(data) > MAX_BYTES or not _is_shallow(scalars):
        raise ValueError(f"the scalars of a checkpoint have {len(data)} bytes or too many levels")
    return storage.write(folder / STATE, [data])


def read_scalars(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What a checkpoint holds beside tensors. Torch-free. DataError when it is damaged."""
    file = manifest.files.get(STATE)
    if file is None:
        raise DataError(f"{STATE} is missing")
    if file.size > MAX_BYTES:
        raise DataError(f"{STATE} has {file.size} bytes; {MAX_BYTES} is the limit")
    try:
        scalars = parse_json(bytes(Blocks(folder, STATE, file).read(0, file.size)))
    except ValueError as error:
        raise DataError(f"{STATE} is no JSON: {ascii(str(error))[:120]}") from None
    if not isinstance(scalars, dict):
        raise DataError(f"{STATE} is no JSON object")
    if not _is_shallow(scalars):
        raise DataError(f"{STATE} has more than {_MAX_STATE_DEPTH} levels")
    return scalars


def read_count(folder: Path, manifest: Manifest, name: str) -> int:
    """A tensor of a checkpoint that is one 64-bit integer. Torch-free. DataError where it is none, or is damaged."""
    stored, box = manifest.tensors[name], manifest.tensors[name].boxes[0]
    file = manifest.files[box.file]
    blocks = Blocks(folder, box.file, file)
    slot = slots(blocks.read, file.size).get(box.key)
    if slot is None or not (stored.dtype, stored.shape) == (slot.dtype, slot.shape) == ("I64", ()):
        raise DataError(f"{box.file} holds no whole number under {box.key!a}")
    return int.from_bytes(blocks.read(slot.start, slot.stop), "little", signed=True)


def _is_shallow(value: Any) -> bool:
    """Whether a value has few enough levels to be walked by functions that call themselves."""
    level = [value]
    for _ in range(_MAX_STATE_DEPTH):
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [item for items in inner for item in items]
        if not level:
            return True
    return False


def loading_fault(
    folder: Path, index: int = 0, count: int = 1, judge: Callable[[dict[str, Any]], object] = dict
) -> str | None:
    """Why a checkpoint must not be loaded, as far as rank `index` of `count` has to look: digests first, then content
    that is as it was written but makes no sense. None when all is well.

    `judge` gets the scalars and raises DataError for those of no use.
    """
    try:
        manifest = storage.read_manifest(folder)
        fault = next(storage.faults(folder, manifest, index, count), None)
        return fault or next(content_faults(folder, manifest, index, count, judge), None)
    except DataError as error:
        return str(error)
    except NotADirectoryError:
        return "is no folder"


def content_faults(
    folder: Path,
    manifest: Manifest,
    index: int = 0,
    count: int = 1,
    judge: Callable[[dict[str, Any]], object] = dict,
) -> Iterator[str]:
    """What is wrong in files whose digests are right: scalars that are none, tensors that are not where the manifest
    says. Rank `index` of `count` looks at its share of the files.
    """
    mine = sorted({STATE, *manifest.files})[index::count]
    stored: dict[str, dict[str, Slot]] = {}
    for name in mine:
        try:
            if name == STATE:
                judge(read_scalars(folder, manifest))
            else:
                file = manifest.files[name]
                stored[name] = slots(Blocks(folder, name, file).read, file.size)
        except (DataError, OSError) as error:
            yield f"{name}: {error}" if name not in str(error) else str(error)
    for name, tensor in manifest.tensors.items():
        for box in tensor.boxes:
            if box.file in stored:
                slot = stored[box.file].get(box.key)
                if slot is None or (slot.dtype, slot.shape) != (tensor.dtype, box.shape):
                    yield f"{box.file}: {box.key!a} is not the box of {name} that the manifest lists"


class StoredCheckpoint:
    """A checkpoint on disk, as programs read it (`dtf.Source`). Bytes are compared with their digests as they are read.

    Not collective. DataError from any method when digests differ. `scalars`: as `Checkpointer.save` got them. Reads
    whole rows of the stored boxes that it needs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.place = folder, f"checkpoint {folder}"
        try:
            self.manifest = storage.read_manifest(folder)
            self.scalars = read_scalars(folder, self.manifest)
        except (DataError, OSError) as error:
            raise DataError(f"checkpoint {folder} cannot be loaded: {error}") from None
        self._blocks: dict[str, Blocks] = {}
        self._slots: dict[str, dict[str, Slot]] = {}
        self._read = set[str]()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self.manifest.tensors)

    def unread(self) -> set[str]:
        """The names of the tensors of which no part was read yet."""
        return self.names() - self._read

    def read(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
        whole: tuple[int, ...] | None = None,
    ) -> Tensor:
        """The part of a global tensor of shape `whole` at `offset` with shape `shape`, on CPU.

        Without `offset`: the whole tensor, which must have `shape` if that is given. DataError for a tensor that is
        absent or has another shape.
        """
        import torch

        offset, shape = self._part(name, offset, shape, whole)
        out = torch.empty(shape, dtype=getattr(torch, TORCH_DTYPES[self.manifest.tensors[name].dtype]))
        self._fill(name, out, offset)
        return out

    def read_into(
        self, name: str, out: Tensor, offset: tuple[int, ...] | None = None, whole: tuple[int, ...] | None = None
    ) -> None:
        """Fill `out`, of any format and device, with the part at `offset` of a global tensor of shape `whole`; see
        `read`. Memory of this host that has the stored format is read into directly: what it holds after a DataError
        is of no use.
        """
        offset, _ = self._part(name, offset, tuple(out.shape), whole)
        self._fill(name, out, offset)

    def _part(
        self,
        name: str,
        offset: tuple[int, ...] | None,
        shape: tuple[int, ...] | None,
        whole: tuple[int, ...] | None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of what is to be read. DataError where there is no such part, or it is one of a tensor of
        another shape: a part of a larger tensor fits as well, and holds other numbers.
        """
        if (offset is None) is not (whole is None):
            raise ValueError(f"{name} is to be read in part: give `offset` and `whole`, the shape of all of it")
        stored = self.manifest.tensors.get(name)
        if stored is None:
            near = difflib.get_close_matches(name, self.manifest.tensors, n=1)
            raise DataError(
                f"checkpoint {self.folder} has no tensor {name}{f', but {near[0]}' if near else ''}; was it written "
                "by another model?"
            )
        self._read.add(name)
        if whole is None or offset is None:
            whole = stored.shape if shape is None else tuple(shape)
            offset = (0,) * len(whole)
        if tuple(whole) != stored.shape:
            raise DataError(
                f"checkpoint {self.folder}: {name} has shape {stored.shape}, and this run's has {tuple(whole)}; give "
                "the model and its tables the sizes that they had, or start without this checkpoint. A buffer has the "
                "shape that the constructor gives it"
            )
        if shape is None:
            shape = tuple(length - at for length, at in zip(whole, offset, strict=True))
        inside = len(offset) == len(shape) == len(whole) and all(
            min(at, n) >= 0 and at + n <= length for at, n, length in zip(offset, shape, whole, strict=True)
        )
        if not inside:
            raise DataError(
                f"checkpoint {self.folder}: {name} has shape {stored.shape}, of which {tuple(shape)} at {offset} is no "
                "part"
            )
        return offset, tuple(shape)

    def _fill(self, name: str, out: Tensor, offset: tuple[int, ...]) -> None:
        stored, shape = self.manifest.tensors[name], tuple(out.shape)
        for box in stored.boxes:
            common = intersect(offset, shape, box.offset, box.shape)
            if common is None:
                continue
            at, size = common
            first, count = (at[0] - box.offset[0], size[0]) if at else (0, 1)
            part = out[tuple(slice(a - b, a - b + n) for a, b, n in zip(at, offset, size, strict=True))]
            if size[1:] == box.shape[1:] and _is_flat(part, stored.dtype):
                self._read_rows(box, stored.dtype, first, count, _bytes(part))
                continue
            rows = self._rows(box, stored.dtype, first, count)
            inner = tuple(slice(a - b, a - b + n) for a, b, n in zip(at[1:], box.offset[1:], size[1:], strict=True))
            part.copy_(rows[(slice(None), *inner)] if at else rows)

    def _rows(self, box: StoredBox, dtype: str, first: int, count: int) -> Tensor:
        """Rows [first, first + count) along the first axis of a stored box; a scalar for a scalar."""
        import torch

        shape = (count, *box.shape[1:]) if box.shape else ()
        rows = torch.empty(shape, dtype=getattr(torch, TORCH_DTYPES[dtype]))
        self._read_rows(box, dtype, first, count, _bytes(rows))
        return rows

    def _read_rows(self, box: StoredBox, dtype: str, first: int, count: int, data: memoryview) -> None:
        """Fill `data` with the bytes of `count` rows of a stored box."""
        slot = self._slot(box)
        if (slot.dtype, slot.shape) != (dtype, box.shape):
            raise DataError(
                f"checkpoint {self.folder}: {box.file} holds {slot.dtype} {slot.shape} under {box.key!a}, not what "
                "the manifest says"
            )
        assert len(data) == count * volume(box.shape[1:]) * ITEM_BYTES[dtype]
        try:
            self._blocks[box.file].read_into(slot.start + first * (len(data) // max(1, count)), data)
        except OSError as error:
            raise DataError(f"checkpoint {self.folder}: {error}") from None
        except DataError as error:
            raise DataError(f"checkpoint {self.folder} is damaged: {error}") from None

    def _slot(self, box: StoredBox) -> Slot:
        if box.file not in self._slots:
            file = self.manifest.files[box.file]
            reader = self._blocks[box.file] = Blocks(self.folder, box.file, file)
            try:
                self._slots[box.file] = slots(reader.read, file.size)
            except (DataError, OSError) as error:
                raise DataError(f"checkpoint {self.folder} is damaged: {box.file}: {error}") from None
        try:
            return self._slots[box.file][box.key]
        except KeyError:
            raise DataError(f"checkpoint {self.folder}: {box.file} has no tensor {box.key!a}") from None
