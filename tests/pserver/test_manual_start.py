"""Externally started processes of a run, a command for each: in any order, joining, leaving, lost and started again;
job=status meanwhile.
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

import pytest

from dtf.core.endpoint_file import find
from dtf.core.errors import AuthError, Exit, PeerError
from tests.conftest import Result
from tests.pserver.test_rpc import certificate
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
    task = ("strategy.mode=async", "launcher.processes=2", "train.steps=1000000", "train.log_every=1000")
    with commands(folder) as start:
        trainer = start("trainer", words(where, "trainer", 0, *task, slow=True))
        server = start("server", words(where, "server", 0, *task, f"run.dir={folder / 'run'}", slow=True))
        until(lambda: members(folder / "run") == [0], server, trainer)
        yield Underway(where, folder / "run", server, trainer)
        trainer.process.send_signal(signal.SIGTERM)  # to all at once, as schedulers do
        assert server.stop() == Exit.PREEMPTED, server.output()
        assert "the state is saved" in server.output()
        assert trainer.end() == Exit.PREEMPTED, trainer.output()
        assert f"trainer 0 takes part in {folder / 'run'}" in trainer.output()
        assert not (folder / "run" / "live.json").exists()
        with pytest.raises(PeerError, match="has ended"):
            find(folder / "run")


def command(live: Underway, role: str, number: int, *more: str) -> list[str]:
    return words(
        live.where,
        role,
        number,
        "strategy.mode=async",
        "launcher.processes=2",
        "train.steps=1000000",
        "train.log_every=1000",
        *more,
        slow=True,
    )


@pytest.mark.slow
def test_status_of_a_live_run(live: Underway, run_dtf: Run) -> None:
    file = live.folder / "live.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert TOKEN not in file.read_text()
    text = run_dtf("job=status", f"job.run_folder={live.folder}", "job.seconds=0.3").out
    assert "mode async, serving" in text
    assert live.where[0] in text
    servers = json.loads(
        run_dtf("job=status", f"job.run_folder={live.folder}", "job.format=json", "job.seconds=0.3").out
    )["servers"]
    assert len(servers) == 1
    server = servers[0]
    assert server["pushes_per_s"] > 0
    assert run_dtf("job=status", f"job.run_folder={live.folder}", "job.seconds=1e-9").code == Exit.OK
    assert server["pushes"] == sum(server["staleness"].values()) == server["updates"]
    assert (
        server["leases"]["opened"]
        >= server["leases"]["granted"] - server["leases"]["granted_again"]
        >= server["leases"]["finished"]
    )
    assert [trainer["trainer"] for trainer in server["trainers"]] == [0]
    assert server["blocks"]["bytes"] > 0


@pytest.mark.slow
def test_status_by_endpoint_needs_the_secret_and_what_the_folder_tells_is_good_for_looking_alone(
    live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DTF_TOKEN", raising=False)
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}").code == Exit.CONFIG
    monkeypatch.setenv("DTF_TOKEN", "another secret, and long enough")
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}").code == Exit.AUTH
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    assert run_dtf("job=status", f"job.endpoint={live.where[0]}", "job.seconds=0.1").code == Exit.OK
    from dtf.pserver.discovery import TRAINER, Member
    from dtf.pserver.net.rpc import Client

    with pytest.raises(AuthError):
        Member(Client(live.where[0], find(live.folder).token, "none"), TRAINER, live.where, {}).ask()


@pytest.mark.slow
def test_who_is_refused(live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", "another secret, and long enough")
    assert run_dtf(*command(live, "trainer", 1)).code == Exit.AUTH
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    other = run_dtf(*command(live, "trainer", 1, "optimizer.momentum=0.5"))
    assert other.code == Exit.CONFIG
    assert "optimizer.momentum=0.5, server 0 has 0.9" in other.err
    fewer = run_dtf(*command(live, "trainer", 1, "launcher.processes=1"))
    assert fewer.code == Exit.CONFIG and "launcher.processes=1, server 0 has 2" in fewer.err
    taken = run_dtf(*command(live, "server", 0))
    assert taken.code == Exit.BUSY
    assert live.where[0] in taken.err
    twice = run_dtf(*command(live, "trainer", 0))
    assert twice.code == Exit.BUSY
    assert "has the number 0" in twice.err
    assert live.trainer.process.poll() is None
    more = [*live.where, endpoints(1)[0]]
    assert (
        "launcher.endpoints names 2 server(s), and 1 for server 0"
        in run_dtf(*words(more, "trainer", 1, "launcher.processes=2", "train.steps=9")).err
    )


@pytest.mark.slow
def test_a_trainer_joins_and_leaves(live: Underway, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    seen: list[list[int]] = []

    def leave() -> None:
        seen.append(until(lambda: members(live.folder) == [0, 7] and members(live.folder), live.server, live.trainer))
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=leave)
    thread.start()
    result = run_dtf(*command(live, "trainer", 7, "launcher.grace_s=8"))  # an eighth of it passes until it leaves
    thread.join()
    assert seen == [[0, 7]]
    assert result.code == Exit.PREEMPTED
    assert "this trainer was asked to stop and has left" in result.err
    assert not result.folder.exists()
    assert members(live.folder) == [0]  # at once: nobody waits for its silence


def finished(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, those of the last launch."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        record["step"]: {key: record[key] for key in ("loss", "grad_norm")}
        for record in records
        if record.get("split") == "train"
    }


SYNC = (
    "launcher.processes=1",
    "strategy.min_block=16",
    "train.steps=40",
    "checkpoint.every_steps=10",
    "launcher.timeout_s=60",
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
        assert (first.end(), second.end(), trainer.end()) == (0, 0, 0), (
            first.output(),
            second.output(),
            trainer.output(),
        )
    whole = run_dtf(
        *words([], "server", 0)[:-5],
        *(word for word in more if not word.startswith("launcher.timeout_s")),
        "strategy.servers=2",
    )
    assert whole.code == 0, whole.err
    assert finished(folder) == finished(whole.folder)


@pytest.mark.slow
def test_server_0_is_lost_with_its_host_and_started_again(tmp_path: Path) -> None:
    """Trainers wait for it, and go on where its last checkpoint is."""
    where, folder = endpoints(1), tmp_path / "run"
    more = (
        "strategy.mode=half_async",
        "launcher.processes=2",
        "train.steps=2000",
        "checkpoint.every_steps=20",
        "launcher.timeout_s=60",
    )
    with commands(tmp_path) as start:
        trainers = [start(f"trainer{number}", words(where, "trainer", number, *more)) for number in range(2)]
        server = start("server", words(where, "server", 0, *more, f"run.dir={folder}"))
        until(lambda: members(folder) == [0, 1] and max(finished(folder), default=0) > 50, server, *trainers)
        server.kill()
        before = max(finished(folder))
        server = start("again", words(where, "server", 0, *more, f"run.dir={folder}"))
        codes = [command.end() for command in (server, *trainers)]
        assert codes == [0, 0, 0], [command.output() for command in (server, *trainers)]
        assert "waiting for the servers to come back" in trainers[0].output()
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
        "launcher.processes=1",
        "train.steps=1500",
    )
    more = (*more, "checkpoint.every_steps=50", "launcher.timeout_s=60", "train.log_every=10")
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
        assert codes == [0, 0, 0], [each.output() for each in (first, second, trainer)]
        assert "restart 1 of 3" in first.output()
        assert "restart 1 of 3" in second.output()
    assert max(finished(folder)) == 1500


@pytest.mark.slow
def test_a_trainer_of_several_threads_comes_leaves_and_ends_with_all_of_them(tmp_path: Path) -> None:
    """At once: nobody waits for their silence."""
    where, folder = endpoints(1), tmp_path / "run"
    more = (
        "strategy.mode=async",
        "strategy.hogwild_threads=2",
        "launcher.processes=2",
        "train.steps=1000000",
        "train.log_every=1000",
    )
    with commands(tmp_path) as start:
        server = start("server", words(where, "server", 0, *more, f"run.dir={folder}"))
        trainer = start("trainer", words(where, "trainer", 1, *more))
        until(lambda: members(folder) == [2, 3], server, trainer)
        assert trainer.stop() == Exit.PREEMPTED, trainer.output()
        assert members(folder) == []
        trainer = start("again", words(where, "trainer", 1, *more))
        until(lambda: members(folder) == [2, 3], server, trainer)
        os.kill(trainer.rank(), signal.SIGKILL)
        until(lambda: "restart 1 of 3" in trainer.output() and members(folder) == [2, 3], server, trainer)
        assert server.stop() == Exit.PREEMPTED, server.output()
        assert trainer.end() == Exit.PREEMPTED, trainer.output()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "half_async", "geo"])
@pytest.mark.parametrize("killed", [False, True])
def test_all_that_live_are_told_to_stop_at_once_and_the_state_is_saved(mode: str, killed: bool, tmp_path: Path) -> None:
    where, folder = endpoints(2), tmp_path / "run"
    more = (f"strategy.mode={mode}", "launcher.processes=2", "train.steps=1000000", "strategy.min_block=16")
    with commands(tmp_path) as start:
        trainers, servers = (
            [start(f"{role}{n}", words(where, role, n, *more, f"run.dir={folder}", slow=True)) for n in range(2)]
            for role in ("trainer", "server")
        )
        until(lambda: members(folder) == [0, 1] and status(folder)[0]["updates"] > 5, *servers, *trainers)
        if killed:
            trainers.pop().kill()
        for command in (*trainers, *servers):
            command.process.send_signal(signal.SIGTERM)
        for command in (*trainers, *servers):
            assert command.end() == Exit.PREEMPTED, command.output()
        assert "the state is saved" in servers[0].output()


@pytest.mark.slow
def test_nobody_waits_for_ever(tmp_path: Path, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    where = endpoints(2)
    for role, number, whom in (
        ("trainer", 0, "UNAVAILABLE"),
        ("server", 1, "UNAVAILABLE"),
        ("server", 0, f"server 1 (at {where[1]}) did not come"),
    ):
        alone = run_dtf(*words(where, role, number, "launcher.processes=1", "train.steps=1", "launcher.timeout_s=1"))
        assert alone.code == Exit.PEER
        assert whom in alone.err
    with commands(tmp_path) as start:
        waiting = start("trainer", words(where, "trainer", 0, "launcher.processes=1", "train.steps=1"))
        until(lambda: "waiting for the servers" in waiting.output(), waiting)
        assert waiting.stop() == Exit.PREEMPTED


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("openssl"), reason="makes certificates with openssl")
@pytest.mark.parametrize("mode", ["tls", "mtls"])
def test_certificates(mode: str, tmp_path: Path, run_dtf: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TOKEN", TOKEN)
    (key, cert), (_, stranger) = certificate(tmp_path, "run"), certificate(tmp_path, "stranger")
    where, folder = endpoints(2), tmp_path / "run"
    more = (*SYNC, f"launcher.tls.mode={mode}")
    files = (f"launcher.tls.ca={cert}", f"launcher.tls.cert={cert}", f"launcher.tls.key={key}")
    with commands(tmp_path) as start:
        servers = [
            start(f"server{number}", words(where, "server", number, *more, *files, f"run.dir={folder}"))
            for number in range(2)
        ]
        until(lambda: (folder / "live.json").exists(), *servers)
        patience = "launcher.timeout_s=2"
        wrong = run_dtf(*words(where, "trainer", 3, *more, *files, patience, f"launcher.tls.ca={stranger}"))
        assert wrong.code == Exit.PEER, wrong.err
        plain = run_dtf(*words(where, "trainer", 3, *SYNC, patience))
        assert plain.code == Exit.PEER, plain.err
        if mode == "mtls":
            nobody = run_dtf(*words(where, "trainer", 3, *more, patience, f"launcher.tls.ca={cert}"))
            assert "launcher.tls.cert is not given" in nobody.err
        asked = run_dtf("job=status", f"job.run_folder={folder}", "job.seconds=0.1")
        assert asked.code == 0, asked.err
        asked = run_dtf(
            "job=status",
            f"job.endpoint={where[0]}",
            "job.seconds=0.1",
            "launcher=manual",
            "launcher.processes=1",
            f"launcher.tls.mode={mode}",
            *files,
        )
        assert asked.code == 0, asked.err
        trainer = run_dtf(*words(where, "trainer", 0, *more, *(files if mode == "mtls" else files[:1])))
        assert trainer.code == 0, trainer.err
        assert [command.end() for command in servers] == [0, 0], [command.output() for command in servers]
