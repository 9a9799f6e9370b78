"""The files of a tree of images by row, read where they lie: in folders, or in an archive at known places.

Decodes nothing.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import PIL

from dtf.core.errors import DataError
from dtf.recipes.resnet.archive import READ_ERRORS, list_archive
from dtf.recipes.resnet.cache import written
from dtf.recipes.resnet.listing import Listing
from dtf.recipes.resnet.tree import SPLITS, Tree, is_archive, read_tree, stamp, tree_of

FORMAT = 2  # of the index below; part of the key
_MOST_AT_ONCE = 1 << 18
"""Bytes of a file that are read before a look at its size: most are smaller, and a thread gives the interpreter's lock
away in each call of the system.
"""
_MOST = 1 << 30
"""Bytes of a file that is read: no picture is larger."""
_NOWHERE = (0, 0)
"""The place of a file that cannot be read."""
_END = b"\xff\xd9"
"""Ends a whole JPEG file."""


class Store:
    """The files of one split: `store[row]` is a file's content.

    Threads may read at once; forked processes must not share one.
    """

    def __init__(
        self,
        root: Path,
        names: tuple[str, ...],
        places: np.ndarray | None,
        digest: str,
        unreadable: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`unreadable`: of these names, which cannot be read, as is known from listing them, and why."""
        self._folder, self.names, self._places, self.digest = str(root), names, places, digest
        self._unreadable = unreadable
        self._file = os.open(root, os.O_RDONLY | os.O_CLOEXEC) if places is not None else -1

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, row: int) -> bytes:
        """OSError or ValueError when the file cannot be read whole."""
        if self._unreadable and (why := self._unreadable.get(self.names[row])):
            raise ValueError(why)
        if self._places is not None:
            return _read(self._file, *map(int, self._places[row]))
        file = os.open(os.path.join(self._folder, self.names[row]), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            content = os.pread(file, _MOST_AT_ONCE, 0)
            if content.endswith(_END) and len(content) < _MOST_AT_ONCE:
                return content
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            _refuse_enormous(status.st_size)
            if len(content) == status.st_size:
                return content
            return content + _read(file, len(content), status.st_size - len(content))
        except OSError as error:
            if error.errno in (errno.ESPIPE, errno.EISDIR):
                raise OSError(errno.EINVAL, "no regular file") from error
            raise
        finally:
            os.close(file)

    def close(self) -> None:
        """Give the archive back."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def reason(error: Exception) -> str:
    """Why a file cannot be read, without a path and a number."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _refuse_enormous(size: int) -> None:
    if size > _MOST:
        raise OSError(errno.EFBIG, f"a file of {size} bytes, more than {_MOST}")


def _read(file: int, at: int, size: int) -> bytes:
    _refuse_enormous(size)
    content = os.pread(file, size, at)
    if len(content) != size:
        raise OSError(errno.EIO, f"{len(content)} of {size} bytes")
    return content


@dataclass(frozen=True)
class Index:
    """A checked tree and where its files lie. `root`: the folder, or the plain archive that `places` refers to."""

    root: Path
    tree: Tree
    places: dict[str, np.ndarray] | None  # split -> (rows, 2) int64: offset and size; None for folders

    def open(self, split: str, rows: np.ndarray) -> Store:
        """These files of a split. `digest` tells trees with other names or, in an archive, other sizes apart."""
        names = tuple(self.tree.files[split][row] for row in rows)
        digest = zlib.crc32("\n".join(names).encode("utf-8", "surrogateescape"))
        unreadable = self.tree.unreadable
        if self.places is None:
            return Store(self.root, names, None, f"{digest:08x}", unreadable)
        places = self.places[split][rows]
        return Store(self.root, names, places, f"{zlib.crc32(places[:, 1].tobytes(), digest):08x}", unreadable)


def read_index(root: Path, cache: Path) -> Index:
    """List and check the files of `root`; what is slow about an archive is done once and kept in `cache`. DataError as
    `read_tree`.

    A compressed archive is unpacked there to a plain one: reading it in any order would mean unpacking it from the
    start for each file.
    """
    if not is_archive(root):
        judged = _key([os.path.realpath(root)])
        return Index(root, read_tree(root, cache / f"{judged}.files.json"), None)
    key = _key([os.path.realpath(root), stamp(root)])
    index_file, plain = cache / f"{key}.json", root if _is_plain(root) else cache / f"{key}.tar"
    if (index := _load(index_file, plain, root)) is not None:
        return index
    with written(cache, key):
        if (index := _load(index_file, plain, root)) is not None:  # another rank was first
            return index
        if plain != root:
            _unpack(root, plain)
        archive = list_archive(plain)
        listing = archive.listing
        tree_of(listing, root)
        places = [archive.places.get(archive.sources.get(name, name), _NOWHERE) for name in listing.names]
        building = index_file.with_suffix(".tmp")
        listed = {
            "names": listing.names,
            "places": places,
            "unreadable": listing.unreadable,
            "left_out": listing.left_out,
        }
        building.write_text(json.dumps(listed))
        building.rename(index_file)
    index = _load(index_file, plain, root)
    assert index is not None
    return index


def _key(parts: list[str]) -> str:
    """The name of a file in the cache: another Pillow may take other files for images."""
    text = json.dumps([FORMAT, PIL.__version__, *parts])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _load(index_file: Path, plain: Path, root: Path) -> Index | None:
    try:
        listed = json.loads(index_file.read_text())
        size = plain.stat().st_size
        tree = tree_of(Listing(listed["names"], dict(listed["unreadable"]), dict(listed["left_out"])), root)
        place_of = dict(zip(listed["names"], listed["places"], strict=True))
        places = {
            split: np.array([place_of[name] for name in tree.files[split]], np.int64).reshape(-1, 2) for split in SPLITS
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError, DataError):
        return None
    whole = all((place.sum(axis=1) <= size).all() and (place >= 0).all() for place in places.values())
    return Index(plain, tree, places) if whole else None


def _is_plain(root: Path) -> bool:
    try:
        with tarfile.open(root, "r:"):
            return True
    except READ_ERRORS:
        return False


def _unpack(root: Path, plain: Path) -> None:
    """The archive without its compression, whatever that is; complete or not at all."""
    building = plain.with_suffix(".part")
    try:
        with tarfile.open(root, "r:*") as archive, open(building, "wb") as out:
            stream = archive.fileobj
            assert stream is not None
            stream.seek(0)
            while block := stream.read(1 << 20):
                out.write(block)
    except (EOFError, tarfile.TarError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise DataError(
            f"recipe.data.root={root} is no readable tar archive: {error}; give a folder or an intact .tar, .tar.gz "
            "file"
        ) from error
    building.rename(plain)
