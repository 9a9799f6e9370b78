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
from tests.unit.test_photos import recipe

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
    done = run_dtf(*common, "recipe.data.bad_records=skip", "recipe.data.bad_share=0.01", "train.epochs=6")
    assert done.code == 0, done.err


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
    done = run_dtf("job=predict", *common, *skip, "job.split=eval")
    assert (
        done.code == 65
        and "val/c0/2.jpg: 8 bytes" in done.err
        and "there is a prediction for every row or none" in done.err
    )


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
