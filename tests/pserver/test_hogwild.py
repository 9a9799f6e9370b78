"""Laws of trainer threads with one copy of the parameters (strategy.hogwild_threads): each sample once, whoever fails
or hangs; learning as without.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dtf.api.helper_roles import RoleContext
from dtf.api.options import StepOptions
from dtf.api.recipe import Recipe
from dtf.api.task import Task
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Place
from dtf.optim.optimizers import Sgd
from dtf.pserver.net.codec import Parts, encode
from dtf.pserver.net.messages import READY, exchange_schemas
from dtf.pserver.options import Dense, Device, Mode
from dtf.pserver.param_slices import lay_out
from dtf.pserver.strategy import Pserver
from dtf.pserver.trainer import hogwild
from dtf.pserver.trainer.compute import ModelSetup, ParamBlocks, PulledState, TrainerModel
from dtf.pserver.trainer.hogwild import PeerThreadFailed, ThreadGroup, trainer_numbers
from dtf.pserver.trainer.trainer import Trainer
from tests.laws.test_sharded_tables import ANY
from tests.pserver.test_kill import BASE, THRICE, left, visits
from tests.support import harness
from tests.support.harness import BATCH, PRECISIONS, ROWS, spread
from tests.support.ranks import ranks
from tests.support.toy import Toy

slow = pytest.mark.slow
ASYNC: dict[str, Any] = {"mode": "async", "min_block": 1}
TASK = Task(Toy(), Sgd(), PRECISIONS["fp32"], StepOptions(batch_size=24), 0)


def train(rank: int, size: int, **case: Any) -> dict[str, Any]:
    """As the harness, whose trainer processes are threads of one: what others draw at random there says nothing of a
    model.
    """
    TrainerModel.warmup = lambda self, batch: None  # type: ignore[method-assign]
    TrainerModel.follow = lambda self, first: None  # type: ignore[method-assign]
    hogwild.END_S = 0.01  # a killed process waits for none of its threads
    return harness.train(rank, size, **case)


def crowd(processes: int, options: dict[str, Any], **case: Any) -> dict[str, Any]:
    """Several trainer processes, two threads each."""
    options = ASYNC | options | {"hogwild_threads": 2}
    servers = options.get("servers", 1)
    return ranks(
        servers,
        f"{__name__}:train",
        strategy="pserver",
        slots=processes,
        options=options,
        clip_norm=0.0,
        eval_every=1,
        **case,
    )[0]


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ({"mode": "async", "servers": 2}, 2),
        pytest.param({"mode": "half_async"}, 1, marks=slow),
        pytest.param({"mode": "half_async", "servers": 2}, 3, marks=slow),
    ],
)
def test_every_sample_once_and_evaluations_exactly(options: dict[str, Any], processes: int) -> None:
    """The engine refuses an evaluation that counts a row twice or not at all."""
    result = crowd(processes, options, recipe=ANY, steps=6)
    for epoch in range(2):
        assert Counter(i for step in range(3 * epoch, 3 * epoch + 3) for i in result["ids"][str(step)]) == Counter(
            range(ROWS)
        )
    assert len(result["eval"]) == 6 and result["eval"]["6"]["loss"] < result["eval"]["1"]["loss"]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=slow) for seed in range(6)])
def test_each_ticket_is_applied_once_although_processes_die(seed: int) -> None:
    result = crowd(2, {"servers": 2}, deaths=seed, steps=10, recipe={"rows": 4 * BATCH + 4})
    assert Counter(i for step in result["ids"].values() for i in step) == Counter(
        dict.fromkeys(range(4 * BATCH + 4), 2)
    ), "two epochs"
    assert result["died"] >= 1


@pytest.mark.slow
def test_it_learns_as_async_does() -> None:
    """Batch normalisation included: its averages are linear, and each thread tells what it adds."""
    case: dict[str, Any] = {"clip_norm": 0.0, "optimizer": "adagrad"}
    begun = spread("pserver", 1, options=ASYNC, **case, steps=1, eval_every=1)["eval"]["1"]["loss"]
    alone, threads = (
        spread("pserver", 1, options=ASYNC | more, **case, steps=300, eval_every=300)
        for more in ({}, {"hogwild_threads": 3})
    )
    assert begun - threads["eval"]["300"]["loss"] > 0.6 * (begun - alone["eval"]["300"]["loss"])


def test_one_copy_of_the_parameters_and_each_what_else_it_needs() -> None:
    layouts = lay_out(Toy().build_model(), TASK.precision, 1, True, 1, "round_robin")
    made = [TrainerModel(ModelSetup(TASK, torch.device("cpu"), layouts, 1, 24), threads=2)]
    made.append(TrainerModel(ModelSetup(TASK, torch.device("cpu"), layouts, 1, 24), threads=2, first=made[0]))
    first, second = ([*model.parameters.values()] for model in made)
    assert [p.data_ptr() for p in first] == [p.data_ptr() for p in second] and not {id(p) for p in first} & {
        id(p) for p in second
    }
    buffers_of = [{buffer.data_ptr() for buffer in model.replica.model.buffers() if buffer.numel()} for model in made]
    assert buffers_of[0] and not buffers_of[0] & buffers_of[1]

    def load(model: TrainerModel, stamp: int) -> set[float]:
        data = np.full(layouts[0].bytes // 4, stamp, np.float32).view(np.uint8)
        model.load(PulledState([ParamBlocks(stamp, data)], [], [0], 1.0))
        return {float(value) for parameter in first for value in parameter.detach().flatten()}

    assert load(made[0], 3) == {3.0} and load(made[1], 5) == {5.0}
    assert load(made[0], 4) == {5.0}, "what is older stays out"
    first[0].sum().backward()
    assert first[0].grad is not None and second[0].grad is None
    squares = (second[0] ** 2).sum()
    load(made[0], 6)
    squares.backward()  # torch does not take what another thread writes for a mistake of this one


def test_an_answer_without_blocks_is_of_those_that_its_question_named() -> None:
    """Whatever another thread has pulled meanwhile."""
    old, new = ParamBlocks(10, np.zeros(1, np.uint8)), ParamBlocks(12, np.ones(1, np.uint8))

    class Slow:
        def call(self, method: str, data: bytes | Parts, deadline_s: float) -> bytes:
            trainer._exchange.latest[0] = new
            return encode(exchange_schemas(Toy())[1], {"pulled": READY, "stamp": 10, "applied": 10, "scale": 1.0}, {})

        def start(self, method: str, data: bytes | Parts, deadline_s: float) -> Any:
            raise AssertionError("one server is called")

    context = RoleContext(Place(), {}, lambda *where: None, lambda phase, step: None, lambda: False)  # type: ignore[arg-type,return-value]
    strategy = Pserver(mode=Mode.async_)
    trainer = Trainer(TASK, context, strategy, strategy.sync_mode(TASK), 1, 0, [Slow()])
    state, pulled = trainer._exchange.send([Parts([], 0)], [old])
    assert state == READY and pulled is not None and pulled.dense == [old] and trainer._exchange.latest == [new]


def test_the_process_shows_the_thread_that_is_silent_longest() -> None:
    shown: list[tuple[str, int]] = []
    thread_group = ThreadGroup(3, lambda *beat: shown.append(beat))
    beats = [thread_group.beat(thread) for thread in range(3)]
    for thread in range(3):
        beats[thread]("step", thread)
    assert shown[-1] == ("step", 0)
    for step in range(5):
        beats[1]("wait", step)
        beats[2]("wait", step)
    assert shown[-1] == ("step", 0) and len(shown) == 3, "thread 0 hangs, and nobody covers it up"
    beats[0]("wait", 9)
    assert shown[-1] == ("wait", 4) and len(shown) == 4


def test_when_one_fails_the_others_end_and_its_error_is_raised() -> None:
    ended, failed = threading.Event(), threading.Event()
    thread_group = ThreadGroup(2, lambda phase, step: None)
    beat = thread_group.beat(1)

    def fail() -> None:
        failed.set()
        raise ValueError("the first one")

    def work() -> None:
        failed.wait(20)
        try:
            while not ended.wait(0.001):
                beat("wait", 0)
        except PeerThreadFailed:
            ended.set()
            raise

    with pytest.raises(ValueError, match="the first one"):
        thread_group.run([fail, work])
    assert ended.is_set()


def test_servers_count_threads() -> None:
    many = Pserver(mode=Mode.async_, hogwild_threads=4)
    assert [list(trainer_numbers(process, many)) for process in range(3)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    assert many.roles(3) == {"server": 1, "trainer": 3} and many.sync_mode(TASK).window(many.count_trainers(3)) == 24


@pytest.mark.parametrize(
    ("options", "devices", "why"),
    [
        ({"mode": Mode.sync}, "cpu", "all gradients of a step are of the same ones"),
        ({"mode": Mode.geo, "staleness": 0}, "cpu", "learns by itself"),
        ({"record": "order"}, "cpu", "cannot be replayed"),
        ({"team": 2}, "cpu", "with strategy.team=2 a trainer is several processes"),
        ({}, "cuda", "is for trainers on CPU"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], devices: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"strategy\.hogwild_threads=2.*{why}"):
        Pserver(**{"mode": Mode.async_, "hogwild_threads": 2} | options).check(TASK, 2, devices)


def test_not_where_trainers_run_the_engine() -> None:
    from tests.support.sparse_toy import Tabled

    recipe: Recipe = Tabled()
    with pytest.raises(ConfigError, match=r"strategy\.hogwild_threads is of no account with strategy\.dense=allreduce"):
        Pserver(dense=Dense.allreduce, hogwild_threads=2, server_device=Device.cpu).check(
            replace(TASK, recipe=recipe), 2, "cpu"
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_model_that_draws_from_the_one_generator_is_refused(threads: int) -> None:
    layouts = lay_out(Toy().build_model(), TASK.precision, 1, True, 1, "round_robin")
    made = TrainerModel(ModelSetup(TASK, torch.device("cpu"), layouts, 1, 24), threads=threads)

    def draw(module: Any, inputs: Any, output: Any) -> Any:
        return output + torch.rand(())

    made.replica.model.register_forward_hook(draw)
    inputs, targets = Toy().open_data("train", 0).fetch(np.arange(4), 0)
    batch = Batch(inputs, targets, torch.ones(4), np.arange(4))
    if threads == 1:
        made.warmup(batch)
        return
    with pytest.raises(ConfigError, match=r"threads of strategy\.hogwild_threads share one generator"):
        made.warmup(batch)


@slow
def test_a_killed_process_is_started_again_with_all_its_threads(run_dtf: Any, tmp_path: Any) -> None:
    killed = run_dtf(
        *BASE,
        "strategy.mode=async",
        "strategy.hogwild_threads=2",
        "step.clip_norm=0",
        f"recipe.marker={tmp_path / 'killed'}",
    )
    assert killed.code == 0, killed.err
    assert (tmp_path / "killed").exists() and visits(killed.folder) == THRICE
    assert left(killed.folder) == []
