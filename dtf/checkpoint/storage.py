"""Checkpoint folders on disk. A crash at any moment leaves the last good checkpoint, and a checkpoint is read only
after its digests were compared.

Knows files, not tensors. Imports no torch, so that a test can stop it at every system call. The lock of the run folder
makes sure that one run writes at a time.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from dtf.checkpoint.blocks import Blocks, fill, open_regular
from dtf.checkpoint.durable_renames import move_aside, sync_folder
from dtf.checkpoint.manifest import BLOCK_BYTES, MAX_BYTES, Manifest, StoredFile, decode, encode
from dtf.core.errors import DataError

MANIFEST = "manifest.json"
LATEST = "latest"
_STEP = re.compile(r"step_(\d{6,18})")
_LEFTOVER = re.compile(r"(?:step_\d{6,18}|latest)\.tmp-.+|\.trash-.+")
_WINDOW = 1024  # blocks that are compared before their damage is told
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)
_FaultOf = Callable[[Path], str | None]


def step_name(step: int) -> str:
    """`step_000120`."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step in the name of a checkpoint. None for any other name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def checkpoints(parent: Path) -> list[Path]:
    """Folders in `parent` that are named like a checkpoint, newest first, whatever they hold."""
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = sorted((step for name in names if (step := step_of(name)) is not None), reverse=True)
    return [parent / step_name(step) for step in steps]


# ---------------------------------------------------------------- writing


def write(
    path: Path,
    pieces: Iterable[bytes | bytearray | memoryview],
    head_of: tuple[int, Callable[[], bytes]] | None = None,
) -> StoredFile:
    """Write a new file, durably, and return its size and digests. FileExistsError when the name is taken.

    Pieces are taken one at a time; no more than one of them and a block are held in memory. `head_of`: how many bytes
    come before them, no more than a block has, and what gives these once all pieces were taken; a block more is held.
    """
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        size, digests, first = 0, [], bytearray()
        for block in _in_blocks(chain([bytes(head_of[0])], pieces) if head_of else pieces):
            if head_of and not digests:
                first = bytearray(block)
            digests.append(crc32(block))
            size += len(block)
            rest = memoryview(block)
            while rest:
                rest = rest[os.write(file, rest) :]
        if head_of:
            first[: head_of[0]] = head_of[1]()
            digests[0] = crc32(first)
            rest, at = memoryview(first)[: head_of[0]], 0
            while at < len(rest):
                at += os.pwrite(file, rest[at:], at)
        os.fsync(file)
    finally:
        os.close(file)
    return StoredFile(size, tuple(digests))


def link(source: Path, target: Path, stored: StoredFile) -> None:
    """Give a file that was written whole another name, or copy it where it cannot have one. DataError where the copy
    is not `stored`. FileExistsError when the name is taken.
    """
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with open(source, "rb") as file:
            if write(target, iter(lambda: file.read(BLOCK_BYTES), b"")) != stored:
                raise DataError(f"{source} is damaged") from None


def _in_blocks(pieces: Iterable[bytes | bytearray | memoryview]) -> Iterator[bytearray | memoryview]:
    """The same bytes in blocks of BLOCK_BYTES, the last one shorter; whole blocks are not copied."""
    held = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        while view:
            if not held and len(view) >= BLOCK_BYTES:
                block, view = view[:BLOCK_BYTES], view[BLOCK_BYTES:]
                yield block
                continue
            missing = BLOCK_BYTES - len(held)
            held += view[:missing]
            view = view[missing:]
            if len(held) == BLOCK_BYTES:
                yield held
                held = bytearray()
    if held:
        yield held


def begin(
    parent: Path, step: int, run_id: str, note: Callable[[str], None], fault_of: _FaultOf | None = None
) -> Path | None:
    """Make a new empty folder for the checkpoint of `step`. None when that checkpoint exists and has no fault.

    A checkpoint is never overwritten. One of the same step that cannot be loaded is moved aside, to
    `step_000120.bad-<run id>`, for a person to look at. A complete one is kept: a run folder holds one history, so it
    is the same training. `fault_of`: says why a checkpoint cannot be loaded; without it, digests decide.
    """
    if not parent.is_dir():
        parent.mkdir(mode=0o700)
        sync_folder(parent.parent)
    final = parent / step_name(step)
    if os.path.lexists(final):
        fault = (fault_of or first_fault)(final)
        if fault is None:
            point_latest(parent, final.name, run_id)
            return None
        aside = move_aside(final, f"bad-{run_id}")
        note(f"checkpoint {final} cannot be loaded ({fault}); moved to {aside.name}")
    draft = parent / f"{final.name}.tmp-{run_id}"
    if os.path.lexists(draft):
        _remove(draft)
    draft.mkdir(mode=0o700)
    return draft


