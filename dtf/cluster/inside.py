"""`python -m dtf --bundle FILE`: what runs inside a job. The run is the one that was submitted; the launcher follows
from what the scheduler says of this process.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.launcher import failures_told
from dtf.cluster.allocation import Allocation
from dtf.cluster.allocation_of import allocation_of
from dtf.cluster.bundle import Bundle, BundledRun, Unpacked, unpacked
from dtf.cluster.ends import count_end, is_finished
from dtf.cluster.names import wait_for_names
from dtf.cluster.platform import JOB_FOLDER
from dtf.config.compose import Composed, Composer
from dtf.config.python_overrides import as_texts
from dtf.core.errors import ConfigError, DtfError, Exit, error_line
from dtf.core.files import flat
from dtf.core.run_record import SUBMISSION
from dtf.core.types import Failed
from dtf.core.version import __version__
from dtf.host.deadline import VARIABLE as DEADLINE
from dtf.host.signals import sent_by_scheduler
from dtf.launch.forkserver_cache import prestart
from dtf.launch.manual_checks import TOKEN
from dtf.launch.rank_options import RankOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

_PASSED_ON = [field.name for field in fields(RankOptions) if field.name != "processes"]
_SEPARATE = ("tls", "allow_insecure")
_OF_THIS_MACHINE = ("launcher", "run.dir")
"""Keys whose values follow from where the bundle runs."""
_EXAMINED = "examined"
"""In the folder of the submission: job=doctor found nothing wrong."""


def run_bundle(path: Path, digest: str, trial: int | None, overrides: Sequence[str]) -> int:
    """Run what was submitted as this process's part of the job; returns the exit code.

    `overrides` come last, for a bundle that somebody runs by hand: `launcher=local` keeps it on this machine. A failure
    is also written where the scheduler shows the reason.
    """
    sent_by_scheduler()
    allocation = allocation_of(os.environ)
    with _reasons(allocation.reason_file), unpacked(path, digest) as content:
        bundle, run = content.bundle, _choose(content.bundle, trial)
        _prepare(content, allocation)
        composed = _composed(content, run, allocation, overrides)
        launcher, run_dir = composed.config["launcher"]["name"], Path(composed.config["run"]["dir"])
        if is_finished(run_dir, digest):
            print(f"dtf: the run in {run_dir} has ended: nothing is left to do", file=sys.stderr)
            return Exit.OK
        prestart([f"launcher={launcher}", f"job={composed.config['job']['name']}"])
        if bundle.token:
            os.environ[TOKEN] = bundle.token
        os.environ[SUBMISSION] = digest
        if launcher != "local":  # one that is tried by hand in a pod of several meets nobody
            wait_for_names([*filter(None, (allocation.address,)), *allocation.endpoints], allocation.meet_timeout_s)
        with _ends(allocation, run_dir) as ends:
            if launcher == "static" and run.config["launcher"]["doctor"] and not allocation.restarts:
                code = _examine(composed, run_dir, allocation)
                if code:
                    return ends(code)
            return ends(composed.job.run(composed))


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


def _composed(content: Unpacked, run: BundledRun, allocation: Allocation, overrides: Sequence[str]) -> Composed:
    """The submitted config with this process's launcher."""
    composer = Composer(str(content.conf) if content.conf else None, content.bundle.config_name or None)
    submitted = composer.compose(run.overrides)
    inside = as_texts({"launcher": _launcher(run.config, allocation), "run.dir": run.run_dir})
    composed = submitted.recompose([*inside, *_options(run.config["launcher"], allocation)])
    if changed := _as_submitted(composed.config, run.config):
        composed = composed.recompose(changed)
    return composed.recompose(overrides) if overrides else composed


def _launcher(config: Mapping[str, Any], allocation: Allocation) -> str:
    if allocation.role:
        return "manual"
    nodes = config["launcher"].get("nodes", 1)
    if allocation.nodes != nodes and allocation.nodes > 1:
        raise ConfigError(f"the job has {allocation.nodes} nodes, and launcher.nodes={nodes} was submitted")
    return "static" if allocation.nodes > 1 else "local"


def _options(node: Mapping[str, Any], allocation: Allocation) -> list[str]:
    """The options of the launcher inside: those that were submitted, and this process's place."""
    known = {name: node[name] for name in _PASSED_ON if name in node}
    per_node = node["processes"] if isinstance(node["processes"], int) else node.get("gpus") or 2
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
def _ends(allocation: Allocation, run_dir: Path) -> Iterator[Callable[[int], int]]:
    """A context that counts how the run ends where nothing outside does. It gives a function that takes an exit code
    and returns it. NoProgressError where the run makes no progress.
    """
    counts = allocation.counts_ends and not allocation.node and not allocation.number

    def ends(code: int) -> int:
        if counts:
            count_end(code, run_dir)
        return code

    try:
        yield ends
    except DtfError as error:
        ends(error.exit)
        raise


def _examine(composed: Composed, run_dir: Path, allocation: Allocation) -> int:
    """`job=doctor` over the nodes of this job, before its run begins. Collective. Returns the exit code.

    ConfigError with the verdict on a node that sees what is wrong. A node that comes later, in the place of one that
    was lost, must not wait for others to examine.
    """
    done = run_dir / JOB_FOLDER / _EXAMINED
    if done.exists() or (run_dir / "run.json").exists():
        return 0
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
            done.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            done.touch()
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
