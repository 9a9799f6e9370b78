"""What tests of mirrors share: small checkpoints, places in memory, and mirrors whose work is done at once."""

from __future__ import annotations

import shutil
from pathlib import Path

from dtf.checkpoint import storage
from dtf.checkpoint.manifest import Base, Manifest, Objective, StoredBox, StoredTensor
from dtf.checkpoint.mirror import Mirror
from dtf.checkpoint.places import Bucket, Place, fetch
from dtf.checkpoint.retention import Retention
from tests.support.checkpoints import GOAL
from tests.support.launching import HANG_S

RULE = Retention(2, 1, GOAL)


def save(
    parent: Path, step: int, value: float | None = None, run: str = "one", size: int = 3000, base: int = 0
) -> Path:
    """`base`: the step whose file a.bin it has too."""
    draft = storage.begin(parent, step, run, lambda text: None)
    assert draft is not None
    data = bytes([step % 251]) * size
    files = {name: storage.write(draft / name, [data]) for name in ("a.bin", "b.bin")[base > 0 :]}
    if base:
        other = parent / storage.step_name(base)
        files["a.bin"] = storage.read_manifest(other).files["a.bin"]
        storage.link(other / "a.bin", draft / "a.bin", files["a.bin"])
    tensors = {f"model/{name}": StoredTensor("U8", (size,), (StoredBox(name, "x", (0,), (size,)),)) for name in files}
    goal = Objective(*GOAL, value) if value is not None else None
    return storage.commit(
        draft, Manifest(step, run, "ddp", 1, goal, files, tensors, Base(base, ("a.bin",)) if base else None)
    )


def memory_bucket() -> Bucket:
    """A new one, in memory."""
    new = Bucket("memory:///")
    new._bulk = new._store
    return new


class Mirrored:
    """A mirror whose work is done when `update` returns."""

    def __init__(self, place: Place, folder: Path, run: str = "one", attempt: int = 0) -> None:
        self.warnings: list[str] = []
        self.said: list[str] = []
        self.mirror = Mirror(place, folder, run, attempt, self.warnings.append, self.said.append)

    def open(self) -> list[int]:
        return self.mirror.look()

    def update(self, rule: Retention = RULE) -> Mirrored:
        self.mirror.wake(rule)
        assert self.mirror.is_done(HANG_S)
        return self


def whole_in(place: Place, tmp_path: Path) -> list[int]:
    """The steps that a run that has lost its folder can go on from, newest first; each is fetched and compared."""
    for step in place.steps():
        shutil.rmtree(tmp_path / "restored", ignore_errors=True)
        (tmp_path / "restored").mkdir()
        assert storage.first_fault(fetch(place, step, tmp_path / "restored", "again")) is None
    return place.steps()


def spoil(place: Place, tmp_path: Path, step: int) -> None:
    """Other bytes, as many."""
    if isinstance(place, Bucket):
        place._put(f"step_{step:06d}/b.bin", bytes([9]) * 3000)
    else:
        (tmp_path / "there" / f"step_{step:06d}" / "b.bin").write_bytes(bytes([9]) * 3000)
