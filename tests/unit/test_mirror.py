"""A mirror of checkpoints: never a half one, whatever is killed; the same ones as here; whole after every repair."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.checkpoint import places, storage
from dtf.checkpoint.manifest import Manifest, Objective, StoredBox, StoredTensor
from dtf.checkpoint.mirror import Mirror
from dtf.checkpoint.options import Every
from dtf.checkpoint.places import Bucket, Folder, Place, fetch
from dtf.checkpoint.retention import Retention, retain
from dtf.core.errors import BusyError, ConfigError, DataError, SaveError
from dtf.core.types import State
from tests.support.checkpoints import GOAL, Together, checkpointer, on_ranks, whole
from tests.support.launching import HANG_S

RULE = Retention(2, 1, GOAL)


def save(parent: Path, step: int, value: float | None = None, run: str = "one", size: int = 3000) -> Path:
    draft = storage.begin(parent, step, run, lambda text: None)
    assert draft is not None
    data = bytes([step % 251]) * size
    files = {name: storage.write(draft / name, [data]) for name in ("a.bin", "b.bin")}
    tensors = {f"model/{name}": StoredTensor("U8", (size,), (StoredBox(name, "x", (0,), (size,)),)) for name in files}
    goal = Objective(*GOAL, value) if value is not None else None
    return storage.commit(draft, Manifest(step, run, "ddp", 1, goal, files, tensors))


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the disk when is judged elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Folder(str(tmp_path / "there")) if request.param == "folder" else Bucket("memory:///there")


class Mirrored:
    """A mirror whose work is done when `update` returns."""

    def __init__(self, place: Place, folder: Path, run: str = "one") -> None:
        self.warnings: list[str] = []
        self.said: list[str] = []
        self.mirror = Mirror(place, folder, run, self.warnings.append, self.said.append)

    def open(self) -> list[int]:
        return self.mirror.open()

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


def test_the_place_has_what_the_run_keeps(place: Place, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    one = Mirrored(place, here)
    here.mkdir()
    assert one.open() == []
    for step, value in [(1, 0.9), (2, 0.1), (3, 0.2), (4, None)]:
        save(here, step, value)
        retain(here, "one", RULE)
        one.update()
    assert place.steps() == [4, 3, 1] and one.mirror.missing() == ("", "")
    assert whole_in(place, tmp_path) == [4, 3, 1]
    assert [line.split()[1] for line in one.said] == [f"step_{step:06d}" for step in (1, 2, 3, 4)]
    assert not one.warnings


def test_a_run_that_was_lost_goes_on_and_retention_counts_both(place: Place, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    here.mkdir()
    one = Mirrored(place, here)
    one.open()
    for step, value in [(1, 0.9), (2, 0.1), (3, 0.2)]:
        save(here, step, value)
        one.update(Retention(9, 1, GOAL))
    shutil.rmtree(here)
    here.mkdir()
    two = Mirrored(place, here, "two")
    assert two.open() == [3, 2, 1]
    assert storage.first_fault(fetch(place, 3, here, "two")) is None
    save(here, 4, 0.3, "two")
    two.update()
    assert place.steps() == [4, 3, 1], "the best is still there, though it is no longer here"
    assert [path.name for path in storage.checkpoints(here)] == ["step_000004", "step_000003"]


class Killed(BaseException):
    pass


def killing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """The process is killed before call number `at` that changes a place."""
    calls = 0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > at:
                raise Killed
            return work(*arguments, **named)

        return call

    for owner, name in [(Bucket, "_put"), (Bucket, "_delete"), (storage, "write"), (os, "rename"), (os, "unlink")]:
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("at", range(24))
def test_no_kill_shows_half_a_checkpoint(
    place: Place, tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "checkpoints"
    here.mkdir()
    one = Mirrored(place, here)
    one.open()
    save(here, 1, 0.5)
    one.update()
    save(here, 2)
    save(here, 3)
    one.said.clear()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killing(patch, at)
        one.mirror._rule = Retention(1, 0, GOAL)
        one.mirror._bring_up_to_date()
        raise Killed  # it was all done before
    announced = {int(line.split()[1][5:]) for line in one.said}
    left = whole_in(place, tmp_path)
    assert left and announced <= {*left, 1}
    two = Mirrored(place, here, "two")
    two.open()
    two.update(Retention(2, 0, GOAL))
    assert whole_in(place, tmp_path) == [3, 2]


def test_what_was_sent_before_a_kill_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, place = tmp_path / "checkpoints", Bucket("memory:///there")
    here.mkdir()
    save(here, 1)
    one = Mirrored(place, here)
    one.open()
    put, sent = Bucket._put, []

    def recorded(self: Bucket, path: str, *rest: Any) -> None:
        sent.append(path)
        if path.endswith("b.bin") and len(sent) < 6:
            raise OSError(5, "the line is cut")
        put(self, path, *rest)

    monkeypatch.setattr(Bucket, "_put", recorded)
    one.update()
    assert place.steps() == [] and one.mirror.missing() == ("step_000001", "the line is cut")
    assert "the line is cut; training goes on" in one.warnings[0]
    two = Mirrored(place, here)
    two.open()
    sent.clear()
    sent.extend([""] * 6)
    two.update()
    assert [path for path in sent if path] == ["uploading.json", "step_000001/b.bin", "step_000001/manifest.json"]
    assert whole_in(place, tmp_path) == [1]


def test_half_a_checkpoint_of_another_history_is_sent_anew(tmp_path: Path) -> None:
    here, place = tmp_path / "checkpoints", Bucket("memory:///there")
    here.mkdir()
    place._put("step_000001/a.bin", b"?" * 3000)
    place._put("step_000007/a.bin", b"?")
    save(here, 1)
    one = Mirrored(place, here)
    assert one.open() == []
    one.update()
    assert whole_in(place, tmp_path) == [1] and place._begun() == [1]


def test_a_damaged_checkpoint_is_not_mirrored(place: Place, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    here.mkdir()
    save(here, 1)
    path = save(here, 2) / "b.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    one = Mirrored(place, here)
    one.open()
    one.update()
    assert place.steps() == [1]
    assert any("step_000002 is not mirrored: b.bin: bytes 0 to 3000 are damaged" in text for text in one.warnings)


def test_damage_in_the_place_is_found(place: Place, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    here.mkdir()
    save(here, 1)
    one = Mirrored(place, here)
    one.open()
    one.update()
    if isinstance(place, Bucket):
        place._put("step_000001/b.bin", bytes([2]) * 3000)
    else:
        (tmp_path / "there" / "step_000001" / "b.bin").write_bytes(bytes([2]) * 3000)
    (tmp_path / "restored").mkdir()
    with pytest.raises(DataError, match=r"b\.bin.*damaged"):
        fetch(place, 1, tmp_path / "restored", "again")
    assert os.listdir(tmp_path / "restored") == []


def test_a_checkpoint_that_was_set_aside_leaves_the_place(place: Place, tmp_path: Path) -> None:
    here = tmp_path / "checkpoints"
    here.mkdir()
    one = Mirrored(place, here)
    one.open()
    for step in (1, 2):
        save(here, step)
        one.update()
    (here / "step_000002").rename(here / "step_000002.suspect-one")
    assert Mirrored(place, here, "two").open() == [1], "at the next start"
    save(here, 3)
    two = Mirrored(place, here, "two")
    two.open()
    two.update()
    (here / "step_000003").rename(here / "step_000003.suspect-two")
    two.update()
    assert place.steps() == [1], "while the run goes on"


def test_a_place_that_another_run_took_is_left_to_it(place: Place, tmp_path: Path) -> None:
    here, other = tmp_path / "checkpoints", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    one, two = Mirrored(place, here), Mirrored(place, other, "two")
    one.open()
    two.open()
    save(here, 1)
    save(other, 5, run="two")
    one.update()
    one.update()
    assert place.steps() == [] and len(one.warnings) == 1
    assert "run 'two' on host" in one.warnings[0] and "a checkpoint.mirror of its own" in one.mirror.missing()[1]
    two.update()
    assert place.steps() == [5]


# ---------------------------------------------------------------- the run


def state(world: Together, step: int) -> State:
    return State([whole(f"model/{world.rank}", torch.full((3,), float(step)))], {})


def test_ranks_go_on_from_the_mirror(tmp_path: Path) -> None:
    def first(world: Together) -> None:
        writer = checkpointer(tmp_path / "a", world, mirror=str(tmp_path / "there"))
        assert writer.find() is None
        for step in (5, 10):
            writer.save(step, state(world, step), {"step": step})
        writer.finish_mirror(False)

    def second(world: Together, folder: str, resume: str = "auto") -> str | None:
        reader = checkpointer(tmp_path / folder, world, mirror=str(tmp_path / "there"), resume=resume)
        path = reader.find()
        return str(path)

    for outcome in on_ranks(2, first):
        assert outcome is None
    damaged = tmp_path / "there" / "step_000010" / "state.json"
    kept = damaged.read_bytes()
    damaged.write_bytes(b"!" + kept[1:])
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "step_000005")] * 2
    damaged.write_bytes(kept)
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "step_000010")] * 2
    assert all(isinstance(one, BusyError) for one in on_ranks(2, lambda world: second(world, "c", "never")))
    ours = tmp_path / "b" / "step_000010" / "state.json"
    ours.write_bytes(b"!" + kept[1:])
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "step_000010")] * 2
    assert ours.read_bytes() == kept, "the copy has mended it"


def test_a_run_whose_mirror_lacks_its_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def run(world: Together, hurried: bool) -> None:
        writer = checkpointer(tmp_path / "a", world, mirror=str(tmp_path / "there"))
        writer.find()
        monkeypatch.setattr(Folder, "send", refused)
        writer.save(5, state(world, 5), {"step": 5})
        writer.finish_mirror(hurried)

    for error in on_ranks(2, lambda world: run(world, False)):
        assert isinstance(error, SaveError) and "step_000005 is in" in str(error), error
        assert "No space left on device; start again with the same command, which sends it" in str(error)
    assert on_ranks(2, lambda world: run(world, True)) == [None, None], "it was asked to stop"


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        ("ftp://there/x", "is no place; write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH"),
        ("s3://", "is no place"),
        ("s3://[", "is no place"),
        ("s3://key:hidden@bucket/x", "holds a user or a password"),
        ("s3://bucket/x", "which is not encrypted"),
        ("gs://bucket/x", "needs obstore, which is not installed"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_by_its_name(
    mirror: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "find_spec", lambda name: None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(ConfigError, match="checkpoint.mirror") as refusal:
        Every(mirror=mirror).check()
    assert expected in str(refusal.value) and "hidden" not in str(refusal.value)


def test_nothing_is_mirrored_where_nothing_is_saved() -> None:
    with pytest.raises(ConfigError, match="nothing to mirror"):
        Every(every_steps=0, mirror="there").check()
