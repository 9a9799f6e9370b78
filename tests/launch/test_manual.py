"""launcher=manual: which process a command starts, its secret, its certificates, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtf.api.helper_roles import HelperRoles, RoleContext
from dtf.api.registry import registered
from dtf.api.schema import build_option, coerce_option
from dtf.api.strategy import Strategy
from dtf.api.task import Task
from dtf.config.compose import compose
from dtf.config.settings import load_parts
from dtf.core.consistency import keys_of_all_commands
from dtf.core.endpoint_file import EndpointFile
from dtf.core.errors import ConfigError, PeerError
from dtf.core.types import ManualStart, Place
from dtf.host.devices import Devices
from dtf.jobs.status import ask
from dtf.launch import manual_checks
from dtf.launch.local import Local
from dtf.launch.manual import Manual, TlsMode, TlsOptions
from dtf.pserver.net.rpc import viewer
from dtf.pserver.options import Dense
from dtf.pserver.strategy import Pserver
from tests.support.manual_start import TOKEN, endpoints
from tests.support.roles import RolesStrategy

load_parts([])
TWO = ["127.0.0.1:4000", "127.0.0.1:4001"]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINTS", "ROLE", "ID", "SERVER_ID", "TRAINER_ID"):
        monkeypatch.delenv(f"DTF_{name}", raising=False)
    monkeypatch.setenv("DTF_TOKEN", TOKEN)


def place(launcher: Manual, strategy: Strategy) -> Place:
    (fields,), _ = launcher._places(strategy)
    return Place(**fields)


def test_options_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDPOINTS", ", ".join(TWO)), ("ROLE", "server"), ("SERVER_ID", "1"), ("TRAINER_ID", "5")):
        monkeypatch.setenv(f"DTF_{name}", value)
    strategy = Pserver(servers=2)
    cases: list[tuple[dict[str, Any], tuple[str, int, int]]] = [
        ({}, ("server", 1, 1)),
        ({"id": 0}, ("server", 0, 0)),
        ({"role": "trainer"}, ("trainer", 5, 7)),
        ({"role": "trainer", "id": 2}, ("trainer", 2, 4)),
    ]
    for options, expected in cases:
        launcher = Manual(processes=3, devices="cpu", **options)
        launcher.check(strategy)
        found = place(launcher, strategy)
        assert (found.role, found.number, found.rank) == expected
        assert (found.size, found.slots, found.token) == (5, 3, TOKEN) and TOKEN not in repr(found)
        assert found.manual is not None and found.manual.endpoints == tuple(TWO)
    monkeypatch.setenv("DTF_SERVER_ID", "")  # as templates of jobs leave it
    monkeypatch.setenv("DTF_ID", "0")
    assert place(Manual(processes=3, devices="cpu"), strategy).rank == 0
    monkeypatch.setenv("DTF_ID", "")
    assert place(Manual(processes=3, devices="cpu", endpoints=TWO[:1]), Pserver()).rank == 0  # there is no other server


@pytest.mark.parametrize(
    ("role", "text", "rule"),
    [
        ("server", "-1", "must be 0 to 1: launcher.endpoints names 2 servers"),
        ("server", "2", "must be 0 to 1"),
        ("server", "one", "must be a whole number"),
        ("trainer", "-1", "must be 0 to 1023: a number that no other trainer has"),
        ("trainer", "1024", "must be 0 to 1023"),
        ("trainer", "9" * 5000, "must be a whole number"),
    ],
)
@pytest.mark.parametrize("variable", ["DTF_ID", "DTF_{}_ID"])
def test_a_wrong_number_is_told_by_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, role: str, text: str, rule: str
) -> None:
    name = variable.format(role.upper())
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"^{name}={text[:77]}[9.]* {rule}"):
        Manual(processes=3, devices="cpu", endpoints=TWO, role=role).check(Pserver(servers=2))


def test_a_place_travels_as_json() -> None:
    import json
    from dataclasses import asdict

    manual = ManualStart(tuple(TWO), 3.0, {"ca": "a"}, True, True)
    for given in (Place(devices=("cpu",)), Place(rank=3, manual=manual)):
        assert Place.from_json(json.loads(json.dumps(asdict(given)))) == given


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"endpoints": []}, "launcher.endpoints=[] says of no process where it listens"),
    ({"role": ""}, "launcher.role is not given"),
    ({"role": "servant"}, "launcher.role=servant.*give launcher.role=server or launcher.role=trainer"),
    ({"id": None}, "launcher.id is not given"),
    ({"id": 2}, "launcher.id=2 must be 0 to 1: launcher.endpoints names 2 servers"),
    ({"role": "trainer", "id": None}, "launcher.id is not given, and each trainer needs one"),
    ({"endpoints": TWO[:1]}, "launcher.endpoints names 1 server.*set strategy.servers to 1"),
    ({"endpoints": [TWO[0], TWO[0]]}, "names one twice"),
    ({"pin": True}, "launcher.pin=true divides the cores"),
    ({"endpoints": ["nonsense", TWO[0]]}, "must be HOST:PORT"),
    ({"endpoints": [TWO[0], "10.0.0.1:4000"]}, "names 10.0.0.1:4000, beyond this host"),
    ({"tls": TlsOptions(ca="x")}, "launcher.tls.ca is given and launcher.tls.mode=none uses no file"),
    ({"tls": TlsOptions(mode=TlsMode.tls)}, "launcher.tls.ca is not given"),
]


@pytest.mark.parametrize(("options", "wrong"), REFUSED)
def test_what_makes_no_process_of_a_run(options: dict[str, Any], wrong: str) -> None:
    fine = {"processes": 1, "endpoints": TWO, "role": "server", "id": 1, "devices": "cpu"}
    Manual(**fine).check(Pserver(servers=2))
    with pytest.raises(ConfigError, match=wrong.replace("[]", r"\[\]")):
        Manual(**{**fine, **options}).check(Pserver(servers=2))


@pytest.mark.parametrize("name", sorted(registered("strategy")))
def test_every_strategy_is_started_or_refused_by_name(name: str) -> None:
    strategy = build_option("strategy", coerce_option("strategy", {"name": name}, "strategy"))
    launcher = Manual(processes=2, endpoints=TWO[:1], role="server", devices="cpu")
    if len(strategy.roles(2)) > 1:
        launcher.check(strategy)
    else:
        with pytest.raises(
            ConfigError, match=f"strategy={name} all are alike; use launcher=local, or on several hosts static, env"
        ):
            launcher.check(strategy)


@pytest.mark.parametrize(
    ("options", "named"), [({"team": 2}, "strategy.team=2"), ({"dense": Dense.allreduce}, "strategy.dense=allreduce")]
)
def test_processes_that_their_launcher_brings_together_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}: .* use launcher=local"):
        Manual(processes=2, endpoints=TWO[:1], role="server", devices="cpu").check(Pserver(**options))


class Keepers(HelperRoles):
    def count_key(self, role: str) -> str:
        return {"keeper": "strategy.how_many"}.get(role) or super().count_key(role)

    def on_device(self, role: str) -> bool:
        return True

    def check_manual_start(self) -> None: ...

    def run(self, task: Task, context: RoleContext) -> None: ...


class KeepersStrategy(RolesStrategy):
    """An author's strategy, with roles of other names."""

    def __init__(self, servers: int = 1) -> None:
        super().__init__(servers)
        self.helper_roles = Keepers()

    def roles(self, processes: int) -> dict[str, int]:
        return {"keeper": self.servers, "night-worker": processes}


