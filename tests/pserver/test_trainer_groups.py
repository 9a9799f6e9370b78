"""Laws of trainers that are several processes (`strategy.team`): the numbers are those of one process, in every mode
that has any.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dtf.core.types import Shard
from dtf.pserver.strategy import Pserver
from dtf.pserver.trainer.group import form_group
from tests.laws.test_sharded_tables import ANY
from tests.pserver.test_kill import BASE, THRICE, TWO, bits, left, visits
from tests.support.harness import ROWS, difference, reference, spread
from tests.support.manual_start import TOKEN

slow = pytest.mark.slow
TOY: dict[str, Any] = {"rows": ROWS}
SLOW_TOY = [
    "plugins=[tests.support.kill_trigger]", "recipe=slow_toy", "recipe.rows=100", "step.batch_size=24",
    "step.micro_batch_rows=5",
    "train.steps=45", "train.log_every=1",
    "checkpoint.every_steps=5", "train.record=true", "lr.warmup=0", "strategy=pserver", "launcher.threads=1",
]  # fmt: skip
RECIPES = pytest.mark.parametrize("recipe", [TOY, ANY], ids=["toy", "tabled"])
RECIPES_RARELY = pytest.mark.parametrize("recipe", [pytest.param(TOY, marks=slow), ANY], ids=["toy", "tabled"])


@RECIPES
@pytest.mark.parametrize(
    ("team", "processes", "servers"),
    [
        (2, 2, 1),
        pytest.param(2, 4, 2, marks=slow),
        pytest.param(3, 3, 2, marks=slow),
        (4, 8, 2),
        pytest.param(7, 7, 1, marks=slow),
    ],
)
def test_sync_is_the_reference(team: int, processes: int, servers: int, recipe: dict[str, Any]) -> None:
    """Two teams of four share five micro-batches: some have none."""
    options = {"team": team, "servers": servers, "min_block": 1}
    assert difference(reference(recipe=recipe), spread("pserver", processes, options=options, recipe=recipe)) <= 1e-10


@pytest.mark.parametrize("name", ["coupled_toy", "received_tables_toy"])
def test_micro_batches_that_are_coupled(name: str) -> None:
    """Each process of a team evaluates whole micro-batches, and makes the inputs of each of its own ready at once."""
    own = {"name": name, "rows": ROWS} | ({"received": True} if name == "coupled_toy" else {})
    case: dict[str, Any] = {"plugin": "tests.support.coupled_toy", "recipe": own}
    options = {"team": 2, "servers": 2, "min_block": 1}
    assert difference(reference(**case), spread("pserver", 4, options=options, **case)) <= 1e-10


@RECIPES_RARELY
def test_modes_that_wait_for_everybody_are_the_reference_too(recipe: dict[str, Any]) -> None:
    alone = spread("pserver", 2, options={"mode": "async", "staleness": 0, "team": 2}, recipe=recipe)
    assert difference(reference(recipe=recipe), alone) <= 1e-10
    gathered = spread("pserver", 4, options={"mode": "half_async", "staleness": 0, "team": 2}, recipe=recipe)
    for run in (gathered, whole := reference(recipe=recipe)):
        run["ids"] = {step: sorted(ids) for step, ids in run["ids"].items()}
    assert difference(whole, gathered) <= 1e-10


@RECIPES_RARELY
def test_geo_is_what_it_is_with_trainers_of_one_process(recipe: dict[str, Any]) -> None:
    options = {"mode": "geo", "geo_steps": 3, "staleness": 0, "servers": 2, "min_block": 1}
    one, team = (
        spread("pserver", 1, options=options, recipe=recipe),
        spread("pserver", 3, options=options | {"team": 3}, recipe=recipe),
    )
    for run in (one, team):
        run["train"] = {}  # measured at every step, and told at every third
    assert difference(one, team) <= 1e-10


@pytest.mark.parametrize("mode", ["async", pytest.param("half_async", marks=slow), pytest.param("geo", marks=slow)])
def test_two_teams_take_every_sample_once_and_count_evaluations_exactly(mode: str) -> None:
    """The engine refuses an evaluation that counts a row twice or not at all."""
    result = spread(
        "pserver",
        4,
        options={"mode": mode, "servers": 2, "min_block": 1, "team": 2},
        recipe=ANY,
        steps=6,
        clip_norm=0.0,
        eval_every=1,
    )
    for epoch in range(2):
        assert Counter(i for step in range(3 * epoch, 3 * epoch + 3) for i in result["ids"][str(step)]) == Counter(
            range(ROWS)
        )
    assert len(result["eval"]) == 6 and result["eval"]["6"]["loss"] < result["eval"]["1"]["loss"]


# ------------------------------------------------------------ meeting


def test_a_team_meets_anew_whichever_order_its_processes_come_back_in() -> None:
    """Each life is of one team at most: who was answered before is waited for until it comes again, who was not is
    still there.
    """
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pool, beats = ThreadPoolExecutor(16), list[int]()

    def come(member: int) -> Future[str]:
        store = dist.TCPStore("127.0.0.1", master.port, is_master=False)
        return pool.submit(form_group, store, Shard(member, 3), lambda: beats.append(member))

    def names(*members: Future[str]) -> set[str]:
        return {member.result(10) for member in members}

    assert names(come(2), come(0), come(1)) == {"1"}
    orphan = come(1)  # its predecessor was killed; the first process does not know yet
    first, other = come(0), come(2)
    assert names(first, orphan, other) == {"2"}
    early, early_too = come(2), come(1)
    assert names(come(0), early, early_too) == {"3"}
    lost = come(1)  # and is killed before anybody answers
    master.wait(["1/4/asks"])
    again = come(1)
    master.wait(["1/5/asks"])
    assert names(again, come(0), come(2)) == {"4"} and not lost.done()
    assert set(beats) == {0, 1, 2}
    master.set("1/4/team", "")
    assert lost.result(10) == ""


# ------------------------------------------------------------ as a user starts it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launcher.processes=3"], "strategy.team=2 does not divide launcher.processes=3; use 1 or 3"),
        (
            ["launcher=manual", "launcher.endpoints=[127.0.0.1:1]", "launcher.role=server", "launcher.id=0"],
            "strategy.team=2: these processes find each other by a launcher that starts them all",
        ),
        (
            ["strategy.dense=allreduce", "recipe=tabled", "plugins=[tests.support.sparse_toy]", "train.steps=1"],
            "strategy.team is of no account with strategy.dense=allreduce",
        ),
    ],
)
def test_where_there_are_no_teams(words: list[str], said: str, run_dtf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    refused = run_dtf("strategy=pserver", "strategy.team=2", "launcher.processes=2", *words)
    assert refused.code == 2 and said in refused.err


def test_who_starts_what() -> None:
    assert Pserver(team=2, servers=3).roles(8) == {"server": 3, "trainer": 8}
    assert Pserver(team=4).count_trainers(8) == 2
    assert Pserver(team=4).roles(12) == {"server": 1, "trainer": 12}


@slow
@pytest.mark.parametrize("servers", [[], TWO], ids=["one server", "two servers"])
def test_killed_processes_of_teams_leave_sync_bit_for_bit(servers: list[str], run_dtf: Any) -> None:
    """First ones and others, and a whole team at once; all of a team are started again, and nobody else."""
    first = 1 + bool(servers)  # rank of the first trainer process
    words = [*SLOW_TOY, *servers, "strategy.team=2", "launcher.processes=4", "observer=[jsonl,kill_trigger]"]
    orders = [f"8:{first + 1}:SIGKILL", f"20:{first}:SIGKILL", f"32:{first + 2}:SIGKILL", f"32:{first + 3}:SIGKILL"]
    whole, killed = run_dtf(*words), run_dtf(*words, f"observer.kill_trigger.orders=[{','.join(map(repr, orders))}]")
    assert killed.code == 0, killed.err
    assert bits(whole.folder) == bits(killed.folder)
    logs = [(killed.folder / f"rank_{rank}.log").read_text().count("started again alone") for rank in range(first + 4)]
    assert logs == [0] * first + [2, 2, 1, 1]
    assert left(killed.folder) == []


@pytest.mark.slow
def test_a_killed_process_of_a_team_leaves_sync_bit_for_bit(run_dtf: Any, tmp_path: Path) -> None:
    words = [*BASE, "strategy.team=2"]
    whole, killed = run_dtf(*words), run_dtf(*words, f"recipe.marker={tmp_path / 'killed'}")
    assert killed.code == 0, killed.err
    assert (tmp_path / "killed").exists() and bits(whole.folder) == bits(killed.folder)
    assert visits(killed.folder) == THRICE and left(killed.folder) == []


@slow
@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_a_run_of_teams_is_replayed(mode: str, run_dtf: Any) -> None:
    words = [*BASE, *TWO, f"strategy.mode={mode}", "step.clip_norm=0", "precision=fp64", "strategy.record=order"]
    done = run_dtf(
        *words, "strategy.team=2", "launcher.processes=4", *(["strategy.geo_steps=4"] if mode == "geo" else [])
    )
    assert done.code == 0, done.err
    again = run_dtf(
        "job=verify",
        f"job.replay={done.folder}",
        "plugins=[tests.support.broken_strategies,tests.support.kill_trigger]",
    )
    assert again.code == 0 and "has the run's numbers" in again.out, again.err
