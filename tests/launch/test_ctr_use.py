"""A trained model of clicks in use: rows without labels, damaged ones, and what an export says of rows, which must be
all there is to know.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from dtf.core.errors import DataError
from dtf.recipes.ctr import avazu
from dtf.recipes.ctr.log_data import Format, Ids, Integers, LogOptions
from tests.conftest import Result
from tests.support.ctr_log import content

Run = Callable[..., Result]

DOCS = Path(__file__).parents[2] / "docs" / "click-logs.md"
TINY = (
    "optimizer=adam",
    "lr.peak=0.01",
    "train.epochs=1",
    "step.batch_size=50",
    "recipe.model.kind=deepfm",
    "recipe.model.hidden=[8]",
    "recipe.model.dim=4",
)


def avazu_line(i: int, *label: str) -> str:
    return ",".join(
        [
            f"{i:020}",
            *label,
            f"141021{i % 24:02}",
            *(f"{(i * 7 + c) % 5:x}" if (i + c) % 6 else "" for c in range(20)),
            f"ü{i % 3}",
        ]
    )


LABELLED = {
    "criteo": content(0, 60).decode(),
    "avazu": avazu.HEADER + "\n" + "".join(avazu_line(i, str(i % 3 and 1)) + "\n" for i in range(60)),
    "libsvm": "".join(f"{i % 2} {i}:1 {i % 9}:1\n" for i in range(60)),
}
UNLABELLED = {
    "criteo": "".join(line.split("\t", 1)[1] + "\n" for line in LABELLED["criteo"].splitlines()),
    "avazu": avazu.UNLABELLED + "\n" + "".join(avazu_line(i) + "\n" for i in range(60)),
    "libsvm": "".join(line.split(" ", 1)[1] + "\n" for line in LABELLED["libsvm"].splitlines()),
}


def options(folder: Path, format: str, **values: Any) -> LogOptions:
    return LogOptions(
        format=Format[format],
        cache=str(folder / "cache"),
        threads=2,
        **{"pairs": 2} if format == "libsvm" else {},
        **values,
    )


@pytest.mark.parametrize(
    "format", ["criteo", *(pytest.param(name, marks=pytest.mark.slow) for name in LABELLED if name != "criteo")]
)
@pytest.mark.slow
def test_rows_without_labels_are_the_same_rows(format: str, tmp_path: Path) -> None:
    """Of one file, or a folder of files, plain and packed; each has a name."""
    found = []
    for text in (LABELLED[format], UNLABELLED[format]):
        folder = tmp_path / f"in{len(found)}"
        folder.mkdir()
        (folder / "a.txt").write_text(text)
        (folder / "b.txt.gz").write_bytes(gzip.compress(text.replace("\n", "\r\n").encode()))
        rows = options(tmp_path, format).inputs(folder)
        assert len(rows) == 120 and rows.places[60] == f"{folder}/b.txt.gz:{1 + (format == 'avazu')}"
        found.append(rows.fetch(np.arange(120), 0))
    (one, labels), (other, nothing) = found
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert labels.sum() > 0 and (nothing == 0).all()


@pytest.mark.parametrize(
    ("format", "line", "why"),
    [
        ("criteo", LABELLED["criteo"].splitlines()[3], "there are too many columns"),
        ("criteo", "", "the line is blank"),
        ("criteo", "1\t2", "columns are missing"),
        ("avazu", avazu_line(3, "1"), "there are too many columns"),
        ("avazu", avazu_line(3).rpartition(",")[0], "columns are missing"),
        ("libsvm", "1 3:1 4:1", "an `id:value` pair is malformed"),
        ("libsvm", "3:1", "columns are missing"),
    ],
)
@pytest.mark.slow
def test_a_line_of_another_kind_than_the_first_is_named(format: str, line: str, why: str, tmp_path: Path) -> None:
    lines = UNLABELLED[format].splitlines()
    lines[5] = line
    (tmp_path / "new").write_text("\n".join(lines))
    with pytest.raises(DataError, match=f"/new:6: {re.escape(why)}"):
        options(tmp_path, format).inputs(tmp_path / "new").fetch(np.arange(58), 0)


@pytest.mark.parametrize("format", ["criteo", "avazu", "libsvm"])
def test_a_line_without_label_among_labelled_ones_is_named(format: str, tmp_path: Path) -> None:
    lines = LABELLED[format].splitlines()
    lines[5] = UNLABELLED[format].splitlines()[5]
    (tmp_path / "new").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"/new:6: (columns are missing|the label is neither)"):
        options(tmp_path, format).inputs(tmp_path / "new").fetch(np.arange(58), 0)


def test_a_column_of_labels_need_not_be_in_parquet_files(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"age": [3, None, 40], "user": ["a", "b", None], "item": [7, 8, 9]}
    pq.write_table(pa.table(columns), tmp_path / "new.parquet")
    pq.write_table(pa.table(columns | {"label": [0, 1, None]}), tmp_path / "old.parquet")
    read = options(tmp_path, "parquet", numbers=["age"], categories=["user", "item"])
    new, old = (read.inputs(tmp_path / f"{name}.parquet").fetch(np.arange(3), 0)[0] for name in ("new", "old"))
    assert torch.equal(new["ids"], old["ids"]) and new["ids"][2, 0] == -1 and torch.equal(new["dense"], old["dense"])
    about = read.preprocessing()
    assert new["ids"].tolist() == [
        encode(about, {}, row)["ids"]
        for row in ({"user": "a", "item": 7}, {"user": "b", "item": 8}, {"user": "", "item": 9})
    ]


def fnv(text: str) -> int:
    x = 0xCBF29CE484222325
    for byte in text.encode():
        x = (x ^ byte) * 0x100000001B3 % 2**64
    return x


VALUES: dict[str, Callable[[Any], int]] = {
    "hexadecimal": lambda text: int(text, 16),
    "text": fnv,
    "last two": lambda text: fnv(text[-2:]),
    "id": lambda text: int(text.split(":")[0]),
    "typed": lambda value: value if isinstance(value, int) else fnv(value),
}


def encode(about: dict[str, Any], arrays: dict[str, np.ndarray], row: dict[str, Any]) -> dict[str, list[Any]]:
    """One row by the formulas of model.json, and nothing else."""
    ids, found, names = (
        about["ids"],
        [],
        {"math": math, "floor": math.floor, "log": math.log, "copysign": math.copysign, "log1p": math.log1p},
    )

    def mix(x: int) -> int:
        inside = {"x": x}
        exec(ids["mix"], inside)
        return inside["x"]

    for f, field in enumerate(ids["fields"]):
        if row[field["column"]] == "":
            found.append(ids["missing"])
            continue
        here: dict[str, Any] = {
            **names,
            "f": f,
            "seed": field["seed"],
            "mix": mix,
            **{name: array.tolist() for name, array in arrays.items()},
        }
        kind = field["value"]
        here["value"] = (
            VALUES[kind](row[field["column"]])
            if kind in VALUES
            else eval(ids["values"][kind], here | {"x": int(row[field["column"]])})
        )
        for name in ("key", "known", "id"):
            here[name] = eval(ids[name], here) if name in ids else None
        found.append(here["id"])
    dense = about.get("dense", {"columns": []})
    return {"ids": found} | (
        {
            "dense": [
                eval(dense["value"], names | {"x": int(row[name])}) if row.get(name, "") != "" else dense["missing"]
                for name in dense["columns"]
            ]
        }
        if dense["columns"]
        else {}
    )


LOG = Integers.log


@pytest.mark.parametrize(
    ("format", "ids", "integers"),
    [
        *(
            pytest.param(
                "criteo", ids, integers, marks=[pytest.mark.slow] * (ids is not Ids.hash and integers is not LOG)
            )
            for ids, integers in product([Ids.hash, Ids.raw, Ids.vocabulary], Integers)
        ),
        *(("avazu", ids, LOG) for ids in (Ids.hash, Ids.raw, Ids.vocabulary)),
        *(("libsvm", ids, LOG) for ids in Ids),
    ],
)
def test_what_an_export_says_of_rows_is_what_is_done_to_them(
    format: str, ids: Ids, integers: Integers, tmp_path: Path
) -> None:
    (tmp_path / "rows").write_text(LABELLED[format])
    (tmp_path / "new").write_text(UNLABELLED[format])
    read = options(
        tmp_path,
        format,
        ids=ids,
        integers=integers,
        train=str(tmp_path / "rows"),
        eval=str(tmp_path / "rows"),
        min_count=3,
        table_size=100,
    )
    inputs, _ = read.inputs(tmp_path / "new").fetch(np.arange(60), 0)
    about, arrays = json.loads(json.dumps(read.preprocessing())), read.preprocessing_arrays()
    lines = (tmp_path / "new").read_text().splitlines()[format == "avazu" :]
    rows = [dict(zip(about["rows"]["columns"], line.split(about["rows"]["separator"]), strict=True)) for line in lines]
    told = [encode(about, arrays, row) for row in rows]
    assert inputs["ids"].tolist() == [each["ids"] for each in told]
    assert ("dense" in inputs) == ("dense" in told[0]) and bool(arrays) == (ids is Ids.vocabulary)
    if "dense" in inputs:
        assert inputs["dense"].numpy() == pytest.approx(np.array([each["dense"] for each in told]), rel=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logs, and a run folder of a model of one of them."""
    from dtf.cli.main import main

    folder = tmp_path_factory.mktemp("clicks")
    (folder / "train.tsv").write_bytes(content(0, 400))
    (folder / "eval.tsv").write_bytes(content(400, 470))
    (folder / "new.tsv").write_text(
        "".join(line.split("\t", 1)[1] + "\n" for line in content(400, 470).decode().splitlines())
    )
    data = [
        f"recipe.data.train={folder}/train.tsv",
        f"recipe.data.eval={folder}/eval.tsv",
        f"recipe.data.cache={folder}/cache",
    ]
    assert not main(
        [
            "recipe=ctr_log",
            *data,
            *TINY,
            "recipe.group=14",
            "observer=[]",
            "launcher=inline",
            f"run.dir={folder / 'run'}",
        ]
    )
    return folder


