"""`launcher=slurm`: the command line as a batch job of Slurm, which starts itself again until the run has ended."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import name_of, option, register
from dtf.cluster.followed_logs import followed
from dtf.cluster.platform import JobRequest, JobState, Platform, State, Unanswered
from dtf.cluster.slurm_script import JOB, TASK, JobText, duration, output_pattern
from dtf.core.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

_PATIENCE_S = 60.0
"""For an answer of Slurm's commands."""
_ASK_S = 5.0
"""Between two questions about a job whose log is followed: the controller answers everybody."""
_EARLY_S = 60
"""By how much Slurm may send the signal of --signal too early, says its manual."""
_LIVE = {
    "PENDING": State.queued,
    "REQUEUED": State.requeued,
    "REQUEUE_HOLD": State.requeued,
    "REQUEUE_FED": State.requeued,
    "SPECIAL_EXIT": State.requeued,
    **dict.fromkeys(
        ("RUNNING", "CONFIGURING", "COMPLETING", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"),
        State.running,
    ),
}
_ENDED = {
    "COMPLETED": State.finished,
    "CANCELLED": State.cancelled,
    **dict.fromkeys(
        ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED", "REVOKED"),
        State.failed,
    ),
}
_ORDER = (State.running, State.requeued, State.queued, State.failed, State.cancelled, State.finished)
"""Of several jobs the first of these that one of them is in."""


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
        given = {"extra": self.extra, **{f"role_extra.{role}": words for role, words in self.role_extra.items()}}
        for key, words in {**given, "srun": self.srun}.items():
            for word in words:
                if not word.startswith("-") or "\n" in word:
                    command = "srun" if key == "srun" else "sbatch"
                    raise ConfigError(f"launcher.{key}: {word!r} is no option of {command}, which begin with --")
        if not self.export or "\n" in self.export:
            raise ConfigError(f"launcher.export={self.export!r} must be ALL, NONE or names of variables")

    # ------------------------------------------------------------ the script

    def render(self, request: JobRequest) -> dict[str, str]:
        if request.separate and request.trials:
            raise ConfigError(
                f"Slurm takes no array of heterogeneous jobs, and roles on launcher.nodes={request.nodes} need one; "
                "use launcher.nodes=1 for each trial, or sweep.prune"
            )
        limit_s = math.inf if self.hours is None else self.hours * 3600
        if limit_s <= request.grace_s + _EARLY_S:
            raise ConfigError(
                f"launcher.hours={self.hours:g}: of {limit_s:.0f} s the run needs {request.grace_s:.0f} to save "
                f"(launcher.grace_s, or three times its longest save), and Slurm may say so {_EARLY_S} s too early; "
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
        for name in ("cancel", "ended", "lost"):  # of an earlier job of this run
            for path in request.job_folder.glob(f"{name}*"):
                path.unlink()
        text = files[JOB].read_text()
        try:
            job = _named(request) if request.again else ""
            job = job or _slurm("sbatch", "--parsable", str(files[JOB]), environment=_for_sbatch(os.environ, text))
        except PeerError as error:  # an answer that came too late: the job may be there
            try:
                job = _named(request)
            except PeerError:
                raise Unanswered(f"{error}; give the same command again, which finds a job that was taken") from error
            if not job:
                raise
        number = job.strip().partition(";")[0]
        return {"job": number, "folder": str(request.job_folder), "trials": str(len(request.trials))}

    def state(self, handle: dict[str, str]) -> JobState:
        text = self._asked(handle)
        if text is None:
            return _noted(handle)
        jobs = [_fields(line) for line in text.splitlines() if line.strip()]
        return combined(jobs)

    def _asked(self, handle: dict[str, str]) -> str | None:
        """What the controller says of a job; None where it has forgotten it."""
        try:
            return _slurm("scontrol", "show", "job", "--oneliner", handle["job"])
        except PeerError as error:
            if "Invalid job id" in str(error):
                return None
            raise

    def cancel(self, handle: dict[str, str]) -> None:
        """The run saves, and the batch script then ends the job."""
        folder, job = Path(handle["folder"]), handle["job"]
        (folder / "cancel").touch()
        # one that is about to start, or to be requeued, could not be signalled: its script sees the file
        for words in (["--state=PENDING"], ["--state=RUNNING", "--signal=TERM"]):
            try:
                _slurm("scancel", *words, job)
            except PeerError as error:
                if not re.search("Invalid job id|already completing|not running", str(error)):
                    raise

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        asked, live = -_ASK_S, follow

        def lives() -> bool:
            nonlocal asked, live
            if live and time.monotonic() - asked > _ASK_S:
                asked, live = time.monotonic(), self.state(handle).state.is_live
            return live

        yield from followed(lambda: _logs(folder / "job", handle["job"]), lives)


def _logs(folder: Path, job: str) -> list[Path]:
    """What a job has printed; of an array, task by task."""
    tasks = sorted(folder.glob(f"slurm-{job}_*.log"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [*folder.glob(f"slurm-{job}.log"), *tasks]


def _comment(request: JobRequest) -> str:
    """By which a job is known before its number is."""
    return f"dtf {request.digest[:16]}"


def _named(request: JobRequest) -> str:
    """The number of the job that was submitted for a request; empty where there is none."""
    lines = _slurm("squeue", "--noheader", "--me", f"--name={request.name}", "--format=%A %k").splitlines()
    return next((line.partition(" ")[0] for line in lines if line.endswith(_comment(request))), "")


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


def _for_sbatch(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Without the variables that would override the script's own lines, and without those of a job in which this
    process may run itself: they would be taken for the new job's.
    """
    given = {word.replace("-", "_").upper() for word in re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)}
    other = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE", "requeue": "NO_REQUEUE"}
    named = {f"SBATCH_{name}" for name in given | {value for key, value in other.items() if key.upper() in given}}
    kept = {"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT"}
    return {
        name: value
        for name, value in environment.items()
        if name not in named and (not name.startswith("SLURM") or name in kept)
    }


def _fields(line: str) -> dict[str, str]:
    """The fields of a line of `scontrol show job --oneliner`. Values may have spaces; names begin with a capital."""
    parts = re.split(r"(?:^| )([A-Z][A-Za-z:/]*)=", line)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def combined(jobs: list[dict[str, str]]) -> JobState:
    """Of the records of one job: several where it is an array or has several components."""
    states = [_state(job) for job in jobs]
    if not states:
        return JobState(State.unknown, "Slurm does not know it")
    state = next((one for one in _ORDER if one in states), State.unknown)
    shown = jobs[states.index(state)]
    if any("ArrayTaskId" in job for job in jobs):
        counts = Counter(job["JobState"] for job in jobs)
        return JobState(state, ", ".join(f"{count} {name}" for name, count in sorted(counts.items())))
    reason = "" if shown.get("Reason", "None") == "None" else f" {shown['Reason']}"
    nodes = ",".join(
        dict.fromkeys(job["NodeList"] for job in jobs if job.get("NodeList", "(null)") not in ("", "(null)"))
    )
    details = [f"{shown['JobState']}{reason}", nodes and f"on {nodes}"]
    if not state.is_live and shown.get("ExitCode", "0:0") != "0:0":
        details.append(f"exit code {shown['ExitCode'].partition(':')[0]}")
    if shown.get("Restarts", "0") != "0":
        details.append(f"{shown['Restarts']} restart(s)")
    if shown.get("Comment", "").partition(" ")[0] not in ("", "dtf"):
        details.append(shown["Comment"])
    return JobState(state, "; ".join(part for part in details if part))


def _state(job: dict[str, str]) -> State:
    word = job["JobState"].partition(",")[0]
    state = _LIVE.get(word) or _ENDED.get(word, State.unknown)
    return State.requeued if state is State.queued and job.get("Restarts", "0") != "0" else state


def _noted(handle: dict[str, str]) -> JobState:
    """What the batch script noted at its end, of a job that Slurm has forgotten."""
    words = {"finished": State.finished, "failed": State.failed, "cancelled": State.cancelled}
    ends = [path.read_text().split(maxsplit=3) for path in sorted(Path(handle["folder"]).glob("ended*"))]
    known = [end for end in ends if len(end) >= 3 and end[2].partition("_")[0] == handle["job"]]
    if not known:
        return JobState(State.unknown, "Slurm has forgotten it, and its script noted no end")
    states = [words.get(end[0], State.unknown) for end in known]
    state = next(one for one in (*_ORDER, State.unknown) if one in states)
    shown = known[states.index(state)]
    missing = max(1, int(handle.get("trials", "0"))) - len(known)
    text = shown[3].strip() if len(shown) > 3 else shown[0]
    return JobState(state, f"{text}; exit code {shown[1]}" + (f"; {missing} without a noted end" if missing else ""))
