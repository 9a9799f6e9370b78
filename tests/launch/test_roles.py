"""Ranks of several roles: which of them start where, and that a lost one that holds nothing is replaced alone."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dtf.api.helper_roles import HelperRoles
from dtf.api.schema import build_option, coerce_option
from dtf.config.settings import Settings, load_parts
from dtf.core.errors import ConfigError, Exit
from dtf.core.types import Failed, Note, Place
from dtf.host import devices
from dtf.host.devices import Devices
from dtf.launch import forkserver_cache, worker_group
from dtf.launch.local import Local
from dtf.runs.run_folder import Run
from dtf.strategies.ddp import Ddp
from tests.support.launching import HANG_S, LONG_S, Launched, launch
from tests.support.roles import RolesStrategy

Start = Callable[..., Launched]

load_parts([])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start({"1": {"0.0": "die"}}, max_restarts=1)`: one server and two trainers that follow the plan, see
    `roles.follow`. No process may be left.
    """
    yield lambda plan, **options: launch(
        "tests.support.roles:follow", tmp_path, {"plan": plan}, RolesStrategy(), **options
    )
    server = forkserver_cache.fork_server({}).pid
    assert not Path(f"/proc/{server}/task/{server}/children").read_text()


def processes(done: Launched) -> dict[int, list[str]]:
    """The processes that were at each place, `attempt.retry`, in order."""
    found = sorted(path.stem.partition("-")[::2] for path in done.folder.glob("*-*.json"))
    return {rank: [turn for at, turn in found if int(at) == rank] for rank in sorted({int(at) for at, _ in found})}


def warnings(done: Launched) -> list[str]:
    return [note.text for note in done.of(Note) if note.level == "warning"]


def test_all_is_well(start: Start) -> None:
    done = start({})
    assert done.code == Exit.OK and not warnings(done)
    assert [json.loads((done.folder / f"{rank}-0.0.json").read_text())["role"] for rank in range(3)] == [
        "server",
        "trainer",
        "trainer",
    ]


def test_a_killed_trainer_alone_is_replaced(start: Start) -> None:
    done = start({"2": {"0.0": "die later"}})
    assert done.code == Exit.OK
    assert processes(done) == {0: ["0.0"], 1: ["0.0"], 2: ["0.0", "0.1"]}
    (told,) = warnings(done)
    assert told.startswith("rank 2 (trainer 1) at step 2: killed by SIGKILL") and told.endswith(
        "it alone is started again, 1 of 3"
    )
    log = (done.folder / "rank_2.log").read_text()
    assert log.count("rank 2 is ") == 2 and "---- attempt 0, started again alone: 1\n" in log
    first, second = (json.loads((done.folder / f"2-0.{again}.json").read_text()) for again in range(2))
    assert first["pid"] != second["pid"] and first["files"] == second["files"]


def test_a_trainer_that_leaves_a_child_is_replaced(start: Start) -> None:
    done = start({"1": {"0.0": "die before its child"}})
    assert done.code == Exit.OK and processes(done)[1] == ["0.0", "0.1"]


def test_two_at_once_and_one_that_dies_while_it_starts(start: Start) -> None:
    done = start({"1": {"0.0": "die"}, "2": {"0.0": "die", "0.1": "die"}})
    assert done.code == Exit.OK
    assert processes(done) == {0: ["0.0"], 1: ["0.0", "0.1"], 2: ["0.0", "0.1", "0.2"]}
    assert sorted(text.partition(" (")[0] for text in warnings(done)) == ["rank 1", "rank 2", "rank 2"]


