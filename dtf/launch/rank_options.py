"""The options of all that starts, watches and restarts the ranks of a host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtf.api.launcher import LONGEST_S
from dtf.api.registry import option
from dtf.host.devices import MOST_PROCESSES, MOST_THREADS
from dtf.launch.restart_policy import NO_PROGRESS


@dataclass(kw_only=True)
class RankOptions:
    """How the ranks of each host are started, and when they are taken for lost."""

    processes: int | Literal["auto"] = option(
        default="auto",
        least=1,
        most=MOST_PROCESSES,
        doc="how far to spread on each host; `auto`: one process per GPU, without GPUs 2",
    )
    devices: str = option(
        default="auto",
        doc="`auto`: GPUs if there are any; `cpu`; `cuda`; or numbers of GPUs, as in launcher.devices='\"0,2\"'",
    )
    threads: int = option(
        default=0,
        least=0,
        most=MOST_THREADS,
        doc="intra-op threads of each rank; 0: cores divided by the trainers of this host",
    )
    pin: bool = option(
        default=False,
        doc="give each rank cores of its own, hardware threads of one core together; for a run that has the host, or "
        "the cores that taskset gives it, for itself",
    )
    env: dict[str, str] = option(
        factory=dict,
        doc="environment variables for ranks, beside those of this process; a config file sets switches of NCCL, gloo, "
        "OpenMP and CUDA alone",
    )
    interface: str = option(
        default="",
        doc="network interface of gloo and nccl; empty: loopback on one host; on several gloo takes the one towards "
        "host 0, nccl chooses",
    )
    log_dir: str = option(
        default="", doc="where the ranks' logs go, in a folder named as the run folder; empty: the run folder itself"
    )
    max_restarts: int = option(
        default=NO_PROGRESS,
        least=0,
        most=NO_PROGRESS,  # as many without a new checkpoint end a run anyway
        doc="restarts after a lost rank; counts again from 0 after a new checkpoint, where one rank alone is "
        "restarted after its next step",
    )
    hang_timeout_s: float = option(
        default=60.0,
        above=0,
        most=LONGEST_S,
        doc="silence of a rank within a step, or of a host, that means it hangs; in any phase the time a rank may be "
        "stopped by a signal",
        unit="s",
    )
    start_timeout_s: float = option(
        default=600.0,
        above=0,
        most=LONGEST_S,
        doc="the same while starting, the first step included, evaluating and saving",
        unit="s",
    )
    grace_s: float = option(
        default=25.0,
        least=0,
        most=LONGEST_S,
        doc="time to save after SIGTERM or SIGINT before ranks are killed",
        unit="s",
    )
