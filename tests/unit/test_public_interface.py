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
from typing import Any

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
        "from dtf import Result, compose, evaluate, predict, train\n"
        "assert compose(['strategy=fsdp', {'lr.peak': 0.1}]).settings.lr.peak == 0.1 and 'torch' not in sys.modules\n"
        "from dtf import RowReader\nassert not {'torch', 'numba', 'safetensors'} & set(sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_from_the_interface_alone(page: Path) -> None:
    for names in re.findall(r"^\s*from dtf import (.+)$", page.read_text(), re.MULTILINE):
        missing = {name.split(" as ")[0].strip(" ()") for name in names.split("#")[0].split(",")} - set(dtf.__all__)
        assert not missing, f"{page.name} imports {missing}, which dtf does not offer"
    private = re.findall(r"^\s*(?:from|import) (dtf\.\S+)", page.read_text(), re.MULTILINE)
    assert not private, f"{page.name} imports from {private}"


OLD_NAMES = {
    "dtf.build": "DTYPES draw_model sketch layout_of drawn is_statistics formats cast_model",
    "dtf.classes": "IGNORED cross_entropy rank",
    "dtf.errors": "LONGEST INTERRUPTED PIPE_CLOSED Exit ORDERLY DtfError ConfigError DataError PeerError BusyError "
    "SaveError Preempted AuthError DivergedError BudgetError NoProgressError code_name error_line",
    "dtf.job": "Job",
    "dtf.launcher": "LONGEST_S WORK Place Launcher check_one_role check_environment log_folder report",
    "dtf.layout": "Split Layout",
    "dtf.lr": "Schedule ramp require check_peak check_warmup Constant Plateau Cosine Step OneCycle",
    "dtf.metrics": "weighted_sums",
    "dtf.observer": "Probe Observer Observers Probes",
    "dtf.optimizer": "Combine Group Optimizer Bound AdamMoments counter sgd_step",
    "dtf.precision": "Format Cast HALF Precision set_switches",
    "dtf.options": "RunOptions BudgetOptions Remat StepOptions FineTuning TrainOptions",
    "dtf.pserver.placing": "placing round_robin hash_name check_placement",
    "dtf.ranking": "auc grouped_auc Ranking",
    "dtf.recipe": "Split Dataset Peers Judge Recipe",
    "dtf.registry": "Range option register brings bring groups registered lookup name_of suggest",
    "dtf.row_optimizer": "DEFAULT RowOptimizer Scheduled",
    "dtf.sampler": "Tail Sampler Shuffle Sequential Weighted Repeated Epochs cut within share",
    "dtf.seeding": "seed_of draws mix",
    "dtf.spmd": "Replica Spmd alone workload waiting",
    "dtf.strategy": "Weights Task Source Program Errand Standing Strategy check_divides check_layout check_tables",
    "dtf.table": "NO_NUMBA Table Placement",
    "dtf.update": "GROWTH_INTERVAL Piece whole made state_bytes rehearsed LocalUpdate",
    "dtf.world": "World",
    "dtf.values": "Shard WHOLE Train Log Poll Evaluate Save Stop Ticket Batch Names StepOutput Evaluated Box State "
    "Measured Started Saved Note Failed Ended Event event_to_json event_from_json",
}
"""Module -> its names before they moved, but for those that only dtf itself used."""


@pytest.mark.parametrize("old", OLD_NAMES)
def test_an_old_import_path_works_and_warns_where_it_is_used(old: str) -> None:
    module = importlib.import_module(old)
    for name in OLD_NAMES[old].split():
        with pytest.warns(DeprecationWarning, match=rf"^{re.escape(old)}\.{name} is now dtf\.") as caught:
            assert getattr(module, name) is not None
        assert caught[0].filename == __file__
    with pytest.raises(AttributeError):
        module.no_such_name  # noqa: B018
    assert set(OLD_NAMES) == set(MODULES)


def test_old_names_of_methods_count_under_the_new_ones() -> None:
    with (
        pytest.warns(DeprecationWarning, match=r"Half\.measures is now called train_metrics; rename it"),
        pytest.warns(DeprecationWarning, match=r"Half\.judge is now called evaluator; rename it"),
    ):

        class Half(dtf.Recipe):
            measures = ("loss", "top1")

            def judge(self, rows: int) -> None:
                return None

    assert Half.train_metrics == ("loss", "top1")  # type: ignore[comparison-overlap]
    assert Half.evaluator is Half.judge and "evaluator" not in Half.__abstractmethods__

    class Whole(dtf.Recipe):
        train_metrics = ("loss",)  # type: ignore[assignment]

    with pytest.warns(DeprecationWarning, match=r"Whole\.measures is now called train_metrics") as caught:
        assert Whole.measures == ("loss",)  # type: ignore[attr-defined]
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="best_possible"):

        class Rows(dtf.Dataset):
            def __len__(self) -> int:
                return 1

            def fetch(self, ids: np.ndarray, epoch: int) -> tuple[None, None]:  # type: ignore[override]
                return None, None

            def ceiling(self) -> dict[str, float]:
                return {"auc": 0.9}

    assert Rows().best_possible() == {"auc": 0.9}


def test_old_names_of_a_program_count_too() -> None:
    """Else a program's `settle` would silently never be called."""
    with pytest.warns(DeprecationWarning) as caught:

        class Mine(dtf.Program):
            def settle(self) -> None:
                """Average what is mine."""

            def rehearse(self, batch: dtf.Batch) -> None:
                """One pass."""

    assert Mine.sync is Mine.settle and Mine.warmup is Mine.rehearse  # type: ignore[comparison-overlap]
    assert len(caught) == 2 and {warning.filename for warning in caught} == {__file__}


def test_the_optional_parts_say_that_there_is_nothing() -> None:
    work, roles = dtf.LeasedWork(), dtf.HelperRoles()
    assert dtf.Program.leased.rest() is work.rest() is work.eval_rest() is None
    assert not work.consumed() and not work.unread("train", 0) and not work.told_to_stop()
    assert not roles.replaceable and roles.on_device("trainer") and not roles.on_device("server")
    assert roles.count_key("trainer") == "launcher.processes" and roles.count_key("server") == "strategy.servers"
    with pytest.raises(dtf.ConfigError, match="launcher=manual.*use launcher=local"):
        roles.check_manual_start()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_names_count_from_a_mixin_and_by_super() -> None:
    class Judges:
        def judge(self, rows: int) -> str:  # a mixin knows no contract
            return "mixin"

    class Base(dtf.Recipe):
        def evaluator(self, rows: int) -> str:  # type: ignore[override]
            return "base"

    class Mixed(Judges, Base):
        pass

    class Old(Base):
        def judge(self, rows: int) -> str:
            return "old, " + super().judge(rows)  # type: ignore[misc]

    class New(Old):
        def evaluator(self, rows: int) -> str:  # type: ignore[override]
            return "new, " + super().evaluator(rows)

    class Field(Base):
        measures: tuple[str, ...] = ("loss", "top1")

    def make(cls: type) -> Any:
        cls.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
        return cls()

    def asked(cls: type) -> set[str]:
        return {make(cls).evaluator(1), make(cls).judge(1)}

    assert asked(Mixed) == {"mixin"} and asked(Old) == {"old, base"} and asked(New) == {"new, old, base"}
    assert make(Field).train_metrics == ("loss", "top1")
