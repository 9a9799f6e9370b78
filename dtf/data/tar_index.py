"""An index of tar files: which samples they hold, and where the files of each lie. Reads and checks them; decodes
nothing.
"""

from __future__ import annotations

import json
import logging
import os
import posixpath
import tarfile
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from dtf.core.errors import DataError
from dtf.core.files import refuse_unread
from dtf.data.made_once import made_once, name_of, state_of

FORMAT = 2  # of the index files; part of their names
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zX": "xz", b"(\xb5/\xfd": "zstd"}
NO_SAMPLE = "in no sample"
"""Why a file is left out whose name has no extension, or nothing before it."""

_OPEN = 64
"""Archives that are open at once."""

_log = logging.getLogger(__name__)


class ShardIndex(NamedTuple):
    """The samples of one archive. Member m of sample s: `bounds[s] <= m < bounds[s + 1]`."""

    keys: np.ndarray  # (bytes,) uint8: the keys one after the other
    key_ends: np.ndarray  # (samples,) int64
    bounds: np.ndarray  # (samples + 1,) int64
    kinds: np.ndarray  # (members,) int32: the number of the extension
    offsets: np.ndarray  # (members,) int64
    sizes: np.ndarray  # (members,) int64
    digests: np.ndarray  # (members,) uint32: crc32 of the bytes
    extensions: tuple[str, ...]
    left_out: tuple[str, ...]  # files that are in no sample

    def key(self, sample: int) -> str:
        first = int(self.key_ends[sample - 1]) if sample else 0
        return self.keys[first : self.key_ends[sample]].tobytes().decode("utf-8", "surrogateescape")

    def digest(self) -> int:
        """Of all keys, extensions and contents."""
        digest = zlib.crc32(json.dumps(self.extensions).encode())
        for array in (self.keys, self.key_ends, self.bounds, self.kinds, self.sizes, self.digests):
            digest = zlib.crc32(array.tobytes(), digest)
        return digest


class TarIndex:
    """The samples of several archives, in their order. Threads may read at once.

    An archive is read whole once, for the index, which is kept in `cache`. It is indexed again when it has changed.
    `left_out`: files that are in no sample -> why. DataError names the archive that cannot be read, is damaged, or
    changes while it is used.
    """

    def __init__(self, shards: Sequence[Path], cache: Path) -> None:
        self._shards = list(shards)
        with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1)), "index") as pool:
            # ranks that start together begin at different archives, so that they share the work
            first = os.getpid() % max(1, len(self._shards))
            order = [*range(first, len(self._shards)), *range(first)]
            made = dict(zip(order, pool.map(lambda n: shard_index(self._shards[n], cache), order), strict=True))
        self._indexes = [made[number] for number in range(len(self._shards))]
        self._starts = np.cumsum([0, *(len(index.key_ends) for index in self._indexes)])
        self.left_out = {
            f"{path}/{name}": NO_SAMPLE
            for path, index in zip(self._shards, self._indexes, strict=True)
            for name in index.left_out
        }
        self._files: OrderedDict[int, IO[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def fingerprint(self) -> str:
        return f"{len(self)} {zlib.crc32(str([index.digest() for index in self._indexes]).encode()):08x}"

    def read(self, number: int) -> dict[str, bytes | str]:
        """The files of a sample by extension, and its key as `__key__`."""
        shard = int(np.searchsorted(self._starts, number, "right")) - 1
        index, sample = self._indexes[shard], number - int(self._starts[shard])
        found: dict[str, bytes | str] = {"__key__": index.key(sample)}
        file = self._file(shard)
        for member in range(int(index.bounds[sample]), int(index.bounds[sample + 1])):
            extension = index.extensions[index.kinds[member]]
            size = int(index.sizes[member])
            content = os.pread(file.fileno(), size, int(index.offsets[member]))
            if len(content) != size or zlib.crc32(content) != index.digests[member]:
                raise DataError(
                    f"{self._shards[shard]}: the bytes of {found['__key__']}.{extension} are others than when the "
                    "archive was indexed; it was changed or damaged meanwhile; restore it and start again"
                )
            found[extension] = content
        return found

    def _file(self, shard: int) -> IO[bytes]:
        """The archive; whoever reads from it keeps it open."""
        with self._lock:
            if shard not in self._files:
                try:
                    self._files[shard] = open(self._shards[shard], "rb", buffering=0)  # noqa: SIM115 - kept open
                except OSError as error:
                    raise DataError(f"{self._shards[shard]} cannot be read: {error.strerror or error}") from error
                if len(self._files) > _OPEN:
                    self._files.popitem(last=False)
            self._files.move_to_end(shard)
            return self._files[shard]


def shard_index(path: Path, cache: Path) -> ShardIndex:
    """The index of an archive: from the cache where the archive is as it was, else made anew."""
    state = state_of(path)

    def fits(file: Path) -> ShardIndex | None:
        try:
            with np.load(file, allow_pickle=False) as stored:
                about = json.loads(stored["about"].tobytes())
                if about["state"] != state:
                    return None
                arrays = [stored[name] for name in ShardIndex._fields[:-2]]
                arrays = dict(zip(ShardIndex._fields, arrays, strict=False))
                return ShardIndex(**arrays, extensions=tuple(about["extensions"]), left_out=tuple(about["left_out"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
            return None

    def make(file: Path) -> None:
        if name.exists():
            _log.warning("%s has changed since it was indexed, or its index is damaged: it is indexed again", path)
        index = _scan(path)
        about = {"state": state, "extensions": index.extensions, "left_out": index.left_out}
        arrays = dict(zip(ShardIndex._fields, index[:-2], strict=False))
        with open(file, "wb") as out:
            np.savez(out, allow_pickle=False, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)

    name = cache / f"{name_of('tar', FORMAT, os.path.realpath(path))}.npz"
    return made_once(name, fits, make)


def _scan(path: Path) -> ShardIndex:
    """Read an archive to its end. DataError for what is no whole, uncompressed one."""
    try:
        with open(path, "rb") as file:
            start = file.read(6)
            packed = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), "")
            if packed:
                raise DataError(
                    f"{path} is compressed ({packed}), so that no sample can be read without those before it; write it "
                    "as a plain tar: images are compressed already"
                )
            file.seek(0)
            return _samples(path, _members(path, file))
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"{path} is no whole tar archive: {error}; write it again") from error


class _Member(NamedTuple):
    name: str
    offset: int
    size: int
    digest: int


def _members(path: Path, file: IO[bytes]) -> list[_Member]:
    """Regular files, and links to files of the archive, in the order they lie there."""
    places: dict[str, tuple[int, int, int]] = {}
    found: list[tuple[str, str]] = []  # a name, and whose content it has
    with tarfile.open(fileobj=file, mode="r:") as archive:
        for member in archive:
            name = posixpath.normpath(member.name)
            if member.issparse():
                raise DataError(f"{path}: {name} is a sparse file; write the archive without --sparse")
            if member.isfile():
                file.seek(member.offset_data)
                content = file.read(member.size)
                if len(content) != member.size:
                    raise tarfile.ReadError(f"it breaks off in {name}, at byte {member.offset_data + len(content)}")
                places[name] = member.offset_data, member.size, zlib.crc32(content)
                found.append((name, name))
            elif member.islnk():
                found.append((name, posixpath.normpath(member.linkname)))
            elif member.issym():
                found.append((name, posixpath.normpath(posixpath.join(posixpath.dirname(name), member.linkname))))
        file.seek(archive.offset)
        refuse_unread(file.read, archive.offset)
    targets = dict(found)
    for name, target in found:
        for _ in range(8):  # links to links
            if target in places or target not in targets:
                break
            target = targets[target]
        if target not in places:
            raise DataError(f"{path}: {name} is a link to {target}, which is no file of the archive; add the file")
        targets[name] = target
    return [_Member(name, *places[targets[name]]) for name, _ in found]


def _samples(path: Path, members: Sequence[_Member]) -> ShardIndex:
    """Files whose names agree up to the first dot of the last part are one sample, in the order of WebDataset."""
    keys, bounds, extensions = list[str](), [0], dict[str, int]()
    kept, kinds, inside, seen, left_out = list[_Member](), list[int](), set[str](), set[str](), list[str]()
    for member in members:
        key, extension = key_of(member.name)
        if not key:
            left_out.append(member.name)
            continue
        if not keys or key != keys[-1]:
            if key in seen:
                raise DataError(
                    f"{path}: the files of sample {key} do not lie side by side; pack the archive with tar --sort=name"
                )
            seen.add(key)
            keys.append(key)
            bounds.append(len(kept))
            inside = set()
        if extension in inside:
            raise DataError(f"{path}: sample {key} has two files .{extension}; a name may occur once")
        inside.add(extension)
        kept.append(member)
        kinds.append(extensions.setdefault(extension, len(extensions)))
        bounds[-1] = len(kept)
    encoded = [key.encode("utf-8", "surrogateescape") for key in keys]
    numbers = [(member.offset, member.size) for member in kept]
    offsets, sizes = np.array(numbers, np.int64).reshape(-1, 2).T
    return ShardIndex(
        np.frombuffer(b"".join(encoded), np.uint8),
        np.cumsum([len(key) for key in encoded], dtype=np.int64),
        np.array(bounds, np.int64),
        np.array(kinds, np.int32),
        offsets,
        sizes,
        np.array([member.digest for member in kept], np.uint32),
        tuple(extensions),
        tuple(left_out),
    )


def key_of(name: str) -> tuple[str, str]:
    """`train/0001.seg.png` -> (`train/0001`, `seg.png`); empty texts for what is no part of a sample."""
    folder, file = posixpath.split(name)
    stem, dot, extension = file.partition(".")
    if not stem or not dot or not extension or (stem.startswith("__") and stem.endswith("__")):
        return "", ""
    return posixpath.join(folder, stem), extension.lower()
