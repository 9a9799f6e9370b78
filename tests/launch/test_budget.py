"""`budget.*`: counted over launches and trials, warned of, and a run or sweep that ends saved, with a code of its own,
and goes on with more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dtf.api.options import BudgetOptions
from dtf.cli.main import main
from dtf.core.errors import DataError, Exit
from dtf.engine import clock
from dtf.jobs.train import TrainJob
from dtf.runs import budget
from dtf.runs.budget import BudgetMeter, is_spent, key, limit_s, spent_s
from dtf.runs.run_folder import Run
from tests.conftest import Result

TOY = [
    "plugins=[tests.support.toy]",
    "recipe=toy",
    "launcher.devices=cpu",
    "launcher.threads=1",
    "step.batch_size=48",
    "observer=[console]",
]
INLINE = ["launcher=inline", "strategy=dp", "strategy.replicas=1"]
ENDLESS = ["train.steps=1000000", "train.eval_every=0", "train.log_every=0", "checkpoint.every_steps=1000000"]
SHORT = "budget.hours=0.0001"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A meter that looks often, and ranks in this process that ask often."""
    monkeypatch.setattr(budget, "_TICK_S", 0.02)
    monkeypatch.setattr(clock, "POLL_S", 0.02)


@pytest.mark.parametrize(
    ("options", "seconds", "named"),
    [
        (BudgetOptions(hours=2), 7200, "budget.hours=2"),
        (BudgetOptions(cost=6, cost_per_hour=3), 7200, "budget.cost=6"),
        (BudgetOptions(hours=1, cost=6, cost_per_hour=3), 3600, "budget.hours=1"),
        (BudgetOptions(hours=3, cost=6, cost_per_hour=3), 7200, "budget.cost=6"),
    ],
)
def test_the_budget_that_is_spent_first_counts(options: BudgetOptions, seconds: float, named: str) -> None:
    assert (limit_s(options), key(options)) == (seconds, named)
    assert limit_s(BudgetOptions(cost_per_hour=3)) == float("inf")


@pytest.mark.parametrize(
    ("elsewhere_s", "warned", "marked"),
    [(0, 0, False), (79.5, 0, False), (79.99, 1, False), (80, 0, False), (99.99, 0, True)],
)
def test_a_meter_warns_once_and_marks_the_end(
    tmp_path: Path, hasty: None, elsewhere_s: float, warned: int, marked: bool
) -> None:
    """A trial that begins after the others spent 80 % warns no more: they did."""
    (tmp_path / "seconds").write_text("0.1\n")
    warnings: list[str] = []
    with BudgetMeter(
        tmp_path, BudgetOptions(cost=100, cost_per_hour=3600), lambda: elsewhere_s, warnings.append
    ) as meter:
        pass
    assert (len(warnings), is_spent(tmp_path)) == (warned, marked), warnings
    assert 0.1 <= spent_s(tmp_path) <= meter.seconds + 0.1
    assert (
        not warnings or warnings[0] == "80% of budget.cost=100 is spent; at 100% the state is saved and the ranks stop"
    )


def test_a_run_ends_with_its_budget_and_goes_on_with_more(
    tmp_path: Path, hasty: None, monkeypatch: pytest.MonkeyPatch, run_dtf: Callable[..., Result]
) -> None:
    looks = count()
    # not yet before the first step, however long it took
    monkeypatch.setattr(budget, "is_spent", lambda folder: next(looks) > 0 and is_spent(folder))
    folder = tmp_path / "run"
    first = run_dtf(*TOY, *INLINE, *ENDLESS, SHORT, folder=folder)
    assert first.code == Exit.BUDGET, first.err
    assert "warning: " in first.out and "of budget.hours=0.0001 is spent" in first.out and "reason=budget" in first.out
    assert (
        "dtf: error[E_BUDGET]" in first.err
        and "the state is saved; raise budget.hours=0.0001 and start again to go on" in first.err
    )
    (saved,) = (folder / "checkpoints").glob("step_*")
    step, spent = int(saved.name.removeprefix("step_")), spent_s(folder)
    assert spent >= 0.3
    again = run_dtf(*TOY, *INLINE, *ENDLESS, SHORT, folder=folder)
    assert (
        again.code == Exit.BUDGET
        and "budget.hours=0.0001 was spent before; raise it to go on" in again.err
        and "started" not in again.out
    )
    more = run_dtf(*TOY, *INLINE, *ENDLESS, "budget.hours=1", f"train.until={step + 3}", folder=folder)
    assert more.code == Exit.OK and f"started step={step}/" in more.out
    record = json.loads((folder / "run.json").read_text())
    assert spent_s(folder) > spent and record["seconds"] == pytest.approx(spent_s(folder), abs=0.1)
    assert [one["exit"] for one in record["earlier"]] == [Exit.BUDGET, Exit.BUDGET]


