"""Saves that write only the rows of tables that changed. Torch-free.

Layer 0 is all rows, layer n those that changed since layer n - 1 was saved. The rows of a layer lie in files of their
own. A later checkpoint takes them over as they are and adds a layer, so that each checkpoint is whole by itself.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import Base, Manifest
from dtf.core.errors import DataError, SaveError

MOST_LAYERS = 100
_ROWS = re.compile(r"rows_\d+(?:\.delta_(\d+))?\.safetensors")


def file_name(rank: int, layer: int | None) -> str:
    """The file of a rank's boxes: those of a layer, or all others."""
    return f"rank_{rank}.safetensors" if layer is None else f"rows_{rank}{f'.delta_{layer}' * (layer > 0)}.safetensors"


def layers_of(manifest: Manifest) -> dict[str, int]:
    """Files of rows -> their layer."""
    return {name: int(match[1] or 0) for name in manifest.files if (match := _ROWS.fullmatch(name))}


def next_layer(manifest: Manifest) -> int:
    """The layer that a checkpoint may add to those of the one before it. 0: it has to be whole, as there are no rows,
    or the layers have more bytes than all rows had, or are too many: else loads would take ever longer.
    """
    layers, whole, added = layers_of(manifest), 0, 0
    for name, layer in layers.items():
        size = manifest.files[name].size
        whole, added = (whole, added + size) if layer else (whole + size, added)
    newest = max(layers.values(), default=0)
    return newest + 1 if 0 in layers.values() and added <= whole and newest < MOST_LAYERS else 0


def take_over(folder: Path, manifest: Manifest, draft: Path) -> None:
    """Link the files of rows of a checkpoint into a draft. OSError where one is gone; SaveError for a damaged one."""
    for name in layers_of(manifest):
        try:
            storage.link(folder / name, draft / name, manifest.files[name])
        except DataError as error:
            raise SaveError(str(error)) from error


def joined(base: Manifest, new: Manifest) -> Manifest:
    """The checkpoint that has the files of rows of `base` beside those that are `new`."""
    taken = {name: base.files[name] for name in layers_of(base)}
    tensors = {name: tensor for name, tensor in base.tensors.items() if all(box.file in taken for box in tensor.boxes)}
    return replace(new, base=Base(base.step, tuple(taken)), files=taken | new.files, tensors=tensors | new.tensors)
