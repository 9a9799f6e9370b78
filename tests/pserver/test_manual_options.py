"""Options of externally started processes: which process a command starts, its secret, its certificates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtf.api.task import Task
from dtf.core.consistency import keys_of_all_commands
from dtf.core.errors import ConfigError, PeerError
from dtf.jobs.status import ask
from dtf.pserver import manual_start
from dtf.pserver.endpoint_file import EndpointFile
from dtf.pserver.net.rpc import viewer
from dtf.pserver.options import Role, TlsMode, TlsOptions
from dtf.pserver.strategy import Pserver
from tests.support.harness import PRECISIONS
from tests.support.manual_start import TOKEN, endpoints


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
        ({"role": Role.server}, "strategy.role is for processes started externally"),
        ({"trainer_id": 1}, "strategy.trainer_id is for processes started externally"),
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


def test_what_is_for_externally_started_processes_alone() -> None:
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
        ask(EndpointFile(endpoints(1), viewer(TOKEN), {}, False))
