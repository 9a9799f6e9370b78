"""Optuna's proposals: within what was asked for, better than chance, and the same whether or not the sweep was
interrupted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtf.cli.optuna_search import OptunaSearch, Told, told_by
from dtf.config.hydra_sources import OptunaOptions
from dtf.config.messages import parse
from dtf.core.errors import BusyError, ConfigError

SPACE = [
    "lr.peak=tag(log,interval(0.001,10))",
    "optimizer=sgd,adamw",
    "seed=range(2,9,3)",
    "step.batch_size=int(interval(8,64))",
    "train.steps=4",
]


def values(overrides: Sequence[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in overrides)


class Parabola:
    """Remembers what was launched; its objective is best at a rate of 0.1."""

    def __init__(self, fails: int = -1, killed: int = -1) -> None:
        self.seen: list[dict[str, str]] = []
        self.fails, self.killed = fails, killed

    def __call__(self, overrides: Sequence[str], number: int) -> float:
        if number == self.killed:
            raise KeyboardInterrupt
        self.seen.append(values(overrides))
        return math.nan if number == self.fails else (math.log10(float(self.seen[-1]["lr.peak"])) + 1) ** 2

    def losses(self) -> list[float]:
        return [(math.log10(float(one["lr.peak"])) + 1) ** 2 for one in self.seen]


def search(folder: Path, launch: Parabola, trials: int = 12, space: Sequence[str] = SPACE) -> list[dict[str, str]]:
    """One trial after the other."""
    search = OptunaSearch(OptunaOptions(n_trials=trials), parse(space), "min", folder)
    known: dict[int, Told] = {}
    given = search.given
    for number in range(trials):
        overrides = given[number] if number < len(given) else search.propose(known)
        assert overrides is not None
        if math.isfinite(value := launch(overrides, number)):
            known[number] = Told(value)
    assert search.propose(known) is None
    return launch.seen


def test_proposals_are_of_the_kinds_asked_for(tmp_path: Path) -> None:
    for one in search(tmp_path, Parabola()):
        assert 0.001 <= float(one["lr.peak"]) <= 10 and len(one["lr.peak"].replace(".", "").lstrip("0")) <= 4
        assert one["optimizer"] in ("sgd", "adamw") and one["seed"] in ("2", "5", "8") and one["train.steps"] == "4"
        assert one["step.batch_size"].isdecimal() and 8 <= int(one["step.batch_size"]) <= 64


def test_what_is_proposed_gets_better(tmp_path: Path) -> None:
    launch = Parabola()
    search(tmp_path, launch, trials=8, space=SPACE[:1])
    losses = launch.losses()
    assert min(losses[2:]) < min(losses[:2])
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_killed_search_proposes_what_an_undisturbed_one_does(tmp_path: Path) -> None:
    whole, first = Parabola(fails=3), Parabola(fails=3, killed=6)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    search(tmp_path / "whole", whole)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "cut", first)
    again = Parabola(fails=3)
    assert search(tmp_path / "cut", again) == whole.seen
    assert len(first.seen) == 6 and len(whole.seen) == 12, "a failed trial counts and ends nothing"
    longer = Parabola(fails=3)
    assert search(tmp_path / "cut", longer, trials=14)[:12] == whole.seen
    assert len(json.loads((tmp_path / "cut" / "proposals.json").read_text())["proposals"]) == 14


def test_another_search_is_not_mixed_with_it(tmp_path: Path) -> None:
    search(tmp_path, Parabola(), trials=1)
    with pytest.raises(BusyError, match="holds a search over other values"):
        search(tmp_path, Parabola(), space=["lr.peak=interval(1,2)"])


@pytest.mark.parametrize(
    "text",
    [
        '{"spa',
        "[]",
        '{"space": {}}',
        '{"space": SPACE, "proposals": [{}]}',
        '{"space": SPACE, "proposals": [{"lr.peak": 3.0}]}',
        '{"space": SPACE, "proposals": [7]}',
        "[" * 100_000,
        "pipe",
    ],
)
def test_damaged_proposals_are_refused(tmp_path: Path, text: str) -> None:
    space = ["lr.peak=interval(1,2)"]
    search(tmp_path, Parabola(), trials=1, space=space)
    path = tmp_path / "proposals.json"
    described = json.dumps(json.loads(path.read_text())["space"])
    if text == "pipe":
        path.unlink()
        os.mkfifo(path)
    else:
        path.write_text(text.replace("SPACE", described))
    with pytest.raises(BusyError, match=r"proposals.json cannot be read \(.*\); remove it, or choose another run.dir"):
        search(tmp_path, Parabola(), space=space)


@pytest.mark.parametrize("seed", [-1, 2**32 - 12])
def test_a_seed_that_numpy_does_not_take_is_refused(tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match=f"hydra.sweeper.seed={seed} must be 0 to 4294967283"):
        OptunaSearch(OptunaOptions(n_trials=12, seed=seed), parse(SPACE), "min", tmp_path)


@pytest.mark.parametrize("bad", ["interval(2,1)", "tag(log,interval(0,1))"])
def test_what_cannot_be_searched_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match="is no interval to search"):
        search(tmp_path, Parabola(), space=[f"lr.peak={bad}"])


def test_proposals_beside_trials_that_run_differ_and_say_what_they_were_made_after(tmp_path: Path) -> None:
    """Also a trial that was pruned teaches; the record of what was known gives the same proposal again."""
    space, options = parse(SPACE[:1]), OptunaOptions(n_trials=12)
    search = OptunaSearch(options, space, "min", tmp_path)
    known: dict[int, Told] = {}
    rates = []
    for number in range(12):
        overrides = search.propose(known)
        assert overrides is not None
        rates.append(float(values(overrides)["lr.peak"]))
        known[number] = Told(None)
        for ended in [other for other, told in known.items() if told.value is None][:-3]:  # three in flight
            loss = (math.log10(rates[ended]) + 1) ** 2
            known[ended] = Told(loss, 2 if ended % 4 == 3 else None)
    assert len(set(rates)) == 12
    kept = json.loads((tmp_path / "proposals.json").read_text())
    assert told_by(kept["news"][:9])[3].evaluations == 2 and told_by(kept["news"][:9])[7].value is None
    assert all(len(news) <= 3 for news in kept["news"]), "what has not changed is not told again"
    for number in (5, 11):
        again = tmp_path / str(number)
        again.mkdir()
        before = {key: kept[key][:number] for key in ("proposals", "news")} | {"space": kept["space"]}
        (again / "proposals.json").write_text(json.dumps(before))
        told = told_by(kept["news"][: number + 1])
        assert OptunaSearch(options, space, "min", again).propose(told) == [f"lr.peak={rates[number]}"]
