"""Where a mirror keeps checkpoints: another folder, or a bucket of an object store. Torch-free.

In any place a checkpoint is complete when its manifest is there. It comes last and goes first.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from dtf.checkpoint import storage
from dtf.checkpoint.blocks import Blocks
from dtf.checkpoint.durable_renames import sync_folder
from dtf.checkpoint.manifest import BLOCK_BYTES, MAX_BYTES, Manifest, StoredFile, decode, encode
from dtf.checkpoint.place_names import allows_http, is_url
from dtf.checkpoint.store_errors import cause, failing
from dtf.core.errors import ConfigError, DataError
from dtf.core.files import replace_text

OWNER = "mirror.json"
"""Says which run writes here."""
_WRITER = "mirror"
"""Ends the names of what is half written or half removed in a folder."""
_UNDER_WAY = "uploading.json"
"""The manifest of the checkpoint that is being sent: what is there of it need not be sent again."""
_PIECE_BYTES = 8 * BLOCK_BYTES
_MOST_PARTS = 9_000
"""Of one object: a store takes 10,000."""
_AT_ONCE = 4
"""Parts on their way at the same time."""

Pieces = Iterator[memoryview]


class Place(ABC):
    """Checkpoints of one run in one place. One thread at a time. Methods raise OSError when the place fails.

    `name`: as the config has it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.moved = 0
        """Bytes that were sent or fetched."""

    @abstractmethod
    def steps(self) -> list[int]:
        """The steps of complete checkpoints, newest first."""

    @abstractmethod
    def read_manifest(self, step: int) -> Manifest:
        """DataError when it is damaged."""

    @abstractmethod
    def pieces(self, step: int, name: str, stored: StoredFile) -> Pieces:
        """A file of a checkpoint, piece by piece."""

    @abstractmethod
    def send(self, folder: Path, manifest: Manifest, allowed: Callable[[], None]) -> None:
        """Copy a checkpoint here, in place of one of the same step. DataError when a byte is not as it was written;
        then nothing of it counts.

        `allowed`: raises where the checkpoint must not be finished after all.
        """

    @abstractmethod
    def remove(self, step: int) -> None:
        """Remove a checkpoint, or what there is of it. A crash leaves it whole, or as rubbish for `clean`."""

    @abstractmethod
    def clean(self) -> None:
        """Remove what crashed runs left, but not what can be of use."""

    @abstractmethod
    def probe(self, name: str) -> None:
        """Write something of this name and remove it."""

    @abstractmethod
    def read_owner(self) -> dict[str, Any]:
        """What `write_owner` wrote last. Empty: nobody did."""

    @abstractmethod
    def write_owner(self, owner: dict[str, Any]) -> None: ...

    def _blocks(self, folder: Path, manifest: Manifest, name: str) -> Pieces:
        """A file of a checkpoint of this machine, which is about to be sent. DataError when it is damaged."""
        return self.counted(_read(folder, name, manifest.files[name]))

    def counted(self, pieces: Pieces) -> Pieces:
        """The same pieces, which count as moved."""
        for piece in pieces:
            self.moved += len(piece)
            yield piece


def fetch(place: Place, step: int, parent: Path, run_id: str) -> Path:
    """Copy a checkpoint into the folder `parent`, with every digest compared. Returns its folder.

    A folder of that step that lies there is moved aside. DataError when the checkpoint is damaged in its place.
    """
    manifest = place.read_manifest(step)
    if manifest.step != step:
        raise DataError(f"{storage.step_name(step)} holds step {manifest.step}")
    draft = storage.begin(parent, step, run_id, lambda text: None, lambda folder: "it is damaged")
    assert draft is not None
    try:
        for name, stored in manifest.files.items():
            if storage.write(draft / name, place.counted(place.pieces(step, name, stored))) != stored:
                raise DataError(f"{storage.step_name(step)}/{name} is damaged")
        return storage.commit(draft, manifest)
    except Exception:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def open_place(name: str) -> Place:
    """The place of this name. ConfigError for one that no store can have."""
    return Bucket(name) if is_url(name) else Folder(name)


