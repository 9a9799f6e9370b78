"""Runs with a mirror: where they go on from, how they end, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.api.launcher import report
from dtf.checkpoint import place_names, sources, storage
from dtf.checkpoint.mirror import Mirror
from dtf.checkpoint.options import Every
from dtf.checkpoint.places import Folder
from dtf.core.errors import BusyError, ConfigError, DataError, Exit, Preempted, SaveError
from dtf.core.types import Failed, State
from dtf.host import heartbeat, waits
from dtf.host.heartbeat import Board
from dtf.launch.waits import WaitWatch
from tests.support.checkpoints import Together, checkpointer, on_ranks, small_checkpoint, whole
from tests.support.launching import HANG_S


def run_folder(tmp_path: Path, name: str) -> Path:
    """Where the run of this name keeps its checkpoints."""
    (tmp_path / name).mkdir(exist_ok=True)
    return tmp_path / name / "checkpoints"


def state(world: Together, step: int) -> State:
    return State([whole(f"model/{world.rank}", torch.full((3,), float(step)))], {})


def test_ranks_go_on_from_the_mirror(tmp_path: Path) -> None:
    def first(world: Together) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        assert writer.find() is None
        for step in (5, 10):
            writer.save(step, state(world, step), {"step": step})
        writer.finish_mirror()

    def second(world: Together, folder: str, resume: str = "auto") -> str | None:
        reader = checkpointer(run_folder(tmp_path, folder), world, mirror=str(tmp_path / "there"), resume=resume)
        path = reader.find()
        return str(path)

    for outcome in on_ranks(2, first):
        assert outcome is None
    damaged = tmp_path / "there" / "step_000010" / "state.json"
    kept = damaged.read_bytes()
    damaged.write_bytes(b"!" + kept[1:])
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "checkpoints" / "step_000005")] * 2
    damaged.write_bytes(kept)
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "checkpoints" / "step_000010")] * 2
    assert all(isinstance(one, BusyError) for one in on_ranks(2, lambda world: second(world, "c", "never")))
    ours = tmp_path / "b" / "checkpoints" / "step_000010" / "state.json"
    ours.write_bytes(b"!" + kept[1:])
    assert on_ranks(2, lambda world: second(world, "b")) == [str(tmp_path / "b" / "checkpoints" / "step_000010")] * 2
    assert ours.read_bytes() == kept, "the copy has mended it"


def test_a_save_is_told_before_its_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    wake = Mirror.wake

    def woken(self: Mirror, *rest: Any) -> None:
        order.append("mirror")
        wake(self, *rest)

    monkeypatch.setattr(Mirror, "wake", woken)

    def run(world: Together) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        assert writer.find() is None
        writer.save(5, state(world, 5), {"step": 5}, told=lambda path: order.append(Path(path).name))
        writer.finish_mirror()

    assert on_ranks(1, run) == [None]
    assert order == ["step_000005", "mirror"]


def test_a_run_whose_mirror_lacks_its_end_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    def run(world: Together, left_s: float) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        writer._left_s = lambda: left_s
        if writer.find():
            writer.retain()
        monkeypatch.setattr(Folder, "send", refused)
        writer.save(5, state(world, 5), {"step": 5})
        writer.finish_mirror()

    for left_s, kind in [(math.inf, SaveError), (3.0, Preempted)]:
        for error in on_ranks(2, lambda world, left_s=left_s: run(world, left_s)):
            assert isinstance(error, kind) and "step_000005 is complete in" in str(error), error
            assert (
                error.raised_by_all
                and error.blames is None
                and str(error).startswith("asked to stop; ") == (kind is Preempted)
            )
            assert "No space left on device; start again with the same command, which sends it" in str(error)


def test_a_run_that_has_lost_its_mirror_is_not_told_to_start_again(tmp_path: Path) -> None:
    place = tmp_path / "there"

    def run(world: Together) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(place))
        writer.find()
        writer.save(5, state(world, 5), {"step": 5})
        writer.finish_mirror()
        owner = json.loads((place / "mirror.json").read_text())
        (place / "mirror.json").write_text(json.dumps(owner | {"run": "other"}))
        writer.save(6, state(world, 6), {"step": 6})
        writer.finish_mirror()

    [error] = on_ranks(1, run)
    assert isinstance(error, BusyError) and "run 'other' on host" in str(error)
    assert str(error).endswith("give each run a checkpoint.mirror of its own")


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_does_not_wait_longer_than_it_may(tmp_path: Path) -> None:
    def run(world: Together) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        writer.find()
        gate = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Folder, "send", lambda *arguments: gate.wait())
            writer._left_s = lambda: -1.0
            writer.save(5, state(world, 5), {"step": 5})
            try:
                writer.finish_mirror()
            finally:
                gate.set()

    for error in on_ranks(1, run):
        assert isinstance(error, Preempted) and "it was not sent yet" in str(error), error


def test_a_restart_does_without_a_mirror_that_does_not_answer(tmp_path: Path) -> None:
    """It is tried again at the next save."""
    (tmp_path / "there").write_text("no folder")
    notes: list[str] = []

    def run(world: Together) -> None:
        writer = checkpointer(run_folder(tmp_path, "a"), world, notes, mirror=str(tmp_path / "there"))
        assert writer.find(attempt=1) is None
        writer.save(5, state(world, 5), {"step": 5})
        mirror = writer._sources.mirror
        assert mirror is None or mirror.is_done(HANG_S)
        if world.rank == 0:
            (tmp_path / "there").unlink()
        writer.save(6, state(world, 6), {"step": 6})
        writer.finish_mirror()

    assert on_ranks(2, run) == [None, None]
    assert Folder(str(tmp_path / "there")).steps() == [6, 5] and any("Not a directory" in note for note in notes), notes
    for error in on_ranks(2, lambda world: checkpointer(run_folder(tmp_path, "b"), world, mirror=__file__).find()):
        assert isinstance(error, ConfigError) and "cannot be used: Not a directory" in str(error), error


def test_a_mirror_in_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    for place in ("run/checkpoints", "run", "run/mirror", "link/x"):
        for error in on_ranks(2, lambda world, place=place: at(world, tmp_path / "run", tmp_path / place).find()):
            assert isinstance(error, ConfigError) and "would be lost with it" in str(error), error


def at(world: Together, run: Path, mirror: Path) -> Any:
    return checkpointer(run / "checkpoints", world, mirror=str(mirror))


def test_a_path_to_resume_from_may_be_lost_where_there_is_a_mirror(tmp_path: Path) -> None:
    lost = str(tmp_path / "lost")
    with pytest.raises(DataError, match="holds no checkpoint"):
        Every(resume=lost).check()
    Every(resume=lost, mirror=str(tmp_path / "there")).check()

    def run(world: Together, folder: str) -> Any:
        one = checkpointer(run_folder(tmp_path, folder), world, mirror=str(tmp_path / "there"), resume=lost)
        return one, one.find()

    for error in on_ranks(2, lambda world: run(world, "a")):
        assert isinstance(error, DataError) and "holds no checkpoint" in str(error), error
    small_checkpoint(tmp_path / "there", 4)
    for one, path in on_ranks(3, lambda world: run(world, "b")):
        assert path == tmp_path / "b" / "checkpoints" / "step_000004" and one.owns(path)


def test_what_comes_from_another_run_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_checkpoint(tmp_path / "there", 4)
    monkeypatch.setattr(sources, "open_place", lambda name: Folder(str(tmp_path / "there")))

    def run(world: Together) -> Any:
        one = checkpointer(run_folder(tmp_path, "b"), world, resume="s3://bucket/other")
        return one, one.find()

    for one, path in on_ranks(3, run):
        assert path == tmp_path / "b" / "checkpoints" / "step_000004" and not one.owns(path)


@pytest.mark.parametrize(
    ("mirror", "expected"),
    [
        ("ftp://there/x", "is no place; write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH"),
        ("s3://", "is no place"),
        ("s3://[", "is no place"),
        ("s3://key:hidden@bucket/x", "holds a user or a password"),
        ("s3://bucket/x", "which is not encrypted"),
        ("gs://bucket/x", "needs obstore, which is not installed"),
        ("s3:/bucket/x", "is no place; write s3://bucket/x; a folder of this name is written ./s3:/bucket/x"),
        ("s3:bucket/x", "is no place; write s3://bucket/x"),
        ("GS:bucket", "is no place; write gs://bucket"),
        ("azure:bucket/x", "is no place; write FOLDER, s3://BUCKET/PATH or gs://BUCKET/PATH"),
        ("s3://bucket/x/step_000064", "is one checkpoint; write s3://bucket/x, the place of all"),
        (__file__, "is no folder; write FOLDER"),
        (f"{__file__}/below/it", f"cannot be used: {__file__} is no folder"),
        (" ", "is no place"),
        ("~nosuch/x", "there is no such user"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused_by_its_name(
    mirror: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place_names, "find_spec", lambda name: None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(ConfigError, match="checkpoint.mirror") as refusal:
        Every(mirror=mirror).check()
    assert expected in str(refusal.value) and "hidden" not in str(refusal.value)


def test_a_mistyped_url_to_resume_from_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for resume in ("s3:bucket/x", "gs:/bucket/x", "s3://bucket/x/step_000064"):
        with pytest.raises(ConfigError, match=r"checkpoint\.resume=.*; write [sg][3s]://bucket/x[;,]"):
            Every(resume=resume).check()
    small_checkpoint(run_folder(tmp_path, "run-10:30"), 4)
    Every(resume="run-10:30").check()


def test_a_restart_with_checkpoints_of_its_own_does_not_wait_for_the_mirror(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint(run_folder(tmp_path, "a"), 4)
    small_checkpoint(tmp_path / "there", 9)

    def run(world: Together, attempt: int) -> Any:
        one = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        path = one.find(attempt=attempt)
        return path.name if path else ""

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "probe", lambda *arguments: 1 / 0)
        assert on_ranks(3, lambda world: run(world, 1)) == ["step_000004"] * 3
    (tmp_path / "there" / "mirror.json").write_text('{"run": "another", "host": "x"}')
    shutil.rmtree(tmp_path / "a")
    assert on_ranks(3, lambda world: run(world, 1)) == [""] * 3, "of another run by now"
    assert on_ranks(3, lambda world: run(world, 0)) == ["step_000009"] * 3


def test_a_checkpoint_that_is_whole_there_stays_whatever_happens_here(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "there", 4)

    def refuse(scalars: dict[str, Any]) -> None:
        raise DataError("read wrongly")

    def run(world: Together) -> None:
        one = checkpointer(run_folder(tmp_path, "a"), world, mirror=str(tmp_path / "there"))
        with pytest.raises(DataError, match="read wrongly"):
            one.find(judge=refuse)
        one.retain()
        assert world.rank or one._sources.mirror.is_done(HANG_S)  # type: ignore[union-attr]

    assert on_ranks(3, run) == [None] * 3
    assert Folder(str(tmp_path / "there")).steps() == [4]


def test_what_was_fetched_in_vain_is_removed(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "there", 4)
    small_checkpoint(run_folder(tmp_path, "b"), 4)

    def run(world: Together, folder: str) -> None:
        one = checkpointer(run_folder(tmp_path, folder), world, mirror=str(tmp_path / "there"))
        path = one.find()
        assert path is not None
        one.give_back(path)

    for folder, left in [("a", []), ("b", ["step_000004"])]:
        assert on_ranks(3, lambda world, folder=folder: run(world, folder)) == [None] * 3
        assert [path.name for path in storage.checkpoints(run_folder(tmp_path, folder))] == left


def test_a_run_that_waits_for_its_mirror_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((heartbeat, "_cell"), (waits, "_numbers"), (waits, "_names")):
        monkeypatch.setattr(module, name, getattr(module, name))
    board, place, said, lines = Board(1), tmp_path / "there", list[str](), list[str]()
    heartbeat.attach(board.fd, 0)
    waits.place("backward")
    watch, begun = WaitWatch(board, lambda note: lines.append(note.text)), board.read(0).at

    def silent(*_: object) -> dict[str, Any]:
        for second in (0, 40):
            watch.look([0], begun + second, begun + second)
        while not said:
            threading.Event().wait(0.01)
        return {}

    monkeypatch.setattr(sources, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(Folder, "read_owner", silent)
    folder = run_folder(tmp_path, "a")
    sources.Sources(folder, Every(mirror=str(place)), "a", said.append, said.append).candidates(0)
    assert said == [
        f"waiting for checkpoint.mirror={place}, which has not answered for 0 s",
        f"the mirror {place} holds no checkpoint yet",
    ]
    assert lines == [f"the start takes long: rank 0 in requests to checkpoint.mirror={place} after 40 s"]
    board.close()


def test_a_failure_of_the_run_names_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    report(Failed(None, 5, int(Exit.IO), "the mirror is full", ""))
    report(Failed(1, 5, int(Exit.IO), "this disk is full", ""))
    assert capsys.readouterr().err == (
        "dtf: error[E_IO] step=5: the mirror is full\ndtf: error[E_IO] rank=1 step=5: this disk is full\n"
    )


def test_nothing_is_mirrored_where_nothing_is_saved() -> None:
    with pytest.raises(ConfigError, match="nothing to mirror"):
        Every(every_steps=0, mirror="there").check()