def test_replacements_that_finish_no_step_are_limited(start: Start) -> None:
    """Beyond the limit the attempt ends, and the next one starts all.

    Steps of the process before do not count for the next.
    """
    done = start({"1": {"0.0": "die later", "0.1": "die", "0.2": "die"}}, max_restarts=2)
    assert done.code == Exit.OK
    assert processes(done) == {0: ["0.0", "1.0"], 1: ["0.0", "0.1", "0.2", "1.0"], 2: ["0.0", "1.0"]}
    assert [text.rpartition("; ")[2] for text in warnings(done)] == [
        "it alone is started again, 1 of 2",
        "it alone is started again, 2 of 2",
        "restart 1 of 2",
    ]


def test_replacements_that_finish_steps_are_not(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they leave open files."""
    open_files: list[int] = []
    replace = worker_group.WorkerGroup._lose
    monkeypatch.setattr(
        worker_group.WorkerGroup,
        "_lose",
        lambda *arguments: (replace(*arguments), open_files.append(len(os.listdir("/proc/self/fd")))),
    )
    done = start({"1": {f"0.{again}": "die later" for again in range(4)}}, max_restarts=1)
    assert done.code == Exit.OK
    assert [text.rpartition("; ")[2] for text in warnings(done)] == ["it alone is started again, 1 of 1"] * 4
    assert len(open_files) == 4 and len(set(open_files)) == 1


def test_without_restarts_nothing_is_replaced(start: Start) -> None:
    done = start({"1": {"0.0": "die later"}}, max_restarts=0)
    assert done.code == Exit.PEER and not warnings(done)
    assert done.of(Failed)[0].rank == 1


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("hang", r", at .*roles.py:\d+ in stays_in_python"),
        pytest.param("stop", ", stopped by a signal", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_hangs_is_replaced(start: Start, how: str, words: str) -> None:
    begun = time.monotonic()
    done = start({"1": {"0.0": how}}, hang_timeout_s=0.3, start_timeout_s=LONG_S)
    assert done.code == Exit.OK and time.monotonic() - begun < HANG_S
    assert processes(done) == {0: ["0.0"], 1: ["0.0", "0.1"], 2: ["0.0"]}
    (told,) = warnings(done)
    assert re.search(
        r"^rank 1 \(trainer 0\) at step 2: no sign of life within .*; phase step, step 2, silent for [\d.]+ "
        rf"s{words}; stacks are in ",
        told,
    ), told
    assert ("most recent call first" in (done.folder / "rank_1.log").read_text()) == (how == "hang")


def test_a_hang_beyond_the_limit_ends_the_attempt(start: Start) -> None:
    done = start({"1": {"0.0": "hang"}}, hang_timeout_s=0.3, max_restarts=0)
    assert done.code == Exit.PEER
    assert "rank 1: phase step, step 2" in done.of(Failed)[0].message


def test_a_lost_server_ends_the_attempt(start: Start) -> None:
    done = start({"0": {"0.0": "die"}, "1": {"0.0": "hang"}, "2": {"0.0": "hang"}})
    assert done.code == Exit.OK
    assert processes(done) == {rank: ["0.0", "1.0"] for rank in range(3)}
    (told,) = warnings(done)
    assert told.startswith("rank 0 at step 0: killed by SIGKILL") and told.endswith("restart 1 of 3")


@pytest.mark.slow
def test_a_fork_server_lost_in_a_replacement_ends_the_attempt(start: Start) -> None:
    done = start({"1": {"0.0": "die", "0.1": "take the fork server along"}})
    assert done.code == Exit.OK
    assert {rank: turns[-1] for rank, turns in processes(done).items()} == dict.fromkeys(range(3), "1.0")
    assert [text.rpartition("; ")[2] for text in warnings(done)] == [
        "it alone is started again, 1 of 3",
        "restart 1 of 3",
    ]


def test_what_a_trainer_says_of_itself_ends_the_run(start: Start) -> None:
    done = start({"1": {"0.0": "fail"}})
    assert done.code == Exit.BUG and not warnings(done)
    assert done.of(Failed)[0].message == "ValueError: a trainer has had enough"


def test_a_trainer_that_lost_the_server_is_replaced(start: Start) -> None:
    done = start({"1": {"0.0": "lose the server"}})
    assert done.code == Exit.OK and processes(done)[1] == ["0.0", "0.1"]
    assert warnings(done) == ["rank 1 (trainer 0) at step 2: lost server 0; it alone is started again, 1 of 3"]


def test_asked_to_stop_during_a_replacement(start: Start) -> None:
    """The new process dies of the signal; the server saves."""
    begun = time.monotonic()
    done = start({"1": {"0.0": "die", "0.1": "tell the launcher to stop"}, "2": {"0.0": "hang"}}, grace_s=0.5)
    assert done.code == Exit.PREEMPTED and time.monotonic() - begun < HANG_S
    assert processes(done) == {0: ["0.0"], 1: ["0.0", "0.1"], 2: ["0.0"]}
    assert len(warnings(done)) == 1
    assert done.of(Failed)[-1].message == "asked to stop; the state is saved"


@pytest.mark.parametrize("end", ["outlive and die", "outlive and lose", "outlive", "start for ever"])
def test_trainers_are_of_no_account_once_the_server_has_ended(start: Start, end: str) -> None:
    begun = time.monotonic()
    done = start({"1": {"0.0": end}}, grace_s=0.3 if end == "outlive" else LONG_S)
    assert done.code == Exit.OK and time.monotonic() - begun < HANG_S
    assert not warnings(done) and not done.of(Failed)
    assert processes(done) == {rank: ["0.0"] for rank in range(3)}


@pytest.mark.parametrize(
    "limits", [{"grace_s": LONG_S, "hang_timeout_s": 0.5}, {"grace_s": 0.5, "hang_timeout_s": LONG_S}], ids=str
)
def test_a_trainer_that_stops_near_the_end_keeps_nobody_longer_than_the_smaller_limit(
    start: Start, limits: dict[str, float]
) -> None:
    begun = time.monotonic()
    done = start({"1": {"0.0": "stop at the end"}}, **limits)
    assert done.code == Exit.OK and time.monotonic() - begun < HANG_S
    assert not warnings(done) and not done.of(Failed)


# ------------------------------------------------------------ the token


def test_the_token_is_seen_by_ranks_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    token = "5ec2e7" * 11
    monkeypatch.setattr(Run, "token", property(lambda self: token, lambda self, drawn: None), raising=False)
    done = start({"1": {"0.0": "die"}, "2": {"0.0": "fail", "1.0": "fail"}})
    assert done.code == Exit.BUG
    for path in done.folder.rglob("*"):
        assert token not in path.read_text(), path
    records = [json.loads(path.read_text()) for path in done.folder.glob("*-*.json")]
    assert records and not any(record["shown"] for record in records)
    assert token not in "".join(capfd.readouterr()) and token not in repr(done.events)


def test_a_token_is_drawn_for_each_launch_of_several_roles(tmp_path: Path) -> None:
    def tokens(strategy: Any, run: Run) -> set[str]:
        launcher = local(processes=2)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dtf.launch.supervised.WorkerGroup", lambda server, order, places, *rest: places)
            patch.setattr("dtf.launch.supervised.fork_server", lambda environment: None)
            run.settings = cast(Settings, SimpleNamespace(strategy=strategy))
            return {
                place.token
                for number in range(2)
                for place in cast(Any, launcher.worker_group(run, "", number, {}, cast(Any, None), print))
            }

    runs = [Run(tmp_path, "id", {}, cast(Settings, None)) for _ in range(3)]
    assert tokens(Ddp(), runs[0]) == {""}
    (first,), (second,) = tokens(RolesStrategy(), runs[1]), tokens(RolesStrategy(), runs[2])
    assert first != second and re.fullmatch("[0-9a-f]{64}", first)


# ------------------------------------------------------------ places


def local(**options: Any) -> Any:
    return build_option(
        "launcher", coerce_option("launcher", {"name": "local", "devices": "cpu", **options}, "launcher")
    )


def places(strategy: RolesStrategy, **options: Any) -> list[dict[str, Any]]:
    return local(**options)._places(strategy)[0]


@pytest.mark.parametrize(
    ("cores", "servers", "trainers", "options", "threads"),
    [
        (2, 1, 1, {}, [1, 2]),
        (16, 2, 4, {}, [2, 2, 4, 4, 4, 4]),
        (1, 1, 2, {}, [1, 1, 1]),
        (16, 1, 2, {"threads": 3}, [3, 3, 3]),
    ],
)
def test_trainers_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, servers: int, trainers: int, options: Any, threads: list[int]
) -> None:
    monkeypatch.setattr(devices, "cores", lambda: cores)
    found = places(RolesStrategy(servers), processes=trainers, **options)
    assert [place["threads"] for place in found] == threads
    assert [place["role"] for place in found] == ["server"] * servers + ["trainer"] * trainers
    assert {(place["size"], place["local_size"], place["slots"]) for place in found} == {
        (servers + trainers, servers + trainers, trainers)
    }
    assert (
        [place["rank"] for place in found]
        == [place["local_rank"] for place in found]
        == list(range(servers + trainers))
    )


def test_pinned_ranks_have_a_thread_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "cores", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(devices, "_core_of", lambda number: (0, number))
    found, pins = local(processes=2, pin=True)._places(RolesStrategy())
    assert [place["threads"] for place in found] == [2, 2, 2] and pins == [[0, 1], [2, 3], [4, 5]]


def test_gpus_are_for_trainers_unless_servers_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "choose", lambda asked: Devices("cuda", (0, 1)))
    assert [place["device"] for place in places(RolesStrategy(2), processes="auto")] == [
        "cpu",
        "cpu",
        "cuda:0",
        "cuda:1",
    ]
    assert [place["device"] for place in places(RolesStrategy(1, "cuda"), processes=2)] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
    ]
    with pytest.raises(ConfigError, match="strategy.servers=3 needs as many GPUs, there are 2"):
        places(RolesStrategy(3, "cuda"), processes=1)
    with pytest.raises(ConfigError, match="launcher.processes=3 needs as many GPUs, there are 2"):
        places(RolesStrategy(), processes=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "inline", "processes": 1}, "launcher=inline .* needs 1 server and 1 trainer; use launcher=local"),
        ({"name": "env"}, "launcher=env .* needs 1 server and 2 trainers; use launcher=local"),
        (
            {"name": "torchrun", "rendezvous": "127.0.0.1:1", "processes": 2},
            "launcher=torchrun .* needs 1 server and 2 trainers; use launcher=local",
        ),
        (
            {"name": "static", "nodes": 2, "node_rank": 0, "address": "127.0.0.1:1"},
            "launcher.nodes=2: server and trainer processes",
        ),
    ],
)
def test_launchers_that_know_no_roles_say_so(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: str
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    launcher = build_option("launcher", coerce_option("launcher", options | {"devices": "cpu"}, "launcher"))
    with pytest.raises(ConfigError, match=words):
        launcher.check(RolesStrategy())


class Idle(RolesStrategy):
    """Its trainers have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.helper_roles = HelperRoles()


def test_a_role_that_nothing_is_said_of_is_refused_before_it_starts() -> None:
    with pytest.raises(ConfigError, match="processes of the role trainer beside server, and nothing says what they do"):
        Local(processes=2).check(Idle())
    Local(processes=2).check(RolesStrategy())


def test_one_host_of_static_knows_roles() -> None:
    options = {"name": "static", "nodes": 1, "node_rank": 0, "address": "127.0.0.1:1", "processes": 1, "devices": "cpu"}
    build_option("launcher", coerce_option("launcher", options, "launcher")).check(RolesStrategy())


def test_a_place_hides_its_token() -> None:
    assert "secret" not in repr(Place(token="secret"))