def _read(folder: Path, name: str, stored: StoredFile) -> Pieces:
    """A file of a checkpoint of this machine. DataError when it is damaged."""
    blocks = Blocks(folder, name, stored)
    for start in range(0, stored.size, _PIECE_BYTES):
        yield blocks.read(start, min(start + _PIECE_BYTES, stored.size))


class Folder(Place):
    """A folder of another disk."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._path = Path(name).expanduser().absolute()

    def steps(self) -> list[int]:
        folders = storage.checkpoints(self._path)
        return [storage.step_of(one.name) or 0 for one in folders if (one / storage.MANIFEST).is_file()]

    def read_manifest(self, step: int) -> Manifest:
        return storage.read_manifest(self._path / storage.step_name(step))

    def pieces(self, step: int, name: str, stored: StoredFile) -> Pieces:
        return _read(self._path / storage.step_name(step), name, stored)

    def send(self, folder: Path, manifest: Manifest, allowed: Callable[[], None]) -> None:
        if os.path.lexists(self._path / storage.step_name(manifest.step)):
            self.remove(manifest.step)
        draft = storage.begin(self._path, manifest.step, _WRITER, lambda text: None)
        assert draft is not None
        try:
            there = self._base_files(manifest)
            for name, stored in manifest.files.items():
                if name in there:
                    storage.link(there[name], draft / name, stored)
                else:
                    storage.write(draft / name, self._blocks(folder, manifest, name))
            allowed()
            storage.commit(draft, manifest)
        except Exception:
            shutil.rmtree(draft, ignore_errors=True)
            raise

    def _base_files(self, manifest: Manifest) -> dict[str, Path]:
        """Files of a checkpoint that is about to come which an earlier one has here already: name -> where."""
        if manifest.base is None:
            return {}
        base = self._path / storage.step_name(manifest.base.step)
        try:
            files = storage.read_manifest(base).files
        except (DataError, OSError):  # it was not sent, or is removed
            return {}
        same = {name: files[name] for name in manifest.base.files if files.get(name) == manifest.files[name]}
        return {
            name: base / name
            for name, stored in same.items()
            if not Blocks(base, name, stored).damaged(range(len(stored.crc32)))
        }

    def remove(self, step: int) -> None:
        storage.discard(self._path / storage.step_name(step), _WRITER)

    def clean(self) -> None:
        for path in list(self._path.iterdir()):
            if storage.is_leftover(path.name) and path.name.endswith(f"-{_WRITER}"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def probe(self, name: str) -> None:
        self._make()
        storage.write(self._path / name, [])
        (self._path / name).unlink()

    def read_owner(self) -> dict[str, Any]:
        path = self._path / OWNER
        return _owner(path.read_bytes()) if path.is_file() else {}

    def write_owner(self, owner: dict[str, Any]) -> None:
        self._make()
        replace_text(self._path / OWNER, json.dumps(owner))

    def _make(self) -> None:
        if self._path.exists() and not self._path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, parents=True)
            sync_folder(self._path.parent)


class Bucket(Place):
    """Objects below a path of a bucket, each of which appears whole or not at all."""

    def __init__(self, name: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        super().__init__(name)

        def store(timeout_s: float, retry_s: float) -> Any:
            pause: Any = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}
            retry: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=retry_s), "backoff": pause}
            limits: Any = {"timeout": timedelta(seconds=timeout_s), "connect_timeout": timedelta(seconds=5)}
            return from_url(name, retry_config=retry, client_options=limits | {"allow_http": allows_http()})

        try:
            self._store, self._bulk = store(10, 20), store(120, 120)  # small requests, and pieces of files
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{name} cannot be used: {cause(error)}") from None

    # ------------------------------------------------------------ objects

    def _get(self, path: str, most: int = MAX_BYTES) -> bytes | None:
        """A small object. None: it is not there."""
        import obstore

        with failing():
            try:
                found = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
            if found.meta["size"] > most:
                raise OSError(errno.EFBIG, f"{path} there has {found.meta['size']} bytes; {most} is the limit")
            return bytes(found.bytes())

    def _put(self, path: str, data: Any, chunk_bytes: int = _PIECE_BYTES) -> None:
        import obstore

        with failing():
            obstore.put(self._bulk, path, data, chunk_size=chunk_bytes, max_concurrency=_AT_ONCE)

    def _sizes(self, step: int) -> dict[str, int]:
        """Name and bytes of each object below a checkpoint."""
        import obstore

        prefix = f"{storage.step_name(step)}/"
        with failing():
            found = [one for chunk in obstore.list(self._store, prefix) for one in chunk]
        return {one["path"].rpartition("/")[2]: one["size"] for one in found}

    def _delete(self, paths: list[str]) -> None:
        import obstore

        with failing():
            obstore.delete(self._store, paths)

    def _begun(self) -> list[int]:
        """The steps of which there is any object, newest first."""
        import obstore

        with failing():
            names = obstore.list_with_delimiter(self._store)["common_prefixes"]
        steps = [storage.step_of(name.rstrip("/").rpartition("/")[2]) for name in names]
        return sorted((step for step in steps if step is not None), reverse=True)

    # ------------------------------------------------------------ checkpoints

    def steps(self) -> list[int]:
        return [step for step in self._begun() if storage.MANIFEST in self._sizes(step)]

    def read_manifest(self, step: int) -> Manifest:
        data = self._get(f"{storage.step_name(step)}/{storage.MANIFEST}")
        if data is None:
            raise DataError(f"{storage.step_name(step)} was removed")
        manifest, sizes = decode(data), self._sizes(step)
        for name, stored in manifest.files.items():
            if sizes.get(name) != stored.size:
                raise DataError(f"{name} has {sizes.get(name, 'no')} bytes instead of {stored.size}")
        return manifest

    def pieces(self, step: int, name: str, stored: StoredFile) -> Pieces:
        import obstore

        path = f"{storage.step_name(step)}/{name}"
        for start in range(0, stored.size, _PIECE_BYTES):  # a request each, which is tried again where it fails
            with failing():
                try:
                    end = min(start + _PIECE_BYTES, stored.size)
                    piece = memoryview(obstore.get_range(self._bulk, path, start=start, end=end))
                except FileNotFoundError:
                    raise DataError(f"{path} is missing") from None
            yield piece

    def send(self, folder: Path, manifest: Manifest, allowed: Callable[[], None]) -> None:
        data, prefix = encode(manifest), storage.step_name(manifest.step)
        there = self._sizes(manifest.step)
        if storage.MANIFEST in there or (there and self._get(_UNDER_WAY) != data):
            self.remove(manifest.step)
            there = {}
        self._put(_UNDER_WAY, data)
        for name, stored in manifest.files.items():
            if there.get(name) == stored.size:
                continue
            part = max(_PIECE_BYTES, math.ceil(stored.size / _MOST_PARTS))
            pieces = self._blocks(folder, manifest, name)
            small = b"".join(pieces) if stored.size <= _PIECE_BYTES else None
            self._put(f"{prefix}/{name}", pieces if small is None else small, part)
        allowed()
        self._put(f"{prefix}/{storage.MANIFEST}", data)

    def remove(self, step: int) -> None:
        prefix, names = storage.step_name(step), sorted(self._sizes(step))
        if storage.MANIFEST in names:
            self._delete([f"{prefix}/{storage.MANIFEST}"])
        if rest := [f"{prefix}/{name}" for name in names if name != storage.MANIFEST]:
            self._delete(rest)

    def clean(self) -> None:
        useful, under_way = None, self._get(_UNDER_WAY)
        with suppress(DataError):
            useful = decode(under_way).step if under_way else None
        for step in self._begun():
            if step != useful and storage.MANIFEST not in self._sizes(step):
                self.remove(step)

    def probe(self, name: str) -> None:
        self._put(name, b"-")
        self._delete([name])

    def read_owner(self) -> dict[str, Any]:
        return _owner(self._get(OWNER, 1 << 16) or b"{}")

    def write_owner(self, owner: dict[str, Any]) -> None:
        self._put(OWNER, json.dumps(owner).encode())


def _owner(data: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}
