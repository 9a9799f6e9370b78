"""The run folder: made once, locked while the run lives, continued only by the same run."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from dtf.cli.trials import find
from dtf.config.settings import Settings
from dtf.core.errors import BusyError, ConfigError, SaveError
from dtf.core.redaction import is_secret, redact
from dtf.core.types import Failed, Measured, Saved, Started
from dtf.runs.run_folder import Run, identity, versions
from dtf.strategies.ddp import Ddp


def config(**changes: Any) -> dict[str, Any]:
    base = {
        "seed": 0,
        "run": {"name": "", "dir": ""},
        "step": {"batch_size": 128, "micro_batch_rows": 0},
        "optimizer": {"name": "sgd", "momentum": 0.9},
        "sampler": {"name": "shuffle", "tail": "partial"},
        "recipe": {"name": "toy", "model": {"depth": 8}, "data": {"root": "/data", "pixels": 24}},
        "strategy": {"name": "ddp"},
        "checkpoint": {"name": "every", "resume": "auto"},
        "launcher": {"name": "local", "env": {"API_TOKEN": "hunter2", "LEVEL": "3"}},
    }
    for key, value in changes.items():
        node, *parts = base, *key.split("__")
        for part in parts[:-1]:
            node = node[part]
        node[parts[-1]] = value
    return base


def opened(wanted: dict[str, Any], again: str = "") -> Run:
    stand_in = SimpleNamespace(run=SimpleNamespace(**wanted["run"]), strategy=Ddp(), objective=("loss", "min"))
    return Run.open(wanted, cast(Settings, stand_in), processes=2, devices="cpu", again=again)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file() and path.name != ".lock"}


def test_a_folder_of_its_own_each_time(here: Path) -> None:
    first, second = opened(config()), opened(config())
    assert first.folder != second.folder and first.id != second.id
    assert first.folder.parent == second.folder.parent == here / "outputs" / "toy"
    assert opened(config(run__name="mine")).folder.parent == here / "outputs" / "mine"
    assert first.folder.stat().st_mode & 0o777 == 0o700


def test_a_mirror_in_the_folder_is_refused_before_there_is_one(here: Path) -> None:
    wanted = config(run__dir="run", checkpoint__mirror=str(here / "run" / "mirror"))
    with pytest.raises(ConfigError, match="checkpoint.mirror=.*would be lost with it"):
        opened(wanted)
    assert not (here / "run").exists()


def test_what_the_folder_says_of_the_run(here: Path) -> None:
    run = opened(config())
    record = json.loads((run.folder / "run.json").read_text())
    assert record["exit"] is None and record["world"] == {"processes": 2, "devices": "cpu", "strategy": "ddp"}
    run.end(79, "it diverged")
    record = json.loads((run.folder / "run.json").read_text())
    assert (record["exit"], record["cause"]) == (79, "it diverged")
    assert record["started"] <= record["ended"]
    assert record["versions"]["python"] == sys.version.split()[0]
    saved = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert saved == run.redacted() and saved["launcher"]["env"] == {"API_TOKEN": "***", "LEVEL": "3"}
    assert run.config["launcher"]["env"]["API_TOKEN"] == "hunter2", "ranks get the real one"
    assert not [path for path in run.folder.rglob("*") if "hunter2" in path.read_text()]


def test_versions_are_read_without_importing() -> None:
    assert set(versions()) == {"dtf", "python", "torch", "torchvision", "numpy"}
    code = (
        "import sys; from dtf.runs.run_folder import versions; assert versions()['torch']; sys.exit('torch' in "
        "sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


def test_a_live_run_keeps_its_folder(here: Path) -> None:
    run = opened(config(run__dir="runs/a"))
    before = contents(run.folder)
    with pytest.raises(BusyError, match=f"in use by a live run \\(process {os.getpid()} on "):
        opened(config(run__dir="runs/a"))
    assert contents(run.folder) == before
    run.end(0)
    opened(config(run__dir="runs/a")).end(0)


def test_a_lock_dies_with_its_process(here: Path) -> None:
    """The next process must not be held up by the lock file of a killed one."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from tests.unit.test_run_folder import *; "
        "opened(config(run__dir='runs/a')); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__).parents[2])], check=False)
    assert (here / "runs/a/run.json").exists()
    opened(config(run__dir="runs/a")).end(0)


def test_a_run_goes_on_in_its_folder(here: Path) -> None:
    first = opened(config(run__dir="runs/a"))
    first.end(75, "preempted")
    second = opened(config(run__dir="runs/a", optimizer__momentum=0.5, recipe__data__root="/moved"))
    second.end(0, "finished")
    record = json.loads((second.folder / "run.json").read_text())
    assert record["id"] == second.id and record["exit"] == 0
    assert [(old["id"], old["exit"]) for old in record["earlier"]] == [(first.id, 75)]
    assert yaml.safe_load((second.folder / f"config.{first.id}.yaml").read_text())["optimizer"]["momentum"] == 0.9
    opened(config(run__dir="runs/a")).end(0)
    assert len(json.loads((second.folder / "run.json").read_text())["earlier"]) == 2