@pytest.mark.parametrize("content", [bytes(16), b"-3", b"nan", b"9" * 500, b"\xff"])
def test_seconds_that_are_none_are_refused_where_a_budget_needs_them(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "seconds").write_bytes(content)
    with pytest.raises(DataError, match="seconds does not say how many seconds .* or remove it to count from 0"):
        spent_s(folder)
    job, run = TrainJob(), SimpleNamespace(folder=folder, notes=[])
    with pytest.raises(DataError):
        job._begin_counting(cast(Run, run), BudgetOptions(hours=1))
    job._begin_counting(cast(Run, run), BudgetOptions())
    assert "held no number and is seconds.bad now" in run.notes[0]
    assert spent_s(folder) == 0.0 and (folder / "seconds.bad").read_bytes() == content


@pytest.mark.slow
def test_a_run_without_a_budget_goes_on_over_damaged_seconds(tmp_path: Path, run_dtf: Callable[..., Result]) -> None:
    folder = tmp_path / "run"
    whole = [*TOY, *INLINE, "train.steps=2", "checkpoint.every_steps=1"]
    assert run_dtf(*whole, "train.until=1", folder=folder).code == Exit.OK
    (folder / "seconds").write_bytes(bytes(16))
    refused = run_dtf(*whole, "budget.hours=1", folder=folder)
    assert refused.code == Exit.DATA and f"{folder}/seconds does not say" in refused.err
    assert json.loads((folder / "run.json").read_text())["exit"] == Exit.DATA
    done = run_dtf(*whole, folder=folder)
    assert done.code == Exit.OK and "are counted from 0" in done.out + done.err


def test_a_budget_that_the_start_takes_buys_no_step(
    tmp_path: Path, hasty: None, run_dtf: Callable[..., Result]
) -> None:
    done = run_dtf(*TOY, *INLINE, *ENDLESS, "budget.hours=1e-9", folder=tmp_path / "run")
    assert (
        done.code == Exit.BUDGET
        and "the budget is spent after step 0; nothing is lost; raise budget.hours=1e-09" in done.err
    )
    assert not [*(tmp_path / "run/checkpoints").glob("step_*")]


def test_all_ranks_end_alike(monkeypatch: pytest.MonkeyPatch, run_dtf: Callable[..., Result]) -> None:
    monkeypatch.setattr(budget, "_TICK_S", 0.02)
    result = run_dtf(*TOY, "strategy=ddp", "launcher.processes=2", *ENDLESS, SHORT)
    assert result.code == Exit.BUDGET, result.err
    assert result.err.count("error[E_BUDGET]") == 1
    logs = [(result.folder / f"rank_{rank}.log").read_text() for rank in range(2)]
    assert len({re.findall(r"the budget is spent after step \d+; .*", log)[0] for log in logs}) == 1


@pytest.mark.slow
def test_a_sweep_ends_with_the_budget_of_all_its_trials(
    capsys: pytest.CaptureFixture[str], hasty: None, elsewhere: Path
) -> None:
    words = ["-m", *TOY, *INLINE, *ENDLESS, "seed=1,2", "train.until=2", "budget.cost_per_hour=2"]
    assert main([*words, "run.dir=mine"]) == Exit.OK
    assert "at a cost of " in capsys.readouterr().out.splitlines()[-1]
    spent = sum(spent_s(folder) for folder in Path("mine").iterdir())
    words[words.index("train.until=2")] = "train.until=100000"
    assert main([*words, "run.dir=mine", f"budget.cost={2 * (spent + 0.5) / 3600}"]) == Exit.BUDGET
    out, err = capsys.readouterr()
    assert (
        "dtf: trial 1: stopped by the budget  " in out and out.count("not begun") == 1 and "the sweep stops here" in err
    )
    assert main([*words, "run.dir=mine", f"budget.cost={2 * spent / 3600}"]) == Exit.BUDGET
    assert "was spent before" in capsys.readouterr().err


def test_money_needs_a_price(run_dtf: Callable[..., Result]) -> None:
    result = run_dtf(*TOY, *INLINE, "train.steps=1", "budget.cost=5")
    assert result.code == Exit.CONFIG
    assert "budget.cost=5 buys hours of a known price only; give budget.cost_per_hour=PRICE" in result.err