def test_roles_have_the_names_that_the_strategy_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_KEEPER_ID", "1")
    monkeypatch.setenv("DTF_NIGHT_WORKER_ID", "4")
    with pytest.raises(ConfigError, match="DTF_KEEPER_ID=1 is for launcher=manual"):
        Local(processes=2, devices="cpu").check(KeepersStrategy())
    Local(processes=2, devices="cpu").check(RolesStrategy())  # it has no keepers
    for role, rank in (("keeper", 1), ("night-worker", 6)):
        launcher = Manual(processes=3, endpoints=TWO, role=role, devices="cpu")
        launcher.check(KeepersStrategy(servers=2))
        assert place(launcher, KeepersStrategy(servers=2)).rank == rank
    with pytest.raises(ConfigError, match=r"names 2 keeper\(s\), .* 1; set strategy.how_many to 2, alike"):
        Manual(processes=3, endpoints=TWO, role="keeper", devices="cpu").check(KeepersStrategy())
    monkeypatch.delenv("DTF_KEEPER_ID")
    monkeypatch.delenv("DTF_NIGHT_WORKER_ID")
    monkeypatch.setattr("dtf.host.devices.choose", lambda given: Devices("cuda", (0,)))
    with pytest.raises(ConfigError, match=r"^strategy.how_many=2 needs as many GPUs, there are 1"):
        Local(processes=1).check(KeepersStrategy(servers=2))


def test_variables_of_a_manual_start_are_not_ignored_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_ENDPOINTS", ",".join(TWO))
    with pytest.raises(ConfigError, match="DTF_ENDPOINTS=.* is for launcher=manual"):
        Local(processes=1, devices="cpu").check(Pserver())
    Local(processes=1, devices="cpu").check(
        build_option("strategy", coerce_option("strategy", {"name": "ddp"}, "strategy"))
    )


