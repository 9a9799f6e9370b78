"""Whole runs on image files: bad ones counted, mixing, and what is done with a trained model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.core.errors import DataError
from dtf.recipes.resnet.photo_recipe import BadRecords
from tests.support.image_files import encode, picture, tree
from tests.support.odd_images import BAD, LEFT_OUT, odd_files, write
from tests.unit.test_photos import recipe

WATCHED, LINES = ["observer=[console,jsonl]"], ["train.log_every=3"]
SHORT = [
    "recipe=resnet_photos",
    "recipe.model.arch=resnet8",
    "recipe.model.stem=cifar",
    "recipe.model.classes=2",
    "recipe.data.pixels=16",
    "step.batch_size=4",
]


@pytest.mark.slow
def test_a_run_counts_unreadable_files_and_ends_when_they_are_too_many(tmp_path: Path, run_dtf: Any) -> None:
    root = tree(tmp_path / "t", train=6, val=5)
    (root / "train/c0/3.jpg").write_bytes(b"")
    (root / "val/c1/2.jpg").write_bytes(b"no image")
    common = [
        *SHORT,
        f"recipe.data.root={root}",
        f"recipe.data.cache={tmp_path}/cache",
        "train.epochs=2",
        "launcher.processes=2",
        "launcher.threads=1",
    ]
    done = run_dtf(*common, "recipe.data.bad_records=skip", "recipe.data.bad_share=0.1")
    assert done.code == 0, done.err
    logs = "".join(path.read_text() for path in done.folder.glob("rank_*.log"))
    assert "train/c0/3.jpg cannot be used and is skipped: it is empty" in logs and "val/c1/2.jpg cannot be used" in logs
    (root / "val/c0/2.jpg").write_bytes(b"")
    done = run_dtf(*common, "recipe.data.bad_records=skip", "recipe.data.bad_share=0.1")
    assert done.code == 65 and "2 evaluation rows cannot be read, recipe.data.bad_share allows 1" in done.err
    done = run_dtf(*common)
    assert done.code == 65 and "cannot be used" in done.err and "recipe.data.bad_records=skip" in done.err


def test_a_bad_file_is_counted_once_however_many_ranks_meet_it(tmp_path: Path, run_dtf: Any) -> None:
    """Over epochs every rank meets it; an evaluation's padding meets it too."""
    root = tree(tmp_path / "t", train=6, val=5)
    (root / "train/c0/3.jpg").write_bytes(b"")
    (root / "val/c1/3.jpg").write_bytes(b"")  # in the last batch, of two rows: the second rank has none
    common = [
        *SHORT,
        f"recipe.data.root={root}",
        f"recipe.data.cache={tmp_path}/cache",
        "launcher.processes=2",
        "launcher.threads=1",
    ]
    done = run_dtf(
        *common, "recipe.data.bad_records=skip", "recipe.data.bad_share=0.01", "train.epochs=6", *WATCHED, *LINES
    )
    assert done.code == 0, done.err
    assert skipped(done.folder) == {"train": [1] * 6, "eval": [1] * 6}
    assert " skipped_rows=1 " in done.out and " skipped_train_rows=6 " in done.out
    assert "warning: 2 rows cannot be read and counted for nothing: train/c0/3.jpg: it is empty; val/c1" in done.out


