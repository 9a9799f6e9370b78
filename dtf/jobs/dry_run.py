"""`train.dry_run`: a few steps of everything that a run does, in a temporary folder, with a line for each part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dtf.api.launcher import author_traceback
from dtf.core.errors import ConfigError, Exit
from dtf.core.text import number_text, plain_text, quoted
from dtf.core.types import Event, Failed, Measured, Started, Tried
from dtf.host.scratch import scratch_folder
from dtf.host.signals import preempting
from dtf.runs.run_folder import Run

if TYPE_CHECKING:
    from dtf.config.compose import Composed

FIRST, LAST = 2, 3
"""Where the first run ends, and the second, which goes on from its save."""
AT_FIRST = ("start", "data", "model", "fetch", "step", "evaluate", "save")
AGAIN = ("resume", "step", "evaluate", "save", "predict")
"""The parts that get a line where they work, in the first run and after it. Others do not depend on the recipe."""
SHOWN = ("mesh", "sends", "compared", "stages", "memory")
"""What is said of the start-up table."""
LAUNCHERS = ("local", "inline")
STOP_REQUESTED = "asked to stop in the middle of a dry run, of which nothing is kept; start it again"


class Watched(Protocol):
    """A job that trains and can be watched."""

    watch: Callable[[Event], None]

    def train(self, composed: Composed) -> int: ...


def dry_run(composed: Composed) -> int:
    """Train two steps, evaluate and save; go on from the save in new ranks for another step, evaluate, save; predict.
    Returns the exit code of the first part that fails. Leaves nothing behind.

    ConfigError for launchers that cannot start ranks again.
    """
    config = composed.config
    launcher, strategy = config["launcher"]["name"], config["strategy"]["name"]
    if launcher not in LAUNCHERS:
        raise ConfigError(
            f"train.dry_run starts all ranks of a run several times, which launcher={launcher} does not allow; use "
            f"launcher={' or launcher='.join(LAUNCHERS)}"
        )
    composed.check()
    print(f"dry run: recipe={config['recipe']['name']} strategy={strategy} launcher={launcher}", flush=True)
    with scratch_folder("dtf-dry-run-") as scratch, preempting(STOP_REQUESTED):
        folder, lines = scratch / "run", _Lines(launcher == "local")
        for first, until in ((0, FIRST), (FIRST, LAST)):
            again = composed.recompose([f"{key}={value}" for key, value in _keys(composed, folder, until).items()])
            lines.begin(resumed=bool(first))
            job: Watched = again.job  # type: ignore[assignment]
            job.watch = lines.see
            code = job.train(again)
            if code:
                return lines.end(code)
        if not lines.predicts:
            print("predict: not tried, as outputs are no scores of classes and the recipe has no probabilities()")
        elif code := _predict(composed, folder, lines):
            return lines.end(code)
    return lines.end(Exit.OK)


def _keys(composed: Composed, folder: Path, until: int) -> dict[str, object]:
    """Overrides of a run that ends after step `until`, where it evaluates and saves."""
    config = composed.config
    rows, steps = config["train"]["eval_rows"] or config["step"]["batch_size"] + 1, config["train"]["steps"]
    return {
        "run.dir": quoted(folder),
        "train.until": until,
        **({"train.steps": LAST} if steps is not None and steps < LAST else {}),
        "train.log_every": 1,
        "train.eval_every": until,
        "train.eval_rows": rows,
        "train.early_stop": 0,
        "checkpoint": "every",
        "checkpoint.every_steps": until,
        "checkpoint.delta_every": "null",
        "checkpoint.keep_best": 0,
        "checkpoint.mirror": "''",
        "checkpoint.resume": "auto" if until == LAST else "never",
        "observer": "[jsonl]",
    }


def _predict(composed: Composed, folder: Path, lines: _Lines) -> int:
    """Predict with what was saved, in one process."""
    again = composed.recompose(["strategy=ddp", "launcher.processes=1", f"run.dir={quoted(folder)}"])
    settings = again.check()
    run = Run(folder, folder.name, again.config, settings)
    return settings.launcher.launch(run, lines.see, "dtf.jobs.rank_dry_run:work")


class _Lines:
    """Prints a line for each part that was tried, with what is known of it."""

    def __init__(self, logs: bool) -> None:
        """`logs`: whether ranks write to logs, where their tracebacks would be."""
        self._shapes, self._guess, self._planned = "", "", list[str]()
        self._first_loss: float | None = None
        self._failed, self._failed_s, self._traced, self._logs = "", 0.0, False, logs
        self.begin(resumed=False)

    @property
    def predicts(self) -> bool:
        """Whether outputs are scores of classes, or the recipe makes probabilities of them."""
        return bool(self._guess)

    def begin(self, resumed: bool) -> None:
        """A run begins."""
        self._resumed = resumed
        self._evaluated: dict[str, float] = {}
        self._started: Started | None = None
        self._steps = 0

    def see(self, event: Event) -> None:
        match event:
            case Started(table=table):
                self._started = event
                shown = {name: table[name] for name in SHOWN if name in table}
                self._planned = [f"{name}:{chr(10) if chr(10) in text else ' '}{text}" for name, text in shown.items()]
            case Measured("train", _, _, _, values):
                self._steps += 1
                if self._first_loss is None:
                    self._first_loss = values.get("loss")
            case Measured("eval", _, _, _, values):
                self._evaluated = values
            case Tried("shapes", _, text):
                self._shapes = text
            case Tried("guess", _, text):
                self._guess = text
            case Tried(part, seconds, text, failed):
                if failed and self._failed:
                    return  # another rank has said so
                if failed:
                    self._failed, self._failed_s = part, seconds  # told last: rank 0 may tell of parts before
                elif part in (AGAIN if self._resumed else AT_FIRST):
                    self._print(part, seconds, text or self._text(part))
            case Failed() if not self._traced and self._logs:
                text = author_traceback(event)
                self._traced = bool(text)
                if text:  # the log of the rank is not kept
                    print(text, file=sys.stderr, flush=True)

    def end(self, code: int) -> int:
        """The last line. Returns the exit code as it is."""
        if code:
            if self._failed:
                self._print(self._failed, self._failed_s, "FAILED")
            where = f" in the part {self._failed}" if self._failed else ""
            print(f"dry run: failed{where}; the error line says why; its folder is removed", flush=True)
            return code
        for line in self._planned:
            print(line)
        print("dry run: every part works; its folder is removed", flush=True)
        return code

    def _text(self, part: str) -> str:
        table = self._started.table if self._started else {}
        match part:
            case "start":
                return str(table.get("strategy", ""))
            case "data":
                return str(table.get("recipe", "")).partition(": ")[2]
            case "model":
                return "" if self._resumed else f"a trial of a few rows: {self._shapes}"
            case "resume":
                at = self._started.step if self._started else 0
                return f"from the save of step {at}" if at else "nothing to go on from"
            case "step":
                return self._steps_text()
            case "evaluate":
                return " ".join(f"{name}={number_text(value)}" for name, value in self._evaluated.items())
        return ""

    def _steps_text(self) -> str:
        number = f"{self._steps} step{'s' * (self._steps != 1)}"
        if self._resumed or self._first_loss is None:
            return number
        guess = f"; a uniform guess would have {self._guess}" if self._guess else ""
        return f"{number}; loss of the first {self._first_loss:.4f}{guess}"

    def _print(self, part: str, seconds: float, text: str) -> None:
        print(f"{part:<9} {seconds:8.2f} s  {plain_text(text, 2000)}".rstrip(), flush=True)
