"""`import dtf` is the public interface: every name is documented, needs no torch before it is asked for, and the names
of before still work, with a warning.
"""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dtf
from dtf.core.renamed import MODULES

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "recipes").glob("*/*.md"),
]


def test_every_public_name_is_listed_once_and_says_what_it_is() -> None:
    assert sorted(dtf.__all__) == sorted(set(dtf.__all__)) == sorted(["__version__", *dtf._PUBLIC])
    for name in dtf._PUBLIC:
        value = getattr(dtf, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            written = inspect.getdoc(value) or ""
            assert written and not written.startswith(f"{name}("), f"dtf.{name} has no docstring"
    with pytest.raises(AttributeError, match="has no attribute 'Recipee'"):
        dtf.Recipee  # type: ignore[attr-defined]  # noqa: B018


def test_the_interface_costs_no_torch() -> None:
    code = (
        "import sys\nfrom dtf import Recipe, Dataset, Strategy, Observer, option, register, weighted_sums, Layout\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "import dtf\nassert set(dtf.__all__) <= set(dir(dtf))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_from_the_interface_alone(page: Path) -> None:
    for names in re.findall(r"^\s*from dtf import (.+)$", page.read_text(), re.MULTILINE):
        missing = {name.split(" as ")[0].strip(" ()") for name in names.split("#")[0].split(",")} - set(dtf.__all__)
        assert not missing, f"{page.name} imports {missing}, which dtf does not offer"
    private = re.findall(r"^\s*(?:from|import) (dtf\.\S+)", page.read_text(), re.MULTILINE)
    assert not private, f"{page.name} imports from {private}"


@pytest.mark.parametrize("old", MODULES)
def test_an_old_import_path_gives_the_same_object_and_a_warning(old: str) -> None:
    new, names = MODULES[old]
    target = importlib.import_module(new)
    public = [name for name, value in vars(target).items() if inspect.isclass(value) and value.__module__ == new]
    functions = [name for name, value in vars(target).items() if inspect.isfunction(value) and value.__module__ == new]
    module = importlib.import_module(old)
    for name in [*names, *[one for one in [*public, *functions] if not one.startswith("_")][:3]]:
        with pytest.warns(DeprecationWarning, match=rf"{re.escape(old)}\.{name} is now {re.escape(new)}\."):
            assert getattr(module, name) is getattr(target, names.get(name, name))
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018


def test_old_names_of_methods_count_under_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match=r"Half\.judge is now called evaluator; rename it"):

        class Half(dtf.Recipe):
            measures = ("loss", "top1")

            def judge(self, rows: int) -> None:
                return None

    assert Half.train_metrics == ("loss", "top1")  # type: ignore[comparison-overlap]
    assert Half.evaluator is Half.judge and "evaluator" not in Half.__abstractmethods__
    with pytest.warns(DeprecationWarning, match="best_possible"):

        class Rows(dtf.Dataset):
            def __len__(self) -> int:
                return 1

            def fetch(self, ids: np.ndarray, epoch: int) -> tuple[None, None]:  # type: ignore[override]
                return None, None

            def ceiling(self) -> dict[str, float]:
                return {"auc": 0.9}

    assert Rows().best_possible() == {"auc": 0.9}
