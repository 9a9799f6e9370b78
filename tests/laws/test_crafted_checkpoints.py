"""Checkpoints whose digests are right and whose content no run has written: none stops a start, none is saved over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.checkpoint import storage
from dtf.checkpoint.safetensors_format import header
from dtf.core.types import State
from dtf.engine.resume import position
from tests.support.checkpoints import checkpointer, on_ranks, reseal, small_checkpoint, whole


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda file: None)


HUGE = 10**400
TENSOR = "model/0.w"
NEVER_WRITTEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an objective that is no float64": lambda m: m.update(objective=["accuracy", "max", HUGE]),
    "hexadecimal digits with spaces": lambda m: m.update(
        objective=["accuracy", "max", {"$float64": "00 00 00 00 00 0"}]
    ),
    "a step that has no name": lambda m: m.update(step=HUGE),
    "an empty tensor larger than memory": lambda m: m["tensors"].update(
        x={"dtype": "F32", "shape": [0, 1 << 61], "boxes": [["state.json", "x", [0, 0], [0, 1 << 61]]]}
    ),
    "nested lists for a number": lambda m: m.update(step=json.loads("[" * 900 + "]" * 900)),
    "a box of another file": lambda m: m["tensors"][TENSOR]["boxes"][0].__setitem__(0, "state.json"),
    "a box of another key": lambda m: m["tensors"][TENSOR]["boxes"][0].__setitem__(1, "k"),
    "a box of another dtype": lambda m: m["tensors"][TENSOR].update(dtype="I32"),
}


def unusable_files() -> dict[str, dict[str, bytes]]:
    shard, length = "rank_0.safetensors", (1 << 40).to_bytes(8, "little")
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    return {
        "scalars that are no JSON": {"state.json": b"{"},
        "scalars that are a list": {"state.json": b"[1]"},
        "scalars with digits that are none": {"state.json": b'{"clock":{"$float64":"00 00 00 00 00 0"}}'},
        "scalars of too many levels": {"state.json": deep},
        "a shard without a header": {shard: b""},
        "a shard with a header longer than it": {shard: length + b"{}"},
        "a shard with a header of too many levels": {shard: len(deep).to_bytes(8, "little") + deep},
        "a shard without its tensors": {shard: header([]) + bytes(4000)},
    }


@pytest.mark.parametrize("what", [*NEVER_WRITTEN, *unusable_files()])
def test_content_that_no_run_writes_leaves_the_older_checkpoint(tmp_path: Path, what: str) -> None:
    older, newer = small_checkpoint(tmp_path, 1), small_checkpoint(tmp_path, 2)
    reseal(newer, NEVER_WRITTEN.get(what, lambda m: None), unusable_files().get(what))
    notes: list[str] = []
    found = on_ranks(2, lambda world: checkpointer(tmp_path, world, notes).find())
    assert found == [older, older] and len(notes) == 1 and "step_000002 is skipped" in notes[0]
    again = checkpointer(tmp_path)  # the run goes on and comes to that step once more
    assert again.find() == older
    saved = again.save(2, State([whole("model/w", torch.zeros(3))], {}), {})
    assert storage.checkpoints(tmp_path)[0] == Path(saved) and checkpointer(tmp_path).find() == newer


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("clock", None),
        ("clock", {"step": -1}),
        ("clock", {"step": 1, "other": 2}),
        ("clock", {"step": 1.5}),
        ("clock", {"step": 1, "best": "x"}),
        ("window", "x"),
        ("window", []),
        ("window", [HUGE]),
        ("course", 3),
        ("program", []),
        ("program", {"skipped": -1}),
        ("program", {"loss_scale": [1.0]}),
        ("recent", 1),
        ("clean", 2),
        ("clean", "x"),
        ("recent", [{"split": "train"}]),
        ("recent", [{"split": "train", "step": 1, "epoch": 0.0, "seconds": 0.0, "values": {"loss": "x"}}]),
    ],
)
def test_scalars_that_no_run_writes_leave_the_older_checkpoint(tmp_path: Path, key: str, value: Any) -> None:
    good = {"clock": {"step": 1}, "window": [0.0, 1.0], "course": {}, "program": {"skipped": 0}, "recent": []}
    for step, scalars in ((1, good), (2, good | {key: value})):
        checkpointer(tmp_path).save(step, State([], {}), scalars)
    notes: list[str] = []
    assert checkpointer(tmp_path, notes=notes).find(judge=position) == tmp_path / "step_000001"
    assert "step_000002 is skipped: state.json" in notes[0]
