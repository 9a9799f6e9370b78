"""Samples that are a few files each, in tar archives or in folders, as rows by number."""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dtf.api.recipe import Dataset
from dtf.core.errors import ConfigError, DataError
from dtf.data import spooled
from dtf.data.decode_any import decode_any
from dtf.data.file_patterns import files_of
from dtf.data.image_formats import SUFFIXES
from dtf.data.made_once import cache_folder
from dtf.data.map_style import map_style
from dtf.data.tar_index import NO_SAMPLE, TarIndex, key_of

Sample = dict[str, Any]
"""The files of a sample by extension, as bytes, and its name under `__key__`."""

Decode = Callable[[Sample], Any]

_PICKLES = ("pkl", "pickle", "pyd", "pt", "pth")


def tar_samples(
    shards: str | Path | Sequence[str | Path],
    decode: Decode | None = None,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    target: str | int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    shapes_vary: bool | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """The samples of tar archives as WebDataset writes them: files side by side whose names agree up to the first dot
    are one sample. Rows are numbered in the order of the archives, and within one in its own.

    `shards`: `shard-{000..010}.tar`, `shards/*.tar`, a folder, or a list of such. `decode`: makes an item of a sample,
    a dict of bytes by extension with the name under `__key__`; by default `decoded`. The other arguments: see
    `map_style`. `cache`: the folder of the index, by default `~/.cache/dtf/rows`.

    Each archive is read once for the index, by all ranks together. The digest of each file of a sample is checked when
    it is read. DataError names the archive that is missing, compressed, damaged, or has changed.
    """
    index = TarIndex(files_of(shards, ".tar"), cache_folder(cache))
    rows = Samples(index, decode)
    return map_style(rows, collate_fn=collate_fn, target=target, threads=threads, seed=seed, shapes_vary=shapes_vary)


def folder_samples(
    root: str | Path,
    decode: Decode | None = None,
    *,
    classes: Sequence[str] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    target: str | int | None = None,
    threads: int | None = None,
    seed: int | None = None,
    shapes_vary: bool | None = None,
) -> Dataset:
    """As `tar_samples`, of the files below a folder, sorted by name. Where each lies in a folder of its class,
    `root/<class>/<name>.jpg`, a sample also has `cls`: the number of the class, in the order of their names.

    `classes`: the names of all classes in the order of their numbers, for a folder that may lack some, such as one to
    evaluate on. The folder is listed at each start. DataError names a file that cannot be read, or whose size has
    changed since, and a class that is none of `classes`.
    """
    rows = Samples(FolderIndex(Path(root).expanduser(), classes), decode)
    return map_style(rows, collate_fn=collate_fn, target=target, threads=threads, seed=seed, shapes_vary=shapes_vary)


class Samples:
    """A map-style data set: sample by number, decoded."""

    decoding_threads = 2

    def __init__(self, index: TarIndex | FolderIndex, decode: Decode | None) -> None:
        self.index, self._decode = index, decoded if decode is None else decode
        self.left_out = index.left_out

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Any:
        return self._decode(self.index.read(number))

    def fingerprint(self) -> str:
        return self.index.fingerprint()


class FolderIndex:
    """The samples of a folder. Holds names and sizes. `left_out`: files that are in no sample -> why."""

    def __init__(self, root: Path, classes: Sequence[str] | None = None) -> None:
        self._root = root
        if not root.is_dir():
            raise DataError(f"{root} is no folder")
        self.left_out: dict[str, str] = {}
        grouped: dict[str, dict[str, tuple[str, int]]] = {}
        for name, size in sorted(self._files()):
            key, extension = key_of(name)
            if not key:
                self.left_out[name] = NO_SAMPLE
            elif extension in grouped.setdefault(key, {}):
                raise DataError(f"{root}: sample {key} has two files .{extension} in upper and lower case")
            else:
                grouped[key][extension] = name, size
        self._keys, self._members = list(grouped), list(grouped.values())
        self._numbers = {name: number for number, name in enumerate(self._folders_of_classes())}
        if classes is not None:
            unknown = next((name for name in self._numbers if name not in classes), None)
            if unknown is not None or not self._numbers:
                what = f"the class {unknown} is none of classes=" if self._numbers else "no folders of classes, as in "
                raise DataError(f"{root}: {what}{[*classes][:20]}; name the folders of classes as these")
            self._numbers = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self._keys)

    def fingerprint(self) -> str:
        text = json.dumps([self._keys, self._members, self._numbers]).encode("utf-8", "surrogateescape")
        return f"{len(self)} {zlib.crc32(text):08x}"

    def read(self, number: int) -> Sample:
        """The files of a sample by extension, and its key as `__key__`."""
        key = self._keys[number]
        found: Sample = {"__key__": key}
        for extension, (name, size) in self._members[number].items():
            try:
                found[extension] = (self._root / name).read_bytes()
            except OSError as error:
                raise DataError(f"{self._root / name} cannot be read: {error.strerror or error}") from error
            if len(found[extension]) != size:
                raise DataError(f"{self._root / name} has changed since the start; restore it and start again")
        if self._numbers:
            found["cls"] = str(self._numbers[key.split("/")[0]]).encode()
        return found

    def _folders_of_classes(self) -> list[str]:
        """The folders that samples lie in, each in one; none where a sample says its class itself."""
        parents = [key.split("/") for key in self._keys]
        if any(len(parts) != 2 for parts in parents) or any("cls" in members for members in self._members):
            return []
        return sorted({parts[0] for parts in parents})

    def _files(self) -> list[tuple[str, int]]:
        def refuse(error: OSError) -> None:
            raise DataError(f"{error.filename} cannot be listed: {error.strerror}") from error

        found = []
        for folder, folders, files in os.walk(self._root, onerror=refuse, followlinks=True):
            folders[:] = [name for name in folders if not name.startswith(".")]  # as hidden files, whose key is empty
            for path in (Path(folder) / name for name in folders):
                if path.is_symlink() and Path(folder).resolve().is_relative_to(path.resolve()):
                    raise DataError(f"{path} is a link in a circle, to {path.resolve()}; remove it")
            inside = Path(folder).relative_to(self._root)
            for file in files:
                path = Path(folder) / file
                if not path.is_file():
                    raise DataError(f"{path} is no file, or a link that leads nowhere; remove it")
                found.append(((inside / file).as_posix(), path.stat().st_size))
        return found


