"""Saves that a thread writes: they are those that training would have waited for, and a failed one is no secret."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.checkpoint import saves as module
from dtf.checkpoint import storage
from dtf.checkpoint.saves import Saves
from dtf.core.errors import ConfigError, DtfError, SaveError
from dtf.core.types import Box, State
from tests.support.checkpoints import Together, checkpointer, on_ranks, same_bits, whole
from tests.support.harness import meshes, spread, variants

HANG_S = 60.0
WAYS = [(*way, 2) for way in variants()] + [(*way, 4) for way in meshes()]
Told = list[tuple[str, float, float]]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("strategy", "options", "processes"),
    [
        pytest.param(*way, marks=pytest.mark.slow if way[2] == 4 or way[1] or way[0] in ("zero1", "tensor") else ())
        for way in WAYS
    ],
)
def test_what_a_thread_writes_later_is_the_state_of_its_step_byte_for_byte(
    strategy: str, options: dict[str, Any], processes: int, tmp_path: Path
) -> None:
    late, at_once = tmp_path / "late", tmp_path / "at_once"
    spread(
        strategy,
        processes,
        options=options,
        steps=3,
        save_every=1,
        optimizer="adamw",
        folder=str(late),
        at_once=str(at_once),
    )
    found = files(late)
    assert found == files(at_once)
    assert {Path(name).parts[0] for name in found} == {"latest", "step_000001", "step_000002", "step_000003"}
    assert len({found[f"step_{step:06}/rank_0.safetensors"] for step in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("strategy", "options", "every"),
    [
        ("ddp", {}, {"save_every": 1}),
        ("ddp", {}, {"save_every": 9, "delta_every": 1}),
        ("pserver", {"servers": 2}, {"save_every": 9, "delta_every": 1}),
        ("pserver", {"servers": 2, "dense": "allreduce", "mode": "sync"}, {"save_every": 1}),
    ],
)
def test_rows_of_tables_are_those_of_the_step_too(
    strategy: str, options: dict[str, Any], every: dict[str, int], tmp_path: Path
) -> None:
    late, at_once = tmp_path / "late", tmp_path / "at_once"
    recipe = {"name": "tabled", "rows": 42}
    spread(
        strategy,
        2,
        options=options,
        steps=3,
        **every,
        recipe=recipe,
        folder=str(late),
        at_once=str(at_once),
    )
    found = files(late)
    assert found == files(at_once) and len({name for name in found if name.endswith("/manifest.json")}) == 3


# ---------------------------------------------------------------- one rank, step by step


class Run:
    """The saves of one rank over a toy state that each step changes."""

    def __init__(self, folder: Path, world: Any = None) -> None:
        self.notes: list[str] = []
        self.told: Told = []
        self.weight = torch.zeros(1000)
        self.check: Callable[[], None] = lambda: None
        world = world or Together(0, 1, threading.Barrier(1), [None])
        self.saves = Saves(checkpointer(folder, world), self.notes.append, lambda: world.broadcast(None))

    def save(self, step: int) -> None:
        self.weight.fill_(step)
        self.saves.ready()
        self.saves.save(step, self.state(), {"step": step}, None, lambda *told: self.told.append(told), self.check)
        self.weight.fill_(-1)  # training goes on

    def state(self) -> State:
        return State([whole("model/w", self.weight)], {})


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No file is written before it is set."""
    event, write = threading.Event(), storage.write

    def wait(*arguments: Any) -> Any:
        assert event.wait(HANG_S)
        return write(*arguments)

    monkeypatch.setattr(storage, "write", wait)
    return event


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path], bool]) -> None:
    write = storage.write

    def refuse(path: Path, pieces: Any) -> Any:
        if fails(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, pieces)

    monkeypatch.setattr(storage, "write", refuse)


def test_training_waits_for_the_copy_alone(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path)
    run.save(1)
    assert not run.told and storage.checkpoints(tmp_path) == []
    gate.set()
    run.saves.finish()
    ((path, seconds, held),) = run.told
    assert path == str(tmp_path / "step_000001") and 0 < held <= seconds
    assert same_bits(checkpointer(tmp_path).load(Path(path)).read("model/w"), torch.full((1000,), 1.0))
    assert not run.notes


