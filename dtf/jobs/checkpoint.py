"""`job=checkpoint`: look into a checkpoint or compare its digests, without loading it and without torch."""

from __future__ import annotations

import json
import math
import os
import re
import time
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job, Output
from dtf.api.registry import option, register
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import content_faults, read_count, read_scalars
from dtf.checkpoint.manifest import ITEM_BYTES, Manifest, volume
from dtf.checkpoint.resolve_path import resolve_checkpoints
from dtf.core.errors import ConfigError, DataError, Exit

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_COUNT = re.compile("table/[^/]+/count")


class Action(Enum):
    inspect = "inspect"
    verify = "verify"


@register("job", "checkpoint")
class Checkpoint(Job):
    """Show what a checkpoint holds, or check that every byte of it is what was written."""

    action: Action = option(
        default=Action.inspect,
        doc="`inspect`: step, writer, tensors, scalars; `verify`: compare all digests, exit 65 when one differs",
    )
    path: str = option(default="", doc="a checkpoint, a run folder, which means its newest one, or RUN/best")
    format: Output = option(default=Output.text, doc="`text` to read, `json` for programs")

    def run(self, composed: Composed) -> int:
        if not self.path:
            raise ConfigError("job.path is empty; give a checkpoint like RUN/checkpoints/step_000120, or a run folder")
        folder = resolve_checkpoints(self.path, "job.path")[0]
        return self._inspect(folder) if self.action is Action.inspect else self._verify(folder)

    def _inspect(self, folder: Path) -> int:
        try:
            manifest = storage.read_manifest(folder)
            scalars, tables = read_scalars(folder, manifest), _tables(folder, manifest)
        except (DataError, OSError) as error:
            raise DataError(
                f"checkpoint {folder} cannot be read: {error}; `job.action=verify` looks at every byte"
            ) from None
        summary = _summary(folder, manifest)
        if self.format is Output.json:
            content = {"tables": tables, "tensors": _tensors(manifest), "scalars": scalars}
            print(json.dumps(_plain({"path": str(folder), **summary, **content}), indent=2))
            return Exit.OK
        print(f"{folder}\n" + "\n".join(f"  {key:<10} {_readable(key, value)}" for key, value in summary.items()))
        if tables:
            counts = [[table["name"], f"{table['rows']:,}", f"{table['bytes']:,}"] for table in tables]
            print("\n" + _table(["sparse table", "rows", "bytes"], counts))
        rows = [
            [t["name"], t["dtype"], "x".join(map(str, t["shape"])) or "scalar", str(len(t["boxes"])), f"{t['bytes']:,}"]
            for t in _tensors(manifest)
        ]
        print("\n" + _table(["tensor", "dtype", "shape", "boxes", "bytes"], rows))
        print("\nscalars\n" + "\n".join(f"  {key:<28} {_short(value)}" for key, value in _flat(scalars)))
        return Exit.OK

    def _verify(self, folder: Path) -> int:
        started = time.perf_counter()
        faults = _faults(folder)
        seconds = time.perf_counter() - started
        if self.format is Output.json:
            print(json.dumps({"path": str(folder), "ok": not faults, "faults": faults}, indent=2))
        elif faults:
            print("\n".join(f"damaged {folder}: {fault}" for fault in faults))
        else:
            manifest = storage.read_manifest(folder)
            print(
                f"ok {folder}: {len(manifest.files) + 1} files, {_bytes(manifest):,} bytes, every byte as written "
                f"({seconds:.1f} s)"
            )
        return Exit.DATA if faults else Exit.OK


def _faults(folder: Path) -> list[str]:
    """Everything wrong with a checkpoint: files, bytes, and tensors that are not where the manifest says."""
    try:
        manifest = storage.read_manifest(folder)
    except (DataError, OSError) as error:
        return [str(error)]
    faults = list(storage.faults(folder, manifest))
    if faults:
        return faults
    return list(content_faults(folder, manifest))


def _bytes(manifest: Manifest) -> int:
    return sum(file.size for file in manifest.files.values())


def _base_bytes(manifest: Manifest) -> int:
    """Bytes of the files that an earlier checkpoint has too."""
    return sum(manifest.files[name].size for name in manifest.base.files) if manifest.base else 0


def _shared(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """The files that are links to those of checkpoints of earlier steps beside this one: on disk once."""
    mine, files, steps = _places(folder), set[str](), list[int]()
    for other in storage.checkpoints(folder.parent):
        step = storage.step_of(other.name)
        if step is not None and step < manifest.step and (both := mine.keys() & _places(other).keys()):
            files |= {mine[place] for place in both}
            steps.append(step)
    files &= manifest.files.keys()
    return {"steps": steps, "files": len(files), "bytes": sum(manifest.files[name].size for name in files)}


def _places(folder: Path) -> dict[int, str]:
    """The files of a checkpoint by their inode. None of one that its run is about to remove."""
    with suppress(OSError), os.scandir(folder) as entries:
        return {entry.inode(): entry.name for entry in entries}
    return {}


def _tables(folder: Path, manifest: Manifest) -> list[dict[str, Any]]:
    """The sparse tables: how many rows each has, and the bytes of all that is kept of it."""
    found = []
    for name in sorted(name for name in manifest.tensors if _COUNT.fullmatch(name)):
        table = name.removesuffix("count")
        kept = [tensor for key, tensor in manifest.tensors.items() if key.startswith(table)]
        size = sum(volume(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in kept)
        found.append({"name": table.split("/")[1], "rows": read_count(folder, manifest, name), "bytes": size})
    return found


def _summary(folder: Path, manifest: Manifest) -> dict[str, Any]:
    goal = manifest.objective
    return {
        "step": manifest.step,
        "run": manifest.run_id,
        "strategy": manifest.strategy,
        "ranks": manifest.ranks,
        "objective": {"metric": goal.metric, "mode": goal.mode, "value": goal.value} if goal else None,
        "files": len(manifest.files) + 1,
        "bytes": _bytes(manifest),
        "base": manifest.base
        and {"step": manifest.base.step, "files": len(manifest.base.files), "bytes": _base_bytes(manifest)},
        "shared": _shared(folder, manifest),
        "elements": sum(volume(tensor.shape) for tensor in manifest.tensors.values()),
    }


def _tensors(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "bytes": volume(tensor.shape) * ITEM_BYTES[tensor.dtype],
            "boxes": [{"file": box.file, "offset": list(box.offset), "shape": list(box.shape)} for box in tensor.boxes],
        }
        for name, tensor in sorted(manifest.tensors.items())
    ]


def _plain(value: Any) -> Any:
    """JSON that any reader takes: floats that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _readable(key: str, value: Any) -> str:
    if key == "objective":
        return f"{value['metric']} = {value['value']:.6g} ({value['mode']})" if value else "not evaluated at this step"
    if key == "base":
        if not value:
            return "none"
        return f"step {value['step']}, which has {value['files']} of the files too: {value['bytes']:,} bytes"
    if key == "shared":
        if not value["files"]:
            return "nothing with checkpoints of earlier steps in this folder"
        steps = ", ".join(map(storage.step_name, value["steps"]))
        return f"{value['files']} of the files, also in {steps}: {value['bytes']:,} bytes"
    return f"{value:,}" if key in ("bytes", "elements") else str(value)


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested dicts as dotted keys."""
    if isinstance(value, dict) and value:
        return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else key)]
    return [(prefix, value)]


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join(
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    )
