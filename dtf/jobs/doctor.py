"""`job=doctor`: checks hosts before a run on them: names, addresses, ports, interfaces, storage, bandwidth, clocks."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DtfError, Exit, error_line
from dtf.host import network
from dtf.runs.run_folder import Run, unique_id

if TYPE_CHECKING:
    from dtf.config.compose import Composed

_RESULT = "doctor.json"  # as dtf.jobs.rank_doctor names it, which needs torch
_CONNECT_S = 3.0


@register("job", "doctor")
class Doctor(Job):
    """Check this launcher's hosts, with its ranks: start it on each host as you would a run.

    Exit 2 when something is wrong.
    """

    submits = True

    megabytes: int = option(default=64, least=1, most=4096, doc="what is sent to measure bandwidth", unit="MB")
    slow_mb_s: float = option(
        default=100.0,
        least=0,
        doc="bandwidth between two hosts below which something is wrong; a gigabit cable has 118",
        unit="MB/s",
    )
    clock_s: float = option(
        default=0.5, above=0, doc="difference between clocks above which something is wrong", unit="s"
    )

    def run(self, composed: Composed) -> int:
        settings = composed.settings
        launcher = settings.launcher
        wrong = list(_before(launcher.meeting_point()))
        for text in wrong:
            print(f"wrong: {text}")
        launcher.check(settings.strategy)
        parent = Path(settings.run.dir).absolute().parent if settings.run.dir else Path("outputs").absolute()

        def make(folder: str) -> Run:
            try:
                parent.mkdir(parents=True, exist_ok=True)
                return Run(
                    Path(tempfile.mkdtemp(prefix=".doctor-", dir=parent)), unique_id(), composed.config, settings
                )
            except OSError as error:
                raise ConfigError(
                    f"the place for run folders, {parent}, cannot be written: {error.strerror}; give run.dir"
                ) from error

        try:
            run = launcher.open(composed.config, make, composed.command)
            try:
                code = launcher.launch(run, lambda event: None, "dtf.jobs.rank_doctor:examine")
                measured = json.loads((run.folder / _RESULT).read_text()) if run.leader and not code else None
            finally:
                if run.leader:
                    shutil.rmtree(run.folder, ignore_errors=True)
        except DtfError as error:
            if wrong:  # most likely for the reasons above
                print(error_line(error.exit, str(error)), file=sys.stderr)
                return error.exit
            raise
        if measured is None:
            return code
        for line in _table(measured):
            print(line)
        wrong += self._problems(measured)
        for text in wrong:
            print(f"wrong: {text}")
        print(f"{len(wrong)} thing(s) wrong" if wrong else "nothing is wrong")
        return Exit.CONFIG if wrong else Exit.OK

    def _problems(self, measured: dict[str, Any]) -> Iterator[str]:
        ranks = measured["ranks"]
        hosts = {facts["host"] for facts in ranks}
        if measured["missing"]:
            names = ", ".join(sorted({f"{ranks[rank]['host']} (rank {rank})" for rank in measured["missing"]}))
            yield f"{names} cannot write where run folders go; put run.dir on storage that all hosts share"
        if len(hosts) > 1:
            for rank, facts in enumerate(ranks):
                if facts["interface"] == "lo":
                    yield (
                        f"rank {rank} on {facts['host']} talks on loopback, which no other host hears; give "
                        "launcher.interface"
                    )
        for clock in measured["clocks"]:
            if abs(clock["ahead_s"]) > self.clock_s + clock["round_trip_s"]:
                yield (
                    f"the clock of {ranks[clock['rank']]['host']} is {abs(clock['ahead_s']):.2f} s "
                    f"{'ahead of' if clock['ahead_s'] > 0 else 'behind'} that of "
                    f"{ranks[0]['host']}; run chrony or another NTP service on both"
                )
        fastest = max((link["mb_s"] for link in measured["links"]), default=0.0)
        for link in measured["links"]:
            pair = f"{ranks[link['from']]['host']} to {ranks[link['to']]['host']}"
            if link["mb_s"] < self.slow_mb_s:
                yield (
                    f"{pair}: {link['mb_s']:.0f} MB/s, less than job.slow_mb_s={self.slow_mb_s:g}; is it the right "
                    "launcher.interface?"
                )
            elif link["mb_s"] < fastest / 3:
                yield (
                    f"{pair}: {link['mb_s']:.0f} MB/s, less than a third of the fastest pair; look at its cable, "
                    "port and interface"
                )


def _before(point: tuple[str, int, bool] | None) -> Iterator[str]:
    """What is wrong with the rendezvous address, as seen from this host, before any rank has started.

    `point`: host, port, whether this host serves it.
    """
    if point is None:
        return
    host, port, serves = point
    where = network.endpoint_text(host, port)
    try:
        address = network.own_address(host, port)
    except socket.gaierror:
        yield (
            f"this host, {socket.gethostname()}, knows no address of {host}; use an IP address, or enter the name "
            "in DNS or /etc/hosts"
        )
        return
    except OSError as error:
        yield (
            f"there is no way from {socket.gethostname()} to {host}: {error.strerror}; look at its interfaces and "
            f"routes (ip route get {host})"
        )
        return
    print(
        f"{socket.gethostname()} reaches {host} from {address} by "
        f"{network.interface_of(address) or 'an unknown interface'}"
    )
    if serves:
        target = socket.getaddrinfo(host, port)[0][4][0]
        loopback = ipaddress.ip_address(str(target).partition("%")[0]).is_loopback
        if address != target and not loopback:
            yield (
                f"{host} is {target}, which is not an address of this host, {socket.gethostname()}, but the first "
                "rank is to be here"
            )
            return
        if loopback:
            print(f"{host} is loopback: only this host can meet there")
        with suppress(OSError), socket.create_connection((host, port), timeout=_CONNECT_S):
            yield f"port {port} of {host} is taken by another program; choose another"
        return
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        print(f"nobody listens at {where} yet; the host is there")
    except OSError as error:
        yield (
            f"{where} does not answer within {_CONNECT_S:g} s ({error}): the host is down, or a firewall between "
            "drops what is sent"
        )


def _table(measured: dict[str, Any]) -> Iterator[str]:
    ranks = measured["ranks"]
    yield (
        f"{'rank':>4}  {'host':<20} {'device':<24} {'cores':>5} {'threads':>7} {'interface':<12} {'backend':<8} "
        f"{'clock':>12} {'round trip':>11}"
    )
    clocks = {clock["rank"]: clock for clock in measured["clocks"]}
    for rank, facts in enumerate(ranks):
        clock = clocks.get(rank)
        times = f"{clock['ahead_s'] * 1000:+9.1f} ms {clock['round_trip_s'] * 1e6:8.0f} us" if clock else ""
        yield (
            f"{rank:>4}  {facts['host'][:20]:<20} {facts['device'][:24]:<24} {facts['cores']:>5} {facts['threads']:>7} "
            f"{facts['interface']:<12} {facts['backend'][:8]:<8} {times}"
        ).rstrip()
    for link in measured["links"]:
        yield f"rank {link['from']} to rank {link['to']}: {link['mb_s']:,.0f} MB/s"
    if len(ranks) > 1:
        rate = f"{measured['all_reduce_mb_s']:,.0f} MB/s"
        yield f"all-reduce of {measured['megabytes']} MB over {len(ranks)} ranks: {rate}"
