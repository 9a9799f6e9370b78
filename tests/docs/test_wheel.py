"""The wheel holds all that dtf needs, and runs where there is no checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from dtf.core.own_code import dtf_digest

ROOT = Path(__file__).parents[2]
INPUTS = ("pyproject.toml", "README.md", "LICENSE", "dtf", "recipes", "conf")


def call(*command: str | Path, cwd: Path, timeout_s: float = 120.0) -> str:
    """Standard output of a command that must succeed; it sees neither the checkout nor this process's Python
    settings.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COV_", "PYTEST"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools leaves a build folder behind, and would put last time's files into this time's
    wheel.
    """
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in INPUTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    call(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        out,
        source,
        cwd=out,
    )
    (built,) = out.glob("dtf-*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the wheel in it. It borrows torch and the rest from this one, but not this one's dtf.

    A path in a `.pth` file is searched, while `.pth` files found there are not read: an editable dtf stays out of
    sight.
    """
    home = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", home, cwd=home)
    python = home / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    (site / "borrowed.pth").write_text("\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    call(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=home,
    )
    return python


def shipped(folder: str, inside: str, *patterns: str) -> set[str]:
    found = {path for pattern in patterns for path in (ROOT / folder).rglob(pattern)}
    return {f"{inside}/{path.relative_to(ROOT / folder)}" for path in found if "__pycache__" not in path.parts}


def test_the_wheel_holds_exactly_what_is_shipped(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    code = {name for name in shipped("dtf", "dtf", "*.py", "*.c", "*.sh") if not name.startswith("dtf/recipes/")}
    conf = shipped("conf", "dtf/conf", "*.yaml")
    recipes = shipped("recipes", "dtf/recipes", "*.py", "*.md", "*.yaml")
    assert "dtf/conf/config.yaml" in conf and "dtf/recipes/resnet/model.py" in recipes
    assert names == code | conf | recipes


def test_the_installed_wheel_and_the_working_copy_are_the_same_code(wheel: Path, tmp_path: Path) -> None:
    """By the digest that a job is held against."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (tmp_path / "dtf" / "__pycache__").mkdir()
    (tmp_path / "dtf" / "__pycache__" / "run.py").touch()
    (tmp_path / "dtf" / ".#run.py").symlink_to("nobody@host")  # Emacs has the file open
    assert dtf_digest(str(tmp_path / "dtf")) == dtf_digest()
    with (tmp_path / "dtf" / "conf" / "config.yaml").open("a") as file:
        file.write("#")
    assert dtf_digest(str(tmp_path / "dtf")) != dtf_digest()


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    about = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "dtf = dtf.__main__:main" in about["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in about["METADATA"] and "Requires-Dist: torch>=2.11" in about["METADATA"]
    assert about["LICENSE"] == (ROOT / "LICENSE").read_text()


@pytest.mark.slow
def test_the_installed_command_composes_and_trains(python: Path, tmp_path: Path) -> None:
    found = Path(call(python, "-c", "import dtf; print(dtf.__file__)", cwd=tmp_path).strip())
    assert found.is_relative_to(python.parent.parent), "the environment must not see the checkout"
    command = python.parent / "dtf"
    assert "strategy:" in call(command, "--cfg", "job", cwd=tmp_path)
    run = tmp_path / "run"
    call(command, "launcher.processes=2", "train.steps=2", "step.batch_size=8", f"run.dir={run}", cwd=tmp_path)
    assert (run / "config.yaml").is_file() and (run / "metrics.jsonl").read_text().strip()
