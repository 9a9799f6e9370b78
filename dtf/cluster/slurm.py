"""`launcher=slurm`: the command line as a batch job of Slurm, which starts itself again until the run has ended."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import name_of, option, register
from dtf.api.schema import KeyProblem, show
from dtf.cluster.followed_logs import followed
from dtf.cluster.node_lists import MOST_TASKS
from dtf.cluster.platform import JobRequest, JobState, Platform, Unanswered, moved
from dtf.cluster.slurm_options import check_extra, check_srun, check_texts, for_sbatch, refused_option
from dtf.cluster.slurm_script import JOB, TASK, JobText, duration, output_pattern
from dtf.cluster.slurm_state import fields, notes_of, of_array, of_job
from dtf.core.errors import ConfigError, PeerError
from dtf.core.files import small_text
from dtf.host.deadline import EARLY_S

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

_PATIENCE_S = 60.0
"""For an answer of Slurm's commands."""
_ASK_S = 5.0
"""Between two questions about a job whose log is followed: the controller answers everybody."""


@register("launcher", "slurm")
class Slurm(Platform):
    """Submit the run to Slurm: one supervising process on each node, or one task for each process where a strategy has
    roles. Preempted, timed out or left without a node, the job is requeued and the run goes on.
    """

    partition: str = option(default="", doc="--partition; empty: the cluster's default")
    account: str = option(default="", doc="--account")
    qos: str = option(default="", doc="--qos")
    constraint: str = option(default="", doc="--constraint, features that nodes must have")
    memory: str = option(default="", doc="--mem of each node, as in 64G; empty: the partition's default")
    cpus: int = option(
        default=0,
        least=0,
        most=4096,
        doc="cores of each node, with roles on several nodes of each process; 0: as many as ranks have threads",
    )
    setup: list[str] = option(
        factory=list,
        doc='lines of the shell before the run, such as "module load cuda" or "source venv/bin/activate"',
    )
    export: str = option(
        default="ALL",
        doc="--export: `ALL`, the environment of the submission as it is then; `NONE`; or names and NAME=VALUE, with "
        "commas between",
    )
    srun: list[str] = option(
        factory=list, doc='arguments of srun besides, such as "--container-image=..." where pyxis is installed'
    )
    role_extra: dict[str, list[str]] = option(
        factory=dict,
        doc="as `extra`, for one role on several nodes: 'launcher.role_extra.server=[\"--partition=cpu\"]'",
    )

    def check(self, strategy: Strategy) -> None:
        super().check(strategy)
        roles = strategy.roles(self.count())
        for role in self.role_extra:
            if role not in roles or len(roles) == 1 or self.nodes == 1:
                raise ConfigError(
                    f"launcher.role_extra.{role}: strategy={name_of('strategy', strategy)} on launcher.nodes="
                    f"{self.nodes} has no processes of that role by themselves; use launcher.extra"
                )
        names = ("partition", "account", "qos", "constraint", "memory", "export", "python")
        check_texts({f"launcher.{name}": getattr(self, name) for name in names})
        check_extra("launcher.extra", self.extra)
        for role, words in self.role_extra.items():
            check_extra(f"launcher.role_extra.{role}", words, role=True)
        check_srun(self.srun)
        if not self.export:
            raise ConfigError(f"launcher.export={self.export!r} must be ALL, NONE or names of variables")

    # ------------------------------------------------------------ the script

    def render(self, request: JobRequest) -> dict[str, str]:
        check_texts({"run.dir": request.run_dir, "the folder of the job": str(request.job_folder)})
        if "\\" in str(request.job_folder):
            raise ConfigError(
                f"{request.folder} has a backslash, which Slurm reads otherwise in a log's path; choose another run.dir"
            )
        if request.separate and request.trials:
            raise ConfigError(
                f"Slurm takes no array of heterogeneous jobs, and roles on launcher.nodes={request.nodes} need one; "
                "use launcher.nodes=1 for each trial, or sweep.prune"
            )
        limit_s = math.inf if self.hours is None else self.hours * 3600
        if limit_s <= request.grace_s + EARLY_S:
            raise ConfigError(
                f"launcher.hours={self.hours:g}: of {limit_s:.0f} s the run needs {request.grace_s:.0f} to save "
                f"(launcher.grace_s, or three times its longest save), and Slurm may say so {EARLY_S:.0f} s too early; "
                "give more hours"
            )
        script = self._script(request)
        return {JOB: script.job(), TASK: script.task()}

    def _script(self, request: JobRequest) -> JobText:
        trials = request.trials or ("",)
        return JobText(
            options=self._options(request),
            steps=self._steps(request),
            tasks=sum(request.roles.values()) if request.separate else request.nodes,
            roles=list(request.roles) if request.separate else [],
            comment=_comment(request),
            job_folder=str(request.job_folder),
            run_dirs=[str(Path(request.run_dir, trial)) for trial in trials],
            setup=self.setup,
            command=request.command(self.python or sys.executable),
        )

    def _options(self, request: JobRequest) -> list[list[str]]:
        """The #SBATCH lines of each component."""
        array = f"--array=0-{len(request.trials) - 1}" if request.trials else ""
        if array and request.parallel:
            array += f"%{request.parallel}"
        shared = {
            "job-name": request.name,
            "comment": _comment(request),
            "output": output_pattern(str(request.job_folder), bool(request.trials)),
            "export": self.export,
        }
        once = [*_lines(shared), "--open-mode=append", "--requeue", *([array] if array else [])]
        limits = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "constraint": self.constraint,
            "mem": self.memory,
            "time": duration(self.hours) if self.hours is not None else "",
            "signal": f"TERM@{min(math.ceil(request.grace_s), 65535)}",
        }
        components = []
        for at, size in enumerate(self._sizes(request)):
            role = list(request.roles)[at] if request.separate else ""
            own = [*_lines(limits), *size, *self.extra, *self.role_extra.get(role, [])]
            components.append([*(once if at == 0 else []), *own])
        return components

    def _sizes(self, request: JobRequest) -> list[list[str]]:
        """What each component takes. Trainers have nodes of their own; others lie where Slurm finds room."""
        if not request.separate:
            gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
            return [
                [f"--nodes={request.nodes}", "--ntasks-per-node=1", f"--cpus-per-task={self._cores(request)}", *gpus]
            ]
        sizes = []
        for role, count in request.roles.items():
            words = [f"--ntasks={count}", f"--cpus-per-task={self._cores(request)}"]
            if role == "trainer":
                words = [f"--nodes={request.nodes}", f"--ntasks-per-node={self.per_node()}", *words]
                words += ["--gpus-per-task=1"] if self.gpus else []
            sizes.append(words)
        return sizes

    def _cores(self, request: JobRequest) -> int:
        """Of each task. Slurm would give one."""
        if self.cpus or request.separate:
            return self.cpus or max(1, self.threads)
        return max(1, self.threads) * math.ceil(sum(request.roles.values()) / request.nodes)

    def _steps(self, request: JobRequest) -> list[list[str]]:
        """The arguments of srun for each component. Sites may let srun end all tasks with the first, which others need
        to save.
        """
        steps = []
        for at in range(len(request.roles) if request.separate else 1):
            once = ["--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--distribution=block"] if at == 0 else []
            steps.append([*once, f"--cpus-per-task={self._cores(request)}", *self.srun])
        return steps

    # ------------------------------------------------------------ the scheduler

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        (request.job_folder / "cancel").unlink(missing_ok=True)  # notes have the number of their job
        environment = for_sbatch(os.environ, files[JOB].read_text())
        job = _known(request) if request.again else ""
        try:
            if not job:
                said = _slurm("sbatch", "--parsable", str(files[JOB]), environment=environment)
                job = said.strip().partition(";")[0]
                if not _is_number(job):
                    raise PeerError(f"sbatch --parsable printed {said.strip()!r}, and no number of a job")
        except PeerError as error:  # an answer that came too late, or amid others: the job may be there
            if key := refused_option(str(error)):
                given = f"launcher.{key}={show(getattr(self, key))}"
                raise KeyProblem(f"launcher.{key}", f"{given}: Slurm refuses such a job: {error}") from error
            try:
                job = _named(request)
            except PeerError:
                raise Unanswered(str(error)) from error
            if not job:
                raise
        return {"job": job, "folder": str(request.job_folder), "trials": str(len(request.trials))}

    def state(self, handle: dict[str, str]) -> JobState:
        job, tasks = _number(handle, "job"), int(_number(handle, "trials"))
        records = [fields(line) for line in self._asked(job).splitlines() if line.strip()]
        if tasks > MOST_TASKS:
            raise ConfigError(f"job/job.json has trials={tasks}; an array of Slurm has at most {MOST_TASKS:,}")
        notes = notes_of({path.name: _note(path) for path in Path(handle["folder"]).glob("ended*")}, job)
        return of_array(records, notes, tasks) if tasks else of_job(records, notes)

    def _asked(self, job: str) -> str:
        """What the controller says of a job; nothing where it has forgotten it."""
        whole = {**os.environ, "SLURM_BITSTR_LEN": "0"}  # it would shorten lists of tasks
        try:
            return _slurm("scontrol", "show", "job", "--oneliner", job, environment=whole)
        except PeerError as error:
            if "Invalid job id" in str(error):
                return ""
            raise

    def cancel(self, handle: dict[str, str]) -> None:
        """The run saves, and the batch script then ends the job."""
        folder, job = Path(handle["folder"]), _number(handle, "job")
        try:
            (folder / "cancel").touch()
        except FileNotFoundError as error:
            raise moved(folder, f"scancel {job}") from error
        # one that is about to start, or to be requeued, could not be signalled: its script sees the file
        for words in (["--state=PENDING"], ["--state=RUNNING", "--signal=TERM"]):
            try:
                _slurm("scancel", *words, job)
            except PeerError as error:
                if not re.search("Invalid job id|already completing|not running", str(error)):
                    raise

    def is_told_to_end(self, handle: dict[str, str]) -> bool:
        return (Path(handle["folder"]) / "cancel").exists()

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        asked, live, job = -_ASK_S, follow, _number(handle, "job")

        def lives() -> bool:
            nonlocal asked, live
            if live and time.monotonic() - asked > _ASK_S:
                asked, live = time.monotonic(), self.state(handle).state.is_live
            return live

        yield from followed(lambda: _logs(folder / "job", job), lives)