@pytest.mark.parametrize("background", [True, False])
def test_nothing_is_saved_where_replicas_are_not_alike(tmp_path: Path, background: bool) -> None:
    run = Run(tmp_path)
    run.saves._barrier = run.saves._barrier if background else None
    run.save(1)

    def refuse() -> None:
        if background:  # ranks that copy less than others compare meanwhile
            [held] = run.saves._copies._held.values()
            assert same_bits(held, torch.full((1000,), 2.0))
        raise ConfigError("not alike")

    run.check = refuse
    with pytest.raises(ConfigError, match="not alike"):
        run.save(2)
    run.saves.settle()
    assert [path.name for path in storage.checkpoints(tmp_path)] == ["step_000001"] and len(run.told) == 1


def test_a_rank_waits_for_the_copies_of_others_where_it_changes_what_they_copy(tmp_path: Path) -> None:
    gone_on = threading.Event()

    def rank(world: Together) -> None:
        run = Run(tmp_path, world)

        def set_aside() -> Callable[[Path], list[dict[str, Any]]]:
            assert not gone_on.wait(0.2)
            return lambda folder: []

        run.state = lambda: State([], {}, set_aside if world.rank else None)  # type: ignore[method-assign]
        run.save(1)
        gone_on.set()
        run.saves.finish()

    on_ranks(2, rank)


def test_a_rank_without_a_thread_bears_a_failed_save_as_the_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, lambda path: "step_000001" in str(path))

    def rank(world: Together) -> list[str]:
        run = Run(tmp_path, world)
        if world.rank == 0:
            run.saves._begin = refuse  # type: ignore[method-assign]
        else:
            run.state = lambda: State([], {})  # type: ignore[method-assign]
        run.save(1)
        run.save(2)
        run.saves.finish()
        return run.notes

    def refuse(work: Callable[[], None]) -> Any:
        raise RuntimeError("can't start new thread")

    for notes in on_ranks(2, rank):
        assert len(notes) == 1 and "training goes on" in notes[0]
    assert [path.name for path in storage.checkpoints(tmp_path)] == ["step_000002"]


def test_one_thread_writes_all_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.saves.reserve(run.state().boxes)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} may never start"))
    for step in (1, 2):
        run.save(step)
    run.saves.finish()
    assert len(run.told) == 2


