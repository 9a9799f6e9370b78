"""What is kept of a submission in the folder of its run, by which `job=status`, `job=logs` and `job=cancel` find it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dtf.api.registry import registered
from dtf.api.schema import build_option
from dtf.cluster.platform import JOB_FOLDER, Platform
from dtf.core.errors import BusyError, ConfigError
from dtf.core.files import replace_text

_NAME = "job.json"


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
        platform = build_option("launcher", self.launcher)
        assert isinstance(platform, Platform)
        return platform

    @property
    def title(self) -> str:
        """As people name it: `slurm job 123`."""
        return f"{self.launcher['name']} job {self.handle.get('job', '?')}"


def keep(folder: Path, record: JobRecord) -> None:
    """Write the record of the run in `folder`; replaces an earlier one."""
    replace_text(folder / JOB_FOLDER / _NAME, json.dumps(asdict(record), indent=2) + "\n")


def find(folder: Path) -> JobRecord | None:
    """The record of the run, or of the sweep, in `folder`; None where none was submitted.

    BusyError when it cannot be read.
    """
    path = folder / JOB_FOLDER / _NAME
    try:
        return JobRecord(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise BusyError(f"{path} cannot be read ({type(error).__name__}: {error}); ask the scheduler") from error
