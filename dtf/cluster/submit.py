"""From a composed config to a job: the run folder, the bundle, what the scheduler gets, the record.

Torch-free, and short: nothing is read but the config and the code of plugins.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.registry import lookup
from dtf.cluster import record
from dtf.cluster.bundle import Bundle, digest_of
from dtf.cluster.platform import JobRequest, Platform, Unanswered, job_name
from dtf.core.errors import BusyError, ConfigError, DtfError, Exit, PeerError
from dtf.core.files import open_private
from dtf.core.run_record import SUBMITTED_FOLDER, is_locked, time_to_save_s
from dtf.core.text import display_path, quoted
from dtf.runs.run_folder import check_folder, take_lock, unique_id
from dtf.runs.standing import standing
from dtf.runs.sweep_record import is_sweep

if TYPE_CHECKING:
    from dtf.config.compose import Composed


def is_submitted(composed: Composed) -> bool:
    """Whether this command line is to be handed to a scheduler: by its launcher and its job."""
    launcher = lookup("launcher", composed.config["launcher"]["name"])
    return isinstance(launcher, type) and issubclass(launcher, Platform) and composed.job.submits


def submit(composed: Composed) -> int:
    """Hand the run to the scheduler of its launcher, or print what would be handed over. Returns the exit code.

    ConfigError, and BusyError for a folder that a live job or another run has; then nothing was changed.
    """
    settings = composed.check(data=False)  # the data may only be where the job runs
    platform = settings.launcher
    assert isinstance(platform, Platform)
    if settings.train.dry_run:
        raise ConfigError("train.dry_run tries a run where it is started; use launcher=local with it")
    platform.check(settings.strategy)
    name, id = settings.run.name or composed.config["recipe"]["name"], unique_id()
    job = job_name(name, id[-6:])
    if platform.sees_folder:
        folder = Path(settings.run.dir or Path("outputs", name, id)).absolute()
        run_dir = str(folder)
    else:  # the same run folder has the same folder here, so that a job of it which lives is found
        run_dir = settings.run.dir or platform.default_run_dir(job_name(name), id)
        folder = Path("outputs", composed.config["launcher"]["name"], platform.place(run_dir, job)).absolute()
    if platform.sees_folder and folder.exists():
        check_folder(folder, composed.config)
    return hand_over(platform, request_of(platform, [composed], folder, run_dir, job))


def hand_over(platform: Platform, request: JobRequest) -> int:
    """Submit a request, or print what would be submitted where `launcher.dry_run` says so. Returns the exit code."""
    if platform.dry_run:
        for name, text in platform.render(request).items():
            print(f"# {name}\n{text.rstrip()}")
        return Exit.OK
    try:
        kept, where = hand_in(platform, request), display_path(request.folder)
    except Unanswered as error:
        # the folder of a sweep follows from its command, that of a run does not
        place = "" if request.trials else f" with {_named(request.folder, 'run.dir')}"
        raise Unanswered(f"{error}; give the same command again{place}, which finds a job that was taken") from error
    print(f"dtf: {kept.title} was submitted; {'sweep' if request.trials else 'run'} folder {where}")
    for job in ("status", "logs", "cancel"):
        print(f"dtf:   python -m dtf job={job} {_named(request.folder)}")
    return Exit.OK


def _named(folder: Path, key: str = "job.run_folder") -> str:
    """The folder as a word of a command that can be pasted."""
    where = display_path(folder)
    plain = re.fullmatch(r"[\w./+=-]+", where)
    return f"{key}={where}" if plain else shlex.quote(f"{key}={quoted(where)}")


def hand_in(platform: Platform, request: JobRequest) -> record.JobRecord:
    """Submit a request, and keep the record of its job in its folder. BusyError while a job of the folder lives."""
    texts = platform.render(request)
    above = [folder for folder in request.folder.parents if not folder.exists()]
    request.folder.parent.mkdir(parents=True, exist_ok=True)
    made, _ = [_make(folder) for folder in (request.folder, request.job_folder)]
    lock = take_lock(request.job_folder)
    try:
        intent = record.intent(request.folder)
        if intent is None or intent.digest != request.digest:
            refuse_live(request.folder)
            before = standing(request.folder)
            launch = before.id if before else ""
            intent = record.Intent(request.name, request.digest, request.token, request.grace_s, launch)
        else:
            request = replace(request, again=True)
        files = {name: request.job_folder / name for name in texts}
        _write(request.bundle, request.content)
        for name, path in files.items():
            _write(path, texts[name].encode())
        record.keep_intent(request.folder, intent)
        if not request.again:
            _refuse_locked(request)
        kept = record.JobRecord(
            request.configs[0]["launcher"],
            _taken(platform, request, files, [request.folder, *above] if made else []),
            datetime.now(UTC).isoformat(),
            request.digest,
            request.run_dir,
            intent.launch_before,
        )
        record.keep(request.folder, kept)
        return kept
    finally:
        os.close(lock)


def _make(folder: Path) -> bool:
    """Whether this process has made the folder: of two that come at once one has, and may remove it."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def _taken(platform: Platform, request: JobRequest, files: dict[str, Path], made: list[Path]) -> dict[str, str]:
    """What finds the job. Where the scheduler says that it has none, the intent goes, and the folders `made` for it."""
    try:
        return platform.submit(request, files)
    except Unanswered:
        raise
    except DtfError:
        record.drop_intent(request.folder)
        if made:
            shutil.rmtree(request.folder, ignore_errors=True)
        with suppress(OSError):  # another run's folder is in it
            for folder in made[1:]:
                folder.rmdir()
        raise