def commit(draft: Path, manifest: Manifest) -> Path:
    """Turn a finished draft into the checkpoint of its step by one rename, and point `latest` to it. Returns its
    folder.

    ValueError when the manifest contradicts itself. OSError when files are not there as it says (a folder that ranks do
    not share).
    """
    data = encode(manifest)
    _check_files(draft, manifest.files)
    write(draft / MANIFEST, [data])
    sync_folder(draft)
    final = draft.parent / step_name(manifest.step)
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
    os.rename(draft, final)
    sync_folder(draft.parent)
    point_latest(draft.parent, final.name, manifest.run_id)
    return final


def point_latest(parent: Path, name: str, run_id: str) -> None:
    """Make the file `latest` hold `name`, for people and scripts; dtf itself looks at the folders.

    A file, not a link: it survives copies to stores without links, and nobody can make a reader follow it.
    """
    draft = parent / f"{LATEST}.tmp-{run_id}"
    draft.unlink(missing_ok=True)
    write(draft, [f"{name}\n".encode()])
    os.replace(draft, parent / LATEST)
    sync_folder(parent)


# ---------------------------------------------------------------- reading


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there, of the right size, and no others. Reads no tensor.

    DataError when it is not complete; OSError when the folder itself cannot be read.
    """
    with os.scandir(folder) as entries:
        names = {entry.name for entry in entries}
    if MANIFEST not in names:
        raise DataError(f"{MANIFEST} is missing; the checkpoint is not complete")
    file, size = open_regular(folder / MANIFEST)
    try:
        if size > MAX_BYTES:
            raise DataError(f"{MANIFEST} has {size} bytes; {MAX_BYTES} is the limit")
        data = bytearray(size)
        manifest = decode(bytes(data[: fill(file, memoryview(data), 0)]))
    finally:
        os.close(file)
    named = step_of(folder.name)
    if named is not None and named != manifest.step:
        raise DataError(f"the folder is named {folder.name} but holds step {manifest.step}")
    unknown = sorted(names - manifest.files.keys() - {MANIFEST})
    if unknown:
        raise DataError(f"unknown file {ascii(unknown[0])[:120]} beside those of the manifest")
    try:
        _check_files(folder, manifest.files)
    except OSError as error:
        raise DataError(f"{Path(error.filename).name}: {error.strerror}") from None
    return manifest


def _check_files(folder: Path, files: dict[str, StoredFile]) -> None:
    for name, stored in files.items():
        status = os.lstat(folder / name)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(folder / name))
        if status.st_size != stored.size:
            raise OSError(errno.EIO, f"has {status.st_size} bytes instead of {stored.size}", str(folder / name))


def faults(folder: Path, manifest: Manifest, index: int = 0, count: int = 1) -> Iterator[str]:
    """Compare the digests of a checkpoint; yields one text per damaged stretch of a file.

    Rank `index` of `count` reads its share.
    """
    total = sum(len(file.crc32) for file in manifest.files.values())
    first, last = total * index // count, total * (index + 1) // count
    for name, stored in manifest.files.items():
        numbers = range(max(first, 0), min(last, len(stored.crc32)))
        if numbers:
            yield from _file_faults(Blocks(folder, name, stored), numbers)
        first, last = first - len(stored.crc32), last - len(stored.crc32)


def _file_faults(file: Blocks, numbers: range) -> Iterator[str]:
    start: int | None = None
    for at in range(numbers.start, numbers.stop, _WINDOW):
        window = range(at, min(at + _WINDOW, numbers.stop))
        damaged = file.damaged(window)
        for number in window:
            if number in damaged:
                start = number if start is None else start
            elif start is not None:
                yield file.damage(start, number)
                start = None
    if start is not None:
        yield file.damage(start, numbers.stop)


def first_fault(folder: Path, index: int = 0, count: int = 1) -> str | None:
    """Why bytes of a checkpoint are not as written, as far as rank `index` of `count` looks; None when all is well."""
    try:
        return next(faults(folder, read_manifest(folder), index, count), None)
    except DataError as error:
        return str(error)
    except NotADirectoryError:
        return "is no folder"


# ---------------------------------------------------------------- removing


def is_leftover(name: str) -> bool:
    """Whether something of this name is half written or half removed."""
    return bool(_LEFTOVER.fullmatch(name))


def clean(parent: Path) -> None:
    """Remove what crashed runs left unfinished.

    Only under the lock of the run folder, and while no save is in progress.
    """
    if parent.is_dir():
        for name in os.listdir(parent):
            if is_leftover(name):
                _remove(parent / name)


def discard(folder: Path, run_id: str) -> None:
    """Remove a checkpoint or draft; a crash leaves it whole or as rubbish for `clean`."""
    trash = folder.parent / f".trash-{folder.name}-{run_id}"
    if os.path.lexists(trash):
        _remove(trash)
    os.rename(folder, trash)
    sync_folder(folder.parent)
    _remove(trash)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