def test_a_run_that_goes_on_tells_what_an_earlier_version_did_otherwise(here: Path) -> None:
    old = {"name": "pserver", "mode": "half_async", "gather": 5}
    opened(config(run__dir="runs/a", strategy=old)).end(75)
    assert opened(config(run__dir="runs/b", checkpoint__resume="runs/a")).notes == [], "there is no checkpoint"
    (here / "runs/a/checkpoints/step_000004").mkdir(parents=True)
    (here / "runs/a/checkpoints/step_000004/manifest.json").write_text("{}")
    told = ["the run was recorded with strategy.gather=5"]
    for run in (
        opened(config(run__dir="runs/c", checkpoint__resume="runs/a")),
        opened(config(run__dir="runs/d", checkpoint__resume="runs/a/checkpoints/step_000004")),
        opened(config(run__dir="runs/a")),
    ):
        assert [text.partition(", which")[0] for text in run.notes] == told
        run.end(75)
    assert opened(config(run__dir="runs/a")).notes == [], "it was told, and is recorded without it"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 1}, "holds a run with seed=0, this one has seed=1"),
        ({"step__batch_size": 64}, "step.batch_size=128, this one has step.batch_size=64"),
        ({"recipe__model": {"depth": 20}}, "recipe.model.depth=8, this one has recipe.model.depth=20"),
        ({"recipe__name": "other"}, "recipe.name=toy, this one has recipe.name=other"),
        (
            {"recipe__name": "other", "recipe__a": 1},
            "recipe.name=other; choose another run.dir, or the same recipe: a run goes on under the command that "
            "started it, recipe=NAME",
        ),
        ({"checkpoint__resume": "never"}, "choose another run.dir or checkpoint.resume=auto"),
        ({"checkpoint": {"name": "off"}}, "checkpoint.resume=never"),
    ],
)
def test_another_run_is_not_mixed_with_it(here: Path, changes: dict[str, Any], words: str) -> None:
    first = opened(config(run__dir="runs/a"))
    first.see(Measured("train", 20, 0.1, 1.0, {"loss": 1.0}))
    first.end(0)
    before = contents(here / "runs/a")
    with pytest.raises(BusyError, match=words):
        opened(config(run__dir="runs/a", **changes))
    assert contents(here / "runs/a") == before, "nothing is lost"


def test_a_folder_without_a_result_takes_another_config(here: Path) -> None:
    first = opened(config(run__dir="runs/a"))
    first.see(Started(0, 100, 10, {"recipe": "toy"}))
    first.see(Failed(0, 0, 2, "a mistake in the recipe", ""))
    first.end(2)
    second = opened(config(run__dir="runs/a", seed=1, checkpoint__resume="never"))
    record = json.loads((second.folder / "run.json").read_text())
    assert record["identity"]["seed"] == 1 and [old["id"] for old in record["earlier"]] == [first.id]
    second.see(Saved(5, "checkpoints/step_000005", False, 0.1))
    second.end(1)
    with pytest.raises(BusyError, match="holds a run with seed=1, this one has seed=2"):
        opened(config(run__dir="runs/a", seed=2))
    opened(config(run__dir="runs/a", seed=1)).end(1)
    with pytest.raises(BusyError, match="holds a run with seed=1, this one has seed=2"):
        opened(config(run__dir="runs/a", seed=2))


@pytest.mark.parametrize(("left", "fits"), [("table", False), ("checkpoint", False), ("", True)])
def test_a_folder_of_an_earlier_version_tells_by_its_start_and_checkpoints(here: Path, left: str, fits: bool) -> None:
    opened(config(run__dir="runs/a")).end(1)
    file = here / "runs/a/run.json"
    record = json.loads(file.read_text())
    del record["results"]
    file.write_text(json.dumps(record | ({"table": {}} if left == "table" else {})))
    if left == "checkpoint":
        (here / "runs/a/checkpoints/step_000005").mkdir(parents=True)
    with nullcontext() if fits else pytest.raises(BusyError, match="holds a run with seed=0"):
        opened(config(run__dir="runs/a", seed=1)).end(1)


def test_a_job_that_trains_nothing_keeps_its_folder(here: Path) -> None:
    opened(config(run__dir="runs/a", job={"name": "predict", "top": 1})).end(1)
    with pytest.raises(BusyError, match="holds a run with job.top=1"):
        opened(config(run__dir="runs/a", job={"name": "predict", "top": 2}))


def test_an_attempt_goes_on_whatever_resume_says(here: Path) -> None:
    first = opened(config(checkpoint__resume="never"))
    first.end(1)
    assert opened(config(checkpoint__resume="never"), again=str(first.folder)).folder == first.folder


