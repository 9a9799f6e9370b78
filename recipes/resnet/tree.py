"""Image files by split and class, in a folder or a tar archive of the same shape.

Lists and checks them; decodes nothing, needs no torch.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from dtf.core.errors import DataError

SPLITS = ("train", "val")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png"})
SHAPE = "{train,val}/<class>/<image>.jpg"
READ_ERRORS = (OSError, EOFError, tarfile.TarError, zlib.error)


@dataclass(frozen=True)
class Tree:
    """The images of both splits. Rows of a split are in the order of (class, file name), wherever the files lie."""

    classes: tuple[str, ...]  # of `train`, sorted: a class's place is its label
    files: dict[str, tuple[str, ...]]  # split -> member name of each row
    counts: dict[str, tuple[int, ...]]  # split -> rows of each class


def is_archive(root: Path) -> bool:
    """A file is taken for an archive, a folder for a tree."""
    return root.is_file()


def stamp(root: Path) -> str:
    """Text that changes with the files below `root`: their names, sizes and modification times.

    DataError when there is nothing.
    """
    if is_archive(root):
        status = root.stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256()
    for name in _folder_names(root):
        try:
            status = (root / name).stat()
        except OSError as error:
            raise DataError(
                f"recipe.data.root={root}: {name} cannot be read: {error.strerror}; replace or remove it"
            ) from error
        digest.update(f"{name}\0{status.st_size} {status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_tree(root: Path) -> Tree:
    """List and check the images below `root`. DataError when they do not form `{train,val}/<class>/<image>`."""
    return tree_of(_archive_names(root) if is_archive(root) else _folder_names(root), root)


def tree_of(names: Iterable[str], root: Path) -> Tree:
    """Sort member names into splits and classes; one folder above `train` and `val` is allowed.

    DataError for any other shape.
    """
    rows: dict[str, dict[str, list[tuple[str, str]]]] = {split: {} for split in SPLITS}
    tops: set[str] = set()
    seen = 0
    for name in names:
        path = PurePosixPath(name)
        if path.suffix.lower() not in SUFFIXES or path.name.startswith("."):
            continue
        seen += 1
        parts = path.parts
        depth = next((depth for depth in (0, 1) if len(parts) > depth + 1 and parts[depth] in SPLITS), None)
        if depth is None:
            continue  # another folder beside the splits
        if len(parts) != depth + 3:
            raise DataError(
                f"recipe.data.root={root}: {name} is not of the form {SHAPE}; put each image into the folder of its "
                "class"
            )
        tops.add(parts[0] if depth else "")
        split, kind, file = parts[depth:]
        rows[split].setdefault(kind, []).append((file, name))
    if len(tops) > 1:
        listed = ", ".join(sorted(repr(top) for top in tops))
        raise DataError(f"recipe.data.root={root} holds several trees, under {listed}; keep one {SHAPE}")
    for split in SPLITS:
        if not rows[split]:
            raise DataError(
                f"recipe.data.root={root} has no images in {split}/ ({seen} images in all); it must hold {SHAPE}"
            )
    unknown = sorted(set(rows["val"]) - set(rows["train"]))
    if unknown:
        raise DataError(
            f"recipe.data.root={root}: classes of val/ that train/ does not have: {', '.join(unknown[:5])}; both need "
            "the same class folders"
        )
    classes = tuple(sorted(rows["train"]))
    ordered = {split: [sorted(rows[split].get(kind, [])) for kind in classes] for split in SPLITS}
    files = {split: tuple(name for group in groups for _, name in group) for split, groups in ordered.items()}
    for split, listed in files.items():
        if len(set(listed)) != len(listed):
            raise DataError(f"recipe.data.root={root}: a file of {split}/ occurs twice in the archive; pack it again")
    return Tree(classes, files, {split: tuple(len(group) for group in groups) for split, groups in ordered.items()})


def read_files(root: Path, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the named files, in whatever order is quick. DataError names the file that cannot be read."""
    if is_archive(root):
        wanted = set(names)
        for name, member, archive in members(root):
            if name in wanted:
                content = archive.extractfile(member)
                assert content is not None  # a regular file
                try:
                    data = content.read()
                except READ_ERRORS as error:
                    raise DataError(f"recipe.data.root={root}: {name} cannot be read: {error}") from error
                yield name, data
    else:
        for name in names:
            try:
                data = (root / name).read_bytes()
            except OSError as error:
                raise DataError(f"recipe.data.root={root}: {name} cannot be read: {error}") from error
            yield name, data


def _archive_names(root: Path) -> Iterator[str]:
    return (name for name, _, _ in members(root))


def members(root: Path) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarFile]]:
    """Regular files of an archive in the order they lie there.

    A broken archive is a DataError: tarfile alone takes a bad header for the end.
    """
    try:
        with tarfile.open(root, "r:*") as archive:
            for member in archive:
                if member.isfile():
                    yield member.name.removeprefix("./"), member, archive
            stream = archive.fileobj
            assert stream is not None
            stream.seek(archive.offset)
            rest = stream.read(tarfile.RECORDSIZE)
            if len(rest) < tarfile.BLOCKSIZE or any(rest):
                raise tarfile.ReadError(f"it breaks off or is damaged at byte {archive.offset} (uncompressed)")
            while stream.read(1 << 20):  # a compressed archive is verified once it is read to its end
                pass
    except READ_ERRORS as error:
        raise DataError(
            f"recipe.data.root={root} is no readable tar archive: {error}; give a folder or an intact .tar, .tar.gz "
            "file"
        ) from error


def _folder_names(root: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise DataError(f"recipe.data.root={root}: {error.filename} cannot be listed: {error.strerror}") from error

    for folder, below, files in os.walk(root, onerror=refuse, followlinks=True):
        if len(Path(folder).relative_to(root).parts) >= 4:
            below.clear()  # no image belongs here, and a link may lead in circles
        below.sort()
        inside = Path(folder).relative_to(root).as_posix()
        for file in sorted(files):
            yield file if inside == "." else f"{inside}/{file}"
