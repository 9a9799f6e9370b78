"""Every decoder of what may come from elsewhere, on changed inputs: it gives back the same, or raises its own error.

Nothing else leaves it, and no input makes it take much memory or go on without end. The parsers of click logs are held
against references in test_ctr_parsing.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from dtf.checkpoint.boxes import read_scalars
from dtf.checkpoint.manifest import (
    Manifest,
    Objective,
    StoredBox,
    StoredFile,
    StoredTensor,
    decode,
    encode,
    exact_json,
    parse_json,
)
from dtf.checkpoint.safetensors_format import header, slots
from dtf.config.compose import Composer
from dtf.config.limits import read_checked
from dtf.config.messages import parse
from dtf.core.errors import ConfigError, DataError, DtfError
from dtf.core.json_lines import row_of, rows
from dtf.engine.resume import position
from dtf.observers.jsonl import forget_after
from dtf.runs import report, results
from dtf.runs.budget import spent_s
from tests.pserver import test_codec as wire
from tests.support.fuzzing import A_MINUTE, fuzz


def inputs(default: int) -> Any:
    """Runs a test with few inputs by default, and for a minute among the slow tests."""
    return pytest.mark.parametrize("count", [default, pytest.param(A_MINUTE, id="a minute", marks=pytest.mark.slow)])


# ---------------------------------------------------------------- checkpoints


def manifests() -> list[bytes]:
    files = {"r.bin": StoredFile(100, (1,)), "state.json": StoredFile(2, (7,)), "empty": StoredFile(0, ())}
    halves = StoredTensor(
        "F32", (4, 2), (StoredBox("r.bin", "k", (0, 0), (1, 2)), StoredBox("r.bin", "l", (1, 0), (3, 2)))
    )
    scalar = StoredTensor("I64", (), (StoredBox("r.bin", "s", (), ()),))
    goal = Objective("loss", "min", float("-inf"))
    return [
        encode(Manifest(3, "run-1", "ddp", 2, goal, files, {"model/w": halves, "optimizer/w/step": scalar})),
        encode(Manifest(0, "r", "dp", 1, None, {}, {})),
    ]


def unsealed(data: bytes) -> bytes:
    return data[: data.rindex(b',"sha256"')]


def sealed(body: bytes) -> bytes:
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


@inputs(1500)
def test_manifests(count: int) -> None:
    def judge(body: bytes) -> bool:
        try:
            found = decode(sealed(body))
        except DataError as error:
            assert str(error).isprintable() and len(str(error)) < 1000
            return False
        assert encode(decode(encode(found))) == encode(found)  # also where a number is NaN
        return True

    fuzz(judge, [unsealed(data) for data in manifests()], count, [b'"$float64":"00 00"', b"[0,0]", b'"r.bin"'])


@inputs(800)
def test_manifests_that_nobody_sealed_again(count: int) -> None:
    seeds = manifests()

    def judge(data: bytes) -> bool:
        try:
            decode(data)
        except DataError:
            return False
        assert data in seeds
        return True

    fuzz(judge, seeds, count)


MEASURED = {"split": "train", "step": 2, "epoch": 0.5, "seconds": 1.5, "values": {"loss": float("inf")}, "best": False}
SCALARS: dict[str, Any] = {
    "clock": {"step": 3, "best": 0.5, "best_step": 2, "since_best": 1, "fallen": 1.0},
    "window": [1.0, 2.5],
    "course": {"lr": {"name": "cosine", "peak": 0.1}},
    "program": {"skipped": 0, "loss_scale": [65536.0, 3], "table_steps": 2},
    "updated": True,
    "recent": [MEASURED],
}


@inputs(1500)
def test_scalars(count: int, tmp_path: Path) -> None:
    manifest = Manifest(0, "r", "dp", 1, None, {}, {})

    class Reader:
        def __init__(self, *about: object) -> None: ...

        def read(self, start: int, stop: int) -> bytes:
            return now[0]

    def judge(data: bytes) -> bool:
        now[:] = [data]
        manifest.files["state.json"] = StoredFile(len(data), ())
        try:
            scalars = read_scalars(tmp_path, manifest)
            resumed = position(scalars)
        except DataError as error:
            assert str(error).isprintable() and len(str(error)) < 1000
            return False
        assert exact_json(parse_json(exact_json(scalars))) == exact_json(scalars)
        assert 0 <= resumed.step < 1 << 62
        return True

    now: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dtf.checkpoint.boxes.Blocks", Reader)
        fuzz(
            judge,
            [exact_json(SCALARS)],
            count,
            [b'{"$float64":"00 00 00 00 00 0"}', b'{"$float64":"7ff8000000000001"}'],
        )


@inputs(1500)
def test_headers_of_shards(count: int) -> None:
    tensors = [("model/w", "F32", (3, 2)), ("s", "I64", ()), ("none", "BF16", (0, 4))]
    seed = header(tensors) + bytes(32)

    def judge(data: bytes) -> bool:
        try:
            found = slots(lambda start, stop: data[start:stop], len(data))
        except DataError as error:
            assert str(error).isprintable() and len(str(error)) < 1000
            return False
        assert all(0 <= slot.start <= slot.stop <= len(data) for slot in found.values())
        return True

    fuzz(judge, [seed, header([])], count, [b'"F64"', b'"data_offsets":[0,24]', b"1" * 30])


# ---------------------------------------------------------------- the network


@inputs(1000)
def test_messages_of_servers(count: int) -> None:
    def judge(data: bytes) -> bool:
        wire.fuzz_one(data)
        try:
            wire.decode(wire.SCHEMA, data)
        except wire.WireError:
            return False
        return True

    fuzz(judge, [wire.FULL], count)


# ---------------------------------------------------------------- run folders


LINES = [
    b'{"split": "train", "step": 5, "epoch": 0.5, "seconds": 1.5, "loss": 2.25, "rows_per_s": 100.0, "top1": null}',
    b'{"split": "eval", "step": 10, "epoch": 1.0, "seconds": 3.0, "loss": 1.5}',
]


@inputs(1500)
def test_lines_of_measurements(count: int) -> None:
    def judge(line: bytes) -> bool:
        row = row_of(line, {"split": str, "step": int, "epoch": float})
        if row is None:
            return False
        assert row_of(json.dumps(row).encode(), {"split": str, "step": int, "epoch": float}) == row
        return True

    fuzz(judge, LINES, count)


@inputs(150)
def test_files_of_measurements(count: int, tmp_path: Path) -> None:
    path, whole = tmp_path / "metrics.jsonl", b"\n".join(LINES) + b"\n"

    def judge(data: bytes) -> bool:
        path.write_bytes(data)
        odd = forget_after(path, 7)
        kept = list(rows(path, {"split": str, "step": int}))
        assert all(row["step"] <= 7 for row in kept) and path.read_bytes().count(b"\n") == len(kept) + odd
        return not odd

    fuzz(judge, [whole], count)


@inputs(150)
def test_seconds(count: int, tmp_path: Path) -> None:
    def judge(data: bytes) -> bool:
        (tmp_path / "seconds").write_bytes(data)
        try:
            return spent_s(tmp_path) >= 0
        except DataError:
            return False

    fuzz(judge, [b"12.5\n", b"1234567.875\n"], count)


@inputs(60)
def test_reports_of_run_folders(count: int, tmp_path: Path) -> None:
    from tests.unit.test_report import run_folder

    made = run_folder(tmp_path / "made")
    names = ["run.json", "config.yaml", "metrics.jsonl", "resources.jsonl", "profile/rank_0.json"]
    seeds = [name.encode() + b"\n" + (made / name).read_bytes() for name in names]

    def judge(data: bytes) -> bool:
        name, _, content = data.partition(b"\n")
        file = made / (name.decode(errors="replace") if name.decode(errors="replace") in names else names[0])
        before = file.read_bytes()
        file.write_bytes(content)
        try:
            found = results.read_runs([str(made)])
            text = report.html(found, report.charts_of(found, {})[:0], "now")
        except (DataError, ConfigError):
            return False
        finally:
            file.write_bytes(before)
        assert "<script" not in text
        return True

    fuzz(judge, seeds, count, [b"<script>alert(1)</script>"])


# ---------------------------------------------------------------- configs


CONFIG = b"""# @package _global_
defaults: [override /strategy: dp, override /lr: cosine]
seed: 3
run: {name: "a ${seed} b", dir: ''}
launcher: {env: {OMP_WAIT_POLICY: 'passive'}}
lr: {peak: 0.25}
step:
  batch_size: 64
