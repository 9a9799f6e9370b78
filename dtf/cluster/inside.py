"""`python -m dtf --bundle FILE`: what runs inside a job. The run is the one that was submitted; the launcher follows
from what the scheduler says of this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.launcher import failures_told
from dtf.cluster.allocation import ADDRESS, Allocation
from dtf.cluster.allocation_of import allocation_of
from dtf.cluster.bundle import Bundle, BundledRun, Unpacked, unpacked
from dtf.cluster.ends import count_end, count_start, is_finished
from dtf.cluster.names import wait_for_names
from dtf.cluster.platform import JOB_FOLDER
from dtf.config.compose import Composed, Composer
from dtf.config.plugin_modules import entry_point_modules
from dtf.config.python_overrides import as_texts
from dtf.core.author_line import DTF
from dtf.core.errors import ConfigError, DtfError, Exit, NoProgressError, Preempted, error_line
from dtf.core.files import flat, open_private
from dtf.core.own_code import dtf_digest
from dtf.core.run_record import SUBMISSION, SUBMITTED_FOLDER
from dtf.core.submitted_code import from_submission_alone
from dtf.core.types import Failed
from dtf.core.version import __version__
from dtf.host.deadline import EARLY_S
from dtf.host.deadline import VARIABLE as DEADLINE
from dtf.host.devices import processes_for
from dtf.host.network import endpoint
from dtf.host.signals import preempting, sent_by_scheduler
from dtf.launch.forkserver_cache import prestart
from dtf.launch.host_job import job_of_node_0
from dtf.launch.manual_checks import TOKEN
from dtf.launch.rank_options import RankOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_PASSED_ON = [field.name for field in fields(RankOptions) if field.name != "processes"]
_SEPARATE = ("tls", "allow_insecure")
_OF_THIS_MACHINE = ("launcher", "run.dir")
"""Keys whose values follow from where the bundle runs."""
_EXAMINED = "examined"
"""In the folder of the submission: the digest of the bundle in whose job job=doctor found nothing wrong."""


def run_bundle(path: Path, digest: str, trial: int | None, overrides: Sequence[str]) -> int:
    """Run what was submitted as this process's part of the job; returns the exit code.

    `overrides` come last, for a bundle that somebody runs by hand: `launcher=local` keeps it on this machine. A failure
    is also written where the scheduler shows the reason.
    """
    sent_by_scheduler()
    allocation = allocation_of(os.environ)
    with _reasons(allocation.reason_file), unpacked(path, digest) as content, _submitted_code(content):
        bundle, run, here = content.bundle, _choose(content.bundle, trial), Path.cwd()
        _prepare(content, allocation)
        composed = _composed(content, run, allocation, overrides, here)
        launcher, run_dir = composed.config["launcher"]["name"], Path(composed.config["run"]["dir"])
        if is_finished(run_dir, digest):
            print(f"dtf: the run in {run_dir} has ended: nothing is left to do", file=sys.stderr)
            return Exit.OK
        prestart([f"launcher={launcher}", f"job={composed.config['job']['name']}"])
        if bundle.token:
            os.environ[TOKEN] = bundle.token
        os.environ[SUBMISSION] = digest
        if allocation.scheduled:
            os.environ[SUBMITTED_FOLDER] = os.path.abspath(run.run_dir)
        if launcher != "local":  # one that is tried by hand in a pod of several meets nobody
            wait_for_names([*filter(None, (allocation.address,)), *allocation.endpoints], allocation.meet_timeout_s)
        with _ends(allocation, run_dir, digest) as ends:
            wanted = run.config["launcher"]["doctor"] and composed.config["job"]["name"] != "doctor"
            examined = run_dir / JOB_FOLDER / _EXAMINED
            if launcher == "static" and wanted and _is_to_examine(examined, digest, allocation, bundle.token):
                code = _examine(composed, examined, digest, allocation)
                if code:
                    return ends(code)
            return ends(_run(composed, allocation))


def _run(composed: Composed, allocation: Allocation) -> int:
    """The job itself. See `_refuse_loop` for what it raises beside its own errors."""
    try:
        code = composed.job.run(composed)
    except Preempted:
        _refuse_loop(composed.config, allocation.deadline)
        raise
    if code == Exit.PREEMPTED:
        _refuse_loop(composed.config, allocation.deadline)
    return code


def _refuse_loop(config: Mapping[str, Any], deadline: float | None) -> None:
    """Raise NoProgressError where a run that keeps nothing was stopped by the time limit, or just before it: each start
    of the job would begin anew and end there.
    """
    job = config["job"]["name"]
    trains = job == "train"
    keeps = config["checkpoint"]["every_steps"] != 0 if trains else job == "predict"
    if keeps or deadline is None or deadline - time.time() > config["launcher"]["grace_s"] + EARLY_S:
        return
    what, instead = ("checkpoint=off", ", or checkpoint=every") if trains else (f"job={job}", "")
    raise NoProgressError(
        f"the time limit of the job ended the run, and with {what} its next start would begin anew; give "
        f"launcher.hours that the whole run fits in{instead}"
    )


def _choose(bundle: Bundle, trial: int | None) -> BundledRun:
    """ConfigError where it is not said which trial of a sweep, or there is no such one."""
    if trial is None and len(bundle.runs) == 1:
        return bundle.runs[0]
    if trial is None or not 0 <= trial < len(bundle.runs):
        raise ConfigError(
            f"--trial={trial}: the bundle has {len(bundle.runs)} trial(s); give --trial=0 to {len(bundle.runs) - 1}"
        )
    return bundle.runs[trial]


def _prepare(content: Unpacked, allocation: Allocation) -> None:
    """Make this process, and those that it starts, find the submitted code and the folder of the submission."""
    bundle, host = content.bundle, socket.gethostname()
    if bundle.versions["dtf"] != __version__:
        raise ConfigError(
            f"the run was submitted with dtf {bundle.versions['dtf']}, and {host} has dtf {__version__}; install that "
            "version there, or submit the run again"
        )
    digest, home = bundle.dtf
    if digest != (own := dtf_digest()):
        raise ConfigError(
            f"the run was submitted with dtf {__version__} of {home} with the code {digest}, and {host} has other code "
            f"of that version: {DTF} with {own}; install the same there, or submit the run again"
        )
    if bundle.directory:
        try:
            os.chdir(bundle.directory)
        except OSError as error:
            raise ConfigError(
                f"{host} does not see the folder of the submission, {bundle.directory} ({error.strerror}); submit from "
                "storage that all nodes share"
            ) from error
    code = str(content.code)
    sys.path.insert(0, code)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH", ""))))
    if allocation.deadline is not None:
        os.environ[DEADLINE] = f"{allocation.deadline:.0f}"


def _submitted_code(content: Unpacked) -> contextlib.AbstractContextManager[None]:
    """Modules of plugins that pip installed as editable lie elsewhere, too."""
    installed = sorted({name.partition(".")[0] for name in entry_point_modules()})
    return from_submission_alone(str(content.code), installed)


def _composed(
    content: Unpacked, run: BundledRun, allocation: Allocation, overrides: Sequence[str], here: Path
) -> Composed:
    """The submitted config with this process's launcher. `here`: the folder of whoever typed `overrides`."""
    composer = Composer(str(content.conf) if content.conf else None, content.bundle.config_name or None)
    submitted = composer.compose(run.overrides)
    inside = as_texts({"launcher": _launcher(run.config, allocation), "run.dir": run.run_dir})
    composed = submitted.recompose([*inside, *_options(run.config["launcher"], allocation, content.bundle.grace_s)])
    if changed := _as_submitted(composed.config, run.config):
        composed = composed.recompose(changed)
    if not overrides:
        return composed
    composed = composed.recompose(overrides)
    folder = composed.config["run"]["dir"]
    return composed if not folder or os.path.isabs(folder) else composed.recompose(as_texts({"run.dir": here / folder}))


