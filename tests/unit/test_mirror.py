"""A mirror of checkpoints: never a half one, whatever is killed; the same ones as here; whole after every repair."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtf.checkpoint import places, storage
from dtf.checkpoint.places import Bucket, Folder, Place, fetch
from dtf.checkpoint.retention import Retention, retain
from dtf.checkpoint.suspects import set_aside
from dtf.core.errors import DataError
from tests.support.checkpoints import GOAL
from tests.support.mirrors import RULE, Mirrored, memory_bucket, save, spoil, whole_in


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches the disk when is judged elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Folder(str(tmp_path / "there")) if request.param == "folder" else memory_bucket()


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Where the run keeps its checkpoints."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


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


def test_a_run_that_was_lost_goes_on_and_retention_counts_both(place: Place, tmp_path: Path, here: Path) -> None:
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


def test_a_file_of_an_earlier_checkpoint_is_there_once(place: Place, tmp_path: Path, here: Path) -> None:
    """Where it is there as it was written; a bucket gets it again."""
    one = Mirrored(place, here)
    one.open()
    for step, base in [(1, 0), (2, 1), (3, 2), (4, 3)]:
        if step == 4:
            data = tmp_path / "there" / "step_000003" / "a.bin"
            if isinstance(place, Folder):
                assert data.samefile(tmp_path / "there" / "step_000002" / "a.bin")
                data.write_bytes(bytes([9]) * 3000)
        before = place.moved
        save(here, step, base=base)
        one.update(Retention(9, 1, GOAL))
        assert place.moved - before == (3000 if step in (2, 3) and isinstance(place, Folder) else 6000)
    assert not one.warnings and storage.first_fault(fetch(place, 4, tmp_path / "restored", "two")) is None


def killing(patch: pytest.MonkeyPatch, at: int, kill: Callable[[], None]) -> None:
    """Before call number `at` that changes a place, the process is killed."""
    calls = 0

    def counted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            if calls == at:
                kill()
            calls += 1
            return work(*arguments, **named)

        return call

    for owner, names in [
        (Bucket, ["_put", "_delete"]),
        (os, ["mkdir", "open", "write", "rename", "replace", "unlink"]),
    ]:
        for name in names:
            patch.setattr(owner, name, counted(getattr(owner, name)))


class Killed(BaseException):
    pass


def stop() -> None:
    raise Killed


def announced_before_a_kill(one: Mirrored, bucket: bool, at: int, told: Path) -> tuple[set[int], bool]:
    """The steps that are announced until the kill, and whether all was done before it. A folder outlives a process that
    is killed; a bucket in memory does not, and nothing of ours is done on its way out.
    """

    def work(kill: Callable[[], None]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            killing(patch, at, kill)
            one.mirror._rule = Retention(1, 0, GOAL)
            one.mirror._bring_up_to_date()

    if bucket:
        try:
            work(stop)
        except Killed:
            return {int(line.split()[1][5:]) for line in one.said}, False
        return set(), True

    def say(text: str) -> None:
        with told.open("a") as file:
            file.write(f"{text.split()[1][5:]}\n")

    one.mirror._say = say
    told.write_text("")
    if not (child := os.fork()):
        work(lambda: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {int(step) for step in told.read_text().split()}, ended == 0


def test_no_kill_shows_half_a_checkpoint(place: Place, tmp_path: Path) -> None:
    done, at = False, 0
    while not done:
        folder, bucket = tmp_path / str(at), isinstance(place, Bucket)
        here, there = folder / "checkpoints", memory_bucket() if bucket else Folder(str(folder / "there"))
        here.mkdir(parents=True)
        one = Mirrored(there, here)
        one.open()
        save(here, 1, 0.5)
        one.update()
        save(here, 2)
        save(here, 3)
        one.said.clear()
        announced, done = announced_before_a_kill(one, bucket, at, folder / "told")
        left = whole_in(there, folder)
        assert left and announced <= {*left, 1}, (at, announced, left)
        two = Mirrored(there, here, "two")
        two.open()
        two.update(Retention(2, 0, GOAL))
        assert whole_in(there, folder) == [3, 2] and not two.warnings, (at, two.warnings)
        at += 1
    assert at > (9 if isinstance(place, Bucket) else 20)


def test_what_was_sent_before_a_kill_is_not_sent_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, place = tmp_path / "checkpoints", memory_bucket()
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
    assert [path for path in sent if path and not path.startswith("probe")] == [
        "mirror.json",
        "uploading.json",
        "step_000001/b.bin",
        "step_000001/manifest.json",
    ]
    assert whole_in(place, tmp_path) == [1]


def test_half_a_checkpoint_of_another_history_is_sent_anew(tmp_path: Path) -> None:
    here, place = tmp_path / "checkpoints", memory_bucket()
    here.mkdir()
    place._put("step_000001/a.bin", b"?" * 3000)
    place._put("step_000007/a.bin", b"?")
    save(here, 1)
    one = Mirrored(place, here)
    assert one.open() == []
    one.update()
    assert whole_in(place, tmp_path) == [1] and place._begun() == [1]


def test_a_damaged_checkpoint_is_not_mirrored(place: Place, tmp_path: Path, here: Path) -> None:
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
    assert one.mirror.missing() == ("step_000002", "it is damaged here")


def test_damage_in_the_place_is_found(place: Place, tmp_path: Path, here: Path) -> None:
    save(here, 1)
    one = Mirrored(place, here)
    one.open()
    one.update()
    spoil(place, tmp_path, 1)
    (tmp_path / "restored").mkdir()
    with pytest.raises(DataError, match=r"b\.bin.*damaged"):
        fetch(place, 1, tmp_path / "restored", "again")
    assert os.listdir(tmp_path / "restored") == []


def test_checkpoints_that_are_set_aside_leave_the_place(place: Place, tmp_path: Path, here: Path) -> None:
    one = Mirrored(place, here)
    one.open()
    for step in (1, 2, 3):
        save(here, step)
        one.update(Retention(9, 0, GOAL))
    storage.discard(here / "step_000002", "one")  # the place lags behind
    assert [path.name for path in set_aside(here, 1, "one", mirrored=True)] == ["step_000003.suspect-one"]
    shutil.rmtree(here / "step_000003.suspect-one")
    assert Mirrored(place, here, "two").open() == [1], "nothing goes on from there, whatever was removed here"
    two = Mirrored(place, here, "two")
    two.open()
    save(here, 3, run="two")
    two.update(Retention(9, 0, GOAL))
    assert place.steps() == [3, 1] and place.read_manifest(3).run_id == "two"
    save(here, 4, run="two")
    two.update(Retention(9, 0, GOAL))
    assert place.steps() == [4, 3, 1]


def test_a_damaged_copy_is_replaced_or_removed(place: Place, tmp_path: Path, here: Path) -> None:
    one = Mirrored(place, here)
    one.open()
    for step in (1, 2):
        save(here, step)
        one.update()
    two = Mirrored(place, here, "two")
    two.open()
    for step in (1, 2):
        spoil(place, tmp_path, step)
        two.mirror.forget(step)
    storage.discard(here / "step_000001", "two")
    two.update()
    assert whole_in(place, tmp_path) == [2]


def test_another_checkpoint_of_the_same_step_is_replaced(place: Place, tmp_path: Path, here: Path) -> None:
    save(here, 1, run="older", size=500)
    one = Mirrored(place, here)
    one.open()
    one.update()
    storage.discard(here / "step_000001", "one")
    save(here, 1)
    one.update()
    assert place.read_manifest(1).run_id == "one" and whole_in(place, tmp_path) == [1]


def test_whatever_goes_wrong_is_told_and_ends_the_wait(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    save(here, 1)
    one = Mirrored(place, here)
    one.open()

    def broken(*arguments: Any) -> None:
        raise RuntimeError("what nobody thought of")

    with monkeypatch.context() as patch:
        patch.setattr(type(place), "send", broken)
        one.update()
    assert "what nobody thought of; training goes on" in one.warnings[0]
    assert one.mirror.missing() == ("step_000001", "what nobody thought of")
    one.update()
    assert place.steps() == [1] and one.mirror.missing() == ("", "")


def test_a_disk_that_fails_after_a_save_costs_no_more_than_the_mirror(
    place: Place, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Mirrored(place, here)
    one.open()
    save(here, 1)
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda *path: exec("raise OSError(5, 'Input/output error')"))
    one.update()
    assert len(one.warnings) == 1 and "Input/output error" in one.warnings[0]
    monkeypatch.setattr(os, "listdir", listdir)
    one.update()
    assert place.steps() == [1]


def test_a_place_that_is_emptied_is_left_alone(place: Place, here: Path, tmp_path: Path) -> None:
    one = Mirrored(place, here)
    one.open()
    save(here, 1)
    one.update()
    if isinstance(place, Bucket):
        place._delete(["mirror.json"])
    else:
        shutil.rmtree(tmp_path / "there")
    save(here, 2)
    one.update()
    assert one.mirror.missing()[0] == "step_000002" and "its mirror.json was removed" in one.warnings[0], one.warnings


def test_a_place_that_another_run_took_is_left_to_it(place: Place, tmp_path: Path) -> None:
    here, other = tmp_path / "checkpoints", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    one, two = Mirrored(place, here), Mirrored(place, other, "two")
    one.open()
    save(here, 1)
    one.update()
    two.open()
    save(here, 2)
    one.update()
    assert place.steps() == [2, 1], "looking takes nothing"
    save(other, 5, run="two")
    two.update()
    save(here, 3)
    one.update()
    one.update()
    assert place.steps() == [5, 2] and len(one.warnings) == 2, "at the first save and the second"
    assert all("run 'two' on host" in text for text in one.warnings)
    assert "run 'two' on host" in one.warnings[0] and "a checkpoint.mirror of its own" in one.mirror.missing()[1]
    assert one.mirror.taken
    again = Mirrored(place, here, "one", attempt=1)
    again.open()
    again.update()
    assert "run 'two' on host" in again.warnings[0], "a restart does not take it back"


def test_a_file_is_fetched_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a request with a time limit of its own, and is tried again alone."""
    import obstore

    here, place, asked = tmp_path / "checkpoints", memory_bucket(), []
    here.mkdir()
    monkeypatch.setattr(places, "_PIECE_BYTES", 1200)
    save(here, 1)
    one = Mirrored(place, here)
    one.open()
    one.update()
    get = obstore.get_range

    def recorded(*arguments: Any, **named: Any) -> Any:
        asked.append((named["start"], named["end"]))
        return get(*arguments, **named)

    monkeypatch.setattr(obstore, "get_range", recorded)
    place.moved = 0
    assert whole_in(place, tmp_path) == [1] and place.moved == 6000
    assert asked == [(0, 1200), (1200, 2400), (2400, 3000)] * 2
