"""Checkpoints under attack: damage never loads, a failure on one rank reaches all, a run folder survives any life."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dtf.checkpoint import storage
from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.manifest import BLOCK_BYTES, Manifest, StoredBox, StoredTensor
from dtf.checkpoint.safetensors_format import header
from dtf.core.errors import DataError, DtfError, Exit, SaveError
from dtf.core.types import Box, State
from tests.support.checkpoints import Together, checkpointer, damage, noise, on_ranks, small_checkpoint, whole


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of folders are written here and none has to outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# ---------------------------------------------------------------- any damage is found before a tensor is handed out


def read_everything(folder: Path) -> None:
    source = checkpointer(folder.parent).load(folder)
    for name in source.names():
        source.read(name)


def test_200_of_200_damages_are_found(tmp_path: Path) -> None:
    good = small_checkpoint(tmp_path / "good")
    older = small_checkpoint(tmp_path / "good", 1)
    found = 0
    for seed in range(200):
        folder = shutil.copytree(tmp_path / "good", tmp_path / "trial")
        what = damage(folder / good.name, random.Random(seed))
        notes: list[str] = []
        assert checkpointer(folder, notes=notes).find() == folder / older.name, (seed, what)
        assert len(notes) == 1 and "skipped" in notes[0], (seed, what)
        with pytest.raises(DataError):
            read_everything(folder / good.name)
        found += 1
        shutil.rmtree(folder)
    assert found == 200
    read_everything(good)


def test_files_of_another_checkpoint_are_foreign(tmp_path: Path) -> None:
    a, b = small_checkpoint(tmp_path, 1), small_checkpoint(tmp_path, 2)
    (a / "state.json").write_bytes((b / "state.json").read_bytes())  # same size, other content
    assert storage.first_fault(a) is not None and storage.first_fault(b) is None


def test_damage_is_found_whichever_rank_looks(tmp_path: Path) -> None:
    boxes = [whole("model/w", noise((5 * BLOCK_BYTES // 4,), torch.float32, 0))]
    path = Path(checkpointer(tmp_path).save(1, State(boxes, {}), {})) / "rank_0.safetensors"
    clean = path.read_bytes()
    for block in range(6):
        data = bytearray(clean)
        data[min(block * BLOCK_BYTES + 5, len(data) - 1)] ^= 4
        path.write_bytes(data)
        for size in (1, 2, 3):
            found = on_ranks(size, lambda world: checkpointer(tmp_path, world).find())
            assert {type(error) for error in found} == {DataError} and len({str(error) for error in found}) == 1
        assert list(storage.faults(path.parent, storage.read_manifest(path.parent))) == [
            f"rank_0.safetensors: bytes {block * BLOCK_BYTES} to {min((block + 1) * BLOCK_BYTES, len(clean))} are "
            "damaged or unreadable"
        ]


def test_a_tensor_that_lies_elsewhere_than_the_manifest_says_is_refused(tmp_path: Path) -> None:
    """A checkpoint with valid digests but a header that disagrees: by hand, or by a defect of the writer."""
    draft = storage.begin(tmp_path, 1, "r", print)
    assert draft is not None
    files = {
        "r.safetensors": storage.write(draft / "r.safetensors", [header([("model/w", "F32", (2, 2))]), bytes(16)]),
        "state.json": storage.write(draft / "state.json", [b"{}"]),
    }
    boxes = (StoredBox("r.safetensors", "model/w", (0,), (4,)),)
    storage.commit(draft, Manifest(1, "r", "dp", 1, None, files, {"model/w": StoredTensor("F32", (4,), boxes)}))
    with pytest.raises(DataError, match="not what the manifest says"):
        checkpointer(tmp_path).load(tmp_path / "step_000001").read("model/w")


# ---------------------------------------------------------------- failures reach every rank


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_on_any_rank_fails_all_and_keeps_the_last_good(
    tmp_path: Path, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    small_checkpoint(folder, 1)
    boxes = [[whole(f"model/{r}", noise((8,), torch.float32, r))] for r in range(3)]
    real = os.write
    at = 0
    for at in itertools.count(1):
        lock, calls = threading.Lock(), itertools.count(1)

        def write(file: int, data: Any, lock: threading.Lock = lock, calls: Iterator[int] = calls, at: int = at) -> int:
            with lock:
                if next(calls) == at:
                    raise OSError(error, os.strerror(error))
            return real(file, data)

        monkeypatch.setattr(os, "write", write)
        results = on_ranks(3, lambda world: checkpointer(folder, world).save(2, State(boxes[world.rank], {}), {}))
        monkeypatch.setattr(os, "write", real)
        if all(isinstance(result, str) for result in results):
            break
        assert {type(result) for result in results} == {SaveError}, (at, results)
        assert len({str(result) for result in results}) == 1
        assert os.strerror(error) in str(results[0]) and "step_000002" in str(results[0])
        assert not list(folder.glob("step_*.tmp-*")) and not list(folder.glob(".trash-*"))
        kept = checkpointer(folder).find()
        assert kept is not None and kept.name in ("step_000001", "step_000002")
        if kept.name == "step_000002":  # only `latest` was not written
            shutil.rmtree(kept)
    assert at == 7  # three shards, state, manifest, latest; then none failed
    assert checkpointer(folder).find() == folder / "step_000002"


def test_a_removed_folder_is_no_full_disk(tmp_path: Path) -> None:
    """Whether the run folder is gone or the one of its checkpoints, and when it went."""
    folder = tmp_path / "run" / "checkpoints"
    folder.parent.mkdir()
    notes: list[str] = []
    saver, state = checkpointer(folder, notes=notes), State([whole("model/w", torch.zeros(3))], {})
    saver.save(1, state, {})
    shutil.rmtree(folder)
    saver.save(2, state, {})
    assert notes == [f"{folder} was removed while the run went on, with its checkpoints; this save makes it anew"]

    def removes(draft: Path) -> list[dict]:
        shutil.rmtree(folder)
        return []

    with pytest.raises(SaveError, match=rf"step_000003 could not be written: {folder} was removed .*; its checkpoints"):
        saver.save(3, State(state.boxes, {}, lambda: removes), {})
    shutil.rmtree(folder.parent)
    with pytest.raises(SaveError, match=rf"step_000004 could not be written: {folder.parent} was removed while"):
        saver.save(4, state, {})
    with pytest.raises(SaveError, match=rf"could not be written: {folder.parent} was removed while"):
        checkpointer(folder).save(4, state, {})


def test_a_rank_that_cannot_make_its_boxes_fails_all(tmp_path: Path) -> None:
    bad = [Box("model/x", torch.zeros(2, dtype=torch.complex64), (2,), (0,))]
    results = on_ranks(
        3, lambda world: checkpointer(tmp_path, world).save(1, State(bad if world.rank == 2 else [], {}), {})
    )
    assert {(type(result), result.exit.name) for result in results} == {(DtfError, "BUG")}
    assert "rank 2" in str(results[0]) and "complex64" in str(results[0])
    assert storage.checkpoints(tmp_path) == []


@pytest.mark.parametrize(
    ("boxes", "rule"),
    [
        ([[("w", (2,), (4,), (0,))], [("w", (2,), (4,), (0,))]], "overlaps"),
        ([[("w", (2,), (4,), (0,))], []], "2 of 4 elements"),
        ([[("w", (2,), (4,), (3,))], []], "does not lie in"),
        ([[("w", (2,), (4,), (0,))], [("w", (3,), (5,), (2,))]], "on one rank"),
        ([[("w w", (2,), (2,), (0,))], []], "tensor name"),
    ],
)
def test_boxes_that_do_not_make_up_their_tensors_are_a_defect(tmp_path: Path, boxes: list, rule: str) -> None:
    made = [[Box(name, torch.zeros(local), shape, offset) for name, local, shape, offset in mine] for mine in boxes]
    results = on_ranks(2, lambda world: checkpointer(tmp_path, world).save(1, State(made[world.rank], {}), {}))
    assert all(type(result) is DtfError and rule in str(result) for result in results), results
    assert storage.checkpoints(tmp_path) == []


def test_ranks_that_do_not_share_the_folder_are_told(tmp_path: Path) -> None:
    small_checkpoint(tmp_path / "0")
    (tmp_path / "1").mkdir()
    found = on_ranks(2, lambda world: on_another_host(world, tmp_path).find())
    assert all(isinstance(error, DataError) and "rank 1 cannot read it" in str(error) for error in found), found
    boxes = State([whole("model/w", torch.zeros(3))], {})
    saved = on_ranks(
        2, lambda world: on_another_host(world, tmp_path).save(9, boxes if world.rank else State([], {}), {})
    )
    assert all(isinstance(error, SaveError) and "rank 1" in str(error) for error in saved), saved


def on_another_host(world: Together, root: Path) -> Checkpointer:
    """A checkpointer whose paths mean another disk on rank 1."""
    made = checkpointer(root / "0", world)
    if world.rank:
        theirs = (str(root / "0"), str(root / "1"))
        broadcast = world.broadcast
        world.broadcast = lambda value: json.loads(json.dumps(broadcast(value)).replace(*theirs))  # type: ignore[method-assign]
    return made


# ---------------------------------------------------------------- a life of a run folder


class Life(RuleBasedStateMachine):
    """Save, crash, damage, restart in any order; a model says which checkpoints must be there."""

    root: Path
    numbers = itertools.count()

    @initialize(keep_last=st.integers(1, 3), keep_best=st.integers(0, 2))
    def start(self, keep_last: int, keep_best: int) -> None:
        self.folder = self.root / str(next(self.numbers)) / "checkpoints"
        self.folder.parent.mkdir()
        self.options: dict[str, Any] = {"keep_last": keep_last, "keep_best": keep_best}
        self.values: dict[int, float | None] = {}  # of checkpoints that must load
        self.step = 0

    @rule(value=st.none() | st.sampled_from([0.0, 0.25, 0.5, float("nan"), float("inf")]))
    def save(self, value: float | None) -> None:
        self.step += 1
        checkpointer(self.folder, **self.options).save(
            self.step, State([whole("model/step", torch.tensor(self.step))], {}), {"step": self.step}, value
        )
        self.values.setdefault(self.step, value)
        self.retain()

    def retain(self) -> None:
        steps = sorted(self.values)
        finite = [step for step in steps if (v := self.values[step]) is not None and math.isfinite(v)]
        best = sorted(finite, key=lambda step: -(self.values[step] or 0.0))[: self.options["keep_best"]]
        self.values = {
            step: self.values[step] for step in steps if step in best or step in steps[-self.options["keep_last"] :]
        }

    @rule(at=st.integers(1, 30))
    def crash(self, at: int) -> None:
        calls = itertools.count(1)

        class Killed(BaseException):
            pass

        def dying(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **keywords: Any) -> Any:
                if next(calls) >= at:
                    raise Killed
                return real(*args, **keywords)

            return call

        with pytest.MonkeyPatch.context() as patch:
            for name in ("open", "write", "mkdir", "rename", "replace", "unlink", "rmdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            with suppress(Killed):
                self.save(None)
        there = {storage.step_of(folder.name) or 0 for folder in storage.checkpoints(self.folder)}
        assert there - self.values.keys() <= {self.step}, "a crash brought something back"
        if self.step in there:
            self.values.setdefault(self.step, None)
        elif self.step not in self.values:
            self.step -= 1  # trained again after the restart
        self.values = {step: value for step, value in self.values.items() if step in there}
        self.restart()

    @precondition(lambda self: len(self.values) > 1)
    @rule(seed=st.integers(0, 2**32), data=st.data())
    def harm(self, seed: int, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from(sorted(self.values)))
        folder = self.folder / storage.step_name(step)
        damage(folder, random.Random(seed))
        del self.values[step]
        assert checkpointer(self.folder, **self.options).find() == self.newest()
        shutil.rmtree(folder)
        self.step = max(self.values)

    @rule()
    def restart(self) -> None:
        again = checkpointer(self.folder, **self.options)
        assert again.find() == self.newest()
        again.retain()
        self.retain()
        left = os.listdir(self.folder) if self.folder.exists() else []
        assert all(name == "latest" or storage.step_of(name) is not None for name in left), left

    def newest(self) -> Path | None:
        return self.folder / storage.step_name(max(self.values)) if self.values else None

    @invariant()
    def what_is_there_loads_and_is_what_was_saved(self) -> None:
        if not hasattr(self, "folder"):
            return
        assert {storage.step_of(folder.name) for folder in storage.checkpoints(self.folder)} == set(self.values)
        for step in self.values:
            source = checkpointer(self.folder).load(self.folder / storage.step_name(step))
            assert source.scalars == {"step": step} and int(source.read("model/step")) == step


def test_a_run_folder_survives_any_life(tmp_path: Path) -> None:
    Life.root = tmp_path
    run_state_machine_as_test(Life, settings=settings(max_examples=25, stateful_step_count=15, deadline=None))


# ---------------------------------------------------------------- what a person learns without observers


@pytest.mark.slow
def test_damage_is_told_where_nobody_observes(run_dtf: Callable[..., Any]) -> None:
    command = [
        "plugins=[tests.support.toy]",
        "recipe=toy",
        "step.batch_size=24",
        "lr.warmup=0",
        "checkpoint.every_steps=2",
        "launcher.processes=1",
        "observer=[]",
    ]
    folder = run_dtf(*command, "train.steps=4", "train.until=4").folder
    newest = folder / "checkpoints" / "step_000004"
    (newest / "state.json").unlink()
    again = run_dtf(*command, "train.steps=4", folder=folder)
    assert again.code == 0, again.err
    log = (folder / "rank_0.log").read_text()
    assert f"warning: checkpoint {newest} is skipped: state.json" in log
    for checkpoint in storage.checkpoints(folder / "checkpoints"):
        (checkpoint / "manifest.json").unlink()
    again = run_dtf(*command, "train.steps=4", folder=folder)
    words = f"{newest.parent} holds no checkpoint that can be loaded (step_000004: manifest.json is missing"
    assert again.code == Exit.DATA
    assert (
        words in again.err
        and words in json.loads((folder / "run.json").read_text())["cause"]
        and words in (folder / "rank_0.log").read_text()
    )
