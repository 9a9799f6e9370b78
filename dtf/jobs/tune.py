"""`job=tune`: finds the value of one setting by short trainings. Trains nothing to keep."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job, Watchable
from dtf.api.registry import option, register
from dtf.core.errors import ConfigError, DtfError, Exit, Preempted, io_failure
from dtf.core.files import replace_text
from dtf.core.json_lines import rows
from dtf.core.text import count_text, quoted, suggest
from dtf.core.types import Ended, Event
from dtf.host.memory import available_bytes
from dtf.host.scratch import scratch_folder
from dtf.host.signals import preempting
from dtf.jobs import largest_micro_batch as sizes
from dtf.jobs.largest_micro_batch import HostGuard, Trial
from dtf.jobs.range_test import RangeTest, judge, table
from dtf.runs.run_folder import unique_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtf.config.compose import Composed

RATE, ROWS = "lr.peak", "step.micro_batch_rows"
LAUNCHER = "local"
RESULT, PICTURE = "tune.json", "tune.png"
_TRIAL_STEPS = 2
_STOPPED = "asked to stop while tuning, of which nothing is kept; start it again"
_LINE = {"split": str, "step": int}


class TrialFailed(DtfError):
    """A trial run failed for want of something else than memory."""


@register("job", "tune")
class Tune(Job):
    """Find a learning rate (a short training in which it rises, with a picture), or the largest micro-batch that fits
    into memory. The suggestion is printed and written to tune.json.
    """

    key: str = option(default=RATE, doc=f"what to find: {RATE} or {ROWS}")
    steps: int = option(default=100, least=10, doc=f"{RATE}: length of the training", unit="steps")
    low: float = option(default=1e-7, above=0, doc=f"{RATE}: first rate")
    high: float = option(default=10.0, above=0, doc=f"{RATE}: last rate")
    most_rows: int = option(
        default=0, least=0, doc=f"{ROWS}: the most to try; 0: the share of a process in step.batch_size", unit="rows"
    )

    def run(self, composed: Composed) -> int:
        self._check(composed)
        run = composed.config["run"]
        folder = Path(run["dir"] or Path("outputs", run["name"] or "tune", unique_id())).absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise io_failure(error, folder) or ConfigError(
                f"run.dir={folder} cannot be written: {error.strerror}; choose another run.dir"
            ) from error
        with scratch_folder("dtf-tune-") as scratch, preempting(_STOPPED):
            if self.key == RATE:
                test = self._rate(composed, scratch)
                found, shown = asdict(test), folder / PICTURE
                _draw(test, shown)
            else:
                found, shown = self._rows(composed, scratch), folder / RESULT
        replace_text(folder / RESULT, json.dumps(found) + "\n")
        print(shown)
        return Exit.OK

    def _check(self, composed: Composed) -> None:
        if self.key not in (RATE, ROWS):
            raise ConfigError(f"job.key={self.key} cannot be tuned; {suggest(self.key, (RATE, ROWS))}")
        launcher = composed.config["launcher"]["name"]
        if launcher != LAUNCHER:
            raise ConfigError(
                f"job=tune starts new ranks for each trial, which launcher={launcher} does not do; use "
                f"launcher={LAUNCHER}"
            )
        if self.key == RATE and not self.low < self.high:
            raise ConfigError(f"job.low={self.low} must be less than job.high={self.high}")
        if self.key == RATE and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"job=tune draws with matplotlib, which is not installed; {sys.executable} -m pip install "
                "'matplotlib>=3.8'"
            )
        if self.key == ROWS and composed.settings.launcher.devices_kind() == "cpu" and available_bytes() is None:
            raise ConfigError("job=tune cannot tell how much memory this host has left, and would risk to take it all")

    # ---------------------------------------------------------------- learning rate

    def _rate(self, composed: Composed, scratch: Path) -> RangeTest:
        keys = {"lr": "geometric", "lr.peak": self.high, "lr.start": self.low / self.high}
        keys |= {"train.steps": self.steps, "train.epochs": "null", "train.until": "null", "train.eval_every": 0}
        keys |= {"train.skip_nonfinite": self.steps, "checkpoint": "off"}
        code, said, _ = _train(composed, scratch / "run", keys)
        lines = [row for row in rows(scratch / "run" / "metrics.jsonl", _LINE) if row["split"] == "train"]
        if code and not (code == Exit.DIVERGED and lines):
            raise TrialFailed(f"the training ended with exit code {code}: {said}")
        found = judge([line["lr"] for line in lines], [line.get("loss") for line in lines])
        for text in table(found):
            print(text)
        return found

    # ---------------------------------------------------------------- micro-batch

    def _rows(self, composed: Composed, scratch: Path) -> dict[str, Any]:
        settings = composed.check()
        processes, batch = settings.launcher.count(), settings.step.batch_size
        most = min(self.most_rows or -(-batch // processes), batch)
        on_cpu = settings.launcher.devices_kind() == "cpu"
        free = available_bytes() if on_cpu else None

        def try_rows(count: int) -> Trial:
            trial = self._trial(composed, scratch / f"rows{count}", count, free)
            print(sizes.line_of(trial), flush=True)
            return trial

        def expected(trials: list[Trial], count: int) -> str:
            why = sizes.refusal(free, processes)(trials, count)
            if why:
                print(sizes.line_of(Trial(count, False, why=why)), flush=True)
            return why

        trials = sizes.search(most, 2 if settings.recipe.pairs else 1, try_rows, expected)
        best = max((trial.rows for trial in trials if trial.fits), default=None)
        if best is None:
            print("no suggestion: not even the smallest micro-batch fits; use strategy=fsdp or a smaller model")
        else:
            whole = (
                f", the whole share of a process in step.batch_size={batch}" if best == -(-batch // processes) else ""
            )
            print(f"suggestion: {ROWS}={best}{whole}")
        return {"key": ROWS, "suggestion": best, "trials": [asdict(trial) for trial in trials]}

    def _trial(self, composed: Composed, folder: Path, count: int, free: int | None) -> Trial:
        """A few steps, an evaluation and a save in new processes."""
        keys = {ROWS: count, "train.until": _TRIAL_STEPS, "train.eval_every": _TRIAL_STEPS}
        keys |= {"train.eval_rows": composed.config["step"]["batch_size"], "checkpoint.every_steps": _TRIAL_STEPS}
        keys |= {"checkpoint.delta_every": "null"}
        keys |= {"checkpoint.keep_best": 0, "checkpoint.mirror": "''", "checkpoint": "every"}
        length = composed.config["train"]
        if length["steps"] is not None or length["epochs"] is None:
            keys["train.steps"] = max(_TRIAL_STEPS, length["steps"] or 0)
        with HostGuard(free) as guard:
            code, said, ended = _train(composed, folder, keys)
        memory = ended.memory if ended else {}
        peak = memory.get("resident", memory.get("allocated"))
        if code and not guard.struck and not sizes.wants_memory(said):
            raise (ConfigError if code == Exit.CONFIG else TrialFailed)(
                f"with {ROWS}={count} the training ended with exit code {code}: {said}"
            )
        if code:
            why = "the host would have had too little left" if guard.struck else said
            return Trial(count, False, memory.get("planned"), why=" ".join(why.split())[:200])
        lines = [row for row in rows(folder / "metrics.jsonl", _LINE) if row["split"] == "train"]
        return Trial(count, True, memory.get("planned"), peak, lines[-1].get("rows_per_s") if lines else None)


def _train(composed: Composed, folder: Path, keys: dict[str, Any]) -> tuple[int, str, Ended | None]:
    """One run in new ranks. Returns its exit code, why it ended, and its last event. What it prints is kept back."""
    overrides = {
        "job": "train",
        "train.log_every": 1,
        "train.early_stop": 0,
        "train.dry_run": "false",
        "train.record": "false",
        "checkpoint.resume": "never",
        "launcher.max_restarts": 0,
        "observer": "[jsonl]",
        "run.dir": quoted(folder),
        **keys,
    }
    again = composed.recompose([f"{key}={value}" for key, value in overrides.items()])
    job, ended = again.job, list[Ended]()
    assert isinstance(job, Watchable)

    def watch(event: Event) -> None:
        if isinstance(event, Ended):
            ended.append(event)

    job.watch = watch
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = job.run(again)
    if code == Exit.PREEMPTED:
        raise Preempted(_STOPPED)
    return code, f"{_cause(folder)} {said.getvalue()[-2000:]}" if code else "", ended[-1] if ended else None


def _cause(folder: Path) -> str:
    try:
        return str(json.loads((folder / "run.json").read_text())["cause"])
    except (OSError, ValueError, KeyError):
        return ""


def _draw(test: RangeTest, path: Path) -> None:
    """The loss of each step, its running mean, and the suggestion, over the learning rate."""
    from dtf.runs.charts import Axes, Chart, Line, png

    count = len(test.smoothed)
    raw = [(rate, loss) for rate, loss in zip(test.rates[:count], test.losses[:count], strict=True) if loss is not None]
    lines = [Line(0, raw, pale=True), Line(0, list(zip(test.rates, test.smoothed, strict=False)))]
    shown = _part_to_draw(test.smoothed)
    if test.suggestion is not None and shown is not None:
        lines.append(Line(1, [(test.suggestion, shown[0]), (test.suggestion, shown[1])]))
    suggested = f"suggestion: {RATE}={test.suggestion:.2g}" if test.suggestion else "no suggestion"
    axes = Axes("loss while the learning rate rises", "learning rate", lines=lines, log=True, shown=shown)
    caption = f"{count_text(count, 'step')} of a range test"
    png(Chart("tune", caption, [axes]), ["loss, smoothed", suggested], path)


def _part_to_draw(smoothed: Sequence[float]) -> tuple[float, float] | None:
    """Losses from below the least to above the beginning: those of a training that diverges would hide how it fell."""
    if not smoothed:
        return None
    least, beginning = min(smoothed), max(smoothed[: 1 + len(smoothed) // 4])
    fall = max(beginning - least, 0.05 * abs(least))
    return least - 0.3 * fall, beginning + fall
