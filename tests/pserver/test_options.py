"""What is said of a parameter server before anything is started: options out of range, and options that would have no
effect.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from dtf.api.strategy import Program
from dtf.api.task import Task
from dtf.config.compose import compose
from dtf.config.settings import Settings
from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.engine.clock import Plan
from dtf.engine.summary import startup_table
from dtf.pserver.strategy import Pserver
from tests.conftest import Result

REFUSED = [
    ("record=yes mode=async", "strategy.record=yes is no switch"),
    ("record=on mode=async", "strategy.record=on is no switch"),
    ("mode=geo staleness=1", "as optimizer=adam keeps them, may become negative; leave it at null"),
    ("mode=geo staleness=1 wire=bf16", "strategy.wire=bf16 narrows gradients"),
    ("mode=asyn", "did you mean async? choices: async, geo, half_async, sync"),
    ("geo_steps=400", "strategy.geo_steps=400 is for strategy.mode=geo"),  # whatever stands where nothing is given
    ("team=2", "strategy.team=2 does not divide launcher.processes=3"),
    *(
        (f"record={name}", f"strategy.record={name} must name a folder of its own")
        for name in ("/tmp/order", "../order", "a/b", ".", "run.json", "checkpoints")
    ),
]


def check(words: str, processes: str = "launcher.processes=3") -> Settings:
    given = [f"strategy.{word}" for word in words.split()]
    return compose(["recipe=ctr_clicks", "strategy=pserver", "launcher.devices=cpu", processes, *given]).check()


@pytest.mark.parametrize(("words", "said"), REFUSED)
def test_what_has_no_effect_or_cannot_be_is_refused(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(words)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("words", "window"),
    [
        ("recipe=ctr_clicks", 0),
        ("recipe=ctr_clicks optimizer=sgd", 1),
        ("recipe=ctr_clicks_sparse optimizer=sgd", 1),
        ("recipe=ctr_clicks_sparse optimizer=sgd sparse=lazy_adam", 0),
        ("recipe=ctr_clicks optimizer=sgd strategy.staleness=3", 3),
    ],
)
def test_geo_exchanges_at_once_where_an_optimizer_averages_squares(words: str, window: int) -> None:
    settings = compose([*words.split(), "strategy=pserver", "strategy.mode=geo", "launcher.devices=cpu"]).check(False)
    task = Task(settings.recipe, settings.optimizer, settings.precision, settings.step, 0, rows=settings.sparse)
    assert cast(Pserver, settings.strategy).sync_mode(task).window(2) == window


@pytest.mark.parametrize("key", ["job=status job.run_folder", "job=verify job.replay"])
def test_a_run_folder_that_is_none(key: str, tmp_path: Path, run_dtf: Callable[..., Result]) -> None:
    job, key = key.split()
    missing = run_dtf(job, f"{key}={tmp_path / 'typo'}")
    assert (
        missing.code == Exit.DATA
        and f"{key}={tmp_path / 'typo'} does not exist; give the folder of a run" in missing.err
    )


def test_the_table_of_a_run_counts_processes_by_their_roles() -> None:
    composed = compose(
        ["recipe=ctr_clicks", "strategy=pserver", "strategy.servers=2", "launcher.devices=cpu", "launcher.processes=3"]
    )
    # in mode async a step is one share
    program = cast(Program, SimpleNamespace(shares=1, micro_batch_rows=64, about=dict))
    world, plan = World(Place(size=2, slots=3, role="server", threads=2)), Plan(5, 1, 0, 0)
    table = startup_table(composed.check(), composed.config, Path("run"), (6, 6), program, world, plan, [], 10, 10)
    assert table["strategy"] == "pserver servers=2 on 2 servers, 3 trainers, 2 threads a server"
    assert table["batch"].endswith(" over 1 share")


@pytest.mark.parametrize("words", ["mode=async record=order", "min_block=16", "servers=2"])
def test_what_has_an_effect_is_not(words: str) -> None:
    check(words)