def _number(handle: dict[str, str], name: str) -> str:
    """A value of a handle. ConfigError for what is no number: a folder may come from elsewhere, and Slurm's commands
    would take another text for an option.
    """
    if not _is_number(handle[name]):
        raise ConfigError(
            f"job/job.json has {name}={handle[name]!r}, which is no number: it is none of dtf's for Slurm"
        )
    return handle[name]


def _note(path: Path) -> str:
    """PeerError for a file that no script writes: how the job ended is not known then."""
    try:
        return small_text(path)
    except (OSError, ValueError) as error:
        raise PeerError(f"{path} cannot be read ({type(error).__name__}: {error}); remove it") from error


def _is_number(text: str) -> bool:
    return bool(re.fullmatch("[0-9]{1,18}", text))


def _logs(folder: Path, job: str) -> list[Path]:
    """What a job has printed; of an array, task by task."""
    tasks = sorted(folder.glob(f"slurm-{job}_*.log"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [*folder.glob(f"slurm-{job}.log"), *tasks]


def _comment(request: JobRequest) -> str:
    """By which a job is known before its number is."""
    return f"dtf {request.digest[:16]}"


def _named(request: JobRequest) -> str:
    """The number of the job that was submitted for a request, of an array that of the whole; empty where there is none.
    Behind the comment stands what the job says of its last start.
    """
    lines = _slurm("squeue", "--noheader", "--me", f"--name={request.name}", "--format=%F %k").splitlines()
    found = (line.partition(" ") for line in lines)
    return next((job for job, _, text in found if f"{text} ".startswith(f"{_comment(request)} ")), "")


def _known(request: JobRequest) -> str:
    """As `_named`, of a submission that was cut off. Unanswered also where Slurm's commands are not here."""
    try:
        return _named(request)
    except (PeerError, ConfigError) as error:
        raise Unanswered(f"{error}; give the same command again, which finds a job that was taken") from error


def _lines(values: dict[str, str]) -> list[str]:
    """Options that have a value."""
    return [f"--{name}={shlex.quote(value)}" for name, value in values.items() if value]


def _slurm(*words: str, environment: dict[str, str] | None = None) -> str:
    """What one of Slurm's commands prints. ConfigError where it is not there, PeerError where it fails."""
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=_PATIENCE_S)
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not on the PATH: launcher=slurm submits where Slurm's commands are, on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise PeerError(f"{words[0]} did not answer within {_PATIENCE_S:.0f} s; is slurmctld up?") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise PeerError(f"{words[0]} ended with {done.returncode}: {said}")
    return done.stdout
