"""`job=report`: one or many runs as a page to look at and to send around. Reads run folders and changes none."""

from __future__ import annotations

import importlib.util
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, Exit
from dtf.core.text import count_text, harmless
from dtf.runs.run_folder import unique_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dtf.config.compose import Composed
    from dtf.runs.results import Result


@register("job", "report")
class Report(Job):
    """Draw runs side by side: report.html, complete in itself, and each chart as PNG beside it."""

    runs: list[str] = option(
        factory=list, doc="run folders, folders of sweeps, or glob patterns such as 'outputs/resnet_shapes/*'"
    )
    published: dict[str, float] = option(
        factory=dict,
        doc="seconds an epoch took elsewhere, by label, which says who measured it and on what: drawn beside the runs, "
        "hatched and against an axis of their own",
    )

    def run(self, composed: Composed) -> int:
        if not self.runs:
            raise ConfigError(
                "job.runs=[] names nothing to report on; give run folders or patterns, "
                "job.runs=[outputs/resnet_shapes/*]"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"job=report draws with matplotlib, which is not installed; {sys.executable} -m pip install "
                "'matplotlib>=3.8'"
            )
        from dtf.runs.charts import png
        from dtf.runs.report import charts_of, html
        from dtf.runs.results import best_trials, read_runs

        results = read_runs(self.runs)
        charts = charts_of(results, self.published)
        text = html(results, charts, f"{datetime.now():%Y-%m-%d %H:%M}")
        run = composed.config["run"]
        folder = Path(run["dir"] or Path("outputs", run["name"] or "report", unique_id())).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for chart in charts:
                png(chart, [result.name for result in results], folder / f"{chart.file}.png")
            (folder / "report.html").write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(
                f"run.dir={folder} cannot be written: {error.strerror}; choose another run.dir"
            ) from error
        for line in (*best_trials(results), *_standings(results)):
            print(harmless(line))
        print(f"{count_text(len(results), 'run')}, {count_text(len(charts), 'chart')}: {folder / 'report.html'}")
        return Exit.OK


def _standings(results: Sequence[Result]) -> Iterator[str]:
    """A line for each run: its name, what it does or how it ended, and how far it has come."""
    names, states = max(len(result.name) for result in results), max(len(result.state) for result in results)
    for result in results:
        yield f"{result.name:<{names}}  {result.state:<{states}}  {result.standing}".rstrip()
