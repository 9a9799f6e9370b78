"""`job=diff`: two runs side by side, and where they part. Reads run folders and changes none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dtf.api.job import Job, Output
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, Exit

if TYPE_CHECKING:
    from dtf.config.compose import Composed


@register("job", "diff")
class Diff(Job):
    """Say in what two runs differ: config, code, data, sampled rows, curves, tensors; and at which step and tensor
    they part.
    """

    runs: list[str] = option(factory=list, doc="two run folders: job.runs=[outputs/first,outputs/second]")
    tolerance: float = option(
        default=0.0,
        least=0.0,
        below=1.0,
        doc="relative difference of numbers that counts as none; 0: each bit counts. Runs that sum in another order "
        "(another strategy, another number of processes) agree to 1e-5 in fp32",
    )
    format: Output = option(default=Output.text, doc="what is printed: `text` to read, `json` for programs")

    def run(self, composed: Composed) -> int:
        from dtf.runs.diff import diff, lines
        from dtf.runs.results import read_runs

        if len(self.runs) != 2:
            raise ConfigError(f"job.runs={self.runs} must be two run folders, job.runs=[outputs/first,outputs/second]")
        results = read_runs(self.runs)
        if len(results) != 2:
            raise ConfigError(
                f"job.runs={self.runs} stands for {len(results)} run folders, and job=diff compares two; name two"
            )
        found = diff(results[0], results[1], self.tolerance)
        if self.format is Output.json:
            print(json.dumps(found, indent=1, default=str))
        else:
            for line in lines(found):
                print(line)
        return Exit.OK