observer: {}
"""
MOST_CALLS = 10_000_000


class TooMuchWork(BaseException):
    pass


def bounded(work: Callable[[], Any]) -> Any:
    """The result of `work`, which may call so many functions."""
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += 1
        if calls > MOST_CALLS:
            raise TooMuchWork

    sys.setprofile(count)
    try:
        return work()
    finally:
        sys.setprofile(None)


@inputs(300)
def test_config_files_are_read(count: int, tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"

    def judge(data: bytes) -> bool:
        file.write_bytes(data)
        try:
            text = read_checked(file)
            yaml.load(text, Loader=yaml.CSafeLoader)
        except ConfigError as error:
            assert len(str(error)) < 2000
            return False
        except (yaml.YAMLError, ValueError):  # refused where it is loaded
            return False
        return True

    fuzz(judge, [CONFIG], count, [b"*a", b"<<: *a", b"\n  ", b"- "])


@inputs(8)
def test_config_files_are_composed(count: int, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "e.yaml").write_bytes(CONFIG)
    composer = Composer(str(tmp_path))

    def judge(data: bytes) -> bool:
        (tmp_path / "experiment" / "e.yaml").write_bytes(data)
        try:
            bounded(lambda: composer.compose(["experiment=e"]).settings)
        except DtfError as error:
            assert len(str(error)) < 5000
            return False
        return True

    fuzz(judge, [CONFIG], count, [b"${oc.env:HOME}", b"${seed}", b"${.x}", b"???", b"_target_: os.getcwd"], watch=False)


@inputs(60)
def test_words_of_a_command_line(count: int) -> None:
    def judge(data: bytes) -> bool:
        try:
            bounded(lambda: parse([data.decode(errors="surrogateescape")]))
        except ConfigError as error:
            assert len(str(error)) < 2000
            return False
        return True

    fuzz(
        judge,
        [b"lr.peak=0.5", b"launcher.env={A: 'b', C: [1, 2]}", b"seed=choice(1,2,3)", b"~lr"],
        count,
        [b"[" * 3000],
    )
