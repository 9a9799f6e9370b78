"""A trained model in use: evaluated, asked, exported; under any strategy, to the same answers."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dtf.config.settings import load_parts
from dtf.core.errors import ConfigError, Exit
from tests.conftest import Result

Run = Callable[..., Result]

MODEL = (
    "recipe.model.width=8",
    "recipe.model.arch=resnet8",
    "recipe.data.pixels=16",
    "recipe.data.train_rows=64",
    "recipe.data.eval_rows=50",
)
INLINE = ("launcher=inline", "launcher.threads=1")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run folder: two evaluations, averaged weights, class names."""
    from dtf.cli.main import main

    folder = tmp_path_factory.mktemp("trained") / "run"
    assert not main(
        [
            *MODEL,
            *INLINE,
            "train.steps=4",
            "step.batch_size=32",
            "step.ema=0.9",
            "observer=[jsonl]",
            f"run.dir={folder}",
        ]
    )
    yield folder


@pytest.mark.parametrize("form", ["dict", *(pytest.param(form, marks=pytest.mark.slow) for form in ("flat", "column"))])
def test_a_model_of_no_classes_is_evaluated_and_not_asked_for_probabilities(form: str, run_dtf: Run) -> None:
    """A softmax over the rows of a batch, or over a single number, is no probability of anything."""
    heights = ("plugins=[tests.support.heights]", "recipe=heights", f"recipe.form={form}", *INLINE)
    trained = run_dtf(*heights, "train.steps=2", "step.batch_size=16")
    assert trained.code == 0, trained.err
    evaluated = run_dtf("job=evaluate", *heights, f"job.model={trained.folder}")
    assert evaluated.code == 0 and "loss=" in evaluated.out and "recall" not in evaluated.out, evaluated.err
    predicted = run_dtf("job=predict", *heights, f"job.model={trained.folder}")
    assert predicted.code == Exit.CONFIG and "Heights.probabilities() is not defined" in predicted.err
    if form == "flat":
        assert "predict: not tried" in run_dtf(*heights, "train.dry_run=true", "train.steps=2").out


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for i in range(11):
        pixels = np.random.default_rng(i).integers(0, 255, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / (f"more/{i:02}.png" if i % 3 else f"{i:02}.jpg"))
    (folder / "notes.txt").write_text("no image")
    return folder


def test_the_best_of_a_run_and_a_split_it_does_not_have(trained: Path, tmp_path: Path, run_dtf: Run) -> None:
    from dtf.checkpoint.resolve_path import resolve_checkpoints
    from dtf.core.errors import DataError

    evaluations = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    tops = {line["step"]: line["top1"] for line in evaluations if line["split"] == "eval"}
    best = max(tops, key=lambda step: (tops[step], -step))
    assert [folder.name for folder in resolve_checkpoints(trained / "best", "job.model")] == [f"step_{best:06d}"]
    with pytest.raises(DataError, match=r"job\.model=.*/best holds no checkpoint|job\.model=.* holds no checkpoint"):
        resolve_checkpoints(tmp_path / "best", "job.model")
    result = run_dtf("job=evaluate", f"job.model={trained}/best", "job.split=test", *INLINE)
    assert result.code == 2 and "job.split=test: ResnetShapes has no such rows; use train or eval" in result.err


def last_evaluation(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["split"] == "eval"][-1]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_strategy_is_tried_below_or_refused_before_anything_starts(trained: Path, run_dtf: Run) -> None:
    from dtf.api.registry import registered

    load_parts([])
    # other tests bring some of theirs
    own = {name for name, kind in registered("strategy").items() if kind.__module__.startswith("dtf.")}
    refused = own - {"ddp", "dp", "fsdp", "mesh", "tensor", "pipeline", "zero1"}
    assert refused == {"pserver"}
    for job, name in product(("evaluate", "predict", "export"), sorted(refused)):
        result = run_dtf(f"job={job}", f"job.model={trained}", f"strategy={name}")
        assert result.code == Exit.CONFIG and not result.folder.exists()
        assert f"strategy={name} has servers and trainers" in result.err
        assert own - refused <= set(re.split(r"\W+", result.err)), result.err