def test_it_starts_processes_of_runs_that_train_and_of_one_run() -> None:
    launcher = Manual(processes=1, endpoints=TWO[:1], role="server", devices="cpu")
    with pytest.raises(ConfigError, match="job=doctor starts all of its own; use launcher=local"):
        launcher.open({"job": {"name": "doctor"}}, lambda folder: pytest.fail("made a run"))
    assert not launcher.starts_ranks


OLD = {
    "endpoints": "[127.0.0.1:1]",
    "role": "server",
    "server_id": "0",
    "trainer_id": "0",
    "token_file": "x",
    "meet_timeout_s": "5",
    "tls.mode": "tls",
    "allow_insecure": "true",
}


@pytest.mark.parametrize("key", OLD)
def test_keys_of_before_are_refused_with_their_names_of_today(key: str) -> None:
    known = {"server_id": "id", "trainer_id": "id", "meet_timeout_s": "timeout_s", "tls.mode": "tls"}
    with pytest.raises(ConfigError, match=rf"strategy\.{key.split('.')[0]}: now launcher\.{known.get(key, key)} of"):
        compose(["strategy=pserver", f"strategy.{key}={OLD[key]}"])


def test_a_secret_is_needed_that_others_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("from the file, long enough\n")
    with pytest.raises(ConfigError, match="can be read by others"):
        manual_checks.token(str(file))
    file.chmod(0o600)
    assert manual_checks.token(str(file)) == "from the file, long enough"
    assert manual_checks.token("") == TOKEN
    monkeypatch.setenv("DTF_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16"):
        manual_checks.token("")
    monkeypatch.delenv("DTF_TOKEN")
    with pytest.raises(ConfigError, match=r"export DTF_TOKEN=\$\(openssl rand -hex 32\)"):
        manual_checks.token("")


def test_beyond_this_host_needs_certificates_or_a_word() -> None:
    manual_checks.check_loopback(["127.0.0.1:1", "[::1]:1", "localhost:5"])
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1:1.*allow_insecure=true"):
        manual_checks.check_loopback(["127.0.0.1:1", "10.0.0.1:1"])
    beyond = {"processes": 1, "endpoints": ["10.0.0.1:1"], "role": "server", "devices": "cpu"}
    Manual(**beyond, allow_insecure=True).check(Pserver())


def test_which_files_a_process_needs(tmp_path: Path) -> None:
    file = tmp_path / "pem"
    file.write_text("-----BEGIN CERTIFICATE-----\nnone\n")
    paths = {"ca": str(file), "cert": str(file), "key": str(file)}
    for options, listens in (({"ca"}, True), ({"cert", "key"}, False)):
        with pytest.raises(ConfigError, match="is not given"):
            TlsOptions(mode=TlsMode.tls, **{name: paths[name] for name in options}).check(listens, asks=not listens)
    with pytest.raises(ConfigError, match="cannot be read"):
        TlsOptions(mode=TlsMode.tls, ca=str(tmp_path / "none")).check(listens=False, asks=True)
    for names, message in (
        (("ca",), f"launcher.tls.ca={file} holds no certificate"),
        (("cert", "key"), f"launcher.tls.key={file} are no"),
    ):
        with pytest.raises(ConfigError) as refused:
            TlsOptions(mode=TlsMode.tls, **{name: paths[name] for name in names}).check("cert" in names, "ca" in names)
        assert message in str(refused.value)


def test_what_commands_must_have_alike() -> None:
    base = {
        "seed": 1,
        "run": {"dir": "a", "objective": ""},
        "strategy": {"mode": "sync"},
        "observer": {},
        "launcher": {"role": "server", "tls": {"key": "k"}},
    }
    other = {**base, "run": {"dir": "b", "objective": ""}, "observer": {"x": 1}, "launcher": {"role": "trainer"}}
    expected = {"seed": 1, "run": {"objective": ""}, "strategy": {"mode": "sync"}}
    assert keys_of_all_commands(base) == keys_of_all_commands(other) == expected


def test_nobody_answers() -> None:
    with pytest.raises(PeerError):
        ask(EndpointFile(endpoints(1), viewer(TOKEN), {}, False))


def test_verify_says_that_it_starts_many_runs() -> None:
    composed = compose(["job=verify", "launcher=manual", "launcher.processes=1"])
    with pytest.raises(ConfigError, match="launcher=manual takes part in one run, and job=verify starts many"):
        composed.job.run(composed)
