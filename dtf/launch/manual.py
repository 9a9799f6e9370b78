"""One process of a run whose other processes are started by commands of their own, on any hosts and in any order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from dtf.api.launcher import LONGEST_S, WORK
from dtf.api.registry import name_of, option, register
from dtf.core.errors import ConfigError
from dtf.core.types import Event, ManualStart, Note
from dtf.host import devices, network
from dtf.host.devices import MOST_PROCESSES
from dtf.launch import manual_checks
from dtf.launch.supervised import SupervisedLauncher

if TYPE_CHECKING:
    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy
    from dtf.runs.run_folder import Run


class TlsMode(Enum):
    none = "none"
    tls = "tls"
    mtls = "mtls"


@dataclass(kw_only=True)
class TlsOptions:
    """PEM files by which processes authenticate each other on a network that others can reach."""

    mode: TlsMode = option(
        default=TlsMode.none,
        doc="`none`; `tls`: those who listen show a certificate, and what passes is encrypted; `mtls`: those who ask "
        "show one too",
    )
    ca: str = option(
        default="", doc="who vouches for the others: the authority's certificate, or the one certificate that all have"
    )
    cert: str = option(
        default="",
        doc="this process's certificate, for the host as launcher.endpoints names it; those who ask need one with mtls",
    )
    key: str = option(default="", doc="the private key of cert")

    @property
    def mutual(self) -> bool:
        return self.mode is TlsMode.mtls

    def files(self) -> dict[str, str]:
        """The paths that are given, by name; empty without TLS."""
        paths = {"ca": self.ca, "cert": self.cert, "key": self.key} if self.mode is not TlsMode.none else {}
        return {name: path for name, path in paths.items() if path}

    def check(self, listens: bool, asks: bool) -> None:
        """Raise ConfigError where a file is missing that this process needs, or is no certificate."""
        if self.mode is TlsMode.none:
            names = [name for name in ("ca", "cert", "key") if getattr(self, name)]
            if names:
                raise ConfigError(
                    f"launcher.tls.{names[0]} is given and launcher.tls.mode=none uses no file; set it to tls or mtls"
                )
            return
        needed = ({"cert", "key"} if listens or self.mutual else set()) | ({"ca"} if asks or self.mutual else set())
        manual_checks.check_files("launcher.tls", self.files(), sorted(needed))
        manual_checks.check_certificates("launcher.tls", self.files())


class Position(NamedTuple):
    """Which process of the run this is."""

    role: str
    number: int  # among the processes of its role
    rank: int  # among all processes; 0 makes the run folder, and reports
    size: int  # how many processes there are
    endpoints: list[str]

    @property
    def listens(self) -> bool:
        """Whether it runs the engine, and listens at an endpoint."""
        return self.rank < len(self.endpoints)


@register("launcher", "manual")
class Manual(SupervisedLauncher):
    """Start one process of a run, watch it and restart it; each other one has a command of its own.

    For strategies whose processes have several roles and find each other by themselves, such as strategy=pserver. The
    processes that run the engine, its servers, listen at `endpoints`.
    """

    processes: int = option(  # type: ignore[assignment]
        least=1, most=MOST_PROCESSES, doc="how many trainer processes the run has, alike everywhere"
    )
    endpoints: list[str] = option(
        factory=list,
        doc="HOST:PORT of each server, in order, alike everywhere; also DTF_ENDPOINTS, with commas between",
    )
    role: str = option(default="", doc="what this command starts, such as `server` or `trainer`; also DTF_ROLE")
    id: int | None = option(
        default=None,
        least=0,
        most=MOST_PROCESSES - 1,
        doc="which of the endpoints this server is, from 0; for a trainer a number that no other one has. Also DTF_ID, "
        "or by the name of the role DTF_SERVER_ID, DTF_TRAINER_ID",
    )
    token_file: str = option(
        default="",
        doc="file that only you can read, with the secret that all processes of the run share; also DTF_TOKEN, the "
        "secret",
    )
    timeout_s: float = option(
        default=600.0,
        above=0,
        most=LONGEST_S,
        doc="how long to wait for the other processes, at first and after they were lost",
        unit="s",
    )
    tls: TlsOptions = option(factory=TlsOptions, doc="certificates, for networks that others can reach")
    allow_insecure: bool = option(
        default=False, doc="let endpoints beyond this host pass everything unencrypted, the token included"
    )

    starts_ranks = False
    hears_all = False

    def count(self) -> int:
        self.check_host()
        return self.processes

    def check(self, strategy: Strategy) -> None:
        if len(strategy.roles(self.processes)) == 1:
            raise ConfigError(
                "launcher=manual starts one process of a run whose processes have several roles, such as "
                f"strategy=pserver, and with strategy={name_of('strategy', strategy)} all are alike; use "
                "launcher=local, or on several hosts static, env or torchrun"
            )
        if self.pin:
            raise ConfigError(
                "launcher.pin=true divides the cores of a host among its ranks, and launcher=manual starts one; use "
                "launcher.pin=false"
            )
        strategy.helper_roles.check_manual_start()
        position = self._position(strategy)
        if self.tls.mode is TlsMode.none and not self.allow_insecure:
            manual_checks.check_loopback(position.endpoints)
        self.tls.check(listens=position.listens, asks=position.rank > 0)
        manual_checks.token(self.token_file)

    def open(self, config: dict[str, Any], make: Callable[[str], Run], command: Sequence[str] = ()) -> Run:
        """Rank 0 makes the run; any other process has a temporary folder, until rank 0 tells it the run's.

        ConfigError for jobs that start their own processes.
        """
        from dtf.config.settings import parse_settings
        from dtf.runs.run_folder import Run

        if config["job"]["name"] != "train":
            raise ConfigError(
                "launcher=manual starts one process of a run that trains, and "
                f"job={config['job']['name']} starts all of its own; use launcher=local"
            )
        settings = parse_settings(config)
        position = self._position(settings.strategy)
        return Run.guest(config, settings, f"{position.role}-{position.rank}") if position.rank else make("")

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        position = self._position(run.strategy)
        towards = manual_checks.addresses(position.endpoints)[0]

        def tell(event: Event) -> None:
            if position.rank and isinstance(event, Note):  # rank 0 has observers
                print(f"dtf: {event.text}", file=sys.stderr, flush=True)
            see(event)

        return self.supervise(run, tell, entry, network.socket_variables(self.interface, towards, os.environ))

    def _position(self, strategy: Strategy) -> Position:
        """ConfigError where options and environment name no process of the run."""
        roles, endpoints = strategy.roles(self.processes), manual_checks.endpoints(self.endpoints)
        engine_role, listening = next(iter(roles.items()))
        manual_checks.addresses(endpoints)
        if len(endpoints) != listening:
            raise ConfigError(
                f"launcher.endpoints names {len(endpoints)} {engine_role}(s), and the strategy has {listening}; set "
                f"{strategy.helper_roles.count_key(engine_role)} to {len(endpoints)}, alike everywhere, or give "
                f"{listening} endpoint(s)"
            )
        role = manual_checks.role_of(self.role, roles)
        number = manual_checks.number_of(self.id, role, listening if role == engine_role else None)
        first = sum(list(roles.values())[: list(roles).index(role)])
        return Position(role, number, first + number, sum(roles.values()), endpoints)

    def _places(self, strategy: Strategy) -> tuple[list[dict[str, Any]], list[list[int]]]:
        position = self._position(strategy)
        on_device = strategy.helper_roles.on_device(position.role)
        device = devices.device_of(0, 1, devices.choose(self.devices)) if on_device else "cpu"
        place = {
            "rank": position.rank,
            "size": position.size,
            "role": position.role,
            "number": position.number,
            "slots": self.processes,
            "device": device,
            "devices": (device,),
            "threads": self.threads or devices.cores(),
            "token": manual_checks.token(self.token_file),
            "manual": ManualStart(
                tuple(position.endpoints), self.timeout_s, self.tls.files(), self.tls.mutual, self.allow_insecure
            ),
        }
        return [place], [sorted(os.sched_getaffinity(0))]
