"""The contract of platforms: launchers that hand the command line to a scheduler, whose job then runs it.

Torch-free. What runs inside such a job is in `inside.py`.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dtf.api.launcher import WORK, Launcher
from dtf.api.registry import name_of, option
from dtf.core.errors import ConfigError, PeerError
from dtf.host.devices import processes_for
from dtf.launch.manual import TlsMode, TlsOptions
from dtf.launch.rank_options import RankOptions

if TYPE_CHECKING:
    from dtf.api.launcher import AnyRun, LaunchedRun
    from dtf.api.strategy import Strategy
    from dtf.core.types import Event

JOB_FOLDER = "job"
"""The folder of a submission, in the folder of its run."""

_LONGEST_NAME, _LONGEST_ID = 50, 30


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """One command line, as a scheduler is to run it."""

    name: str
    """For people and schedulers: a-z, 0-9 and dashes, at most 50 characters, begins with a letter."""
    folder: Path
    """Of the run, or of the sweep, on this machine."""
    run_dir: str
    """The same folder as the job's processes see it."""
    content: bytes
    """Of the bundle, which may hold secrets."""
    digest: str
    """SHA-256 of the bundle, hexadecimal."""
    roles: dict[str, int]
    """Role -> processes, in order of rank."""
    nodes: int
    configs: tuple[dict[str, Any], ...]
    """Resolved: of the run, or of each trial."""
    grace_s: float
    """What a save may take after a notice, of the scheduler and of the launcher inside: three times the longest save of
    this run so far, where this machine sees its folder; at least `launcher.grace_s`."""
    token: str = ""
    """A secret that all processes of the job share; the bundle has it too."""
    again: bool = False
    """Whether an earlier submission of this request was cut off: the scheduler may have its job."""
    trials: tuple[str, ...] = ()
    """Of a sweep: the names of its trials. Number N of them is `--trial N` of the bundle."""
    parallel: int = 0
    """Of a sweep: the most trials at once; 0: as many as the scheduler gives."""

    @property
    def job_folder(self) -> Path:
        return self.folder / JOB_FOLDER

    @property
    def bundle(self) -> Path:
        """What the job's processes run: a zip file that only its owner can read."""
        return self.job_folder / "bundle.zip"

    @property
    def separate(self) -> bool:
        """Whether each process is a task, pod or actor of its own, as roles on several nodes are. Otherwise there is
        one supervisor a node, which starts its ranks.
        """
        return len(self.roles) > 1 and self.nodes > 1

    def command(self, python: str, bundle: str = "") -> list[str]:
        """What each node, or each process, runs. `bundle`: its path there, where it is another one."""
        return [python, "-m", "dtf", f"--bundle={bundle or self.bundle}", f"--digest={self.digest}"]


class State(Enum):
    """What has become of a job."""

    queued = "queued"
    running = "running"
    requeued = "requeued"
    finished = "finished"
    failed = "failed"
    cancelled = "cancelled"
    unknown = "unknown"

    @property
    def is_live(self) -> bool:
        """Whether the scheduler still has work to do for it."""
        return self in (State.queued, State.running, State.requeued)


class Unanswered(PeerError):
    """Whether the scheduler has taken a job is not known. The same submission again finds it."""


@dataclass(frozen=True)
class JobState:
    """`detail`: in the scheduler's words: reason, nodes, exit code, restarts."""

    state: State
    detail: str = ""


