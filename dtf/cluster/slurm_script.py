"""The texts that Slurm gets: the batch script, and what each task of its step runs. Pure: values in, text out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from dtf.cluster.after_exit import ALWAYS, FINAL, MOST

JOB, TASK = "job.sh", "task.sh"

_ASKED_S = 60
"""Between two questions of another node of a heterogeneous job whether the batch script still runs."""


@dataclass(frozen=True, kw_only=True)
class JobText:
    """`options`, `steps`: the #SBATCH lines and the arguments of srun, of each component of the job. `roles`: of the
    components, none where there is one. `comment`: by which the job is known before its number is. `run_dirs`: one, or
    those of a sweep's trials.
    """

    options: list[list[str]]
    steps: list[list[str]]
    tasks: int
    roles: list[str]
    comment: str
    job_folder: str
    run_dirs: list[str]
    setup: list[str]
    command: list[str]

    def job(self) -> str:
        """The batch script."""
        setup = [f'printf %s {shlex.quote(line)} >|"$_dtf_line"\n{line}\n_dtf_check "$?"' for line in self.setup]
        options = "#SBATCH hetjob\n".join("".join(f"#SBATCH {line}\n" for line in lines) for lines in self.options)
        body = {
            "FOLDER": shlex.quote(self.job_folder),
            "RUNS": " ".join(map(shlex.quote, self.run_dirs)),
            "COMMENT": self.comment,
            "TASKS": str(self.tasks),
            "ALWAYS": " | ".join(map(str, ALWAYS)),
            "FINAL": " | ".join(map(str, FINAL)),
            "MOST": str(MOST),
            "ROLES": ",".join(self.roles),
            "SETUP": "\n".join(setup),
            "SRUN": self._srun(),
        }
        return f"#!/bin/bash\n{options}{_filled('slurm_job.sh', body)}"

    def task(self) -> str:
        """What srun starts: dtf, and a note of its exit code."""
        trial = ' --trial="$SLURM_ARRAY_TASK_ID"' if len(self.options) == 1 and _is_array(self.options[0]) else ""
        command = shlex.join(self.command) + trial
        body = {"FOLDER": shlex.quote(self.job_folder), "COMMAND": command, "ASKED": str(_ASKED_S)}
        body["ALWAYS"] = " | ".join(map(str, ALWAYS))
        return _filled("slurm_task.sh", body)

    def _srun(self) -> str:
        alone = len(self.steps) == 1
        steps = [words if alone else [f"--het-group={at}", *words] for at, words in enumerate(self.steps)]
        return " : ".join(shlex.join([*words, "bash", f"{self.job_folder}/{TASK}"]) for words in steps)


def output_pattern(job_folder: str, array: bool) -> str:
    """Where Slurm writes what the job prints: `%` begins a pattern there."""
    return f"{job_folder.replace('%', '%%')}/slurm-{'%A_%a' if array else '%j'}.log"


def duration(hours: float) -> str:
    """As Slurm writes it: days-hours:minutes:seconds."""
    minutes, seconds = divmod(round(hours * 3600), 60)
    total, minutes = divmod(minutes, 60)
    days, left = divmod(total, 24)
    return f"{days}-{left:02d}:{minutes:02d}:{seconds:02d}"


def _is_array(options: list[str]) -> bool:
    return any(line.startswith("--array=") for line in options)


def _filled(name: str, values: Mapping[str, str]) -> str:
    """A text of this package with a value for each `@NAME@`."""
    text = files("dtf.cluster").joinpath(name).read_text("utf-8")
    return re.sub("@([A-Z]+)@", lambda found: values[found[1]], text)
