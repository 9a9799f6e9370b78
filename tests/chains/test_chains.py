"""A few chains by default, more with `-m slow`; that a chain notices faults; what the command does with its results."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.chains import __main__ as command
from tests.chains.chain import WAYS, Chain, Leg, draw
from tests.chains.trial import Outcome, Refused, attempt, broken, judge
from tests.support.harness import reference

USUAL = [5, 23]
"""Seeds of chains that run by default."""

CASE: dict[str, Any] = {
    "steps": 4,
    "plugin": "tests.support.broken_strategies",
    "recipe": {"name": "toy", "rows": 42},
    "precision": "fp64",
}


def chain(*legs: tuple[str, int, int], **case: Any) -> Chain:
    """`legs`: strategy, processes, last step of each."""
    return Chain(
        legs=[Leg(way=name, strategy=name, options={}, processes=count, until=until) for name, count, until in legs],
        case=CASE | case,
    )


def judged(chosen: Chain) -> Outcome:
    return judge(chosen, Outcome(seed=0, chain=asdict(chosen)))


@pytest.mark.parametrize(
    "seed", [*USUAL, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60) if seed not in USUAL)]
)
def test_a_chain_equals_the_run_left_alone(seed: int) -> None:
    outcome = attempt(seed)
    assert not outcome.why, f"{outcome.chain}: {outcome.why}"


@pytest.mark.parametrize(
    ("legs", "found"),
    [
        ([("ddp", 1, 2), ("forgetful", 2, 4)], "train, step 4 differs"),
        ([("stale_average", 2, 2), ("ddp", 1, 4)], "running_"),
        ([("ddp", 1, 2), ("lost_rows", 2, 4)], "other samples than the sampler gives"),
    ],
)
def test_a_fault_is_found(legs: list[tuple[str, int, int]], found: str) -> None:
    assert found in judged(chain(*legs)).why


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"ids": {"3": [0] * 4}}, "other samples than the sampler gives"),
        ({"ids": {"4": [1]}}, "steps [0, 1, 2, 3, 4]"),
        ({"eval": {}}, "other steps of eval"),
        ({"eval": {"4": {"loss": float("nan"), "top1": 0.0}}}, "eval, step 4"),
        ({"tensors": {"model/0.weight": [[0.0] * 8] * 16}}, "other tensors"),
    ],
)
def test_each_difference_is_seen(changed: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = reference(**CASE)
    wrong = {key: whole[key] | value if key == "ids" or "4" in value else value for key, value in changed.items()}
    monkeypatch.setattr("tests.chains.trial.broken", lambda chain: whole | wrong)
    assert found in judged(chain(("ddp", 1, 4))).why
    monkeypatch.setattr("tests.chains.trial.broken", lambda chain: whole)
    assert not judged(chain(("ddp", 1, 4))).why


def test_a_refusal_of_a_rank_is_no_failure() -> None:
    blocks = chain(("pipeline", 3, 4))
    blocks = replace(blocks, legs=[replace(blocks.legs[0], options={"virtual": 2})])
    with pytest.raises(Refused, match="4 blocks do not make 6 stages"):
        broken(blocks)


def test_a_seed_is_a_chain() -> None:
    assert draw(3, 0) == draw(3, 0) != draw(3, 1)
    chains = [draw(seed, 0) for seed in range(300)]
    assert {leg.way for each in chains for leg in each.legs} == {name for name, *_ in WAYS}
    for each in chains:
        ends = [leg.until for leg in each.legs]
        assert 2 <= len(ends) <= 4 and ends == sorted(set(ends)) and ends[-1] == each.case["steps"]


def test_the_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []

    def attempted(seed: int) -> Outcome:
        tried.append(seed)
        why = "model/0.weight differs" if seed == 4 else ""
        return Outcome(seed=seed, why=why, refused=["3 blocks"], chain=asdict(draw(seed, 0)))

    monkeypatch.setattr(command, "attempt", attempted)
    file = tmp_path / "chains.jsonl"
    assert command.main([f"--results={file}", "--count=3"]) == 0
    assert "3 of 3 chains passed" in capsys.readouterr().out
    assert command.main([f"--results={file}", "--count=5"]) == 1
    text = capsys.readouterr().out
    assert tried == [0, 1, 2, 3, 4]
    assert "4 of 5 chains passed" in text and "python -m tests.chains --only 4\n" in text
    assert "refused 5 times: N blocks" in text