def predicted(result: Result) -> list[float]:
    assert result.code == 0, result.err
    lines = [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(len(lines)))
    return [line["probability"] for line in lines]


def test_predictions_and_evaluation_of_a_click_log(folder: Path, run_dtf: Run) -> None:
    """The same rows, labelled or not, get the same probabilities, of which the evaluation tells what is wanted of
    clicks: no table of classes.
    """
    predict = ("job=predict", f"job.model={folder / 'run'}")
    of_split = predicted(run_dtf(*predict, "launcher=inline"))
    result = run_dtf(*predict, f"job.input={folder / 'new.tsv'}", "launcher.processes=2", "step.batch_size=9")
    assert predicted(result) == pytest.approx(of_split, rel=1e-5)
    assert (
        json.loads((result.folder / "predictions.jsonl").read_text().splitlines()[69])["input"]
        == f"{folder}/new.tsv:70"
    )
    judged = run_dtf("job=evaluate", f"job.model={folder / 'run'}", "launcher=inline")
    found = json.loads((judged.folder / "evaluation.json").read_text())
    clicks = np.array([float(number % 3 == 0) for number in range(400, 470)])
    chances = np.array(of_split)
    assert found["metrics"]["loss"] == pytest.approx(
        -np.log(np.where(clicks == 1, chances, 1 - chances)).mean(), rel=1e-5
    )
    assert found["metrics"]["calibration"] == pytest.approx(chances.sum() / clicks.sum(), rel=1e-5)
    assert (
        found["classes"] == []
        and re.search(r"70 rows: loss=\S+ calibration=\S+ auc=\S+ group_auc=\S+\n", judged.out)
        and "recall" not in judged.out
    )