@dataclass(kw_only=True)
class Platform(RankOptions, Launcher):
    """The options of all platforms, and what they must be able to do.

    `RankOptions` are those of the launcher inside the job.
    """

    nodes: int = option(default=1, least=1, most=1024, doc="machines that the job takes")
    gpus: int = option(default=0, least=0, most=64, doc="GPUs of each node")
    hours: float | None = option(
        default=None, above=0, doc="time limit of one start of the job; the run goes on in the next one", unit="h"
    )
    extra: list[str] = option(factory=list, doc="what a site needs besides, passed on as it is")
    doctor: bool = option(
        default=True, doc="on several nodes without roles: job=doctor inside the job before its first start, which "
        "ends it if a node, the network or the storage is wrong"
    )  # fmt: skip
    python: str = option(default="", doc="the interpreter inside the job; empty: the platform's usual one")
    tls: TlsOptions = option(
        factory=TlsOptions, doc="for roles on several nodes: certificates, as of launcher=manual, on each node"
    )
    allow_insecure: bool = option(
        default=False, doc="for roles on several nodes: let everything pass unencrypted, the token included"
    )
    dry_run: bool = option(default=False, doc="print what would be submitted, and submit nothing")

    starts_ranks = False
    hears_all = False

    sees_folder: ClassVar[bool] = True
    """Whether the job's processes see the run folder at the same path as this machine."""

    def devices_kind(self) -> str:
        return "cuda" if self.gpus or self.devices not in ("auto", "cpu") else "cpu"

    def per_node(self) -> int:
        """Ranks of each node; of roles the trainers."""
        return processes_for(self.processes, self.gpus)

    def count(self) -> int:
        return self.nodes * self.per_node()

    def check(self, strategy: Strategy) -> None:
        """Raise ConfigError for options that no job could run with."""
        roles = strategy.roles(self.count())
        if self.gpus and self.per_node() > self.gpus:
            raise ConfigError(
                f"launcher.processes={self.processes} on each node needs as many GPUs, launcher.gpus={self.gpus}; give "
                "launcher.processes=auto"
            )
        if len(roles) == 1 and sum(roles.values()) % self.nodes:
            raise ConfigError(
                f"strategy={name_of('strategy', strategy)} has {sum(roles.values())} process(es), which do not divide "
                f"among launcher.nodes={self.nodes}; use another strategy, or launcher.nodes=1"
            )
        self._check_devices()
        separate = len(roles) > 1 and self.nodes > 1
        if separate and self.pin:
            raise ConfigError(
                f"launcher.pin=true divides the cores of a node among its ranks, and on launcher.nodes={self.nodes} "
                "each process of a role is placed by itself; use launcher.pin=false"
            )
        if not separate and (self.tls != TlsOptions() or self.allow_insecure):
            key = "allow_insecure" if self.allow_insecure else "tls"
            raise ConfigError(
                f"launcher.{key} is for roles on several nodes, and strategy={name_of('strategy', strategy)} on "
                f"launcher.nodes={self.nodes} has none: what its ranks send each other is never encrypted; leave "
                f"launcher.{key} out"
            )
        if self.allow_insecure and self.tls != TlsOptions():
            raise ConfigError(
                f"launcher.allow_insecure=true lets everything pass unencrypted, and launcher.tls.mode="
                f"{self.tls.mode.value} is given too; leave one of them out"
            )
        if separate and self.tls.mode is TlsMode.none and not self.allow_insecure:
            raise ConfigError(
                f"processes of the roles {' and '.join(roles)} talk between launcher.nodes={self.nodes} nodes; give "
                "launcher.tls.mode=mtls with certificates that lie on each node, or, on a network that no stranger "
                "reaches, launcher.allow_insecure=true"
            )

    def _check_devices(self) -> None:
        """Ranks find the GPUs that the scheduler gives the job, and no others."""
        if self.devices == "cpu" and self.gpus:
            raise ConfigError(f"launcher.gpus={self.gpus}: launcher.devices=cpu uses none; give launcher.devices=auto")
        if self.devices not in ("auto", "cpu") and not self.gpus:
            raise ConfigError(
                f"launcher.devices={self.devices} needs GPUs, and launcher.gpus=0 asks for none; give launcher.gpus=N, "
                "for each node"
            )

    def open(self, config: dict[str, Any], make: Callable[[str], AnyRun], command: Sequence[str] = ()) -> AnyRun:
        """Jobs that are not submitted would start ranks here: ConfigError."""
        name, job = config["launcher"]["name"], config["job"]["name"]
        raise ConfigError(
            f"launcher={name} submits job=train, evaluate, predict and doctor; job={job} starts ranks where it runs: "
            "start it inside a job of yours with launcher=local"
        )

    def launch(self, run: LaunchedRun, see: Callable[[Event], None], entry: str = WORK) -> int:
        raise ConfigError("a platform starts no ranks")

    def default_run_dir(self, name: str, id: str) -> str:
        """The run folder as the job sees it where `run.dir` is empty and `sees_folder` is False."""
        raise NotImplementedError

    def place(self, run_dir: str, job: str) -> str:
        """Where a run folder lasts, as a relative path, where `sees_folder` is False: the folder on this machine of
        each submission of that run. `job`: its name. ConfigError for a folder that would not last.
        """
        raise NotImplementedError

    @abstractmethod
    def render(self, request: JobRequest) -> dict[str, str]:
        """What would be submitted: file name -> text, in the order to read. Pure.

        ConfigError for a request that the scheduler cannot take.
        """

    @abstractmethod
    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        """Submit what `render` made, which lies in `files`. Returns what finds the job again, in texts.

        Less than a second, and the same job when `request.again`. PeerError when the scheduler does not take it,
        ConfigError when its programs or its client library are not there: then nothing of it is left to run. Unanswered
        where it may have taken it.
        """

    @abstractmethod
    def state(self, handle: dict[str, str]) -> JobState:
        """Ask the scheduler. PeerError when it does not answer."""

    def finished_trials(self, handle: dict[str, str], count: int) -> set[int]:
        """Numbers of the trials, of `count` in a job, that have ended well, as far as the scheduler still knows; to be
        told where `sees_folder` is False, as nobody else can. Elsewhere their folders tell. PeerError when it does not
        answer.
        """
        return set()

    @abstractmethod
    def cancel(self, handle: dict[str, str]) -> None:
        """End the job, with notice: its run saves. Nothing happens to one that has ended."""

    def is_told_to_end(self, handle: dict[str, str]) -> bool:
        """Whether `cancel` has told a job to end that its scheduler still calls running."""
        return False

    @abstractmethod
    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        """Lines that the job printed, the oldest first. `follow`: until it ends. `folder`: as `JobRequest.folder`."""


def moved(folder: Path, end: str) -> ConfigError:
    """The error where the folder of a job is not where its job looks. `end`: the command that ends the job itself."""
    return ConfigError(
        f"{folder} is not there, in which the job is told to end: its run folder was moved; move it back, or end the "
        f"job with {end}"
    )


def job_name(text: str, id: str = "") -> str:
    """A name that every scheduler takes, made of one that people gave, and of an `id` that is kept where it is cut."""
    name, tail = (re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in (text, id))
    name = name if name[:1].isalpha() else f"dtf-{name}"
    tail = tail[-_LONGEST_ID:].strip("-")
    return "-".join(filter(None, (name[: _LONGEST_NAME - len(tail) - bool(tail)].strip("-"), tail)))
