"""A run whose folder is lost goes on from its mirror, an S3 server; what was announced is there, whatever is killed."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtf.checkpoint import storage
from dtf.checkpoint.places import fetch, open_place
from dtf.jobs.chaos.command import Command
from tests.support.launching import HANG_S
from tests.support.object_store import object_store

RUN = ["strategy=ddp", "step.batch_size=16", "recipe.data.pixels=8", "recipe.data.train_rows=128"]
MIRROR = "checkpoint.mirror=s3://bucket/runs/one"


@pytest.fixture(scope="module")
def store() -> Iterator[dict[str, str]]:
    with object_store() as environment:
        yield environment


@pytest.mark.slow
def test_a_run_that_has_lost_its_folder_goes_on_from_the_store(
    run_dtf: Any, store: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "lost"
    options = [*RUN, MIRROR, "checkpoint.every_steps=3", "train.eval_every=0", "train.steps=8"]
    first = run_dtf(*options, "train.until=6", folder=folder)
    assert first.code == 0 and "mirrored step_000006 to s3://bucket/runs/one" in first.out, first.out + first.err
    kept = {path.name: path.read_bytes() for path in (folder / "checkpoints" / "step_000006").iterdir()}
    shutil.rmtree(folder)
    second = run_dtf(*options, "strategy=dp", folder=folder)
    assert second.code == 0 and "started step=6/8" in second.out, second.out + second.err
    assert "mirrored step_000008" in second.out
    assert kept == {path.name: path.read_bytes() for path in (folder / "checkpoints" / "step_000006").iterdir()}
    third = run_dtf(*RUN, "train.steps=9", "train.eval_every=0", "checkpoint.resume=s3://bucket/runs/one")
    assert third.code == 0 and "started step=8/9" in third.out, third.out + third.err
    fourth = run_dtf(*options, "checkpoint.mirror=s3://nowhere/x")
    assert fourth.code == 2 and "cannot be used: NoSuchBucket" in fourth.err, fourth.err
    assert len(open_place("s3://bucket/runs/one").steps()) == 3


@pytest.mark.slow
def test_50_kills_during_uploads_lose_nothing_that_was_announced(tmp_path: Path) -> None:
    """The line is slow: something is on its way most of the time. After half of the kills the folder is lost."""
    with object_store(2e6) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        rng, folder, place = random.Random(1), tmp_path / "run", open_place("s3://bucket/kills")
        for _ in range(50):
            _train_until_killed(folder, tmp_path / "log", environment, rng)
            there, announced = place.steps(), max(_mirrored(folder / "events.jsonl"))
            for step in there:
                shutil.rmtree(tmp_path / "copy", ignore_errors=True)
                (tmp_path / "copy").mkdir()
                assert storage.first_fault(fetch(place, step, tmp_path / "copy", "copy")) is None
            assert there and there[0] >= announced, f"{announced} was announced, {there} are there"
            if rng.random() < 0.5:
                shutil.rmtree(folder)


def _train_until_killed(folder: Path, log: Path, environment: dict[str, str], rng: random.Random) -> None:
    """Go on with a run, and kill it some time after it has mirrored one or several checkpoints."""
    endless = ["launcher.processes=2", "train.steps=100000", "train.eval_every=0", "checkpoint.every_steps=2"]
    more = ["checkpoint.mirror=s3://bucket/kills", "observer=[jsonl,events]", f"run.dir='{folder}'"]
    events = folder / "events.jsonl"
    enough = len(list(_mirrored(events))) + rng.randrange(1, 6)
    command = Command([*RUN, *endless, *more], log, environment)
    try:
        assert command.watch(lambda: len(list(_mirrored(events))) >= enough, HANG_S), log.read_text()
        assert not command.watch(lambda: False, rng.uniform(0.0, 1.0)) and command.code is None, log.read_text()
    finally:
        command.end()


def _mirrored(events: Path) -> Iterator[int]:
    """The steps that a run announced."""
    for line in events.read_text().splitlines() if events.exists() else ():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event.get("event") == "Note" and event["text"].startswith("mirrored step_"):
            yield int(event["text"].split()[1][5:])
