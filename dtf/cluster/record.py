"""What is kept of a submission in the folder of its run, by which `job=status`, `job=logs` and `job=cancel` find it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dtf.api.registry import registered
from dtf.api.schema import build_option, coerce_option, keys
from dtf.cluster.platform import JOB_FOLDER, Platform
from dtf.core.errors import BusyError, ConfigError
from dtf.core.files import replace_text, small_json
from dtf.core.text import plain_text

_Kept = TypeVar("_Kept")
_NAME, _INTENT = "job.json", "submitting.json"
_MOST_BYTES = 1 << 26  # Kubernetes and SageMaker find a sweep by a name for each trial
_LONGEST_S = 1e7
"""Of a save: more is no time that anybody gives."""


@dataclass(frozen=True)
class Intent:
    """A submission whose outcome is not known yet. It is kept before the scheduler is asked, so that the same command
    makes the same request again, by which the scheduler knows a job that it has taken already.

    `launch_before`: the id of the newest launch in the run folder when it was submitted first.
    """

    name: str
    digest: str
    token: str
    grace_s: float
    launch_before: str = ""


@dataclass(frozen=True)
class JobRecord:
    """A job that was submitted. `launcher`: its config node, `handle`: see `Platform.submit`.

    `launch_before`: the id of the newest launch in the run folder at that time; another one is of this job.
    """

    launcher: dict[str, Any]
    handle: dict[str, str]
    submitted: str
    digest: str
    run_dir: str
    launch_before: str = ""

    @property
    def platform(self) -> Platform:
        """What submitted it. ConfigError where a plugin brings it that this command does not name: a folder may come
        from elsewhere, and decides about no import.
        """
        name = self.launcher["name"]
        if name not in registered("launcher"):
            raise ConfigError(
                f"the run was submitted by launcher={name}, which a plugin brings; give plugins=[MODULE] too"
            )
        cls = registered("launcher")[name]
        if not issubclass(cls, Platform):
            raise BusyError(f"the record of the job says launcher={name}, which submits no jobs; ask the scheduler")
        # another version of dtf may have had other options; what asks for a job needs only some
        known = {key.name for key in keys(cls)} & self.launcher.keys()
        return build_option(
            "launcher", coerce_option("launcher", {key: self.launcher[key] for key in ("name", *known)}, "launcher")
        )

    @property
    def title(self) -> str:
        """As people name it: `slurm job 123`."""
        return plain_text(f"{self.launcher['name']} job {self.handle.get('job', '?')}")


def keep(folder: Path, record: JobRecord) -> None:
    """Write the record of the run in `folder`; replaces an earlier one, and the intent to submit it."""
    replace_text(folder / JOB_FOLDER / _NAME, json.dumps(asdict(record), indent=2) + "\n")
    drop_intent(folder)


def keep_intent(folder: Path, intent: Intent) -> None:
    """Before the scheduler is asked."""
    replace_text(folder / JOB_FOLDER / _INTENT, json.dumps(asdict(intent)) + "\n")


def drop_intent(folder: Path) -> None:
    """Of a submission that is recorded, or that the scheduler did not take."""
    (folder / JOB_FOLDER / _INTENT).unlink(missing_ok=True)


def intent(folder: Path) -> Intent | None:
    """Of a submission for `folder` that was cut off; None where there is none. BusyError when it cannot be read."""
    return _read(folder / JOB_FOLDER / _INTENT, Intent)


def refuse_cut_off(folder: Path) -> None:
    """Raise BusyError where a submission was cut off, so that nobody knows its job."""
    if known := intent(folder):
        raise BusyError(
            f"a submission for {folder} was cut off, and a job {known.name} may wait or run; give the same command "
            f"again, with run.dir as then, which finds it; or look for it with the scheduler's own commands, end it, "
            f"and delete {folder / JOB_FOLDER / _INTENT}"
        )


def set_aside(folder: Path) -> Path:
    """Let the folder have no job any more. Returns where the record of the last one is now."""
    path = folder / JOB_FOLDER / _NAME
    return path.rename(path.with_name(f"forgotten-{_NAME}"))


def find(folder: Path) -> JobRecord | None:
    """The record of the run, or of the sweep, in `folder`; None where none was submitted.

    BusyError when it cannot be read, or a later submission was cut off.
    """
    refuse_cut_off(folder)
    return _read(folder / JOB_FOLDER / _NAME, JobRecord)


class _Handle(dict[str, str]):
    """What finds a job, as a file has it."""

    def __missing__(self, key: str) -> NoReturn:
        raise ConfigError(f"job/{_NAME} lacks the {key} of its job: it is not dtf's; ask the scheduler")


def _read(path: Path, make: Callable[..., _Kept]) -> _Kept | None:
    try:
        kept = make(**small_json(path, _MOST_BYTES))
        _check(vars(kept))
        return replace(kept, handle=_Handle(kept.handle)) if isinstance(kept, JobRecord) else kept
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BusyError(f"{path} cannot be read ({type(error).__name__}: {error}); ask the scheduler") from error


def _check(values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for fields that dtf would not have written."""
    for key, value in values.items():
        if key == "grace_s":
            if type(value) not in (int, float) or not 0 <= value <= _LONGEST_S:
                raise ValueError(f"{key}={value}")
            continue
        texts = [value]
        if key in ("launcher", "handle"):
            if not isinstance(value, dict):
                raise TypeError(f"{key} is {type(value).__name__}")
            texts = [value["name"]] if key == "launcher" else [*value.values()]
        for text in texts:
            if not isinstance(text, str):
                raise TypeError(f"{key} has {type(text).__name__} where a text is")
            if "\0" in text.encode().decode():
                raise ValueError(f"{key} has a character of no text")
