"""Laws of `strategy.dense=allreduce`: trainers hold the dense parameters, servers the rows; the numbers are those of
ddp.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.api.registry import lookup, registered
from dtf.checkpoint.boxes import StoredCheckpoint, write_rank
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.pserver.net.codec import Message, decode, encode
from dtf.pserver.net.messages import COPY, COUNT, GIVE, LOAD, LOOK, SAVE, rows_schemas
from dtf.pserver.net.transport import Refused
from dtf.pserver.row_routing import ServerShard, ServerShards
from dtf.pserver.server.rows_server import RowServer
from dtf.runs.compare import RecordedRun
from dtf.sparse.store import SparseTable
from tests.laws.test_recovery import measurements
from tests.laws.test_sharded_tables import ANY, RANGE
from tests.support.harness import difference, reference, spread
from tests.support.sparse_toy import Tabled

slow = pytest.mark.slow
TWO: dict[str, Any] = {"dense": "allreduce", "servers": 2}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Also where numbers are none."""
    return all(
        json.dumps(a[key], sort_keys=True) == json.dumps(b[key], sort_keys=True)
        for key in ("train", "eval", "ids", "tensors")
    )


@pytest.mark.parametrize("recipe", [ANY, pytest.param(RANGE, marks=slow)], ids=["any", "range"])
@pytest.mark.parametrize("servers", [pytest.param(1, marks=slow), 2])
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=slow), 3])
def test_the_numbers_are_the_references_in_fp64(processes: int, servers: int, recipe: dict[str, Any]) -> None:
    result = spread("pserver", processes, options={"dense": "allreduce", "servers": servers}, recipe=recipe)
    assert difference(reference(recipe=recipe), result) <= 1e-10


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=slow), pytest.param("bf16", marks=slow), "fp16"])
def test_bit_for_bit_those_of_ddp(precision: str) -> None:
    """Whose rows are dealt by the same hash; the loss scale of fp16 begins so large that steps are skipped, whose
    gradients nobody applies.
    """
    case: dict[str, Any] = {"recipe": ANY, "precision": precision, "sparse": "lazy_adam", "steps": 12}
    ddp = spread("ddp", 2, options={"tables": "rows"}, **case)
    assert same(spread("pserver", 2, options=TWO, **case), ddp)
    assert any(math.isnan(values["grad_norm"]) for values in ddp["train"].values()) == (precision == "fp16")


@slow
@pytest.mark.parametrize("rule", sorted(registered("sparse")))
def test_with_every_row_optimizer(rule: str) -> None:
    assert (
        difference(reference(recipe=ANY, sparse=rule), spread("pserver", 3, options=TWO, recipe=ANY, sparse=rule))
        <= 1e-10
    )


def test_a_full_table_is_refused() -> None:
    """No server is full by itself."""
    with pytest.raises(AssertionError, match="table ids is full: capacity=50"):
        spread("pserver", 2, options=TWO, recipe=ANY | {"capacity": 50})


@cache
def calm(servers: int) -> dict[str, Any]:
    return spread("pserver", 3, recipe=ANY | {"rows": 100}, steps=6, options=TWO | {"servers": servers})


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=slow) for seed in range(8)])
@pytest.mark.parametrize("servers", [1, 2])
def test_bit_for_bit_as_on_a_good_network(servers: int, seed: int) -> None:
    result = spread("pserver", 3, recipe=ANY | {"rows": 100}, steps=6, options=TWO | {"servers": servers}, network=seed)
    assert same(result, calm(servers))
    assert result["met"].keys() >= {"lose_request", "lose_response"} | ({"double"} if servers > 1 else set())


# ---------------------------------------------------------------- a server by itself


class Asked:
    """One of two servers, with requests as they come."""

    def __init__(self, folder: Path, trainers: int = 2) -> None:
        self.recipe, world = Tabled(), World(Place(rank=1, size=2))
        shards = {
            name: ServerShard(SparseTable(spec, lookup("sparse", "sgd")(), 0, name), world)
            for name, spec in self.recipe.tables().items()
        }
        self.row_server = RowServer(
            ServerShards(shards, world), self.recipe, trainers, 3, folder, StoredCheckpoint, write_rank
        )
        self.update = {"version": 0, "factor": 0.0, "lr": 0.0, "step": 0}

    def __call__(self, method: str, scalars: dict[str, Any], arrays: dict[str, np.ndarray]) -> Message:
        asked, reply = rows_schemas(self.recipe)[method]
        return decode(reply, self.row_server.handlers[method](encode(asked, scalars, arrays)))

    def rows(self, ids: np.ndarray) -> np.ndarray:
        row_request = {"want/ids": ids, "want/who": np.empty(0, np.int64)}
        return self(LOOK, self.update | {"train": 1}, row_request).arrays["rows/ids"]

    def give(self, rank: int, turn: int, ids: np.ndarray, value: float, given: int = 1) -> Message:
        own = {"ids/ids": ids, "gradients/ids": np.full((len(ids), 5), value, np.float32)}
        other = {"ids/who": np.empty(0, np.int64), "gradients/who": np.empty((0, 2), np.float32)}
        return self(GIVE, {"rank": rank, "turn": turn, "given": given}, own | other)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr("dtf.pserver.server.rows_server.LONGEST_WAIT_S", 0.01)
    return Asked(tmp_path)