def test_a_save_waits_for_the_one_before_and_says_so(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    run = Run(tmp_path)
    monkeypatch.setattr(run.saves, "_note", lambda text: (run.notes.append(text), gate.set()))
    run.save(7)
    run.save(8)  # the note opens the gate
    run.saves.finish()
    assert len(run.notes) == 1 and "save of step 7 is still being written" in run.notes[0]
    assert [Path(path).name for path, *_ in run.told] == ["step_000007", "step_000008"]


def test_a_save_under_way_is_complete_before_suspects_are_set_aside(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path)
    run.save(7)
    threading.Timer(0.01, gate.set).start()
    moved, left = run.saves.set_aside(3)
    assert [name.partition("-")[0] for name in moved] == ["step_000007.suspect"] and not left
    assert storage.checkpoints(tmp_path) == [] and len(run.told) == 1


def test_memory_is_taken_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.saves.reserve(run.state().boxes)
    places = set()
    for step in (1, 2, 3):
        run.save(step)
        places |= {held.data_ptr() for held in run.saves._copies._held.values()}
    run.saves.finish()
    assert len(places) == 1 and len(storage.checkpoints(tmp_path)) == 3


@pytest.mark.parametrize("file", ["rank_0.safetensors", "state.json", "manifest.json"])
def test_a_failed_save_is_told_and_the_next_one_makes_up_for_it(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    run.save(1)
    failing(monkeypatch, lambda path: path.name == file and "000002" in path.parent.name)
    run.save(2)
    run.save(3)
    run.save(4)
    run.saves.finish()
    (note,) = run.notes
    assert (
        f"step_000002 could not be written to {tmp_path}: " in note
        and "No space left on device" in note
        and "; step_000001 is kept; make room or mend the disk; training goes on" in note
    )
    assert [Path(path).name for path, *_ in run.told] == ["step_000001", "step_000003", "step_000004"]
    assert run.told[1][1] == run.told[1][2] > run.told[2][2]  # the one after it was waited for
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000001", "step_000003", "step_000004"]


def test_two_failed_saves_in_a_row_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.saves.ready()
    failing(monkeypatch, lambda path: True)
    run.save(2)
    with pytest.raises(SaveError, match="step_000003 could not be written.*; step_000001 is kept; .*then start again"):
        run.save(3)
    assert len(run.notes) == 1 and checkpointer(tmp_path).find() == tmp_path / "step_000001"
    assert (tmp_path / "latest").read_text() == "step_000001\n"


def test_a_checkpoint_is_called_kept_only_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    failing(monkeypatch, lambda path: True)
    run.save(1)
    with pytest.raises(SaveError, match="step_000001 could not be written") as failed:
        run.saves.finish()
    assert "kept" not in f"{failed.value} {run.notes}"


def test_a_run_does_not_end_well_without_its_last_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.save(1)
    run.saves.ready()
    failing(monkeypatch, lambda path: True)
    run.save(2)
    with pytest.raises(SaveError, match="step_000002 could not be written"):
        run.saves.finish()
    assert checkpointer(tmp_path).find() == tmp_path / "step_000001"


def test_an_error_that_is_no_matter_of_disks_is_not_borne(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.weight = torch.zeros(3, dtype=torch.complex64)
    run.save(1)
    with pytest.raises(DtfError, match="complex64"):
        run.save(2)


def test_a_failure_on_one_rank_is_that_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where there is no memory for a copy nobody waits for the rank that has none."""
    room = module.Copies._room

    def no_room(self: module.Copies, box: Box) -> torch.Tensor:
        if box.offset == (1000,) and float(box.tensor[0]) == 2.0:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return room(self, box)

    monkeypatch.setattr(module.Copies, "_room", no_room)

    def work(world: Together) -> tuple[list[str], list[str]]:
        run = Run(tmp_path, world)
        monkeypatch.setattr(
            run, "state", lambda: State([Box("model/w", run.weight, (2000,), (1000 * world.rank,))], {})
        )
        for step in (1, 2, 3):
            run.save(step)
        run.saves.finish()
        return run.notes, [Path(path).name for path, *_ in run.told]

    for notes, told in on_ranks(2, work):
        assert len(notes) == 1 and f"step_000002 could not be written to {tmp_path}: rank 1: out of memory" in notes[0]
        assert told == ["step_000001", "step_000003"]


@pytest.mark.parametrize("at", [1, 2, 4, 6, 8, 10])
def test_a_kill_while_a_thread_writes_leaves_the_newest_complete_checkpoint(tmp_path: Path, at: int) -> None:
    """The process is gone at the `at`-th call that changes the disk, while its training goes on."""
    Run(tmp_path).saves.finish()
    child = os.fork()
    if not child:
        _save_and_die(tmp_path, at)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    found = checkpointer(tmp_path).find()
    assert found is not None and found.name in ("step_000001", "step_000002")
    step = float(found.name[-1])
    assert same_bits(checkpointer(tmp_path).load(found).read("model/w"), torch.full((1000,), step))
    assert json.loads((found / "state.json").read_bytes()) == {"step": int(step)}
    assert not list(tmp_path.glob("*.tmp-*"))


def _save_and_die(folder: Path, at: int) -> None:
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return call

    try:
        run = Run(folder)
        run.save(1)
        run.saves.ready()
        for name in ("write", "fsync", "rename", "replace", "mkdir"):
            setattr(os, name, dying(getattr(os, name)))
        run.save(2)
        threading.Event().wait(HANG_S)
    finally:
        os._exit(1)