@pytest.mark.slow
def test_there_is_a_prediction_for_each_row_or_an_error(folder: Path, run_dtf: Run, tmp_path: Path) -> None:
    """Also where training and evaluation may leave rows out."""
    lines = (folder / "new.tsv").read_text().splitlines()
    lines[40] = "what"
    (tmp_path / "bad.tsv").write_text("\n".join(lines))
    skip = ("recipe.data.bad_records=skip", "recipe.data.bad_share=0.5", "launcher=inline")
    of_inputs = (f"job.model={folder / 'run'}", f"job.input={tmp_path / 'bad.tsv'}", "launcher=inline")

    def answers(result: Any) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (result.folder / "predictions.jsonl").read_text().splitlines()]

    result = run_dtf("job=predict", *of_inputs)
    assert result.code == 0 and result.err.endswith("dtf: 70 rows: 69 predicted, 1 error\n"), result.err
    assert [row["row"] for row in answers(result) if "error" in row] == [40]
    assert answers(result)[40]["input"] == f"{tmp_path}/bad.tsv:41"
    result = run_dtf("job=predict", *of_inputs, "job.bad_share=0")
    assert result.code == 65 and "1 of 50 rows cannot be read, job.bad_share allows 0" in result.err
    lines = (folder / "eval.tsv").read_text().splitlines()
    lines[40] = "what"
    (tmp_path / "eval.tsv").write_text("\n".join(lines))
    of_split = (f"job.model={folder / 'run'}", f"recipe.data.eval={tmp_path / 'eval.tsv'}", *skip)
    for mode in ("memory", "queue"):
        result = run_dtf("job=predict", *of_split, f"recipe.data.mode={mode}")
        assert result.code == 0 and len(answers(result)) == 70, result.err
        assert answers(result)[40] == {"row": 40, "error": f"{tmp_path}/eval.tsv:41: the label is neither 0 nor 1"}
    assert "70 rows of which 1 cannot be read: loss=" in run_dtf("job=evaluate", *of_split).out


