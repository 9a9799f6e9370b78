"""A mirror that two runs were given: which of them may go on with it, and what is said."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtf.checkpoint.line import Line
from dtf.checkpoint.options import Every
from dtf.checkpoint.places import Folder, Place
from dtf.checkpoint.sources import Sources
from dtf.core.errors import BusyError
from dtf.core.run_record import LOCK, is_live
from dtf.runs.run_folder import take_lock
from tests.support.mirrors import Mirrored, memory_bucket, save


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Folder(str(tmp_path / "there")) if request.param == "folder" else memory_bucket()


def run_folder(tmp_path: Path, name: str, *launches: str) -> Path:
    """Where a run keeps its checkpoints, whose folder knows of these launches."""
    folder = tmp_path / name
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    record = {"id": launches[-1], "earlier": [{"id": one} for one in launches[:-1]]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder / "checkpoints"


@contextmanager
def live(folder: Path) -> Iterator[None]:
    lock = take_lock(folder)
    try:
        yield
    finally:
        os.close(lock)


def train(place: Place, here: Path, run: str, *steps: int) -> Mirrored:
    """A launch that goes on from what is here, and saves at these steps."""
    one = Mirrored(place, here, run)
    one.open()
    one.mirror.wake(one.mirror._rule)
    for step in steps:
        save(here, step, run=run)
        one.update()
    return one


def contents(tmp_path: Path, place: Place) -> object:
    return sorted(path for path in tmp_path.rglob("*")), place.steps(), place.read_owner()


def test_the_mirror_of_a_live_run_is_left_to_it(place: Place, tmp_path: Path) -> None:
    here, other = run_folder(tmp_path, "la", "a"), run_folder(tmp_path, "lb", "b")
    train(place, here, "a", 5)
    with live(here.parent):
        before = contents(tmp_path, place)
        with pytest.raises(BusyError, match=r"in use by a live run \(run a, process \d+ on .*/la'\)"):
            Mirrored(place, other, "b").open()
        assert contents(tmp_path, place) == before
        assert Mirrored(place, here, "a", attempt=1).open() == [5], "a restart of that run goes on"
    assert Mirrored(place, other, "b").open() == [5], "it has ended"
    with live(here.parent):
        (here.parent / "run.json").write_text('{"id": "of another run"}')
        assert Mirrored(place, other, "b").open() == [5]


def test_two_lines_of_training_are_not_mixed(place: Place, tmp_path: Path) -> None:
    """A launch elsewhere went on from step 5 of the mirror; the first folder is at step 8."""
    here, other = run_folder(tmp_path, "m1", "a"), run_folder(tmp_path, "m3", "c")
    train(place, here, "a", 5)
    shutil.copytree(here / "step_000005", other / "step_000005")  # fetched
    train(place, other, "c", 7)
    save(here, 8, run="a")
    run_folder(tmp_path, "m1", "a", "d")
    before = contents(tmp_path, place)
    with pytest.raises(BusyError, match=r"another line of training than .*m1/checkpoints/step_000008.*run c, process"):
        Mirrored(place, here, "d").open()
    assert contents(tmp_path, place) == before
    shutil.rmtree(here / "step_000008")
    with pytest.raises(
        BusyError, match=r"holds step_000007 of run c, .* a run folder of its own, .*/m3; .*go on there"
    ):
        Mirrored(place, here, "d").open()
    shutil.rmtree(other)
    (other.parent / "run.json").unlink()
    assert Mirrored(place, here, "d").open() == [7, 5], "its own step 5 lies on the line of the mirror"


def test_a_run_that_moves_from_machine_to_machine_is_one_line(place: Place, tmp_path: Path) -> None:
    """Each has a disk of its own, and the mirror is all that they share."""
    folders = [run_folder(tmp_path, name, name) for name in ("m1", "m2")]
    for launch, step in enumerate(range(10, 60, 10)):
        here = folders[launch % 2]
        id = f"launch-{launch}"
        run_folder(tmp_path, here.parent.name, *{f"launch-{one}" for one in range(launch % 2, launch, 2)}, id)
        one = Mirrored(place, here, id)
        steps = one.open()
        assert steps[:1] == ([step - 10] if launch else [])
        if steps and not (here / f"step_{steps[0]:06d}").exists():
            shutil.copytree(folders[1 - launch % 2] / f"step_{steps[0]:06d}", here / f"step_{steps[0]:06d}")
        train(place, here, id, step)
        (here.parent / "run.json").unlink()  # the others do not see it


def test_who_wrote_what_a_run_goes_on_with_is_said(tmp_path: Path) -> None:
    place = Folder(str(tmp_path / "there"))
    train(place, run_folder(tmp_path, "la", "a"), "a", 5)
    other = run_folder(tmp_path, "lb", "b")
    for said in (True, False):
        lines: list[str] = []
        sources = Sources(other, Every(mirror=str(tmp_path / "there")), "b", lines.append, lines.append)
        candidate = sources.candidates(0)[0]
        assert sources.fetch(candidate) is None
        told = [line for line in lines if "goes on with run a, which wrote step_000005" in line]
        assert len(told) == said and all(f"process {os.getpid()} on host" in line for line in told), lines
        run_folder(tmp_path, "lb", "a", "b")
        shutil.rmtree(other / "step_000005")


def test_a_line_goes_through_what_later_launches_went_on_from() -> None:
    line = Line([]).then("b", "a", 10).then("c", "b", 20)
    assert line.holds("a", 10) and line.holds("b", 20) and line.holds("c", 99)
    assert not line.holds("a", 11) and not line.holds("b", 21) and not line.holds("x", 0)
    assert Line.of({"line": json.loads(json.dumps(line.plain()))}).plain() == line.plain()
    for odd in (None, 3, [[]], [[1, 2, 3]], ["ab"], [["a", "b"]]):
        assert not Line.of({"line": odd})


def test_of_two_runs_that_start_together_the_first_to_save_has_the_place(place: Place, tmp_path: Path) -> None:
    here, other = run_folder(tmp_path, "la", "a"), run_folder(tmp_path, "lb", "b")
    first, second = Mirrored(place, here, "a"), Mirrored(place, other, "b")
    assert first.open() == second.open() == []
    save(here, 5, run="a")
    first.update()
    save(other, 5, run="b")
    second.update()
    assert place.read_owner()["run"] == "a" and place.read_manifest(5).run_id == "a"
    assert "run a" in second.warnings[0], second.warnings
    save(here, 10, run="a")
    assert not first.update().warnings and place.steps() == [10, 5]
    assert place.read_owner()["line"] == [["a", 0]], "it began with nothing"


def test_the_step_that_two_runs_went_on_from_is_no_sign_that_they_are_one(place: Place, tmp_path: Path) -> None:
    here, other = run_folder(tmp_path, "la", "a"), run_folder(tmp_path, "lb", "b")
    train(place, here, "a", 5)
    shutil.copytree(here / "step_000005", other / "step_000005")
    save(other, 30, run="b")
    train(place, here, "a", 20)
    with live(here.parent), pytest.raises(BusyError, match="in use by a live run"):
        Mirrored(place, other, "b").open()
    with pytest.raises(BusyError, match="of another line of training than .*step_000030.*move what is later"):
        Mirrored(place, other, "b").open()


def test_a_run_that_starts_while_another_asks_whether_it_lives_gets_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked, flock = run_folder(tmp_path, "run", "one").parent, list[int](), fcntl.flock
    (folder / LOCK).touch()
    others = os.open(folder / LOCK, os.O_RDONLY)
    flock(others, fcntl.LOCK_SH)

    def answered(lock: int, how: int) -> None:
        asked.append(how)
        if len(asked) == 3:
            flock(others, fcntl.LOCK_UN)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", answered)
    os.close(take_lock(folder))
    os.close(others)
    assert len(asked) == 3 and not is_live(folder, "one")