def skipped(folder: Path) -> dict[str, list[int]]:
    """What metrics.jsonl says of rows that could not be read."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {split: [line["skipped_rows"] for line in lines if line["split"] == split] for split in ("train", "eval")}


@pytest.mark.slow
def test_skipped_rows_are_the_same_with_any_ranks_and_after_a_stop(tmp_path: Path, run_dtf: Any) -> None:
    """A row counts in each epoch. Between two lines there may be a stop."""
    root = tree(tmp_path / "t", train=8, val=5)
    for name in ("train/c0/3.jpg", "train/c1/5.jpg", "train/c1/7.jpg", "val/c1/3.jpg"):
        (root / name).write_bytes(b"")
    common = [*SHORT, f"recipe.data.root={root}", f"recipe.data.cache={tmp_path}/cache", *WATCHED, "train.epochs=3"]
    common += ["recipe.data.bad_records=skip", "recipe.data.bad_share=0.5", "launcher.threads=1", "train.log_every=5"]
    one = run_dtf(*common, "launcher.processes=1", "strategy=dp")
    assert one.code == 0 and sum(skipped(one.folder)["train"]) <= 9 and " skipped_train_rows=9 " in one.out, one.err
    assert "warning: 4 rows cannot be read" in one.out
    for strategy in ("ddp", "fsdp", "tensor", "pipeline", "pserver"):
        other = run_dtf(*common, "launcher.processes=2", f"strategy={strategy}")
        assert other.code == 0, other.err
        assert skipped(other.folder)["eval"] == skipped(one.folder)["eval"], strategy
        assert " skipped_train_rows=9 " in other.out, strategy
        if strategy != "pserver":  # whose trainers are asynchronous to the lines
            assert skipped(other.folder) == skipped(one.folder), strategy
    stopped = run_dtf(*common, "launcher.processes=2", "train.until=7", "checkpoint.every_steps=7")
    assert stopped.code == 0, stopped.err
    again = run_dtf(*common, "launcher.processes=3", "checkpoint.every_steps=7", folder=stopped.folder)
    assert again.code == 0 and skipped(again.folder) == skipped(one.folder), again.err
    assert " skipped_train_rows=9 " in again.out


@pytest.mark.parametrize("split", ["val", pytest.param("test", marks=pytest.mark.slow)])
def test_a_folder_to_evaluate_needs_no_train(tmp_path: Path, run_dtf: Any, split: str) -> None:
    """It may lack classes of the model, and says how many rows could not be read, and which."""
    root = tree(tmp_path / "t", classes=2, val=5)
    where = [f"recipe.data.cache={tmp_path}/cache", "launcher=inline"]
    trained = run_dtf(*SHORT, *where, f"recipe.data.root={root}", "train.steps=1")
    assert trained.code == 0, trained.err
    (tmp_path / "alone").mkdir()
    (root / "val").rename(tmp_path / "alone" / split)
    for row in range(5):
        (tmp_path / "alone" / split / "c0" / f"{row}.jpg").unlink()
    (tmp_path / "alone" / split / "c1" / "2.jpg").write_bytes(b"no image")
    (tmp_path / "alone" / split / "c1" / "notes.txt").write_text("no image")
    common = ["job=evaluate", f"job.model={trained.folder}", f"recipe.data.root={tmp_path / 'alone'}", *where]
    common += ["recipe.data.bad_records=skip", *([] if split == "val" else ["job.split=test"])]
    done = run_dtf(*common)
    assert done.code == 0, done.err
    found = json.loads((done.folder / "evaluation.json").read_text())
    assert (found["rows"], found["unread"]) == (5, 1) and [one["rows"] for one in found["classes"]] == [0, 4]
    assert found["unread_rows"] == [f"{split}/c1/2.jpg: 8 bytes that are no image, or one whose beginning is damaged"]
    assert "5 rows of which 1 cannot be read: loss=" in done.out and f"skipped {split}/c1/2.jpg: 8 bytes" in done.out
    assert "left out: 1 .txt (no image)" in done.err
    (tmp_path / "alone" / split / "c1").rename(tmp_path / "alone" / split / "c2")
    done = run_dtf(*common)
    assert done.code == 65 and "the model does not know the classes c2; it knows c0, c1" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "tensor", "pipeline"])
def test_predictions_of_odd_files_end_with_a_line_for_each(tmp_path: Path, run_dtf: Any, strategy: str) -> None:
    """Whatever strategy and number of ranks predict, also where the job is cut off and goes on."""
    root, folder, files = tree(tmp_path / "t"), tmp_path / "odd", list(odd_files())
    write(folder, files)
    where = [f"recipe.data.root={root}", f"recipe.data.cache={tmp_path}/cache", "launcher.threads=1"]
    trained = run_dtf(*SHORT, *where, "train.steps=1", "launcher=inline")
    assert trained.code == 0, trained.err
    common = ["job=predict", f"job.model={trained.folder}", f"job.input={folder}", "step.batch_size=16"]
    done = run_dtf(*common, f"strategy={strategy}", "launcher.processes=2", "launcher.threads=1")
    expected = sorted(file.name for file in files if file.fate != LEFT_OUT)
    bad = sorted(file.name for file in files if file.fate == BAD)
    text = f"dtf: {len(expected)} rows: {len(expected) - len(bad)} predicted, {len(bad)} errors\n"
    assert done.code == 0 and done.err.endswith(text), done.err[-2000:]
    file = done.folder / "predictions.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    rows = [json.loads(line) for line in whole]
    assert [row["row"] for row in rows] == list(range(len(expected))) and [row["input"] for row in rows] == expected
    assert [row["input"] for row in rows if "error" in row] == bad
    assert all(("class" in row) != ("error" in row) for row in rows)
    left = dict(line.split("\t") for line in (done.folder / "left_out.txt").read_text().splitlines())
    assert len(left) == len(files) - len(expected) and "left out: " in done.err
    for kept in (0, 1, 37, 200):  # as a kill leaves it, in the middle of a line too
        file.write_bytes(b"".join(whole[:kept]) + whole[kept][:9])
        again = run_dtf(*common, "launcher=inline", folder=done.folder)
        assert again.code == 0 and again.err.endswith(text), again.err[-2000:]
        found = [json.loads(line) for line in file.read_bytes().splitlines()]
        assert [row["row"] for row in found] == list(range(len(expected)))
        assert [row["input"] for row in found if "error" in row] == bad


@pytest.mark.slow
def test_a_run_on_photos_is_evaluated_used_and_exported(tmp_path: Path, run_dtf: Any) -> None:
    root = tree(tmp_path / "t", val=5)
    run = run_dtf(
        *SHORT,
        f"recipe.data.root={root}",
        f"recipe.data.cache={tmp_path}/cache",
        "train.steps=1",
        "launcher=inline",
        "recipe.data.mixup=0.2",
    )
    assert run.code == 0, run.err
    common = [f"job.model={run.folder}", "launcher=inline"]
    done = run_dtf("job=export", *common)
    assert done.code == 0, done.err
    done = run_dtf("job=predict", *common, f"job.input={root / 'val'}")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (done.folder / "predictions.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(10))
    done = run_dtf("job=evaluate", *common, "job.split=train")
    assert done.code == 0, done.err
    assert [one["rows"] for one in json.loads((done.folder / "evaluation.json").read_text())["classes"]] == [4, 4], (
        "although training mixed them"
    )
    (root / "val/c0/2.jpg").write_bytes(b"no image")
    skip = ["recipe.data.bad_records=skip"]
    done = run_dtf("job=evaluate", *common, *skip)
    assert done.code == 0, done.err
    found = json.loads((done.folder / "evaluation.json").read_text())
    assert (found["rows"], found["unread"]) == (10, 1) and [one["rows"] for one in found["classes"]] == [4, 5]
    done = run_dtf("job=predict", *common, "job.split=eval")
    assert done.code == 0 and "dtf: 10 rows: 9 predicted, 1 error" in done.err
    lines = [json.loads(line) for line in (done.folder / "predictions.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines if "error" in line] == [2] and "val/c0/2.jpg: 8 bytes" in lines[2]["error"]


def test_a_thin_picture_is_not_blown_up(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    (root / "val/c0/0.jpg").write_bytes(encode(picture(1, 60_000), "PNG"))
    with pytest.raises(DataError, match="too long and thin"):
        recipe(root, pixels=224, whole=256).open_data("eval", 0).fetch(np.array([0]), 0)
    narrow = recipe(root, crop_ratio=[0.001, 0.001]).open_data("train", 0)
    assert narrow.fetch(np.arange(8), 0)[0]["pixels"].any()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "device"])
def test_what_is_no_regular_file_is_no_image(make: Callable[[Path], None], tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    make(root / "train/c0/odd.jpg")
    with pytest.raises(DataError, match="odd.jpg cannot be used: .*no regular file"):
        recipe(root).open_data("train", 0).fetch(np.arange(9), 0)


def test_nobody_is_mixed_with_what_is_not_there(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    (root / "train/c0/2.jpg").write_bytes(b"")
    data = recipe(root, bad_records=BadRecords["skip"], bad_share=0.5, mixup=0.4, cutmix=1.0).open_data("train", 0)
    inputs, targets = data.fetch(np.arange(8), 0)
    assert inputs["mix"][2:4].tolist() == [[1, 0, 0, 0, 0]] * 2 and targets[2:4, 2].tolist() == [1, 1]


def test_mixing_needs_even_micro_batches(tmp_path: Path, run_dtf: Any) -> None:
    root = tree(tmp_path / "t")
    common = [
        *SHORT,
        f"recipe.data.root={root}",
        f"recipe.data.cache={tmp_path}/cache",
        "train.steps=1",
        "launcher=inline",
        "recipe.data.mixup=0.2",
    ]
    done = run_dtf(*common, "step.micro_batch_rows=3")
    assert done.code == 2 and "step.micro_batch_rows=3 parts the pairs of rows" in done.err and not done.folder.exists()
    done = run_dtf(*common, "step.batch_size=6", "strategy=dp", "launcher.processes=2")
    assert done.code == 2 and "micro-batches of 3 rows, as strategy=dp chooses them, part them" in done.err
    done = run_dtf(*common, "step.batch_size=3")
    assert done.code == 0, done.err
    done = run_dtf(*common, "sampler=repeated", "recipe.data.cutmix=1", "recipe.data.policy=rand")
    assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "ddp", "fsdp", "tensor", "pipeline"])
def test_the_same_numbers_on_mixed_photos(tmp_path: Path, run_dtf: Any, strategy: str) -> None:
    root = tree(tmp_path / "t", train=8)
    data = [
        "recipe.data.mixup=0.2",
        "recipe.data.cutmix=1",
        "recipe.data.policy=trivial",
        "recipe.data.jitter=[0.2,0.2,0.2,0.1]",
    ]
    where = [f"recipe.data.root={root}", f"recipe.data.cache={tmp_path}/cache"]
    common = [
        *SHORT,
        *where,
        *data,
        "job=verify",
        f"job.strategies=[{strategy}]",
        "job.processes=[2,3]",
        "job.micro_batches=[1]",
        "job.batch_size=12",
    ]
    done = run_dtf(*common, "job.precisions=[fp64]", "job.steps=3", "train.epochs=3")
    assert done.code == 0, done.out + done.err


@pytest.mark.slow
def test_another_network_by_its_name_simply_works_and_its_blocks_are_shown(tmp_path: Path, run_dtf: Any) -> None:
    """Those of a shufflenet are found; nobody names them."""
    root = tree(tmp_path / "t", train=4, val=2)
    done = run_dtf(
        "recipe=resnet_photos",
        f"recipe.data.root={root}",
        f"recipe.data.cache={tmp_path}/cache",
        "recipe.model.classes=2",
        "recipe.model.arch=shufflenet_v2_x0_5",
        "recipe.data.pixels=32",
        "strategy=pipeline",
        "launcher.processes=2",
        "launcher.threads=1",
        "step.batch_size=4",
        "train.steps=2",
    )
    assert done.code == 0, done.err
    table = json.loads((done.folder / "run.json").read_text())["table"]
    assert table["blocks"].startswith("19 found in the model: 16 InvertedResidual")