@pytest.mark.slow
def test_predictions_do_not_go_on_with_other_rows(folder: Path, run_dtf: Run, tmp_path: Path) -> None:
    """As many of them, under the same names."""
    command = ("job=predict", f"job.model={folder / 'run'}", f"job.input={tmp_path / 'new.tsv'}", "launcher=inline")
    text = (folder / "new.tsv").read_text()
    (tmp_path / "new.tsv").write_text(text)
    first = run_dtf(*command)
    assert first.code == 0, first.err
    (tmp_path / "new.tsv").write_text(text.replace("\t2\t", "\t3\t"))
    again = run_dtf(*command, folder=first.folder)
    assert again.code == 73 and "holds predictions of other inputs" in again.err


def test_the_example_of_the_docs_says_what_the_job_says(
    folder: Path, run_dtf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With model.pt2, model.json and rows as they stand in a log, hashed."""
    result = run_dtf("job=export", f"job.model={folder / 'run'}", f"job.input={folder / 'new.tsv'}")
    assert result.code == 0, result.err
    about = json.loads((result.folder / "model.json").read_text())
    assert about["call"] == 'program({"ids": ids, "dense": dense})' and about["classes"] == [] and "arrays" not in about
    assert about["inputs"] == {
        "ids": {"format": "int64", "shape": ["batch", 26]},
        "dense": {"format": "float32", "shape": ["batch", 13]},
    }
    assert about["outputs"] == {"format": "float32", "shape": ["batch"], "are": "logits", "probabilities": "sigmoid"}
    example = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert example
    (result.folder / "new.tsv").write_text((folder / "new.tsv").read_text())
    monkeypatch.chdir(result.folder)
    names: dict[str, Any] = {"torch": torch}
    exec(example[1], names)
    of_job = predicted(
        run_dtf("job=predict", f"job.model={folder / 'run'}", f"job.input={folder / 'new.tsv'}", "launcher=inline")
    )
    assert names["probabilities"].tolist() == pytest.approx(of_job, rel=1e-5)


@pytest.mark.slow
def test_an_export_with_a_vocabulary_holds_it(folder: Path, run_dtf: Run, tmp_path: Path) -> None:
    """A sparse table; integers as categories."""
    data = [
        f"recipe.data.train={folder}/train.tsv",
        f"recipe.data.eval={folder}/eval.tsv",
        f"recipe.data.cache={folder}/cache",
        "recipe.data.integers=bucket",
    ]
    sparse = ("recipe.model.table=sparse", "sparse=adagrad", "launcher=inline", "observer=[]")
    trained = run_dtf("recipe=ctr_log", *data, *TINY, *sparse, "recipe.data.ids=vocabulary", "recipe.data.min_count=5")
    assert trained.code == 0, trained.err
    result = run_dtf("job=export", f"job.model={trained.folder}")
    assert result.code == 0 and str(result.folder / "preprocessing.safetensors") in result.out, result.err
    about = json.loads((result.folder / "model.json").read_text())
    arrays = load_file(result.folder / about["arrays"]["file"])
    rows = [
        dict(zip(about["preprocessing"]["rows"]["columns"], line.split("\t"), strict=True))
        for line in (folder / "new.tsv").read_text().splitlines()
    ]
    ids = torch.tensor([encode(about["preprocessing"], arrays, row)["ids"] for row in rows])
    program = torch.export.load(result.folder / "model.pt2").module()
    of_job = predicted(
        run_dtf("job=predict", f"job.model={trained.folder}", f"job.input={folder / 'new.tsv'}", "launcher=inline")
    )
    assert len(set(of_job)) > 10 and program({"ids": ids}).sigmoid().tolist() == pytest.approx(of_job, rel=1e-5)
