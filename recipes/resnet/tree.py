"""Image files by split and class, in a folder or a tar archive of the same shape.

Lists and checks them; decodes nothing, needs no torch.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtf.core.errors import DataError
from dtf.recipes.resnet.archive import list_archive, read_members
from dtf.recipes.resnet.listing import Judgements, Listing, list_folder

SPLITS = ("train", "val", "test")
SHAPE = "{train,val}/<class>/<image>.jpg"
ELSEWHERE = "beside train/, val/ and test/"
"""Why an image is left out."""


@dataclass(frozen=True)
class Tree:
    """The images of all splits. Rows of a split are in the order of (class, file name), wherever the files lie."""

    classes: tuple[str, ...]  # of `train`, of all splits where there is none; sorted: a class's place is its label
    files: dict[str, tuple[str, ...]]  # split -> member name of each row
    counts: dict[str, tuple[int, ...]]  # split -> rows of each class
    faults: dict[str, str] = field(default_factory=dict)  # split -> why it cannot be used; it has no rows here
    unreadable: dict[str, str] = field(default_factory=dict)  # member -> why it cannot be read, as far as is known
    left_out: dict[str, str] = field(default_factory=dict)  # file that is no row -> why
    sources: dict[str, str] = field(default_factory=dict)  # member of an archive -> the one that it is a link to

    def check(self, splits: Collection[str]) -> None:
        """Raise DataError where one of these splits cannot be used."""
        for split in splits:
            if split in self.faults:
                raise DataError(self.faults[split])

    def unreadable_rows(self, splits: Collection[str]) -> Iterator[tuple[str, str]]:
        """(member, why) of rows of these splits that cannot be read, as far as is known."""
        rows = {name for split in splits for name in self.files[split]} if self.unreadable else ()
        return ((name, why) for name, why in self.unreadable.items() if name in rows)


def is_archive(root: Path) -> bool:
    """A file is taken for an archive, a folder for a tree."""
    return root.is_file()


def stamp(root: Path) -> str:
    """Text that changes with the files below `root`: their names, sizes and modification times.

    DataError for a folder that cannot be listed.
    """
    if is_archive(root):
        status = root.stat()
        return f"{status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256()
    for name in sorted(_listed(root, None).names):
        try:
            status = (root / name).stat()
            text = f"{status.st_size} {status.st_mtime_ns}"
        except OSError:
            text = "gone"
        digest.update(f"{name}\0{text}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_tree(root: Path, judgements: Path | None = None) -> Tree:
    """List the images below `root`. DataError when they do not form `{train,val,test}/<class>/<image>`.

    `judgements`: where to keep what is found in files of a folder whose names say nothing.
    """
    if is_archive(root):
        archive = list_archive(root)
        return tree_of(archive.listing, root, archive.sources)
    return tree_of(_listed(root, judgements), root)


def _listed(root: Path, judgements: Path | None) -> Listing:
    try:
        return list_folder(root, Judgements(root, judgements))
    except DataError as error:
        raise DataError(f"recipe.data.root={root}: {error}") from error


def tree_of(listing: Listing, root: Path, sources: dict[str, str] | None = None) -> Tree:
    """Sort images into splits and classes; one folder above `train`, `val` and `test` is allowed.

    What is wrong with a split is said when it is needed. DataError for several trees.
    """
    rows: dict[tuple[str, str], dict[str, list[tuple[str, str]]]] = {}  # top, split -> class -> file, name
    faults, left_out = dict[str, str](), dict(listing.left_out)
    for name in listing.names:
        parts = name.split("/")
        depth = _depth(parts)
        if depth is None:
            left_out[name] = ELSEWHERE
        elif len(parts) != depth + 3:
            split = parts[depth]
            shape = SHAPE if split in SPLITS[:2] else "test/<class>/<image>.jpg"
            faults.setdefault(
                split,
                f"recipe.data.root={root}: {name} is not of the form {shape}; put each image into the folder of its "
                "class",
            )
        else:
            top = parts[0] if depth else ""
            rows.setdefault((top, parts[depth]), {}).setdefault(parts[-2], []).append((parts[-1], name))
    top = _top(rows, root)
    for (other, _), kinds in rows.items():
        if other != top:
            left_out |= {name: ELSEWHERE for files in kinds.values() for _, name in files}
    found = {split: rows.get((top, split), {}) for split in SPLITS}
    classes = tuple(sorted(found["train"] or {kind for kinds in found.values() for kind in kinds}))
    for split in SPLITS:
        fault = faults.get(split) or _fault(split, found, len(listing.names), root)
        if fault:
            faults[split], found[split] = fault, {}
    ordered = {split: [sorted(found[split].get(kind, [])) for kind in classes] for split in SPLITS}
    files = {split: tuple(name for group in groups for _, name in group) for split, groups in ordered.items()}
    counts = {split: tuple(len(group) for group in groups) for split, groups in ordered.items()}
    return Tree(classes, files, counts, faults, listing.unreadable, left_out, sources or {})


def _depth(parts: Sequence[str]) -> int | None:
    """How many folders are above the split of an image; None where it is in none."""
    for splits, depth in ((SPLITS[:2], 0), (SPLITS[:2], 1), (SPLITS[2:], 0), (SPLITS[2:], 1)):
        if len(parts) > depth + 1 and parts[depth] in splits:
            return depth
    return None


def _top(rows: Collection[tuple[str, str]], root: Path) -> str:
    """The folder above the splits, or "". DataError when there are several."""
    tops = {top for top, split in rows if split != "test"} or {top for top, _ in rows}
    if len(tops) > 1:
        listed = ", ".join(sorted(repr(top) for top in tops))
        raise DataError(f"recipe.data.root={root} holds several trees, under {listed}; keep one {SHAPE}")
    return next(iter(tops), "")


def _fault(split: str, found: dict[str, dict[str, list[tuple[str, str]]]], seen: int, root: Path) -> str:
    """Why a split cannot be used, or ""."""
    kinds = found[split]
    if not kinds:
        others = " and ".join(f"{other}/" for other in SPLITS if found[other])
        here = f", but in {others}" if others else ""
        return (
            f"recipe.data.root={root} has no images in {split}/ ({seen} images in all){here}; it must hold {SHAPE}, "
            "and for job.split=test test/ likewise"
        )
    if found["train"] and (unknown := sorted(set(kinds) - set(found["train"]))):
        return (
            f"recipe.data.root={root}: classes of {split}/ that train/ does not have: {', '.join(unknown[:5])}; both "
            "need the same class folders"
        )
    if any(count > 1 for files in kinds.values() for count in Counter(name for _, name in files).values()):
        return f"recipe.data.root={root}: a file of {split}/ occurs twice in the archive; pack it again"
    return ""


def labels_of(classes: Sequence[str], known: Sequence[str], outputs: int, root: object) -> list[int]:
    """The label of each class of a tree: its place among the classes that a model knows by name; its own place where
    `known` is empty. `outputs`: of the model. DataError where labels cannot be told.
    """
    if not known:
        if len(classes) != outputs:
            raise DataError(
                f"recipe.data.root={root} has {len(classes)} of {outputs} classes, and the model has no names of "
                "classes that say which; give a checkpoint of a run, or all class folders"
            )
        return list(range(outputs))
    places = {name: place for place, name in enumerate(known)}
    if unknown := [name for name in classes if name not in places]:
        raise DataError(
            f"recipe.data.root={root}: the model does not know the classes {', '.join(unknown[:5])}; it knows "
            f"{', '.join(known[:5])}{', ...' if len(known) > 5 else ''}; name the class folders as in training"
        )
    return [places[name] for name in classes]


def read_files(root: Path, names: Iterable[str], sources: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the named files, in whatever order is quick. `sources`: as in `Tree`. DataError names the file
    that cannot be read.
    """
    if is_archive(root):
        yield from read_members(root, names, sources)
        return
    for name in names:
        try:
            file = os.open(root / name, os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(file, "rb") as content:
                yield name, content.read()
        except OSError as error:
            raise DataError(f"recipe.data.root={root}: {name} cannot be read: {error.strerror}") from error
