"""What is remembered of the check at the start, and when it counts for nothing."""

from __future__ import annotations

import importlib
import json
import os
import stat
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from dtf.api.task import StartCheck
from dtf.config.compose import compose
from dtf.engine import start_record
from dtf.engine.start_record import NAME, StartRecord, start_digest
from tests.support.toy import Toy

FOUND = {"clipped": ""}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "dtf" / "start_checks"


@pytest.fixture
def record(tmp_path: Path) -> StartRecord:
    (tmp_path / "run").mkdir()
    return StartRecord("a" * 64, 2, tmp_path / "run")


def test_plans_are_those_of_the_run(record: StartRecord, tmp_path: Path) -> None:
    record.write(StartCheck(FOUND, fresh=True, plans={"pipeline": "[0, 3]"}))
    assert record.read("auto")[1] == {"pipeline": "[0, 3]"}
    assert StartRecord(record.digest, 2, tmp_path).read("auto")[1] == {}, "another run measures for itself"


def test_what_was_written_is_read(record: StartRecord, cache: Path, tmp_path: Path) -> None:
    assert record.read("auto")[0] is None
    record.write(StartCheck(FOUND, fresh=True))
    assert record.read("auto")[0] == FOUND
    other = StartRecord(record.digest, 2, tmp_path)  # another run folder
    assert other.read("auto")[0] == FOUND
    assert StartRecord(record.digest, 3, tmp_path).read("auto")[0] is None  # another number of processes
    assert StartRecord("b" * 64, 2, record.folder).read("auto")[0] is None  # other code
    assert StartRecord("", 2, record.folder).read("auto")[0] is None
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert [path.name for path in cache.iterdir()] == [f"{'a' * 32}-2.json"]  # nothing half written


def test_a_run_that_goes_on_takes_any_number_of_processes(record: StartRecord) -> None:
    record.write(StartCheck(FOUND, fresh=True))
    assert StartRecord(record.digest, 5, record.folder).read("auto")[0] == FOUND


def test_what_was_read_is_handed_on_and_not_cached_again(record: StartRecord, cache: Path) -> None:
    record.write(StartCheck(FOUND))
    assert record.read("auto")[0] == FOUND and not cache.exists()


def _each_byte(data: bytes) -> list[bytes]:
    return [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(len(data))]


def test_a_damaged_record_counts_for_nothing(record: StartRecord, cache: Path) -> None:
    record.write(StartCheck(FOUND, fresh=True))
    os.unlink(cache / f"{'a' * 32}-2.json")
    path = record.folder / NAME
    whole = path.read_bytes()
    meant = json.loads(whole)
    broken = [*_each_byte(whole), *(whole[:length] for length in range(len(whole))), b"[]", b"null", b"{" * 9999]
    for data in broken:
        path.write_bytes(data)
        found, _ = record.read("auto")
        assert found is None or json.loads(data) == meant  # spaces between values do not count


def test_a_record_that_others_may_write_counts_for_nothing(record: StartRecord, tmp_path: Path) -> None:
    record.write(StartCheck(FOUND))
    path = record.folder / NAME
    path.chmod(0o666)
    assert record.read("auto")[0] is None
    path.chmod(0o600)
    assert record.read("auto")[0] == FOUND
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert record.read("auto")[0] is None
    path.unlink()
    os.mkfifo(path)  # reading one would wait
    assert record.read("auto")[0] is None


def test_a_folder_that_cannot_be_written_is_no_error(record: StartRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/no folder")
    StartRecord(record.digest, 2, Path("/dev/null/none")).write(StartCheck(FOUND, fresh=True))
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert record.read("auto")[0] is None


def test_old_records_are_removed(record: StartRecord, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_record, "KEPT", 3)
    for number in range(6):
        StartRecord(f"{number}" * 64, 2, record.folder).write(StartCheck(FOUND, fresh=True))
        os.utime(cache / f"{str(number) * 32}-2.json", (number, number))
    assert sorted(path.name[0] for path in cache.iterdir()) == ["3", "4", "5"]


def _digest(*overrides: str, model: nn.Module | None = None, data: str = "rows", device: str = "cpu") -> str:
    config = compose(["recipe=resnet_shapes", "launcher.processes=2", *overrides]).config
    return start_digest(config, Toy(), model or nn.Linear(2, 2), device, data)


def test_what_the_digest_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    same = _digest()
    assert same and same == _digest("seed=3", "lr.peak=0.3", "optimizer=adam", "train.steps=7", "launcher.threads=1")
    others = [
        _digest("precision=fp64"),
        _digest("step.micro_batch_rows=4"),
        _digest("strategy=fsdp"),
        _digest("strategy.bucket_mb=1"),
        _digest("recipe.data.train_rows=64"),
        _digest(data="other rows"),
        _digest(model=nn.Linear(2, 3)),
        _digest(model=nn.Sequential(nn.Linear(2, 2))),
        _digest(device="mps"),
    ]
    monkeypatch.setattr(torch, "__version__", "0.0")
    others.append(_digest())
    assert len({same, *others}) == 1 + len(others)


def test_plain_attributes_and_code_are_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nclass Own(nn.Linear):\n    pass\n"
    path = tmp_path / "own_model_of_a_test.py"
    path.write_text(source)
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(source, vars(module))
    model = module.Own(2, 2)
    first = _digest(model=model)
    model.level = 3.0
    second = _digest(model=model)
    path.write_text(source + "# changed\n")
    third = _digest(model=model)
    assert first and second and third and len({first, second, third}) == 3
    path.unlink()
    assert _digest(model=model) == ""  # nobody can tell whether this code is that of before


def test_helpers_that_the_model_calls_are_in_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digest()
    path = tmp_path / "functions_of_a_test.py"
    path.write_text("x = 1\n")
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)
    assert _digest() not in (before, "")


def test_installed_functions_that_own_files_use_are_in_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "site-packages" / "losses_of_a_test.py"
    path.parent.mkdir()
    path.write_text("def loss(outputs, targets):\n    return outputs\n")
    monkeypatch.syspath_prepend(path.parent)
    loss = importlib.import_module(path.stem).loss
    monkeypatch.setitem(globals(), "loss_of_a_test", loss)
    before = _digest()
    path.write_text("def loss(outputs, targets):\n    return outputs.sum(1)\n")
    assert before != "" and _digest() not in (before, "")
    monkeypatch.delitem(sys.modules, path.stem)