@pytest.mark.parametrize(
    "strategy",
    [
        "dp",
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "mesh", "tensor", "zero1")),
    ],
)
@pytest.mark.slow
def test_an_evaluation_repeats_what_training_saw(strategy: str, trained: Path, run_dtf: Run) -> None:
    """The same metrics, from the averages of the weights; a batch size and number of ranks that divide nothing."""
    result = run_dtf(
        "job=evaluate", f"job.model={trained}", f"strategy={strategy}", "step.batch_size=7", "launcher.processes=2"
    )
    assert result.code == 0, result.err
    found = json.loads((result.folder / "evaluation.json").read_text())
    for name, value in found["metrics"].items():
        assert value == pytest.approx(last_evaluation(trained)[name], rel=1e-5)
    assert [each["class"] for each in found["classes"]][:2] == ["disc", "ring"]
    assert (
        sum(each["rows"] for each in found["classes"])
        == sum(each["predicted"] for each in found["classes"])
        == found["rows"]
        == 50
    )
    right = sum(each["rows"] * each["recall"] for each in found["classes"])
    assert right / 50 == pytest.approx(found["metrics"]["top1"])
    assert "50 rows: loss=" in result.out and "crescent" in result.out and "averaged weights" in result.out


@pytest.mark.slow
def test_predictions_are_in_order_and_go_on_where_they_stopped(trained: Path, images: Path, run_dtf: Run) -> None:
    """Under another strategy too.

    What was written stays, a line cut short is written anew, and each row is there once.
    """
    command = ("job=predict", f"job.model={trained}", f"job.input={images}", "job.top=3", "step.batch_size=4")
    result = run_dtf(*command, *INLINE)
    assert result.code == 0, result.err
    file = result.folder / "predictions.jsonl"
    whole = lines(file)
    names = sorted(path.relative_to(images).as_posix() for path in images.rglob("*.*") if path.suffix != ".txt")
    assert [row["row"] for row in whole] == list(range(11)) and [row["input"] for row in whole] == names
    assert all(
        row["probability"] == row["top"][0][1] >= row["top"][1][1] >= row["top"][2][1]
        and row["class"] == row["top"][0][0]
        for row in whole
    )
    text = file.read_bytes()
    kept = b"".join(text.splitlines(keepends=True)[:5])
    file.write_bytes(kept + text.splitlines()[5][:20])
    again = run_dtf(*command, "strategy=tensor", "launcher.processes=2", folder=result.folder)
    assert again.code == 0, again.err
    assert file.read_bytes().startswith(kept)
    assert [row["input"] for row in lines(file)] == names
    for a, b in zip(whole, lines(file), strict=True):
        assert b["probability"] == pytest.approx(a["probability"], rel=1e-4)
    (images / "zz.png").write_bytes((images / "00.jpg").read_bytes())
    assert "other rows and inputs" in run_dtf(*command, *INLINE, folder=result.folder).err
    assert "holds a run with job.top=3" in run_dtf(*command, "job.top=2", folder=result.folder).err
    for damage in ("{", "3", '["rows"]'):
        (result.folder / "predictions.json").write_text(damage)
        damaged = run_dtf(*command, *INLINE, folder=result.folder)
        assert (
            damaged.code == 65
            and f"{result.folder / 'predictions.json'} cannot be read" in damaged.err
            and "choose another run.dir" in damaged.err
        )


@pytest.mark.slow
def test_the_config_of_the_run_stands_behind_the_command_line(trained: Path, tmp_path: Path, run_dtf: Run) -> None:
    """Its recipe's keys need no recipe=NAME beside them, wherever the job and the model are named; what is shown is
    what is done.
    """
    from dtf.config.compose import compose

    given = [f"job.model={trained}", "recipe.data.eval_rows=20"]
    composed = compose(["job=evaluate", *given])
    assert (
        composed.config["recipe"]["data"] | {"eval_rows": 50}
        == compose(["job=evaluate", f"job.model={trained}"]).config["recipe"]["data"]
    )
    assert (
        composed.config["recipe"]["model"]["width"],
        composed.config["step"]["ema"],
        composed.config["recipe"]["data"]["eval_rows"],
    ) == (8, 0.9, 20)
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "judge.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - override /job: evaluate\njob:\n  model: {trained}\n"
    )
    assert (
        compose([f"--config-dir={tmp_path}", "experiment=judge", "recipe.data.eval_rows=20"]).config["recipe"]
        == composed.config["recipe"]
    )
    assert "\n    eval_rows: 20\n" in run_dtf("job=evaluate", *given, "--cfg", "job").out
    with pytest.raises(ConfigError, match="job.model=.* holds an interpolation"):
        compose(["job=evaluate", "job.model=${run.dir}"])
    swept = run_dtf(
        "-m",
        "job=evaluate",
        f"job.model={trained}",
        "recipe.data.eval_rows=3",
        "launcher=inline",
        folder=Path(f"{tmp_path}/a,{tmp_path}/b"),
    )
    assert (
        swept.code,
        swept.out.count("eval split, 3 rows"),
        f"trial 1 of 2: run.dir={tmp_path}/a\n" in swept.out,
    ) == (0, 2, True), swept.out + swept.err


