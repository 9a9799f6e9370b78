"""The files below a folder: which are taken for images, which of these cannot be read, and what is left out. Decodes
nothing, needs no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dtf.core.errors import DataError
from dtf.core.files import replace_text
from dtf.data.image_formats import HEAD, SUFFIXES, is_image

DEEPEST = 5
"""Names that a path below a tree may have: one folder more than an image has above it."""

NO_IMAGE, EMPTY, HIDDEN, FOLDER, CIRCLE, TOO_DEEP, NO_FILE = (
    "no image",
    "empty",
    "hidden",
    "a folder without files",
    "a link in a circle",
    "too deep",
    "no regular file",
)
"""Why a file is left out."""


@dataclass
class Listing:
    """Files by name, relative to the root, with `/` between folders."""

    names: list[str] = field(default_factory=list)  # taken for images, the unreadable ones too
    unreadable: dict[str, str] = field(default_factory=dict)  # of them: which cannot be read, and why
    left_out: dict[str, str] = field(default_factory=dict)  # all others, and why

    def add(self, name: str, file: str, fault: str, reason: Callable[[], str]) -> None:
        """Sort a file in. `file`: the last part of `name`; `fault`: why it cannot be read, if so; `reason()`: why it is
        no image by its content, "" if it is one.
        """
        if name.startswith(".") or "/." in name:
            self.left_out[name] = HIDDEN
        elif os.path.splitext(file)[1].lower() in SUFFIXES:
            self.names.append(name)
            if fault:
                self.unreadable[name] = fault
        elif why := fault or reason():
            self.left_out[name] = why
        else:
            self.names.append(name)


MOST = 1 << 28
"""Bytes of a file without a signature that are decoded, to see whether it is an image."""


class Judgements:
    """What was found in files whose names say nothing, kept in a file until they change. `path=None`: kept nowhere."""

    def __init__(self, root: Path, path: Path | None) -> None:
        self._root, self._path = str(root), path
        self._known: dict[str, list] = {}
        self._seen: dict[str, list] = {}
        if path is not None:
            try:
                self._known = dict(json.loads(path.read_text(errors="surrogateescape")))
            except (OSError, ValueError, TypeError):
                self._known = {}

    def reason(self, name: str) -> str:
        """Why a regular file is no image, by its first bytes; "" if it is one."""
        path = os.path.join(self._root, name)
        try:
            status = os.stat(path)
            key = [status.st_size, status.st_mtime_ns]
            known = self._known.get(name)
            reason = known[2] if isinstance(known, list) and known[:2] == key else _look(path)
        except OSError as error:
            return _cannot(error)
        self._seen[name] = [*key, reason]
        return reason

    def keep(self) -> None:
        """Write them down, where there is something new. Without them the files are looked at again."""
        if self._path is None or self._seen == self._known:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(self._seen))
        except OSError:
            pass


def _look(path: str) -> str:
    with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        head = file.read(HEAD)
        if not head:
            return EMPTY
        return "" if is_image(head, lambda: head + file.read(MOST)) else NO_IMAGE


def list_folder(root: Path, judgements: Judgements, deepest: int = DEEPEST, strict: bool = True) -> Listing:
    """The files below `root`. Links to files and folders are followed, wherever they lead.

    `deepest`: names in a path; what lies deeper is left out. DataError for `root` where it cannot be listed, `strict`:
    for any folder; others are left out.
    """
    listing = Listing()
    _descend(root, "", listing, judgements, (deepest, strict), ())
    judgements.keep()
    return listing


def _descend(
    root: Path,
    inside: str,
    listing: Listing,
    judgements: Judgements,
    limits: tuple[int, bool],
    above: tuple[tuple[int, int], ...],
) -> bool:
    """List what lies in the folder `inside` (its path with a `/` behind it, or ""); whether there is any file.

    `limits`: as `list_folder`. `above`: device and inode of each folder on the way to it.
    """
    deepest, strict = limits
    try:
        status = os.stat(root / inside)
        here = status.st_dev, status.st_ino
        if here in above:
            listing.left_out[inside] = CIRCLE
            return True
        with os.scandir(root / inside) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if strict or not inside:
            raise DataError(f"{root / inside} cannot be listed: {error.strerror}") from error
        listing.left_out[inside] = f"it cannot be listed: {error.strerror}"
        return True
    any_file = False
    for entry in found:
        file = entry.name
        name = inside + file
        if _is(entry.is_dir):
            if file.startswith("."):
                listing.left_out[f"{name}/"] = HIDDEN
            elif name.count("/") + 2 > deepest:
                listing.left_out[f"{name}/"] = TOO_DEEP
            elif _descend(root, f"{name}/", listing, judgements, limits, (*above, here)):
                any_file = True
            elif os.path.splitext(file)[1].lower() in SUFFIXES:
                listing.left_out[f"{name}/"] = FOLDER
        else:
            any_file = True
            fault = "" if _is(entry.is_file) else _fault(entry)
            listing.add(name, file, fault, lambda name=name: judgements.reason(name))
    return any_file


def _is(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # a link in a circle
        return False


def _fault(entry: os.DirEntry) -> str:
    """Why something that is no folder is no regular file either."""
    try:
        os.stat(entry.path)
    except OSError as error:
        return f"a link that leads nowhere, to {os.readlink(entry.path)}" if entry.is_symlink() else _cannot(error)
    return NO_FILE


def _cannot(error: OSError) -> str:
    return f"it cannot be read: {error.strerror}"