def decoded(sample: Sample) -> Any:
    """A sample with what its extensions say: images as uint8 (3, H, W), upright, in RGB; `cls` a number; `txt` a text;
    `json`; `npy` a tensor. What `write_samples` wrote is as it was. The key is left out, other files stay bytes.

    DataError for a file that is none of its kind. ConfigError for pickles: reading one may run code.
    """
    if spooled.KIND in sample:
        return spooled.read(sample[spooled.KIND])
    found = {}
    for extension, content in sample.items():
        if extension == "__key__":
            continue
        kind = extension.rpartition(".")[2]
        if kind in _PICKLES:
            raise ConfigError(
                f"sample {sample['__key__']} has a pickle, .{extension}: reading one may run any code. Write tensors "
                "as .npy, all else as .json; or give decode=, which makes an item of a sample's bytes"
            )
        try:
            found[extension] = _decode(kind, content)
        except Exception as error:  # whatever a parser of a broken file stumbles on
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise DataError(
                f"{sample['__key__']}.{extension} ({len(content)} bytes) cannot be decoded: {reason}"
            ) from error
    return found


def _decode(kind: str, content: bytes) -> Any:
    if f".{kind}" in SUFFIXES:
        return image(content)
    if kind in ("cls", "index", "id"):
        return int(content)
    if kind in ("txt", "text"):
        return content.decode()
    if kind == "json":
        return json.loads(content)
    if kind == "npy":
        return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False))
    return content


def image(content: bytes) -> torch.Tensor:
    """A picture as uint8 (3, H, W), see `decode_any`. ValueError, with the reason, for what cannot be decoded whole."""
    return torch.from_numpy(np.ascontiguousarray(decode_any(content).transpose(2, 0, 1)))
