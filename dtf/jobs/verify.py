"""`job=verify`: compares the numbers of a recipe under each strategy and world size with those of one process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from enum import Enum
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job, Watchable
from dtf.api.launcher import failures_told
from dtf.api.registry import option, register
from dtf.config.inherit import saved_config
from dtf.config.strategy_spec import read_entry
from dtf.core.errors import ConfigError, DtfError, Exit, LayoutError, NeverMeetError, Preempted
from dtf.core.files import replace_text
from dtf.core.text import count_text, quoted
from dtf.core.types import Event, Note
from dtf.host.devices import cores
from dtf.host.signals import Stop
from dtf.jobs.verify_text import EXACT, compared, explain, line, markdown, replayed
from dtf.runs.run_folder import Run, unique_id

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.runs.recorded_run import RecordedRun


class Output(Enum):
    text = "text"
    json = "json"
    markdown = "markdown"


NOISES = (1, 2)
"""Seeds of the runs that show what rounding does to the reference."""

PRECISIONS = (EXACT, "fp32")
REFERENCE = "ddp"
"""The strategy of the reference, in one process. With nothing to divide, the model is the same under all of them."""


@register("job", "verify")
class Verify(Job):
    """Run the first steps of a recipe in one process, and under each strategy on each number of processes; compare
    every number, those of an evaluation too; exit 1 on a break.

    Each comparison fixes the micro-batches: `micro_batches` per process, so that batch statistics are the same on both
    sides.
    """

    trains = True

    steps: int = option(default=8, least=1, doc="length of each run", unit="steps")
    strategies: list[str] = option(
        factory=list,
        doc="strategies to compare with the reference, with options after a blank: ddp, 'tensor degree=2'; empty: all "
        "of them",
    )
    processes: list[int] = option(
        factory=lambda: [1, 2, 4], least=1, doc="numbers of processes (replicas, for strategies in one process)"
    )
    precisions: list[str] = option(
        factory=lambda: [EXACT, "fp32"],
        doc="fp64: every tensor within 1e-10; fp32: all parameters together within 1e-5",
    )
    micro_batches: list[int] = option(
        factory=lambda: [1, 2], least=1, doc="micro-batches per process; more than one accumulates gradients"
    )
    batch_size: int = option(default=26, least=1, doc="global batch; the default divides unevenly", unit="rows")
    eval_rows: int = option(
        default=256, least=0, doc="evaluation rows by which the models are compared at the end; 0: none", unit="rows"
    )
    format: Output = option(default=Output.text, doc="what is printed; verify.json is written either way")
    replay: str = option(
        default="",
        doc="instead: the folder of a run with strategy=pserver and strategy.record, whose recorded order is done "
        "once more, one update after the other; it must end with the same numbers",
    )
    keep: bool = option(default=False, doc="keep the run folders of all runs beside verify.json")

    def run(self, composed: Composed) -> int:
        if self.replay:
            return self._replay(composed)
        strategies = self._check(composed)
        run = composed.config["run"]
        folder = Path(run["dir"] or Path("outputs", run["name"] or "verify", unique_id())).absolute()
        folder.mkdir(parents=True, mode=0o700, exist_ok=bool(run["dir"]))
        rows: list[dict[str, Any]] = []
        references: dict[tuple[str, int], _Reference] = {}
        with _runs(folder, self.keep) as runs, Stop() as self._stop:
            for precision in self.precisions:
                for processes in self.processes:
                    for count in self.micro_batches:
                        micro = -(-self.batch_size // (processes * count))
                        key = (precision, micro)
                        if key not in references:
                            references[key] = _Reference(
                                lambda name, noise, precision=precision, micro=micro: self._train(
                                    composed, runs, name, REFERENCE, 1, precision, micro, noise
                                )
                            )
                        for strategy in strategies:
                            rows.append(
                                self._row(composed, runs, references[key], strategy, processes, precision, micro)
                            )
                            explain(rows)
                            if self.format is Output.text:
                                print(line(rows[-1], first=len(rows) == 1), flush=True)
        if all("refused" in row for row in rows):
            raise ConfigError(f"nothing to compare: {rows[0]['refused']}")
        rows, refused = [row for row in rows if "refused" not in row], [row for row in rows if "refused" in row]
        broken = [row for row in rows if not row["ok"]]
        wrong_layout = any(row["wrong_layout"] for row in refused)
        report = {
            "recipe": composed.config["recipe"]["name"],
            "optimizer": composed.config["optimizer"]["name"],
            "ok": not broken and not wrong_layout,
            "runs": rows,
            "refused": refused,
        }
        replace_text(folder / "verify.json", json.dumps(report, indent=1))
        if self.format is Output.json:
            print(json.dumps(report, indent=1))
        elif self.format is Output.markdown:
            print(markdown(rows))
        else:
            refusals = f", {len(refused)} {'was' if len(refused) == 1 else 'were'} refused" if refused else ""
            mistake = "; the recipe's own layout is wrong, see above" if wrong_layout else ""
            print(
                f"{len(rows) - len(broken)} of {len(rows)} runs have the reference's numbers in "
                f"{compared(max(each.steps for each in references.values()), self.steps)}{refusals}{mistake}; "
                f"{folder / 'verify.json'}"
            )
        return Exit.BUG if broken else Exit.CONFIG if wrong_layout else Exit.OK

    def _check(self, composed: Composed) -> list[str]:
        if not composed.settings.launcher.starts_ranks:
            raise ConfigError(
                f"launcher={composed.config['launcher']['name']} takes part in one run, and job=verify starts many, "
                "each with all of its processes; use launcher=local"
            )
        strategies = list(dict.fromkeys(self.strategies)) or composed.composer.options("strategy")
        for text in strategies:
            read_entry(
                composed,
                "job.strategies",
                text,
                elsewhere={"launcher.processes": "numbers of processes are in job.processes"},
            )
        for name in self.precisions:
            if name not in PRECISIONS:
                raise ConfigError(f"job.precisions names {name}; there is a bound for {' and '.join(PRECISIONS)} only")
        for key in ("processes", "micro_batches", "precisions"):
            if not getattr(self, key):
                raise ConfigError(f"job.{key}=[] must hold at least one")
        if max(self.processes) * max(self.micro_batches) > self.batch_size:
            raise ConfigError(
                f"job.batch_size={self.batch_size} is less than {max(self.processes)} processes x "
                f"{max(self.micro_batches)} micro-batches; use at least {max(self.processes) * max(self.micro_batches)}"
            )
        self._check_any(composed, strategies)
        return strategies

    def _replay(self, composed: Composed) -> int:
        default, accepted = Verify(), ("format", "replay")
        others = [
            field.name
            for field in fields(self)
            if field.name not in accepted and getattr(self, field.name) != getattr(default, field.name)
        ]
        if others:
            raise ConfigError(
                f"job.{others[0]} is of no account with job.replay, which does one recorded run again; leave it out"
            )
        from dtf.jobs.use_model import print_event

        folder = Path(self.replay).absolute()
        recorded = saved_config(folder / "config.yaml", f"job.replay={self.replay}", composed.config["plugins"])
        recorded["run"]["dir"] = str(folder)
        # As many threads as its trainers had: sums in the same order, so that replays of runs that diverged end with
        # the same numbers too.
        roles = json.loads((folder / "run.json").read_text())["world"].get("roles", {})
        trainers = roles.get("trainer", 1)
        if "server" in roles:  # earlier versions also counted them by an environment variable
            recorded["strategy"]["servers"] = roles["server"]
        threads = (
            composed.config["launcher"].get("threads")
            or recorded["launcher"].get("threads")
            or max(1, cores() // trainers)
        )
        single = composed.recompose(
            ["job=verify", "strategy=ddp", "launcher=local", "launcher.processes=1", f"launcher.threads={threads}"]
        )
        with tempfile.TemporaryDirectory(prefix="dtf-replay-") as scratch:
            run = Run(Path(scratch), unique_id(), recorded, single.settings)
            code = single.settings.launcher.launch(run, print_event, "dtf.jobs.rank_replay:work")
            if code:
                return code
            result = json.loads(Path(scratch, "replay.json").read_text())
        if self.format is Output.json:
            print(json.dumps(result, indent=1))
        else:
            print(replayed(result, recorded["precision"]["param"], threads))
        return Exit.OK if result["ok"] else Exit.BUG

    def _check_any(self, composed: Composed, strategies: list[str]) -> None:
        """Raise ConfigError when no strategy runs on any number of processes, as far as can be told without
        training.
        """

        def check(strategy: str, processes: int) -> None:
            self._composed(composed, Path("unused"), strategy, processes, self.precisions[0], 0).check()

        check(REFERENCE, 1)
        refusals = []
        for strategy, processes in product(strategies, self.processes):
            try:
                return check(strategy, processes)
            except ConfigError as refusal:
                refusals.append(_with_job_keys(refusal))
        raise ConfigError(
            f"nothing to compare: none of job.strategies={strategies} runs on job.processes={self.processes}: "
            f"{refusals[0]}"
        )

    def _train(
        self,
        composed: Composed,
        runs: Path,
        name: str,
        strategy: str,
        processes: int,
        precision: str,
        micro: int,
        noise: int = 0,
    ) -> RecordedRun:
        from dtf.runs.recorded_run import RecordedRun

        folder = runs / f"{name}-{precision}-{micro}"
        who = f"strategy={strategy} on {count_text(processes, 'process')} with precision={precision}"
        again = self._composed(composed, folder, strategy, processes, precision, micro, noise)
        job = again.job
        if isinstance(job, Watchable):
            job.watch = lambda event: _tell(who, event)
        with failures_told(lambda failure, raised: failure.exit == Exit.CONFIG):
            code = 0 if self._stop.count else job.run(again)
        if self._stop.count or code == Exit.PREEMPTED:  # however the run ended that was cut
            raise Preempted("asked to stop while comparing; nothing is said of the runs that are left")
        cause, raised = _cause(folder)
        if code == Exit.CONFIG and raised != NeverMeetError.__name__:
            raise (LayoutError if raised == LayoutError.__name__ else ConfigError)(cause)
        if code:
            kept = "; job.keep=true keeps its logs" if ".log" in cause and not self.keep else ""
            raise RunFailed(f"{who} ended with exit code {code}: {cause}{kept}")
        return RecordedRun.read(folder)

    def _composed(
        self,
        composed: Composed,
        folder: Path,
        strategy: str,
        processes: int,
        precision: str,
        micro: int,
        noise: int = 0,
    ) -> Composed:
        """The config of one run."""
        chosen, *options = shlex.split(strategy)
        overrides = {
            "job": "train",
            "strategy": chosen,
            **{f"strategy.{key}": value for key, _, value in (option.partition("=") for option in options)},
            "precision": precision,
            "launcher.processes": processes,
            "launcher.threads": 1,  # the same kernels on both sides: what is left to differ is the order of sums
            "step.batch_size": self.batch_size,
            "step.micro_batch_rows": micro,
            "train.until": self.steps,
            "train.log_every": 1,
            "train.eval_every": self.steps if self.eval_rows else 0,
            "train.eval_rows": self.eval_rows,
            "train.early_stop": 0,
            "train.dry_run": "false",
            "train.record": "true",
            "train.perturb": noise,
            "checkpoint": "every",
            "checkpoint.every_steps": self.steps,
            "checkpoint.delta_every": "null",
            "checkpoint.keep_best": 0,
            "checkpoint.mirror": "''",
            "checkpoint.resume": "never",
            "observer": "[jsonl]",
            "run.dir": quoted(folder),
        }
        if "max_restarts" in composed.config["launcher"]:
            overrides["launcher.max_restarts"] = 0  # what hangs would hang again
        return composed.recompose([f"{key}={value}" for key, value in overrides.items()])

    def _row(
        self,
        composed: Composed,
        runs: Path,
        reference: _Reference,
        strategy: str,
        processes: int,
        precision: str,
        micro: int,
    ) -> dict[str, Any]:
        from dtf.runs.compare import compare

        row = {"strategy": strategy, "processes": processes, "precision": precision, "micro_batch_rows": micro}
        of_reference = reference.run()
        try:
            run = self._train(
                composed,
                runs,
                f"{re.sub(r'[^a-z0-9=_.]+', '-', strategy)}-{processes}",
                strategy,
                processes,
                precision,
                micro,
            )
            return row | compare(of_reference, run, precision == EXACT, reference.noisy).to_json()
        except RunFailed as failure:
            return row | {"ok": False, "first": str(failure)}
        except ConfigError as refusal:
            # not every strategy runs every recipe on any number
            return row | {
                "ok": True,
                "worst": f"refused: {_with_job_keys(refusal)}",
                "refused": _with_job_keys(refusal),
                "wrong_layout": isinstance(refusal, LayoutError),
            }


class _Reference:
    """The run to compare with, and those that show what rounding does to it: each is trained when it is asked for."""

    def __init__(self, train: Callable[[str, int], RecordedRun]) -> None:
        self._train = train
        self._runs: dict[int, RecordedRun] = {}

    def run(self, noise: int = 0) -> RecordedRun:
        if noise not in self._runs:
            self._runs[noise] = self._train(f"reference-{noise}" if noise else "reference", noise)
        return self._runs[noise]

    @property
    def steps(self) -> int:
        """How many were recorded."""
        return max((len(run.metrics) for run in self._runs.values()), default=0)

    def noisy(self) -> list[RecordedRun]:
        return [self.run(noise) for noise in NOISES]


def _tell(who: str, event: Event) -> None:
    """Say what a run has to say beside its numbers, such as who waits for whom."""
    if isinstance(event, Note):
        print(f"dtf: {who}: {event.text}", file=sys.stderr, flush=True)


def _cause(folder: Path) -> tuple[str, str]:
    """Why a run ended, as it says itself, and the class of the error that ended it."""
    try:
        record = json.loads((folder / "run.json").read_text())
        return str(record["cause"]), str(record.get("error", ""))
    except (OSError, ValueError, KeyError):
        return "its own error line says why", ""


def _with_job_keys(refusal: ConfigError) -> str:
    """The text of a refusal, with the key of this job in place of the launcher's."""
    return str(refusal).replace("launcher.processes", "job.processes")


class RunFailed(DtfError):
    """A run to compare failed; its own error line says why."""


@contextmanager
def _runs(parent: Path, keep: bool) -> Iterator[Path]:
    """A folder for the run folders, removed at the end unless they are to be kept."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="runs-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
