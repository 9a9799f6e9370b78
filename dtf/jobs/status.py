"""`job=status`: how a run stands: the job at its scheduler, the run in its folder, and of a live run with servers its
processes, what each server holds, its rate and staleness. Changes nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job, Output
from dtf.api.registry import option, register
from dtf.api.schema import build
from dtf.cluster import joint_state as joint
from dtf.cluster import record
from dtf.cluster.platform import JobState, State
from dtf.core.endpoint_file import NAME as LIVE
from dtf.core.endpoint_file import EndpointFile, find
from dtf.core.errors import ConfigError, Exit, PeerError
from dtf.core.text import bytes_text, harmless
from dtf.host import network
from dtf.launch.manual import TlsOptions
from dtf.launch.manual_checks import token
from dtf.runs import standing
from dtf.runs.sweep_record import is_sweep, sweep_state

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_DEADLINE_S = 5.0


@register("job", "status")
class Status(Job):
    """Say how a run stands: what its scheduler says, how far it is, what its servers hold."""

    run_folder: str = option(
        default="", doc="the folder of a run or of a sweep; of a live one with servers on a host that reaches them"
    )
    endpoint: str = option(
        default="",
        doc="HOST:PORT of a server of a run under launcher=manual. The secret is DTF_TOKEN; with launcher=manual also "
        "that of launcher.token_file, and launcher.tls has the certificates",
    )
    seconds: float = option(default=1.0, above=0, most=3600, doc="over which pushes are counted", unit="s")
    format: Output = option(default=Output.text, doc="what is printed: `text` to read, `json` for programs")

    def run(self, composed: Composed) -> int:
        if bool(self.run_folder) == bool(self.endpoint):
            raise ConfigError(
                "job=status needs to know which run: give either job.run_folder=FOLDER or job.endpoint=HOST:PORT"
            )
        found: dict[str, Any] = {}
        text: list[str] = []
        if self.run_folder:
            found, text = _standing_of(Path(self.run_folder))
        if self.endpoint or not found or (Path(self.run_folder) / LIVE).exists():
            servers = self._servers(composed)
            found["servers"] = servers
            text += [*([""] if text else []), *lines(servers)]
        print(json.dumps(found, indent=2) if self.format is Output.json else harmless("\n".join(text)))
        return Exit.OK

    def _servers(self, composed: Composed) -> list[dict[str, Any]]:
        """What the servers of a live run say. ConfigError, DataError, PeerError or AuthError."""
        if find_spec("grpc") is None:
            raise ConfigError("job=status asks by grpcio, which is not installed: python -m pip install 'dtf[pserver]'")
        live = find(Path(self.run_folder)) if self.run_folder else self._by_endpoint(composed)
        before = ask(live)
        time.sleep(self.seconds)
        servers = ask(live)
        for server, earlier in zip(servers, before, strict=True):
            pushes, passed = (server[key] - earlier[key] for key in ("pushes", "uptime_s"))
            server["pushes_per_s"] = round(pushes / passed, 2) if passed > 0 else None  # it was started again meanwhile
        return servers

    def _by_endpoint(self, composed: Composed) -> EndpointFile:
        from dtf.pserver.net.rpc import viewer

        network.endpoint(self.endpoint, "job.endpoint")
        launcher = composed.config["launcher"]
        manual = launcher["name"] == "manual"
        tls, file = (build(TlsOptions, launcher["tls"]), launcher["token_file"]) if manual else (TlsOptions(), "")
        tls.check(listens=False, asks=True)
        live = EndpointFile([self.endpoint], viewer(token(file)), tls.files(), tls.mutual)
        return EndpointFile(ask(live)[0]["endpoints"], live.token, live.tls, live.mutual)


def _standing_of(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """How the job of this folder stands, where one was submitted for it, and its run, or each of a sweep."""
    known = record.find(folder)
    one = standing.standing(folder) if folder.is_dir() else None
    found: dict[str, Any] = {}
    text: list[str] = []
    told = ""
    if known is not None:
        job = joint.job_state(_asked(known), one, known.launch_before)
        detail = f" ({job.detail})" if job.detail else ""
        node = {"platform": known.launcher["name"], **known.handle, "state": job.state.value, "detail": job.detail}
        found["job"] = node
        text.append(f"{known.title}: {job.state.value}{detail}, submitted {known.submitted[:19]}")
        if one is not None:
            if job.state is State.running and one.exit is None and one.id != known.launch_before:
                one = replace(one, live=True)  # on another host, whose locks are not seen here
            ends = job.state is State.running and known.platform.is_told_to_end(known.handle)
            told = joint.run_state(job.state, one, known.launch_before, ends)
        if one is None and job.state.is_live and not is_sweep(folder):
            unseen = f"{known.run_dir} is not seen from here; job=logs prints what the run does"
            text.append("the run has not begun yet" if known.platform.sees_folder else unseen)
    if one is not None:
        found["run"] = one.to_json()
        return found, [*text, *standing.lines(one, told)]
    more, said = _sweep_of(folder, known is not None) if folder.is_dir() else ({}, [])
    return found | more, text + said


def _asked(known: record.JobRecord) -> JobState:
    """What the scheduler says of a job."""
    try:
        return known.platform.state(known.handle)
    except (PeerError, ConfigError) as error:  # how the run stands is known all the same
        return JobState(State.unknown, f"the scheduler cannot be asked: {error}")


def _sweep_of(folder: Path, submitted: bool) -> tuple[dict[str, Any], list[str]]:
    trials = dict(standing.runs_in(folder))
    found: dict[str, Any] = {"trials": {name: trial.to_json() for name, trial in trials.items()}} if trials else {}
    text = [
        f"{name}: {trial.state}, {trial.progress or (f'saved step {trial.saved:,}' if trial.saved else 'no step yet')}"
        for name, trial in trials.items()
    ]
    if is_sweep(folder):
        state = sweep_state(folder, submitted)
        found, text = {"sweep": {"state": state}} | found, [f"sweep: {state}", *text]
    return found, text


def ask(live: EndpointFile) -> list[dict[str, Any]]:
    """What each server says. PeerError or AuthError."""
    from dtf.pserver.net.codec import decode, encode
    from dtf.pserver.net.messages import STATUS, status_schemas
    from dtf.pserver.net.rpc import Client, Tls

    tls = Tls(**{name: Path(path) for name, path in live.tls.items()}, mutual=live.mutual) if live.tls else None
    answers = []
    for endpoint in live.endpoints:
        client = Client(endpoint, live.token, "none", tls=tls)
        try:
            answer = client.call(STATUS, encode(status_schemas()[0], {}, {}), _DEADLINE_S)
        finally:
            client.close()
        answers.append(json.loads(decode(status_schemas()[1], answer).arrays["status"].tobytes()))
    return answers


def lines(servers: list[dict[str, Any]]) -> Iterator[str]:
    """The status of the servers as lines of text."""
    first = servers[0]
    yield (
        f"mode {first['mode']}, {first['state']}, step {first['version']}, up for {first['uptime_s']:,.0f} s, "
        f"attempt {first['attempt']}"
    )
    yield f"run folder {first['folder']}"
    if leases := first.get("leases"):  # not of servers of rows alone
        yield "leases: " + ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in leases.items())
    yield ""
    yield (
        f"{'server':>6}  {'at':<21} {'blocks':>6} {'MiB':>9} {'updates':>9} {'pushes':>9} {'a second':>8} "
        f"{'again':>6}  updates between pull and push"
    )
    for server in servers:
        lags = "  ".join(f"{lag}: {count:,}" for lag, count in server["staleness"].items()) or "-"
        rate = "-" if server["pushes_per_s"] is None else f"{server['pushes_per_s']:.1f}"
        yield (
            f"{server['server']:>6}  {first['endpoints'][server['server']]:<21} {server['blocks']['number']:>6} "
            f"{server['blocks']['bytes'] / 2**20:>9.2f} "
            f"{server['updates']:>9,} {server['pushes']:>9,} {rate:>8} {server['dropped']:>6,}  {lags}"
        )
    tables = [(name, server["server"], table) for server in servers for name, table in server["tables"].items()]
    if tables:
        yield ""
        yield f"{'table':<24} {'server':>6} {'rows':>13} {'MiB':>9}  rows all servers may hold"
        for name, number, table in tables:
            life = [f"{table[key]:,} {key}" for key in ("admitted", "refused", "evicted") if key in table]
            on_disk = ""
            if "disk_bytes" in table:
                asked = table["found"] + table["read"]
                share = f", {table['found'] / asked:.1%} of rows found in memory" if asked else ""
                on_disk = f"; {bytes_text(table['disk_bytes'])} on disk{share}"
            yield (
                f"{name[:24]:<24} {number:>6} {table['rows']:>13,} {table['bytes'] / 2**20:>9.2f}  "
                f"{table['capacity']:,}{on_disk}{'; since the start ' * bool(life)}{', '.join(life)}"
            )
    if "trainers" not in first:
        return
    yield ""
    yield f"{'trainer':>7}  holds"
    for trainer in first["trainers"]:
        yield f"{trainer['trainer']:>7}  {'; '.join(trainer['holds']) or '-'}"
    if not first["trainers"]:
        yield "none has come"