def _launcher(config: Mapping[str, Any], allocation: Allocation) -> str:
    if allocation.role:
        return "manual"
    nodes = config["launcher"].get("nodes", 1)
    if allocation.nodes != nodes and allocation.nodes > 1:
        raise ConfigError(f"the job has {allocation.nodes} nodes, and launcher.nodes={nodes} was submitted")
    return "static" if allocation.nodes > 1 else "local"


def _options(node: Mapping[str, Any], allocation: Allocation, grace_s: float) -> list[str]:
    """The options of the launcher inside: those that were submitted, and this process's place. Ranks get as much time
    to save as the scheduler gives.
    """
    known = {name: node[name] for name in _PASSED_ON if name in node} | {"grace_s": grace_s}
    per_node = processes_for(node["processes"], node.get("gpus", 0))
    if allocation.role:
        place = {
            "processes": node["nodes"] * per_node,
            "role": allocation.role,
            "id": allocation.number,
            "endpoints": list(allocation.endpoints),
            "timeout_s": allocation.meet_timeout_s,
            **{name: node[name] for name in _SEPARATE},
        }
    elif allocation.nodes > 1:
        place = {
            "processes": per_node,
            "nodes": allocation.nodes,
            "node_rank": allocation.node,
            "address": allocation.address,
            "meet_timeout_s": allocation.meet_timeout_s,
        }
    else:
        place = {"processes": per_node}
    return as_texts({f"launcher.{name}": value for name, value in {**known, **place}.items() if value != {}})


