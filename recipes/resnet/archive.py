"""The files of a tar archive: which are taken for images, where they lie, and where links lead.

Links are followed inside the archive; nothing outside of it is ever read. Decodes nothing, needs no torch.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dtf.core.errors import DataError
from dtf.core.files import refuse_unread
from dtf.data.image_formats import HEAD, SUFFIXES, is_image
from dtf.recipes.resnet.listing import (
    CIRCLE,
    DEEPEST,
    EMPTY,
    HIDDEN,
    MOST,
    NO_FILE,
    NO_IMAGE,
    TOO_DEEP,
    Listing,
)

READ_ERRORS = (OSError, EOFError, tarfile.TarError, zlib.error)
_SPARSE = "a sparse file; pack the archive without --sparse"
_MOST_LINKS = 40
"""Links on the way to a file, as on Linux."""


@dataclass
class Archive:
    """What an archive holds. `sources`: name of an image -> name of the member with its bytes, where that is another
    one; `places`: member -> offset and size in the uncompressed archive.
    """

    listing: Listing = field(default_factory=Listing)
    sources: dict[str, str] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)


def members(root: Path) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    """The members of an archive in the order they lie there, of any kind.

    A broken archive is a DataError: tarfile alone takes a bad header for the end.
    """
    try:
        with tarfile.open(root, "r:*") as archive:
            for member in archive:
                yield _clean(member.name), member, archive
            stream = archive.fileobj
            assert stream is not None
            stream.seek(archive.offset)
            refuse_unread(stream.read, archive.offset)
    except READ_ERRORS as error:
        raise DataError(
            f"recipe.data.root={root} is no readable tar archive: {error}; give a folder or an intact .tar, .tar.gz "
            "file"
        ) from error


def list_archive(root: Path) -> Archive:
    """Read through an archive. Files whose names say nothing are looked into. DataError when it is damaged."""
    found, links, reasons = Archive(), {}, {}
    for name, member, archive in members(root):
        file = name.rpartition("/")[2]
        if member.isdir():
            continue
        if member.issym() or member.islnk():
            links[name] = (member.issym(), member.linkname)
            continue
        links.pop(name, None)  # of two members with one name the last one counts
        fault = NO_FILE if not member.isfile() else _SPARSE if member.issparse() else ""
        if not fault:
            found.places[name] = member.offset_data, member.size
        elif os.path.splitext(file)[1].lower() not in SUFFIXES:
            reasons[name] = fault
        found.listing.add(name, file, fault, lambda m=member, a=archive, n=name: _judge(m, a, n, reasons))
    if links:
        _Links(found, links, reasons).add()
    return found


def read_members(root: Path, names: Iterable[str], sources: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the named files, in the order of the archive. DataError names what cannot be read."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(sources.get(name, name), []).append(name)
    for member_name, member, archive in members(root):
        if member_name in wanted and member.isfile():
            content = archive.extractfile(member)
            assert content is not None  # a regular file
            try:
                data = content.read()
            except READ_ERRORS as error:
                raise DataError(f"recipe.data.root={root}: {member_name} cannot be read: {error}") from error
            for name in wanted[member_name]:
                yield name, data


def _clean(name: str) -> str:
    """A path without `.` and empty parts."""
    if name.startswith(("/", "./")) or "//" in name or "/./" in name:
        return "/".join(part for part in name.split("/") if part not in ("", "."))
    return name


def _judge(member: tarfile.TarInfo, archive: tarfile.TarFile, name: str, reasons: dict[str, str]) -> str:
    """Why a regular file is no image, by its content; kept in `reasons`."""
    content = archive.extractfile(member)
    assert content is not None
    head = content.read(HEAD)
    reasons[name] = reason = (
        EMPTY if not head else "" if is_image(head, lambda: head + content.read(MOST)) else NO_IMAGE
    )
    return reason


class _Links:
    """Links of an archive: name -> (whether it is symbolic, target)."""

    def __init__(self, found: Archive, links: dict[str, tuple[bool, str]], reasons: dict[str, str]) -> None:
        self._found, self._links, self._reasons = found, links, reasons
        self._below: dict[str, dict[str, None]] = {}  # folder -> names in it
        if any(symbolic for symbolic, _ in links.values()):
            for name in (*found.places, *reasons, *links):
                while name and (folder := name.rpartition("/"))[2]:
                    inside = self._below.setdefault(folder[0], {})
                    if folder[2] in inside:
                        break
                    inside[folder[2]], name = None, folder[0]

    def add(self) -> None:
        """Sort all of them in, and what lies in folders that they lead to."""
        for name in self._links:
            self._enter(name, self._ancestors(name))

    def _ancestors(self, name: str) -> tuple[str, ...]:
        parts = name.split("/")[:-1]
        return tuple("/".join(parts[:count]) for count in range(len(parts) + 1))

    def _enter(self, name: str, above: tuple[str, ...]) -> None:
        """Sort in what is seen at `name`. `above`: the folders on the way to it, as they are called in the archive."""
        file, listing = name.rpartition("/")[2], self._found.listing
        try:
            real = self._real(name)
        except _NoWay as error:
            listing.add(name, file, str(error), str)
            return
        if real not in self._below:
            self._add_file(name, file, real)
        elif file.startswith(".") or real in above or name.count("/") + 2 > DEEPEST:
            listing.left_out[f"{name}/"] = HIDDEN if file.startswith(".") else CIRCLE if real in above else TOO_DEEP
        else:
            for child in self._below[real]:
                self._enter(f"{name}/{child}", (*above, real))

    def _add_file(self, name: str, file: str, real: str) -> None:
        if real in self._found.places:
            image = os.path.splitext(real)[1].lower() in SUFFIXES
            self._found.listing.add(name, file, "", lambda: "" if image else self._reasons.get(real, HIDDEN))
            self._found.sources[name] = real
        else:
            self._found.listing.add(name, file, self._reasons.get(real, NO_FILE), str)

    def _real(self, name: str) -> str:
        """The member or folder that a path leads to. _NoWay when there is none."""
        ahead, done, count, target = deque(name.split("/")), [], 0, name
        while ahead:
            part = ahead.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                if not done:
                    raise _NoWay(f"a link that leads out of the archive, to {target}")
                done.pop()
                continue
            done.append(part)
            here = "/".join(done)
            if here in self._links:
                symbolic, target = self._links[here]
                if (count := count + 1) > _MOST_LINKS:
                    raise _NoWay(CIRCLE)
                if symbolic and target.startswith("/"):
                    raise _NoWay(f"a link that leads out of the archive, to {target}")
                done = done[:-1] if symbolic else []
                ahead.extendleft(reversed(target.split("/")))
        real = "/".join(done)
        if real not in self._found.places and real not in self._below and real not in self._reasons:
            raise _NoWay(f"a link that leads nowhere in the archive, to {target}")
        return real


class _NoWay(Exception):
    """A path leads to nothing in the archive."""