def test_a_folder_that_holds_something_else_is_left_alone(here: Path) -> None:
    folder = here / "thesis"
    folder.mkdir()
    (folder / "chapter.txt").write_text("years of work")
    with pytest.raises(BusyError, match="is not empty and holds no run \\(chapter.txt\\)"):
        opened(config(run__dir="thesis"))
    assert sorted(os.listdir(folder)) == ["chapter.txt"]


def test_an_unreadable_record_is_not_overwritten(here: Path) -> None:
    opened(config(run__dir="runs/a")).end(0)
    for text in ("{", "[]", '{"identity": 3}', "", "[" * 100_000):
        (here / "runs/a/run.json").write_text(text)
        with pytest.raises(BusyError, match="cannot be read"):
            opened(config(run__dir="runs/a"))
        assert (here / "runs/a/run.json").read_text() == text
    (here / "runs/a/run.json").unlink()
    os.mkfifo(here / "runs/a/run.json")  # would wait for ever for somebody who writes
    with pytest.raises(BusyError, match="no regular file"):
        opened(config(run__dir="runs/a"))
    with pytest.raises(BusyError, match="no regular file"):
        find(here / "runs/a", config())


def test_whole_checkpoints_under_an_unreadable_record_are_not_lost(here: Path) -> None:
    opened(config(run__dir="runs/a")).end(0)
    (here / "runs/a/run.json").write_text("")
    (here / "runs/a/checkpoints/step_000002").mkdir(parents=True)
    with pytest.raises(BusyError) as caught:
        opened(config(run__dir="runs/a"))
    remedy = f"choose another run.dir, with checkpoint.resume='{here}/runs/a' to go on from its checkpoints"
    assert str(caught.value).endswith(remedy)


def test_a_process_killed_while_it_began_does_not_block_the_next(here: Path) -> None:
    folder = here / "runs/a"
    folder.mkdir(parents=True)
    for leftover in (".lock", ".run.json.new"):
        (folder / leftover).write_text("half")
    opened(config(run__dir="runs/a")).end(0)
    (folder / "config.yaml").unlink()
    opened(config(run__dir="runs/a")).end(0)


def test_a_folder_that_cannot_be_made_is_a_config_error(here: Path) -> None:
    (here / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(ConfigError, match=f"run.dir={place}: the run folder .* cannot be used"):
            opened(config(run__dir=place))


def disk_is_full(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_folder_on_a_full_disk_is_no_config_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = config(run__dir="a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_is_full)
        with pytest.raises(SaveError, match="No space left"):
            opened(wanted)
    opened(wanted).end(0)


def test_a_full_disk_does_not_end_the_run_over_its_record(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = opened(config(run__dir="a"))
    before = contents(run.folder)
    monkeypatch.setattr(os, "fsync", disk_is_full)
    run.see(Started(0, 8, 8, {"parameters": 3}))
    assert "run.json has no start-up table: No space left on device" in capsys.readouterr().err
    assert contents(run.folder) == before
    run.end(0)


def test_secrets_are_found_by_the_names_of_their_keys() -> None:
    tree = {
        "api_key": "a",
        "Passwd": "b",
        "tokens": {"one": "c", "many": ["d", 4]},
        "plain": "e",
        "secret": "",
        "key_count": 3,
    }
    assert redact(tree) == {
        "api_key": "***",
        "Passwd": "***",
        "tokens": {"one": "***", "many": ["***", 4]},
        "plain": "e",
        "secret": "",
        "key_count": 3,
    }


@pytest.mark.parametrize(
    ("names", "secret"),
    [
        ("key token api_key apikey API_KEYS hubToken tokenFile recipe.token.file aws-secret-id my_password2", True),
        (
            "tokenizer tokenizers TOKENIZERS_PARALLELISM recipe.tokenizer.name detokenized keyword keypoints turkeyed",
            False,
        ),
    ],
)
def test_a_word_that_begins_like_a_secret_is_none(names: str, secret: bool) -> None:
    assert [name for name in names.split() if is_secret(name) is not secret] == []


def test_a_run_goes_on_whose_record_starred_more_keys(here: Path) -> None:
    run = opened(config(run__dir="runs/a", recipe__tokenizer="bytes"))
    run.see(Measured("train", 1, 0.1, 1.0, {"loss": 1.0}))
    run.end(0)
    record = run.folder / "run.json"
    record.write_text(record.read_text().replace('"bytes"', '"***"'))
    opened(config(run__dir="runs/a", recipe__tokenizer="bytes")).end(0)
    with pytest.raises(BusyError, match="recipe.tokenizer=bytes, this one has recipe.tokenizer=words"):
        opened(config(run__dir="runs/a", recipe__tokenizer="words"))


def test_identity_says_what_makes_the_numbers() -> None:
    recipe = {"recipe.name", "recipe.model.depth", "recipe.data.pixels"}
    assert set(identity(config())) == {"seed", "step.batch_size", "optimizer", "sampler.name", "sampler.tail"} | recipe