def _as_submitted(now: Mapping[str, Any], submitted: Mapping[str, Any]) -> list[str]:
    """Overrides for the keys that would have other values here, as those that read the environment have."""
    here, there = ({key: value for key, value in flat(config, "") if not _is_local(key)} for config in (now, submitted))
    gone = sorted(here.keys() - there.keys())
    return [*(f"~{key}" for key in gone), *as_texts({k: v for k, v in there.items() if k not in here or here[k] != v})]


def _is_local(key: str) -> bool:
    return any(f"{key}.".startswith(f"{name}.") for name in _OF_THIS_MACHINE)


@contextlib.contextmanager
def _ends(allocation: Allocation, run_dir: Path, digest: str) -> Iterator[Callable[[int], int]]:
    """A context that counts how the run ends where nothing outside does. It gives a function that takes an exit code
    and returns it. NoProgressError where the run makes no progress.
    """
    counts = allocation.counts_ends and not allocation.node and not allocation.number

    def ends(code: int) -> int:
        if counts:
            count_end(code, run_dir, digest)
        return code

    try:
        with preempting("asked to stop while no ranks ran; start it again") if counts else contextlib.nullcontext():
            if counts:
                count_start(run_dir, digest)
            yield ends
    except DtfError as error:
        ends(error.exit)
        raise


def _is_to_examine(examined: Path, digest: str, allocation: Allocation, token: str) -> bool:
    """Whether the nodes are examined before the run. Node 0 decides: no start of this submission has done it. The
    others ask it: they may see an older state of the folder, and one that comes in the place of a lost one, in the
    midst of the run, examines nothing.
    """
    if allocation.node:
        address = endpoint(allocation.address, ADDRESS)
        return job_of_node_0(address, allocation.node, token, allocation.meet_timeout_s) == "doctor"
    try:
        return examined.read_text() != digest
    except OSError:
        return True


def _examine(composed: Composed, examined: Path, digest: str, allocation: Allocation) -> int:
    """`job=doctor` over the nodes of this job, before its run begins. Collective. Returns the exit code.

    ConfigError with the verdict on a node that sees what is wrong.
    """
    printed = io.StringIO()
    examining = composed.recompose(["job=doctor"])
    with contextlib.redirect_stdout(printed):
        code = examining.job.run(examining)
    print(printed.getvalue(), end="", flush=True)
    wrong = [line.removeprefix("wrong: ") for line in printed.getvalue().splitlines() if line.startswith("wrong: ")]
    if wrong:
        raise ConfigError(f"job=doctor, before the run began: {'; '.join(wrong)}")
    if not code and not allocation.node:
        with contextlib.suppress(OSError):  # whoever makes the run folder says what is wrong
            examined.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open_private(examined, "w") as file:
                file.write(digest)
    return code


@contextlib.contextmanager
def _reasons(file: str) -> Iterator[None]:
    """A context whose failures are also written into `file`, where there is one."""

    def tell(text: str) -> None:
        with contextlib.suppress(OSError):  # it is told on standard error, too
            Path(file).write_text(f"{text}\n")

    def hear(failure: Failed, raised: BaseException | None) -> bool:
        tell(error_line(Exit(failure.exit), failure.message, failure.rank, failure.step))
        return False

    if not file:
        yield
        return
    with failures_told(hear):
        try:
            yield
        except DtfError as error:
            tell(error_line(error.exit, str(error)))
            raise
