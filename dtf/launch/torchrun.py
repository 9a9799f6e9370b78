"""Ranks on hosts that may come and go: an agent of torch.distributed.elastic on each, which starts processes with
launcher=env and restarts them.

The agent is this process. It makes no run folder and sees no event: its ranks find each other, agree and report as
those that a cluster starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dtf.api.launcher import LONGEST_S, WORK, Launcher, check_environment, check_one_role, log_folder
from dtf.api.registry import name_of, option, register
from dtf.core.errors import ConfigError, Exit, PeerError
from dtf.core.text import quoted
from dtf.core.types import Event
from dtf.host import devices, network
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.launch.restart_policy import NO_PROGRESS

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from dtf.api.launcher import LaunchedRun
    from dtf.api.strategy import Strategy
    from dtf.launch.elastic_agent import Agent
    from dtf.runs.run_folder import Run


@register("launcher", "torchrun")
class Torchrun(Launcher):
    """Start this host's ranks with torch's elastic agent: from `min` to `max` hosts, which may join and leave while the
    run goes on.
    """

    hears_all = False

    rendezvous: str = option(doc="HOST:PORT where the agents meet; the one on HOST serves it, and the run ends with it")
    nodes: str = option(default="1:1", doc="fewest and most hosts, as in 2:4; or one number for both")
    processes: int | Literal["auto"] = option(
        default="auto", least=1, most=MOST_PROCESSES, doc="ranks on each host; `auto`: one per GPU, without GPUs 2"
    )
    devices: str = option(
        default="auto",
        doc="`auto`: GPUs if there are any; `cpu`; `cuda`; or numbers of GPUs, as in launcher.devices='\"0,2\"'",
    )
    threads: int = option(
        default=0,
        least=0,
        most=MOST_THREADS,
        doc="intra-op threads of each rank; 0: cores divided by the ranks of this host",
    )
    env: dict[str, str] = option(
        factory=dict,
        doc="environment variables for ranks, beside those of this process; a config file sets switches of NCCL, gloo, "
        "OpenMP and CUDA alone",
    )
    interface: str = option(
        default="",
        doc="network interface of gloo and nccl; empty: gloo takes the one towards the rendezvous, nccl chooses",
    )
    log_dir: str = option(
        default="", doc="where the agent puts what ranks print, a folder for each attempt; empty: this terminal"
    )
    max_restarts: int = option(
        default=NO_PROGRESS, least=0, most=100, doc="restarts of a host's ranks after one of them was lost"
    )
    meet_timeout_s: float = option(
        default=600.0, above=0, most=LONGEST_S, doc="time for the fewest hosts to come", unit="s"
    )

    def devices_kind(self) -> str:
        return devices.choose(self.devices).kind

    def count(self) -> int:
        """With the fewest hosts."""
        check_environment(self.env)
        network.check_interface(self.interface)
        network.endpoint(self.rendezvous, "launcher.rendezvous")
        return self._nodes()[0] * devices.processes(self.processes, devices.choose(self.devices))

    def check(self, strategy: Strategy) -> None:
        slots = self.count()
        check_one_role("torchrun", strategy, slots)
        ranks = sum(strategy.roles(slots).values())
        if ranks != slots:
            raise ConfigError(
                f"launcher=torchrun starts {slots} ranks, and strategy={name_of('strategy', strategy)} has {ranks}; "
                "use launcher=local"
            )

    def meeting_point(self) -> tuple[str, int, bool]:
        return *network.endpoint(self.rendezvous, "launcher.rendezvous"), False

    def open(self, config: dict[str, Any], make: Callable[[str], Run], command: Sequence[str] = ()) -> Run:
        """Make no folder: rank 0 does it, in `run.dir`.

        ConfigError without `run.dir`, which hosts that join later have to know too.
        """
        from dtf.config.settings import parse_settings
        from dtf.runs.run_folder import Run, unique_id

        if not config["run"]["dir"]:
            raise ConfigError(
                "launcher=torchrun needs run.dir=FOLDER, on storage that all hosts share: hosts that join later go on "
                "there"
            )
        if config["checkpoint"].get("resume", "auto") != "auto":
            raise ConfigError(
                f"launcher=torchrun needs checkpoint.resume=auto, not {config['checkpoint']['resume']}: ranks that "
                "are started again go on in run.dir"
            )
        self._command = [word for word in command if not word.lstrip("+~").startswith("launcher")]
        return Run(Path(config["run"]["dir"]).absolute(), unique_id(), config, parse_settings(config), leader=False)

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        """Run torch's elastic agent in this process; returns the exit code of its ranks.

        `see` hears nothing and `entry` is not used: ranks do the job of the same command line, and report themselves.
        """
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.rendezvous import (
            RendezvousClosedError,
            RendezvousConnectionError,
            RendezvousTimeoutError,
        )

        # A new store for each round, hosted by its rank 0. With the shared one a host that joins later waits for an
        # address nobody writes (torch 2.15).
        os.environ |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **self.env}
        address = self._own_address()
        logs = log_folder(self.log_dir, run.folder) if self.log_dir else None
        handler = self._rendezvous_handler(run, address)
        agent = self._agent(logs, handler, address)
        try:
            return agent.exit_code(agent.run())  # type: ignore[arg-type]
        except SignalException:
            return Exit.PREEMPTED
        except RendezvousConnectionError as error:
            # the host that serves it has left, because the run ended or it was lost
            code = agent.left()
            if code == Exit.PEER:
                raise PeerError(
                    f"launcher.rendezvous={self.rendezvous} is gone; start all again with the same run.dir to go on"
                ) from error
            return code
        except RendezvousTimeoutError as error:
            raise PeerError(
                f"fewer than {self._nodes()[0]} hosts came to launcher.rendezvous={self.rendezvous} within "
                f"{self.meet_timeout_s:g} s"
            ) from error
        except RendezvousClosedError as error:
            raise PeerError(
                "another host has ended the run; its own error line says why; start all again with the same run.dir "
                "to go on"
            ) from error
        finally:
            handler.shutdown()

    def _rendezvous_handler(self, run: LaunchedRun, address: str) -> RendezvousHandler:
        """The rendezvous of the agents, served by this process where it is the first on its HOST.

        PeerError when it cannot be reached.
        """
        from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        fewest, most = self._nodes()
        timeouts = {
            "join_timeout": self.meet_timeout_s,
            "timeout": self.meet_timeout_s,
            "read_timeout": max(1, int(self.meet_timeout_s)),
        }
        # torch would find out by this host's name who serves the rendezvous, which not every host can resolve. Of two
        # agents on one host one serves it.
        if self._serves(address):
            with contextlib.suppress(RendezvousConnectionError, RuntimeError):
                return get_rendezvous_handler(
                    RendezvousParameters(
                        "c10d", self.rendezvous, _id(run), fewest, most, address, is_host=True, **timeouts
                    )
                )
        try:
            return get_rendezvous_handler(
                RendezvousParameters(
                    "c10d", self.rendezvous, _id(run), fewest, most, address, is_host=False, **timeouts
                )
            )
        except (RendezvousConnectionError, RuntimeError) as error:
            raise PeerError(
                f"launcher.rendezvous={self.rendezvous} cannot be reached: {str(error).splitlines()[0]}; see job=doctor"
            ) from error

    def _agent(self, logs: Path | None, handler: RendezvousHandler, address: str) -> Agent:
        """The agent of this host, about to start its ranks. `logs`: the folder of their logs."""
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

        from dtf.launch.elastic_agent import Agent

        specs = DefaultLogsSpecs(log_dir=str(logs), redirects=Std.ALL, tee=Std.ALL) if logs else DefaultLogsSpecs()
        spec = WorkerSpec(
            role="dtf",
            local_world_size=devices.processes(self.processes, devices.choose(self.devices)),
            entrypoint=sys.executable,
            args=("-m", "dtf", *self._rank_command()),
            rdzv_handler=handler,
            max_restarts=self.max_restarts,
            monitor_interval=0.1,
            local_addr=address,
        )
        return Agent(spec, specs)

    def _nodes(self) -> tuple[int, int]:
        """The fewest and most hosts. ConfigError for a malformed option."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", self.nodes)
        fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= fewest <= most:
            raise ConfigError(
                f"launcher.nodes={self.nodes} must be FEWEST:MOST hosts, such as 2:4, or one number for both"
            )
        return fewest, most

    def _own_address(self) -> str:
        """The address of this host on the route to the rendezvous.

        What torch finds by the host's name is often an address that others cannot reach.
        """
        host, port = network.endpoint(self.rendezvous, "launcher.rendezvous")
        try:
            return network.own_address(host, port)
        except OSError as error:
            raise ConfigError(
                f"launcher.rendezvous={self.rendezvous}: no way to {host}: {error}; see job=doctor"
            ) from error

    def _serves(self, address: str) -> bool:
        """Whether the rendezvous is on this host."""
        host, port = network.endpoint(self.rendezvous, "launcher.rendezvous")
        return any(target[0] in (address, "127.0.0.1", "::1") for *_, target in socket.getaddrinfo(host, port))

    def _rank_command(self) -> list[str]:
        """The command line of each rank: this process's, with launcher=env."""
        options = {
            "devices": quoted(self.devices),
            "threads": self.threads,
            "interface": quoted(self.interface),
            "meet_timeout_s": self.meet_timeout_s,
        }
        return [*self._command, "launcher=env", *(f"launcher.{key}={value}" for key, value in options.items())]


def _id(run: LaunchedRun) -> str:
    """The id of the rendezvous: the same on all hosts, another for each run folder."""
    return hashlib.sha256(str(run.folder).encode()).hexdigest()[:16]
