"""What hosts compare of code that no package manager has installed."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from dtf.core import own_code
from dtf.core.consistency import describe_differences
from dtf.core.own_code import CODE, is_own


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package that is loaded, with a module."""
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, path in (("mine", folder / "__init__.py"), ("mine.model", folder / "model.py")):
        path.write_text("x = 1\n")
        module = ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)
    return folder


def test_files_are_known_by_the_names_that_imports_give_them(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = own_code.own_code().keys() - {"mine/__init__.py", "mine/model.py"}  # what other tests have made
    first = own_code.own_code()
    assert first.keys() - known == {"mine/__init__.py", "mine/model.py"}
    assert not [path for path in first if path.startswith(("torch/", "numpy/", "pytest/"))]
    monkeypatch.setattr(sys.modules["mine.model"], "__file__", str(plugin.rename(plugin.parent / "other") / "model.py"))
    assert own_code.own_code()["mine/model.py"] == first["mine/model.py"], "wherever the host keeps it"
    (plugin.parent / "other" / "model.py").write_text("x = 2\n")
    second = own_code.own_code()
    said = describe_differences({"rank 0 on a": {CODE: first}, "rank 1 on b": {CODE: second}})
    digests = f'code.mine/model.py="{second["mine/model.py"]}", rank 0 on a has "{first["mine/model.py"]}"'
    assert said.startswith(f"ranks differ: rank 1 on b: {digests}; give all the same command line")


def test_what_one_side_has_not_loaded_is_no_difference() -> None:
    assert not describe_differences({"rank 0": {CODE: {"a.py": "1"}}, "rank 1": {CODE: {"b.py": "2"}}})
    assert describe_differences({"rank 0": {"data": {"a": "1"}}, "rank 1": {"data": {"b": "2"}}})


def test_a_working_copy_of_dtf_is_compared_by_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.py", "engine/b.py", "engine/c.py", "engine/__pycache__/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(own_code, "DTF", f"{tmp_path}{os.sep}")
    monkeypatch.setattr(sys, "modules", {})
    first = own_code.own_code()
    assert [*first] == ["dtf", "dtf/engine"]
    (tmp_path / "engine/c.py").rename(tmp_path / "engine/d.py")
    second = own_code.own_code()
    assert second["dtf"] == first["dtf"] and second["dtf/engine"] != first["dtf/engine"]
    monkeypatch.setattr(own_code, "DTF", "/usr/lib/python3/dist-packages/dtf/")
    assert own_code.own_code() == {}, "its version stands for it"


def test_what_is_installed_counts_by_its_version() -> None:
    paths = sysconfig.get_paths()
    installed = (paths["purelib"], paths["stdlib"], paths["scripts"])
    assert not any(is_own(f"{folder}/thing.py") for folder in installed)
    assert not is_own(own_code.__file__) and is_own(__file__)