def test_predictions_as_a_table(trained: Path, run_dtf: Run) -> None:
    """Of the evaluation split: the share of right answers is the accuracy that training saw."""
    result = run_dtf(
        "job=predict", f"job.model={trained}", "job.format=csv", "job.top=2", "strategy=dp", "launcher.processes=3"
    )
    assert result.code == 0, result.err
    with (result.folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [str(i) for i in range(50)]
    kinds = ("disc", "ring", "square", "triangle", "plus", "star", "crescent", "bar")
    assert sum(row["class"] == kinds[i % 8] for i, row in enumerate(rows)) / 50 == pytest.approx(
        last_evaluation(trained)["top1"]
    )
    assert float(rows[0]["probability"]) >= float(rows[0]["probability_2"])


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_a_broken_image_gets_a_line_with_an_error(trained: Path, images: Path, run_dtf: Run, form: str) -> None:
    """Once, also where the job goes on, within the limit that is set; the last line counts them."""
    (images / "03.jpg").write_bytes(b"no image")
    (images / "empty.webp").write_bytes(b"")
    command = ("job=predict", f"job.model={trained}", f"job.input={images}", f"job.format={form}", *INLINE)
    result = run_dtf(*command, "job.bad_share=0.1", "step.batch_size=4")
    assert result.code == 65 and "2 of 8 rows cannot be read, job.bad_share allows 1 of all 12" in result.err
    result = run_dtf(*command, folder=result.folder)
    assert result.code == 0 and result.err.endswith("dtf: 12 rows: 10 predicted, 2 errors\n"), result.err
    assert "left out: 1 .txt (no image); left_out.txt in the run folder names them" in result.err
    assert (result.folder / "left_out.txt").read_text() == "notes.txt\tno image\n"
    file = result.folder / f"predictions.{form}"
    assert result.out == f"{file}\n"
    rows = list(csv.DictReader(file.open())) if form == "csv" else lines(file)
    assert [int(row["row"]) for row in rows] == list(range(12))
    errors = {row["input"]: row["error"] for row in rows if row.get("error")}
    assert errors == {
        "03.jpg": "8 bytes that are no image, or one whose beginning is damaged",
        "empty.webp": "it is empty",
    }
    kept = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(kept[: -6 if form == "csv" else -7]))
    again = run_dtf(*command, folder=result.folder)
    assert again.code == 0 and file.read_bytes() == b"".join(kept) and again.err.endswith("10 predicted, 2 errors\n")


def test_where_nothing_can_be_read_predictions_end_with_an_error(trained: Path, tmp_path: Path, run_dtf: Run) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").touch()
    command = ("job=predict", f"job.model={trained}", f"job.input={tmp_path / 'images'}", *INLINE)
    result = run_dtf(*command)
    assert result.code == 65 and "none of the 1 rows can be read; predictions.jsonl says why of each" in result.err
    assert lines(result.folder / "predictions.jsonl") == [{"row": 0, "input": "a.png", "error": "it is empty"}]
    assert run_dtf(*command, folder=result.folder).code == 65


def test_exported_files_say_what_the_model_says(trained: Path, images: Path, run_dtf: Run) -> None:
    """Without dtf, at other batch sizes; torchvision's names; class names and preprocessing beside the numbers."""
    from safetensors import safe_open

    from dtf.recipes.resnet.unlabelled import Unlabelled, list_inputs

    result = run_dtf("job=export", f"job.model={trained}", f"job.input={images}", *INLINE)
    assert result.code == 0, result.err
    told = json.loads((result.folder / "model.json").read_text())
    assert max(told["largest_difference"].values()) < 1e-5 and told["classes"][0] == "disc"
    extra = {"dtf.json": ""}
    with (result.folder / "model.pt2").open("rb") as file:
        program = torch.export.load(file, extra_files=extra).module()
    assert json.loads(extra["dtf.json"])["preprocessing"] == told["preprocessing"]
    with safe_open(result.folder / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["dtf.json"])["classes"] == told["classes"]
        assert {"conv1.weight", "bn1.running_var", "layer3.0.conv2.weight", "fc.bias"} <= set(file.keys())
    predicted = run_dtf(
        "job=predict", f"job.model={result.folder / 'model.safetensors'}", f"job.input={images}", *MODEL, *INLINE
    )
    assert predicted.code == 0, predicted.err
    inputs, _ = Unlabelled(
        images,
        list_inputs(images),
        told["preprocessing"]["pixels"],
        told["preprocessing"]["mean"],
        told["preprocessing"]["std"],
    ).fetch(np.arange(11), 0)
    chances = program(inputs).softmax(-1).detach()
    for row, chance in zip(lines(predicted.folder / "predictions.jsonl"), chances, strict=True):
        assert row["class"] == told["classes"][int(chance.argmax())]
        assert row["probability"] == pytest.approx(float(chance.max()), rel=1e-4)