def _refuse_locked(request: JobRequest) -> None:
    """Raise BusyError where a run lives in a folder of the request. A run looks for a submission once it has the lock:
    so of two that come at once, one at least sees the other.
    """
    for folder in [request.folder / trial for trial in request.trials] or [request.folder]:
        if is_locked(folder):
            record.drop_intent(request.folder)
            raise BusyError(
                f"{display_path(folder)} is in use by a live run; wait for it, stop it, or choose another run.dir"
            )


def refuse_live(folder: Path) -> None:
    """Raise BusyError where a job of this folder waits or runs, or may do so as its scheduler does not answer."""
    if (job := live_job(folder)) is not None:
        raise BusyError(
            f"{display_path(folder)} belongs to {job}; wait for it, or end it with job=cancel {_named(folder)}"
        )


def live_job(folder: Path) -> str | None:
    """The job of this folder that waits or runs, in words. BusyError where its scheduler does not answer."""
    known = record.find(folder)
    if known is None:
        return None
    try:
        state = known.platform.state(known.handle)
    except (PeerError, ConfigError) as error:
        raise BusyError(
            f"{display_path(folder)} belongs to {known.title} of {known.submitted[:19]}, whose scheduler cannot be "
            f"asked: {error}; if that job is gone for good, job=cancel job.forget=true "
            f"{_named(folder)} sets its record aside"
        ) from error
    return f"{known.title}, which is {state.state.value}" if state.state.is_live else None


def refuse_submitted(folder: Path) -> None:
    """Raise BusyError, as `refuse_live`, where a run would take the folder of a job that waits or runs, or of its
    sweep. The run of that job itself may.
    """
    if os.path.abspath(folder) == os.environ.get(SUBMITTED_FOLDER):
        return
    for known in (folder, *([folder.parent] if is_sweep(folder.parent) else [])):
        refuse_live(known)


def request_of(
    platform: Platform,
    composed: Sequence[Composed],
    folder: Path,
    run_dir: str,
    name: str,
    trials: Sequence[str] = (),
    parallel: int = 0,
) -> JobRequest:
    """The request of one run, or of a sweep: `trials` are then the names of the folders in `run_dir`."""
    first = composed[0]
    cut_off = record.intent(folder)
    if cut_off:
        name, token, grace_s = cut_off.name, cut_off.token, cut_off.grace_s
    else:
        token = secrets.token_hex(32)
        grace_s = max(time_to_save_s(folder / trial, platform.grace_s) for trial in trials or [""])
    run_dirs = [f"{run_dir.rstrip('/')}/{trial}" for trial in trials] or [run_dir]
    bundle = Bundle.of(composed, run_dirs, os.getcwd() if platform.sees_folder else "", token, grace_s)
    content = bundle.to_bytes(composed)
    return JobRequest(
        name=name,
        folder=folder,
        run_dir=run_dir,
        digest=digest_of(content),
        content=content,
        roles=first.settings.strategy.roles(platform.count()),
        nodes=platform.nodes,
        configs=tuple(one.config for one in composed),
        grace_s=grace_s,
        token=token,
        trials=tuple(trials),
        parallel=parallel,
    )


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole; its owner alone can read it."""
    new = path.with_name(f".{path.name}.new")
    with open_private(new, "wb") as file:
        file.write(content)
    os.replace(new, path)
