"""Processes of a run that are started by hand, a command for each: in any order, joining, leaving, lost and started
again; job=status meanwhile.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dtf.api.task import Task
from dtf.core.consistency import keys_of_all_commands
from dtf.core.errors import AuthError, ConfigError, Exit, PeerError
from dtf.jobs.status import ask
from dtf.pserver import manual_start
from dtf.pserver.endpoint_file import Live, find
from dtf.pserver.net.rpc import viewer
from dtf.pserver.options import Role, TlsMode, TlsOptions
from dtf.pserver.strategy import Pserver
from tests.conftest import Result
from tests.pserver.test_rpc import certificate
from tests.support.harness import PRECISIONS
from tests.support.manual_start import TOKEN, Command, commands, endpoints, members, status, until, words

Run = Callable[..., Result]


@dataclass(frozen=True)
class Underway:
    where: list[str]
    folder: Path
    server: Command
    trainer: Command


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Underway]:
    """A run under way: trainer 0 was started before the server."""
    folder = tmp_path_factory.mktemp("live")
    where = endpoints(1)
    task = ("strategy.mode=async", "strategy.trainers=2", "train.steps=1000000", "train.log_every=1000")
    with commands(folder) as start:
        trainer = start("trainer", words(where, "trainer", 0, *task))
        server = start("server", words(where, "server", 0, *task, f"run.dir={folder / 'run'}"))
        until(lambda: members(folder / "run") == [0], server, trainer)
        yield Underway(where, folder / "run", server, trainer)
        assert server.stop() == Exit.PREEMPTED, server.said()
        assert trainer.end() == Exit.PREEMPTED, trainer.said()
        assert f"trainer 0 takes part in {folder / 'run'}" in trainer.said()
        assert not (folder / "run" / "live.json").exists()
        with pytest.raises(PeerError, match="has ended"):
            find(folder / "run")


def command(live: Underway, role: str, number: int, *more: str) -> list[str]:
    return words(
        live.where,
        role,
        number,
        "strategy.mode=async",
        "strategy.trainers=2",
        "train.steps=1000000",
        "train.log_every=1000",
        *more,
    )


def test_status_of_a_live_run(live: Underway, run_dtf: Run) -> None:
    file = live.folder / "live.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN not in file.read_text()
    text = run_dtf("job=status", f"job.run_folder={live.folder}", "job.seconds=0.3").out
    assert "mode async, serving" in text
    assert live.where[0] in text
    found = json.loads(
        run_dtf("job=status", f"job.run_folder={live.folder}", "job.format=json", "job.seconds=0.3").out
    )["servers"]
    assert len(found) == 1
    server = found[0]
    assert server["pushes_per_s"] > 0
    assert run_dtf("job=status", f"job.run_folder={live.folder}", "job.seconds=1e-9").code == Exit.OK
    assert server["pushes"] == sum(server["staleness"].values()) == server["updates"]
    assert (
        server["leases"]["opened"]
        >= server["leases"]["granted"] - server["leases"]["granted_again"]
        >= server["leases"]["finished"]
    )
    assert [each["trainer"] for each in server["trainers"]] == [0]
    assert server["blocks"]["bytes"] > 0


def test_status_by_endpoint_needs_the_secret_and_what_the_folder_tells_is_good_for_looking_alone(
    live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTF_TOKEN", raising=False)
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}").code == Exit.CONFIG
    monkeypatch.setenv("DTF_TOKEN", "another secret, and long enough")
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}").code == Exit.AUTH
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}", "job.seconds=0.1").code == Exit.OK
    from dtf.pserver.discovery import NOBODY, Guest
    from dtf.pserver.net.rpc import Client

    with pytest.raises(AuthError):
        Guest(Client(live.where[0], find(live.folder).token, "none"), NOBODY, 1, {}).ask()


def test_who_is_refused(live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", "another secret, and long enough")
    assert run_dtf(*command(live, "trainer", 1)).code == Exit.AUTH
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    other = run_dtf(*command(live, "trainer", 1, "optimizer.momentum=0.5"))
    assert other.code == Exit.CONFIG
    assert "optimizer.momentum=0.5, server 0 has 0.9" in other.err
    taken = run_dtf(*command(live, "server", 0))
    assert taken.code == Exit.BUSY
    assert live.where[0] in taken.err
    twice = run_dtf(*command(live, "trainer", 0))
    assert twice.code == Exit.BUSY
    assert "has the number 0" in twice.err
    assert live.trainer.process.poll() is None
    more = [*live.where, endpoints(1)[0]]
    assert (
        "strategy.endpoints names 2 server(s), and 1 for server 0"
        in run_dtf(*words(more, "trainer", 1, "strategy.trainers=2", "train.steps=9")).err
    )


def test_a_trainer_joins_and_leaves(live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    seen: list[list[int]] = []

    def leave() -> None:
        seen.append(until(lambda: members(live.folder) == [0, 7] and members(live.folder), live.server, live.trainer))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=leave)
    thread.start()
    result = run_dtf(*command(live, "trainer", 7))
    thread.join()
    assert seen == [[0, 7]]
    assert result.code == Exit.PREEMPTED
    assert "this trainer was asked to stop and has left" in result.err
    assert not result.folder.exists()
    assert members(live.folder) == [0]  # at once: nobody waits for its silence


def finished(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, those of the last launch."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        each["step"]: {key: each[key] for key in ("loss", "grad_norm")}
        for each in found
        if each.get("split") == "train"
    }


SYNC = (
    "strategy.trainers=1",
    "strategy.min_block=16",
    "train.steps=40",
    "checkpoint.every_steps=10",
    "strategy.meet_timeout_s=60",
)


@pytest.mark.slow
def test_two_servers_in_any_order_one_of_them_killed_and_started_again(tmp_path: Path, run_dtf: Run) -> None:
    """They all go back to the last checkpoint together, and the numbers are those of a run that nothing happened to."""
    where, folder = endpoints(2), tmp_path / "byhand"
    more = (*SYNC, "recipe.rows=48", "train.steps=400")
    with commands(tmp_path) as start:
        trainer = start("trainer", words(where, "trainer", 0, *more))
        second = start("server1", words(where, "server", 1, *more))
        first = start("server0", words(where, "server", 0, *more, f"run.dir={folder}"))
        until(
            lambda: (folder / "metrics.jsonl").exists() and max(finished(folder), default=0) > 15,
            first,
            second,
            trainer,
        )
        assert len(status(folder)) == 2
        second.kill()
        second = start("server1b", words(where, "server", 1, *more))
        assert (first.end(), second.end(), trainer.end()) == (0, 0, 0), (first.said(), second.said(), trainer.said())
    whole = run_dtf(
        *words([], "server", 0)[:-3],
        *more,
        "strategy.servers=2",
        "strategy.meet_timeout_s=null",
        "launcher.processes=1",
    )
    assert whole.code == 0, whole.err
    assert finished(folder) == finished(whole.folder)


@pytest.mark.slow
def test_server_0_is_lost_with_its_host_and_started_again(tmp_path: Path) -> None:
    """Trainers wait for it, and go on where its last checkpoint is."""
    where, folder = endpoints(1), tmp_path / "run"
    more = (
        "strategy.mode=half_async",
        "strategy.trainers=2",
        "train.steps=2000",
        "checkpoint.every_steps=20",
        "strategy.meet_timeout_s=60",
    )
    with commands(tmp_path) as start:
        trainers = [start(f"trainer{number}", words(where, "trainer", number, *more)) for number in range(2)]
        server = start("server", words(where, "server", 0, *more, f"run.dir={folder}"))
        until(lambda: members(folder) == [0, 1] and max(finished(folder), default=0) > 50, server, *trainers)
        server.kill()
        before = max(finished(folder))
        server = start("again", words(where, "server", 0, *more, f"run.dir={folder}"))
        codes = [each.end() for each in (server, *trainers)]
        assert codes == [0, 0, 0], [each.said() for each in (server, *trainers)]
        assert "waiting for the servers to come back" in trainers[0].said()
    assert max(finished(folder)) == 2000 > before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "geo"])
def test_a_server_whose_rank_is_killed_in_a_mode_in_which_servers_rarely_meet(mode: str, tmp_path: Path) -> None:
    """Its launcher starts it again; server 0 hears of it, and all go back together."""
    where, folder = endpoints(2), tmp_path / "run"
    more = (
        f"strategy.mode={mode}",
        *(["strategy.geo_steps=5"] if mode == "geo" else []),
        "strategy.min_block=16",
        "strategy.trainers=1",
        "train.steps=1500",
    )
    more = (*more, "checkpoint.every_steps=50", "strategy.meet_timeout_s=60", "train.log_every=10")
    with commands(tmp_path) as start:
        first, second = (
            start(f"server{number}", words(where, "server", number, *more, f"run.dir={folder}")) for number in range(2)
        )
        trainer = start("trainer", words(where, "trainer", 0, *more))
        until(
            lambda: (folder / "metrics.jsonl").exists() and max(finished(folder), default=0) > 100,
            first,
            second,
            trainer,
        )
        os.kill(second.rank(), signal.SIGKILL)
        codes = [each.end() for each in (first, second, trainer)]
        assert codes == [0, 0, 0], [each.said() for each in (first, second, trainer)]
        assert "restart 1 of 3" in first.said()
        assert "restart 1 of 3" in second.said()
    assert max(finished(folder)) == 1500


@pytest.mark.slow
def test_a_trainer_of_several_threads_comes_leaves_and_ends_with_all_of_them(tmp_path: Path) -> None:
    """At once: nobody waits for their silence."""
    where, folder = endpoints(1), tmp_path / "run"
    more = (
        "strategy.mode=async",
        "strategy.hogwild_threads=2",
        "strategy.trainers=2",
        "train.steps=1000000",
        "train.log_every=1000",
    )
    with commands(tmp_path) as start:
        server = start("server", words(where, "server", 0, *more, f"run.dir={folder}"))
        trainer = start("trainer", words(where, "trainer", 1, *more))
        until(lambda: members(folder) == [2, 3], server, trainer)
        assert trainer.stop() == Exit.PREEMPTED, trainer.said()
        assert members(folder) == []
        trainer = start("again", words(where, "trainer", 1, *more))
        until(lambda: members(folder) == [2, 3], server, trainer)
        os.kill(trainer.rank(), signal.SIGKILL)
        until(lambda: "restart 1 of 3" in trainer.said() and members(folder) == [2, 3], server, trainer)
        assert server.stop() == Exit.PREEMPTED, server.said()
        assert trainer.end() == Exit.PREEMPTED, trainer.said()


@pytest.mark.slow
def test_nobody_waits_for_ever(tmp_path: Path, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    where = endpoints(2)
    for role, number, whom in (
        ("trainer", 0, "UNAVAILABLE"),
        ("server", 1, "UNAVAILABLE"),
        ("server", 0, f"server 1 (at {where[1]}) did not come"),
    ):
        alone = run_dtf(
            *words(where, role, number, "strategy.trainers=1", "train.steps=1", "strategy.meet_timeout_s=1")
        )
        assert alone.code == Exit.PEER
        assert whom in alone.err
    with commands(tmp_path) as start:
        waiting = start("trainer", words(where, "trainer", 0, "strategy.trainers=1", "train.steps=1"))
        until(lambda: "waiting for the servers" in waiting.said(), waiting)
        assert waiting.stop() == Exit.PREEMPTED


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
@pytest.mark.parametrize("mode", ["tls", "mtls"])
def test_certificates(mode: str, tmp_path: Path, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    (key, cert), (_, stranger) = certificate(tmp_path, "run"), certificate(tmp_path, "stranger")
    where, folder = endpoints(2), tmp_path / "run"
    more = (*SYNC, f"strategy.tls.mode={mode}")
    own = (f"strategy.tls.ca={cert}", f"strategy.tls.cert={cert}", f"strategy.tls.key={key}")
    with commands(tmp_path) as start:
        servers = [
            start(f"server{number}", words(where, "server", number, *more, *own, f"run.dir={folder}"))
            for number in range(2)
        ]
        until(lambda: (folder / "live.json").exists(), *servers)
        patience = "strategy.meet_timeout_s=2"
        wrong = run_dtf(*words(where, "trainer", 3, *more, *own, patience, f"strategy.tls.ca={stranger}"))
        assert wrong.code == Exit.PEER, wrong.err
        plain = run_dtf(*words(where, "trainer", 3, *SYNC, patience))
        assert plain.code == Exit.PEER, plain.err
        if mode == "mtls":
            nobody = run_dtf(*words(where, "trainer", 3, *more, patience, f"strategy.tls.ca={cert}"))
            assert "strategy.tls.cert is not given" in nobody.err
        asked = run_dtf("job=status", f"job.run_folder={folder}", "job.seconds=0.1")
        assert asked.code == 0, asked.err
        asked = run_dtf(
            "job=status",
            f"job.endpoint={where[0]}",
            "job.seconds=0.1",
            "strategy=pserver",
            f"strategy.tls.mode={mode}",
            *own,
        )
        assert asked.code == 0, asked.err
        trainer = run_dtf(*words(where, "trainer", 0, *more, *(own if mode == "mtls" else own[:1])))
        assert trainer.code == 0, trainer.err
        assert [each.end() for each in servers] == [0, 0], [each.said() for each in servers]


@pytest.mark.slow
def test_launcher_inline_starts_one_too(tmp_path: Path) -> None:
    where = endpoints(2)
    more = (*SYNC, "launcher=inline")
    with commands(tmp_path) as start:
        all_of_them = [
            start(f"server{number}", words(where, "server", number, *more, f"run.dir={tmp_path / 'run'}"))
            for number in range(2)
        ]
        all_of_them.append(start("trainer", words(where, "trainer", 0, *more)))
        assert [each.end() for each in all_of_them] == [0, 0, 0], [each.said() for each in all_of_them]


# ---------------------------------------------------------------- without processes


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (manual_start.ENDPOINTS, manual_start.ROLE, manual_start.SERVER_ID, manual_start.TRAINER_ID):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(manual_start.TOKEN, TOKEN)


TWO = ["10.0.0.1:4000", "10.0.0.2:4000"]


@pytest.mark.usefixtures("secret")
def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        (manual_start.ENDPOINTS, ", ".join(TWO)),
        (manual_start.ROLE, "server"),
        (manual_start.SERVER_ID, "1"),
        (manual_start.TRAINER_ID, "5"),
    ):
        monkeypatch.setenv(name, value)
    alone = Pserver(trainers=3).external_process()
    assert alone
    assert (alone.role, alone.rank, alone.towards, alone.token) == ("server", 1, ("10.0.0.1", 4000), TOKEN)
    assert TOKEN not in repr(alone)
    cases: list[tuple[dict[str, Any], int]] = [
        ({"role": Role.trainer}, 7),
        ({"server_id": 0}, 0),
        ({"role": Role.trainer, "trainer_id": 2}, 4),
    ]
    for options, rank in cases:
        alone = Pserver(trainers=3, **options).external_process()
        assert alone
        assert alone.rank == rank
    alone = Pserver(trainers=3, endpoints=["127.0.0.1:1"], server_id=0).external_process()
    assert alone
    assert alone.towards == ("127.0.0.1", 1)
    assert Pserver(trainers=3).roles(9) == {"server": 2, "trainer": 3}


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"role": Role.server}, "strategy.role is for processes started by hand"),
        ({"trainer_id": 1}, "strategy.trainer_id is for processes started by hand"),
        ({"endpoints": TWO}, "strategy.role is not given"),
        ({"endpoints": TWO, "role": Role.server}, "strategy.server_id is not given"),
        ({"endpoints": TWO, "role": Role.server, "server_id": 2}, "must be less than the 2"),
        (
            {"endpoints": TWO, "role": Role.trainer, "server_id": 1, "trainer_id": 1},
            "strategy.server_id=1 is not for strategy.role=trainer",
        ),
        ({"endpoints": TWO, "role": Role.trainer}, "strategy.trainer_id is not given"),
        ({"endpoints": TWO, "role": Role.trainer, "trainer_id": 0, "trainers": 0}, "strategy.trainers=0"),
        ({"endpoints": TWO, "role": Role.trainer, "trainer_id": 0, "servers": 3}, "strategy.servers=3"),
        ({"endpoints": ["a:1", "a:1"], "role": Role.trainer, "trainer_id": 0}, "names one twice"),
        ({"endpoints": ["nonsense"], "role": Role.trainer, "trainer_id": 0}, "must be HOST:PORT"),
    ],
)
def test_what_makes_no_process_of_a_run(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Pserver(**{"trainers": 1, **options}).external_process()


def test_what_is_for_those_started_by_hand_alone() -> None:
    from dtf.api.options import StepOptions
    from dtf.optim.optimizers import Sgd
    from tests.support.toy import Toy

    task = Task(Toy(), Sgd(), PRECISIONS["fp32"], StepOptions(), 0)
    # whatever stands where nothing is given
    cases: list[dict[str, Any]] = [{"meet_timeout_s": 600.0}, {"token_file": "x"}, {"geo_steps": 400}]
    for options in cases:
        with pytest.raises(ConfigError, match=f"strategy.{next(iter(options))}.* is for strategy"):
            Pserver(**options).check(task, 1, "cpu")
    Pserver().check(task, 1, "cpu")


@pytest.mark.usefixtures("secret")
def test_a_secret_is_needed_that_others_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from the file, long enough\n")
    with pytest.raises(ConfigError, match="can be read by others"):
        manual_start.token(str(file))
    file.chmod(0o600)
    assert manual_start.token(str(file)) == "from the file, long enough"
    assert manual_start.token("") == TOKEN
    monkeypatch.setenv(manual_start.TOKEN, "short")
    with pytest.raises(ConfigError, match="at least 16"):
        manual_start.token("")
    monkeypatch.delenv(manual_start.TOKEN)
    with pytest.raises(ConfigError, match=r"export DTF_TOKEN=\$\(openssl rand -hex 32\)"):
        manual_start.token("")


def test_beyond_this_host_needs_certificates_or_a_word() -> None:
    manual_start.check_loopback(["127.0.0.1:1", "[::1]:1", "localhost:5"])
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:1.*allow_insecure=true"):
        manual_start.check_loopback(["127.0.0.1:1", "10.0.0.1:1"])


def test_which_files_a_process_needs(tmp_path: Path) -> None:
    file = tmp_path / "pem"
    file.write_text("x")
    paths = {"ca": str(file), "cert": str(file), "key": str(file)}
    TlsOptions(mode=TlsMode.tls, ca=str(file)).check(serves=False, asks=True)
    TlsOptions(mode=TlsMode.mtls, **paths).check(serves=True, asks=False)
    for options, serves in (({"ca"}, True), ({"cert", "key"}, False)):
        with pytest.raises(ConfigError, match="is not given"):
            TlsOptions(mode=TlsMode.tls, **{name: paths[name] for name in options}).check(
                serves=serves, asks=not serves
            )
    with pytest.raises(ConfigError, match="uses no file"):
        TlsOptions(ca=str(file)).check(serves=False, asks=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        TlsOptions(mode=TlsMode.tls, ca=str(tmp_path / "none")).check(serves=False, asks=True)


def test_what_commands_must_have_alike() -> None:
    base = {
        "seed": 1,
        "run": {"dir": "a", "objective": ""},
        "strategy": {"mode": "sync", "role": "server", "tls": {"key": "k"}},
        "observer": {},
        "launcher": {},
    }
    other = {
        **base,
        "run": {"dir": "b", "objective": ""},
        "strategy": {"mode": "sync", "role": "trainer", "tls": {}},
        "observer": {"x": 1},
        "launcher": {"a": 1},
    }
    assert (
        keys_of_all_commands(base)
        == keys_of_all_commands(other)
        == {"seed": 1, "run": {"objective": ""}, "strategy": {"mode": "sync"}}
    )


def test_nobody_answers() -> None:
    with pytest.raises(PeerError):
        ask(Live(endpoints(1), viewer(TOKEN), {}, False))