@pytest.mark.slow
def test_an_onnx_file_says_what_the_model_says(trained: Path, images: Path, run_dtf: Run) -> None:
    import onnxruntime

    result = run_dtf("job=export", f"job.model={trained}", "job.forms=[onnx,safetensors]", *INLINE)
    assert result.code == 0 and "model.onnx  differs by at most" in result.out, result.err
    told = json.loads((result.folder / "model.json").read_text())
    assert told["largest_difference"]["model.onnx"] <= told["tolerance"] == 1e-4
    session = onnxruntime.InferenceSession(result.folder / "model.onnx")
    about = json.loads(session.get_modelmeta().custom_metadata_map["dtf.json"])
    assert about["classes"] == told["classes"] and session.get_inputs()[0].shape == ["batch", 3, 16, 16]
    outputs: Any = session.run(None, {"inputs": np.zeros((3, 3, 16, 16), np.float32)})
    assert outputs[0].shape == (3, 8)


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        (("job=evaluate",), 2, "job.model is not set"),
        (("job=evaluate", "job.model=nowhere"), 65, "job.model=nowhere does not exist"),
        (("job=predict", "job.model=nowhere", "job.input=elsewhere"), 65, "job.input=elsewhere does not exist"),
        (("job=predict", "job.model={run}", "job.input=.", "job.split=train"), 2, "two sources of rows"),
        (("job=export", "job.model={run}", "launcher.processes=3"), 2, "job=export is the work of one process"),
        (("job=export", "job.model={run}", "job.max_rows=9"), 2, "job.max_rows=9 says which rows of sparse tables go"),
        (("job=export", "job.model={run}", "job.forms=[onnx]", "precision=fp64"), 2, "give precision=fp32"),
        (("job=evaluate", "job.model={run}", "recipe.model.width=16", *INLINE), 2, "in the file and"),
        (("job=evaluate", "job.model={run}", "recipe.model.classes=5", *INLINE), 2, "set recipe.model.classes=8"),
        (("job=evaluate", "job.model={run}/config.yaml"), 65, "config.yaml is no file of weights; give a .ckpt, .pth"),
        (("recipe.model.weights={run}/checkpoints/nothing",), 65, "nothing does not exist"),
        (("recipe.model.weights={run}/run.json",), 65, "run.json is no file of weights"),
        (("recipe.model.weights=nowhere.pth",), 65, "recipe.model.weights=nowhere.pth does not exist"),
        (("recipe.model.freeze=[layr1]", *INLINE), 2, "did you mean layer1"),
        (("optimizer.lr_factors={head:2}", *INLINE), 2, "optimizer.lr_factors names 'head'"),
    ],
    ids=str,
)
def test_what_cannot_be(command: tuple[str, ...], code: int, told: str, trained: Path, run_dtf: Run) -> None:
    result = run_dtf(*(word.replace("{run}", str(trained)) for word in command))
    assert (result.code, told in result.err) == (code, True), result.err


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_file_only(trained: Path, run_dtf: Run, tmp_path: Path) -> None:
    """Where the file lies may change, its bytes may not; the checkpoint's numbers win over it."""
    from safetensors.torch import save_file

    from dtf.model.pretrained import open_weights

    weights = open_weights(str(trained), "job.model")
    file, copy = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    tensors = {name: weights.read(name) for name in weights.shapes}
    save_file(tensors, file)
    copy.write_bytes(file.read_bytes())
    command = (*MODEL, *INLINE, "step.batch_size=32", "observer=[]")
    first = run_dtf(*command, "train.steps=4", "train.until=2", f"recipe.model.weights={file}")
    assert first.code == 0, first.err
    assert "tensors kept" in json.loads((first.folder / "run.json").read_text())["table"]["weights"]
    again = run_dtf(*command, "train.steps=4", "train.until=3", f"recipe.model.weights={copy}", folder=first.folder)
    assert again.code == 0, again.err
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, copy)
    other = run_dtf(*command, "train.steps=4", f"recipe.model.weights={copy}", folder=first.folder)
    assert other.code == 2 and "recipe.model.weights" in other.err
