"""The folder of a run: made, locked and described by the launching process alone.

Writes no metrics and no checkpoints.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import platform
import secrets
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.checkpoint.place_names import refuse_inside
from dtf.checkpoint.resolve_path import run_folder_of
from dtf.checkpoint.storage import checkpoints
from dtf.config.limits import read_checked
from dtf.core.endpoint_file import withdraw
from dtf.core.errors import BusyError, ConfigError, DtfError, io_failure
from dtf.core.files import flat, replace_text
from dtf.core.redaction import may_be, redact
from dtf.core.renamed import lost_effects
from dtf.core.run_record import LOCK, LONGEST_SAVE, SUBMISSION, record_of
from dtf.core.text import quoted
from dtf.core.types import Ended, Event, Measured, Saved, Started
from dtf.core.version import __version__
from dtf.host.deadline import EARLY_S
from dtf.runs.git_commit import git_commit
from dtf.runs.objective_log import add, begin, carry
from dtf.runs.time_left import TIME_LEFT, refuse_short

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy
    from dtf.config.settings import Settings

_BEFORE_A_RUN = {LOCK, ".run.json.new", "job"}
"""What a process that is killed in its first millisecond leaves behind, and the folder of a submission."""
_ASKED_S = 0.2
_WEIGHTS = "recipe.model.weights"
_LIMIT = "job.bad_share"
"""Says when to give up, not what the answers are."""
_MAY_MOVE = "root"
"""Keys of this name, and the weights to start from, say where data lies, not what it is; checkpoints hold digests of
that.
"""


class Run:
    """A run and its folder. `leader`: whether this process made it and has the observers, as not in a rank of `env`."""

    def __init__(self, folder: Path, id: str, config: dict[str, Any], settings: Settings, leader: bool = True) -> None:
        self.folder, self.id, self.config, self.settings, self.leader = folder, id, config, settings, leader
        # of this process alone, a secret that its ranks share
        self.token = secrets.token_hex(32)
        self.notes: list[str] = []
        self._lock: int | None = None
        self._temporary = False
        self._record: dict[str, Any] = {}

    @property
    def strategy(self) -> Strategy:
        """How the run is spread over processes."""
        return self.settings.strategy

    @classmethod
    def open(
        cls, config: dict[str, Any], settings: Settings, processes: int, devices: str, again: str = "",
        refuse: Callable[[Path], None] = lambda folder: None,
    ) -> Run:  # fmt: skip
        """Make or continue the run folder, and lock it until `end`. `again`: the folder of an earlier attempt of this
        run, to continue there. `refuse`: raises BusyError for a folder that belongs to a job; asked under the lock too.

        BusyError when another run uses the folder, or when it holds a run that this one must not be mixed with; then
        nothing in it has changed. ConfigError when it cannot be made.
        """
        id = unique_id()
        name = settings.run.name or config["recipe"]["name"]
        folder = Path(again or settings.run.dir or Path("outputs", name, id)).absolute()
        refuse_inside(config["checkpoint"].get("mirror", ""), folder)
        try:
            refuse(folder)
            made = not folder.exists()
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=bool(again or settings.run.dir))
            _refuse_foreign(folder)
            run = cls(folder, id, config, settings)
            run._lock = take_lock(folder)
            try:
                _refuse_foreign(folder)
                refuse(folder)  # a job may have been submitted meanwhile
                run.notes = _lost_effects(folder, config["checkpoint"].get("resume", "never"))
                run._continue(made, bool(again))
                run._begin(processes, devices)
            except BaseException:
                run._release()
                raise
            return run
        except OSError as error:
            if error.errno != errno.EROFS and (failure := io_failure(error, folder)):
                raise failure from error
            key = f"run.dir={settings.run.dir}" if settings.run.dir else f"run.name={name}"
            raise ConfigError(
                f"{key}: the run folder {folder} cannot be used: {error.strerror}; choose another run.dir"
            ) from error

    @classmethod
    def guest(cls, config: dict[str, Any], settings: Settings, name: str) -> Run:
        """Of a process whose run another one makes the folder of. It has a temporary one, for its log."""
        id = unique_id()
        run = cls(Path(tempfile.mkdtemp(prefix=f"dtf-{name}-")), id, config, settings, leader=False)
        run._temporary = True
        return run

    def end(self, exit: int, cause: str = "", results: Mapping[str, Any] | None = None) -> None:
        """Write how the run ended, and `results`, into run.json, and unlock the folder. Does nothing where the run was
        not opened.
        """
        if self._temporary:
            with suppress(OSError):  # a log is kept
                self.folder.rmdir()
        if self._lock is None:
            return
        withdraw(self.folder)
        self._record |= {"ended": _now(), "exit": int(exit), "cause": cause, **(results or {})}
        self._update("does not say how the run ended")
        self._release()

    def redacted(self) -> dict[str, Any]:
        """The config as it may be shown and saved: texts under keys that look like secrets are starred out."""
        return redact(self.config)

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _continue(self, made: bool, again: bool) -> None:
        """Check that the run in the folder, if there is one, may be continued by this one, and keep its record."""
        if not (self.folder / "run.json").exists():
            if not made:
                self.folder.chmod(0o700)
            return
        past = self._record["earlier"] = _earlier_launches(self.folder, self.config, again)
        carry(self._record, past[-1])
        saved = self.folder / "config.yaml"
        if saved.exists():  # else the process was killed between writing run.json and this
            os.replace(saved, self.folder / f"config.{past[-1]['id']}.yaml")

    def _begin(self, processes: int, devices: str) -> None:
        import yaml

        before, trains = self._record, self.config.get("job", {}).get("name", "train") == "train"
        self._record = {
            "id": self.id,
            "started": _now(),
            "ended": None,
            "exit": None,
            "cause": "",
            "identity": identity(self.config),
            "versions": versions(),
            "git": git_commit(),
            "host": socket.gethostname(),
            "world": {"processes": processes, "devices": devices, "strategy": self.config["strategy"]["name"]},
        }
        if digest := os.environ.get(SUBMISSION):
            self._record["submission"] = digest
        roles = self.settings.strategy.roles(processes)
        if len(roles) > 1:
            self._record["world"]["roles"] = roles
        if trains:
            self._record["results"] = False
        self._record |= before
        self._write()
        replace_text(self.folder / "config.yaml", yaml.safe_dump(self.redacted(), sort_keys=False))

    def allot(self, left_s: float) -> None:
        """Write into run.json that the allocation of this launch ends in `left_s` seconds. Where that is too little the
        run ends, and this raises: see `refuse_short`.
        """
        if left_s == math.inf:
            return
        self._record[TIME_LEFT] = round(left_s, 1)
        self._update("does not say when the allocation ends")
        # in a job the scheduler asks a run to stop before the end; elsewhere whoever likes does, at any time
        notice_s = self.config["launcher"].get("grace_s", 0.0) + EARLY_S if os.environ.get(SUBMISSION) else 0.0
        try:
            refuse_short(left_s, self._record.get("earlier", []), notice_s)
        except DtfError as error:
            self.end(error.exit, str(error), {"error": type(error).__name__})
            raise

    def ready(self, table: dict[str, Any]) -> None:
        """Called when the ranks are ready: write the start-up table into run.json."""
        if self.leader:
            self._record["table"] = table
            self._update("has no start-up table")

    def see(self, event: Event) -> None:
        """Write into run.json what an event of the ranks says of the run: the plan and the start-up table, that there
        are results, the objective after each evaluation, how long saves take.
        """
        if isinstance(event, Started):
            if "results" in self._record:
                begin(self._record, self.settings.objective[0], event)
            self.ready(event.table)
        if isinstance(event, Ended):
            self._record["step"] = event.step
        evaluated = isinstance(event, Measured) and add(self._record, event)
        first = self._record.get("results") is False and (
            isinstance(event, Measured | Saved) or (isinstance(event, Ended) and event.step > 0)
        )
        if self.leader and (first or evaluated):
            self._record["results"] = True
            self._update("does not have the newest results")
        if self.leader and isinstance(event, Saved) and event.seconds > self._record.get(LONGEST_SAVE, 0.0):
            self._record[LONGEST_SAVE] = round(event.seconds, 3)
            self._update("does not say how long saves take")

    def _update(self, otherwise: str) -> None:
        """Write run.json anew. Where that fails the run goes on: its next save, if there is one, has to write too.

        `otherwise`: what is then wrong with run.json.
        """
        try:
            self._write()
        except OSError as error:
            print(f"dtf: warning: {self.folder / 'run.json'} {otherwise}: {error.strerror}", file=sys.stderr)

    def _write(self) -> None:
        replace_text(self.folder / "run.json", json.dumps(self._record, indent=2) + "\n")


def untouched(folder: Path) -> bool:
    """Whether the run in a folder ended before its first result, so that another config may take its place."""
    try:
        record = record_of(folder)
        past = [*record.pop("earlier", []), record]
        return not any(map(_left_something, past)) and not checkpoints(folder / "checkpoints")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_folder(folder: Path, config: dict[str, Any]) -> None:
    """Raise BusyError where a run of this config may not begin or go on in a folder that exists. Changes nothing."""
    _refuse_foreign(folder)
    if (folder / "run.json").exists():
        _earlier_launches(folder, config, again=False)


def _earlier_launches(folder: Path, config: dict[str, Any], again: bool) -> list[dict[str, Any]]:
    """The records of the launches in a folder, the oldest first. BusyError where this config may not go on there."""
    try:
        record = record_of(folder)
        past, old = [*record.pop("earlier", []), {**record, "id": str(record["id"])}], dict(record["identity"])
        left = any(map(_left_something, past)) or bool(checkpoints(folder / "checkpoints"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EISDIR):  # as of a disk that fails
            raise
        whole = bool(checkpoints(folder / "checkpoints"))
        rescue = f", with checkpoint.resume={quoted(folder)} to go on from its checkpoints" if whole else ""
        raise BusyError(
            f"{folder / 'run.json'} cannot be read ({type(error).__name__}: {error}), so what the folder holds is not "
            f"known; choose another run.dir{rescue}"
        ) from error
    if left and config["checkpoint"].get("resume", "never") == "never" and not again:
        raise BusyError(
            f"{folder} holds another run and checkpoint.resume=never; choose another run.dir or checkpoint.resume=auto"
        )
    new = identity(config) if left else old
    # other recipes have other keys
    for key in sorted(old.keys() | new.keys(), key=lambda key: (key != "recipe.name", key)):
        if not may_be(new.get(key), old.get(key)):
            was, now = _show(old.get(key)), _show(new.get(key))
            raise BusyError(
                f"{folder} holds a run with {key}={was}, this one has {key}={now}; choose another run.dir, or "
                f"the same {key.removesuffix('.name')}: a run goes on under the command that started it, "
                "recipe=NAME included; its config.yaml says all of it"
            )
    return past


def take_lock(folder: Path) -> int:
    """Lock a folder for this process. Returns the descriptor; the lock lasts until it is closed or the process ends.

    BusyError when another process has the lock, and not just for the moment in which `is_live` asks.
    """
    lock, until = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + _ASKED_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                holder = os.read(lock, 100).decode(errors="replace").strip()
                os.close(lock)
                raise BusyError(
                    f"{folder} is in use by a live run ({holder}); wait for it, stop it, or choose another run.dir"
                ) from None
            time.sleep(0.01)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock


def unique_id() -> str:
    """The time of day and six random digits: two runs started in the same second do not share a folder."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """What must stay the same when a run goes on: dotted keys of the recipe and the sampler, which optimizer, the seed
    and the global batch.

    Of a job that trains nothing: those of the recipe and of the job, and the seed. Where the data lies may change.
    """
    recipe = redact(
        {
            key: value
            for key, value in flat(config["recipe"], "recipe")
            if key.rpartition(".")[2] != _MAY_MOVE and key != _WEIGHTS
        }
    )
    job = dict(flat(config.get("job", {}), "job"))
    if job.get("job.name", "train") != "train":
        job.pop(_LIMIT, None)
        return recipe | job | {"seed": config["seed"]}
    sampler = dict(flat(config["sampler"], "sampler"))
    return (
        recipe
        | sampler
        | {
            "optimizer": config["optimizer"]["name"],
            "seed": config["seed"],
            "step.batch_size": config["step"]["batch_size"],
        }
    )


def versions() -> dict[str, str]:
    """Versions of the packages that decide the numbers, read from metadata: nothing is imported."""
    from importlib.metadata import PackageNotFoundError, version

    numbers = {"dtf": __version__, "python": platform.python_version()}
    for package in ("torch", "torchvision", "numpy"):
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            numbers[package] = ""
    return numbers


def _left_something(record: dict[str, Any]) -> bool:
    """Whether a launch got as far as a first result, by its record. Those of earlier versions tell only whether its
    ranks were ready.
    """
    return bool(record.get("results", "table" in record or "job.name" in record["identity"]))


def _refuse_foreign(folder: Path) -> None:
    names = sorted(name for name in os.listdir(folder) if name not in _BEFORE_A_RUN)
    if names and "run.json" not in names:
        raise BusyError(
            f"{folder} is not empty and holds no run ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}); "
            "choose another run.dir"
        )


def _lost_effects(folder: Path, resume: str) -> list[str]:
    """Lines on what the run that is resumed did and this version does not, by its recorded config; see
    `renamed.lost_effects`.
    """
    source = folder if checkpoints(folder / "checkpoints") else run_folder_of(resume)
    if source is None or not (source / "config.yaml").is_file():
        return []
    import yaml

    try:
        return lost_effects(yaml.safe_load(read_checked(source / "config.yaml")))
    except (ConfigError, ValueError, AttributeError, TypeError, yaml.YAMLError):
        return []


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