def test_what_comes_twice_counts_once(server: Asked) -> None:
    ids = np.arange(3)
    before = server.rows(ids)
    assert not server.give(0, 0, ids, 1.0).scalars["whole"] and not server.give(0, 0, ids, 7.0).scalars["whole"]
    answers = [server.give(1, 0, ids, 2.0), server.give(1, 0, ids, 2.0), server.give(0, 0, ids, 1.0, given=0)]
    assert [float(answer.arrays["squares"][0]) for answer in answers] == [3 * 5 * 9.0] * 3
    server.update = {"version": 1, "factor": 0.5, "lr": 1.0, "step": 0}
    after = [server.rows(ids) for _ in range(3)]
    assert all(np.array_equal(rows, before - np.float32(1.5)) for rows in after)
    for rank in (0, 1):
        late = server.give(rank, 1, ids, 0.0)
    assert late.scalars["whole"] and float(late.arrays["squares"][0]) == 0
    with pytest.raises(Refused, match="turn 0 is over"):
        server.give(0, 0, ids, 1.0)
    snapshot = server.row_server.snapshot()
    assert (snapshot["updates"], snapshot["pushes"], snapshot["dropped"], snapshot["version"]) == (1, 4, 3, 1)


def test_requests_that_make_no_sense_are_refused_and_change_nothing(server: Asked, tmp_path: Path) -> None:
    ids = np.arange(3)
    before = server.rows(ids)
    with pytest.raises(Refused, match="there is no trainer 2, but 2"):
        server.give(2, 0, ids, 1.0)
    with pytest.raises(Refused, match="turn 1 comes after 0"):
        server.give(0, 1, ids, 1.0)
    with pytest.raises(Refused, match=r"gradients/ids has shape \(3, 4\), wanted is \(3, 5\)"):
        server(
            GIVE,
            {"rank": 0, "turn": 0, "given": 1},
            {"ids/ids": ids, "gradients/ids": np.ones((3, 4), np.float32), **_nobody()},
        )
    with pytest.raises(Refused, match="update 2 comes after 0"):
        server(COUNT, server.update | {"version": 2}, {})
    for path in ("/etc", f"{tmp_path}/../elsewhere", "relative"):
        with pytest.raises(Refused, match="no place in the run folder"):
            server(
                SAVE,
                server.update | {"order": 1},
                {"path": np.frombuffer(path.encode(), np.uint8)},
            )
    assert np.array_equal(server.rows(ids), before) and server(COUNT, server.update, {}).arrays["sizes"].tolist() == [
        *(3, 0, 3),
        *(0, 0, 0),
    ]


def _nobody() -> dict[str, np.ndarray]:
    return {"ids/who": np.empty(0, np.int64), "gradients/who": np.empty((0, 2), np.float32)}


def test_a_server_that_cannot_write_says_why_and_lives(server: Asked, tmp_path: Path) -> None:
    server.rows(np.arange(3))
    places = {"before": np.zeros(6, np.int64), "total": np.array([3, 0, 3, 0, 0, 0])}
    request = {"path": np.frombuffer(str(tmp_path / "absent").encode(), np.uint8)}
    assert not len(done(server, COPY, 1, places).arrays["error"])
    answer = done(server, SAVE, 2, request)
    assert (
        "No such file" in answer.arrays["error"].tobytes().decode()
        and json.loads(answer.arrays["told"].tobytes()) == []
    )
    (tmp_path / "absent").mkdir()
    done(server, COPY, 3, places)
    (written,) = json.loads(done(server, SAVE, 4, request).arrays["told"].tobytes())
    assert written["file"] == "rank_3.safetensors" and {box[0] for box in written["boxes"]} == {
        "table/ids/ids",
        "table/ids/rows",
    }
    with pytest.raises(Refused, match="order 3 is over"):
        done(server, SAVE, 3, request)


def test_a_checkpoint_that_is_none_ends_the_server(server: Asked, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot be loaded"):
        done(server, LOAD, 1, {"path": np.frombuffer(str(tmp_path).encode(), np.uint8)})


def done(server: Asked, method: str, order: int, arrays: dict[str, np.ndarray]) -> Message:
    while not (answer := server(method, server.update | {"order": order}, arrays)).scalars["done"]:
        pass
    return answer


# ---------------------------------------------------------------- as a user starts it

RUN = [
    "plugins=[tests.support.sparse_toy,tests.support.kill_trigger]", "recipe=tabled", "strategy=pserver",
    "strategy.dense=allreduce",
    "strategy.servers=2", "launcher.processes=2",
    "launcher.threads=1", "step.batch_size=24", "step.micro_batch_rows=5", "train.steps=40", "train.log_every=1",
    "train.eval_every=20",
    "checkpoint.every_steps=4", "train.record=true", "lr.warmup=0", "lr.peak=0.01",
]  # fmt: skip


def bits(folder: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in RecordedRun.read(folder).tensors.items()}


@slow
@pytest.mark.parametrize(
    ("rank", "signal"),
    [
        (1, "SIGKILL"),
        (2, "SIGKILL"),
        (3, "SIGKILL"),
        (3, "SIGTERM"),
    ],
)
def test_whoever_is_killed_all_go_back_to_the_last_checkpoint(rank: int, signal: str, run_dtf: Any) -> None:
    """Trainers are ranks 0 and 1. Who is told to stop tells the others: all is saved."""
    words = [*RUN, "train.steps=90"] if signal == "SIGTERM" else RUN  # until ranks ask each other whether to stop
    whole = run_dtf(*words, "observer=[jsonl]")
    assert whole.code == 0, whole.err
    hit = run_dtf(*words, "observer=[jsonl,kill_trigger]", f"observer.kill_trigger.orders=['6:{rank}:{signal}']")
    if signal == "SIGTERM":
        assert hit.code == 75, hit.err
        hit = run_dtf(*words, "observer=[jsonl]", folder=hit.folder)
    assert hit.code == 0, hit.err
    assert bits(whole.folder) == bits(hit.folder) and measurements(whole.folder) == measurements(hit.folder)
