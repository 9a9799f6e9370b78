"""Decoded pixels on disk: images are decoded once, and all ranks of all later runs map the same file.

Says nothing about augmentation.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import mmap
import os
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import PIL

from dtf.core.errors import DataError
from dtf.recipes.resnet.tree import read_tree, stamp

FORMAT = 2  # of the files below; part of the key
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decoded:
    """Decoded splits of a tree: `<folder>/<split>.u8` holds (rows, pixels, pixels, 3) bytes, rows in the order of the
    tree.
    """

    folder: Path
    classes: tuple[str, ...]
    counts: dict[str, tuple[int, ...]]  # split -> rows of each class
    digests: dict[str, int]  # split -> crc32 of the file
    left_out: dict[str, str]  # file of the tree that is no row -> why

    def rows(self, split: str) -> int:
        return sum(self.counts.get(split, ()))

    def file(self, split: str) -> Path:
        return self.folder / f"{split}.u8"


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/dtf/images`, by default `~/.cache/dtf/images`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtf" / "images"


def location(root: Path, pixels: int, cache: Path, split: str) -> Path:
    """The folder in the cache for one tree at one size. It is another one when a file of the tree changes.

    `train` and `val` are decoded together, where they are there, and `test` only when it is asked for.
    """
    key = json.dumps([FORMAT, PIL.__version__, os.path.realpath(root), stamp(root), pixels, split == "test"])
    return cache / hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def together(split: str) -> tuple[str, ...]:
    """The splits that are decoded with this one."""
    return ("test",) if split == "test" else ("train", "val")


def glance(folder: Path, pixels: int) -> Decoded | None:
    """The images that an earlier run decoded, or None. Checks their sizes only."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        decoded_tree = Decoded(
            folder,
            tuple(map(str, meta["classes"])),
            {str(split): tuple(map(int, counts)) for split, counts in meta["counts"].items()},
            {str(split): int(digest) for split, digest in meta["digests"].items()},
            dict(meta["left_out"]),
        )
        whole = all(
            decoded_tree.file(split).stat().st_size == decoded_tree.rows(split) * pixels * pixels * 3
            for split in decoded_tree.digests
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return decoded_tree if whole else None


def decoded(root: Path, pixels: int, cache: Path, split: str) -> Decoded:
    """The decoded images of `root`. They come from the cache when it holds `split` intact; otherwise this process
    decodes them while others wait.

    DataError for a tree that cannot be read and for a cache that cannot be written.
    """
    folder = location(root, pixels, cache, split)
    decoded_tree = glance(folder, pixels)
    if decoded_tree and _intact(decoded_tree, split):
        return decoded_tree
    with written(cache, folder.name):
        decoded_tree = glance(folder, pixels)  # another rank may have been first
        if decoded_tree and _intact(decoded_tree, split):
            return decoded_tree
        if folder.exists():
            _log.warning("decoded images in %s are damaged; decoding %s again", folder, root)
        return _decode(root, pixels, folder, split)


@contextlib.contextmanager
def written(cache: Path, name: str) -> Iterator[None]:
    """One process at a time makes `name` in the cache; the kernel releases the lock when the process dies.

    DataError for whatever cannot be written.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with open(cache / f"{name}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise DataError(
            f"recipe.data.cache={cache} cannot be written: {error.strerror or error}; set recipe.data.cache=DIR to a "
            "folder with free space"
        ) from error


def _intact(decoded_tree: Decoded, split: str) -> bool:
    try:
        return _crc32(decoded_tree.file(split)) == decoded_tree.digests[split]
    except (OSError, ValueError):
        return False


def _crc32(path: Path) -> int:
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return zlib.crc32(content)


def _decode(root: Path, pixels: int, folder: Path, split: str) -> Decoded:
    """Decode into a folder beside `folder`, then put it there in one rename. Called under the lock.

    DataError when there is nothing to decode in `split`.
    """
    from dtf.recipes.resnet.decode import decode_tree

    tree = read_tree(root)
    tree.check([split])
    splits = [split for split in together(split) if split not in tree.faults]
    building = folder.with_name(f"{folder.name}.tmp")
    for stale in (building, folder):
        if stale.exists():
            shutil.rmtree(stale)
    building.mkdir()
    decode_tree(root, tree, pixels, {split: building / f"{split}.u8" for split in splits})
    counts = {split: tree.counts[split] for split in splits}
    digests = {split: _crc32(building / f"{split}.u8") for split in splits}
    made = Decoded(folder, tree.classes, counts, digests, tree.left_out)
    meta = {"classes": made.classes, "counts": counts, "digests": digests, "left_out": made.left_out}
    (building / "meta.json").write_text(json.dumps(meta))
    building.rename(folder)
    return made
