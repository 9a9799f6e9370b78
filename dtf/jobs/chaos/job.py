"""`job=chaos`: rehearse faults on the run of this command line, and say what each of them cost."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path
from signal import strsignal
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job
from dtf.api.registry import option, register
from dtf.config.strategy_spec import read_entry
from dtf.core.errors import ConfigError, Exit, Preempted
from dtf.core.files import replace_text
from dtf.core.text import count_text, suggest
from dtf.host.signals import Stop
from dtf.jobs.chaos.folder import TRIALS, trials_folder
from dtf.runs.run_folder import unique_id

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.jobs.chaos.trial import Outcome, Subject

REPORT = "chaos.json"


@register("job", "chaos")
class Chaos(Job):
    """Train the run again and again, disturb it each time at a random moment, and compare it with the run left alone.
    Exit 1 when a trial breaks a promise.
    """

    trains = True

    faults: list[str] = option(
        factory=list,
        doc="which faults to rehearse, see docs/reliability.md; empty: all that this machine and the strategy allow",
    )
    strategies: list[str] = option(
        factory=list,
        doc="strategies to rehearse them on, with options after a blank, and `processes`; empty: the one of this "
        "command line",
    )
    trials: int = option(default=30, least=1, doc="trials of this seed, dealt out over faults and strategies")
    seed: int = option(default=0, least=0, doc="what is drawn follows from it; another seed adds other trials")
    minutes: float = option(default=0.0, least=0, doc="begin no trial after so long; 0: no limit", unit="minutes")
    steps: int = option(default=24, least=4, doc="length of each run", unit="steps")
    save_every: int = option(default=5, least=1, doc="steps between two saves", unit="steps")
    eval_rows: int = option(default=64, least=1, doc="evaluation rows, every job.save_every + 2 steps", unit="rows")
    keep: bool = option(default=False, doc="keep the folders of broken trials")

    def run(self, composed: Composed) -> int:
        from dtf.jobs.chaos.faults import FAULTS, fits
        from dtf.jobs.chaos.reference import add_reference, refuse_other_options
        from dtf.launch.forkserver_cache import shut_down

        plans = [self._planned(composed, text) for text in self.strategies or [None]]
        faults = self._faults(_no_heirs(composed, plans))
        pairs = [
            (name, number) for number, plan in enumerate(plans) for name in faults if fits(FAULTS[name], plan.roles)
        ]
        if idle := [name for name in self.faults if name not in {name for name, _ in pairs}]:
            raise ConfigError(f"job.faults has '{idle[0]}', which hits nobody under these strategies; leave it out")
        run = composed.config["run"]
        folder = Path(run["dir"] or Path("outputs", run["name"] or "chaos", unique_id())).absolute()
        shut_down()  # each trial has its own
        with trials_folder(folder, composed.config, self._lengths(), self._own_options().keys()), Stop() as stop:
            print(f"run.dir={folder}\n{self._told_lengths()}", flush=True)
            refuse_other_options(plans, folder)
            subjects = [add_reference(plan, folder, lambda: _stopped(stop, folder)) for plan in plans]
            heirs = [subject for subject in subjects if subject.repeats]  # others have no numbers to hand over
            chosen = [
                (name, subjects[number])
                for name, number in pairs
                if not FAULTS[name].hands_over or (subjects[number].repeats and len(heirs) > 1)
            ]
            if not chosen:
                raise ConfigError(
                    "job.faults has only faults that no strategy of job.strategies can have: of these, fewer than two "
                    "repeat their numbers, and no other can take a run over"
                )
            return self._rehearse(composed, folder, chosen, heirs, stop)

    # ------------------------------------------------------------ what is to be done

    def _faults(self, no_heirs: str) -> list[str]:
        """The faults to rehearse. ConfigError for one that is unknown, or that was asked for and cannot be.

        `no_heirs`: why no run can go on under another strategy; empty where it can.
        """
        from dtf.jobs.chaos.faults import FAULTS

        def refused(name: str) -> str:
            return FAULTS[name].refused() or (no_heirs if FAULTS[name].hands_over else "")

        for name in self.faults:
            if name not in FAULTS:
                raise ConfigError(f"job.faults has '{name}'; {suggest(name, tuple(FAULTS))}")
            if why := refused(name):
                raise ConfigError(f"job.faults has '{name}', which cannot be rehearsed: {why}; leave it out")
        chosen = list(dict.fromkeys(self.faults))
        for name in FAULTS if not chosen else ():
            if why := refused(name):
                print(f"left out: {name}; {why}")
        return chosen or [name for name in FAULTS if not refused(name)]

    def _lengths(self) -> dict[str, int]:
        """What all trials of a folder have in common."""
        return {"steps": self.steps, "save_every": self.save_every, "eval_rows": self.eval_rows}

    def _told_lengths(self) -> str:
        evaluated = f"evaluated every {self.save_every + 2} on {self.eval_rows} rows (job.eval_rows)"
        return f"each run: {self.steps} steps (job.steps), saved every {self.save_every} (job.save_every), {evaluated}"

    def _planned(self, composed: Composed, text: str | None) -> Subject:
        """The runs of a strategy, an entry of job.strategies; None: the one of this command line."""
        from dtf.jobs.chaos.reference import plan

        if composed.config["launcher"]["name"] != "local":
            raise ConfigError(
                f"launcher={composed.config['launcher']['name']} has no ranks that job=chaos could disturb; use "
                "launcher=local"
            )
        elsewhere = {"launcher.processes": "write processes=N"}
        if composed.config["checkpoint"]["every_steps"] == 0:
            raise ConfigError(
                "checkpoint.every_steps=0 saves nothing, and job=chaos is about going on from what was saved, every "
                "job.save_every steps; leave it out"
            )
        entry = read_entry(composed, "job.strategies", text, ("processes",), elsewhere) if text is not None else None
        processes = entry.list_options.get("processes") if entry else None
        if processes is not None and not (processes.isdecimal() and int(processes)):
            raise ConfigError(f"job.strategies has '{text}'; processes={processes} must be a whole number from 1 on")
        overrides = {
            "job": "train",
            **(entry.overrides if entry else {}),
            **({"launcher.processes": processes} if processes else {}),
            "launcher.threads": composed.config["launcher"]["threads"] or 1,
            **self._own_options(),
        }
        try:
            again = composed.recompose([f"{key}={value}" for key, value in overrides.items()])
            settings = again.check()
            settings.launcher.check(settings.strategy)
        except ConfigError as refusal:
            raise ConfigError(f"job.strategies has '{text}': {refusal}" if text else str(refusal)) from refusal
        return plan(again, settings, text or "")

    def _own_options(self) -> dict[str, Any]:
        """What the job sets in each run, whatever the user's config has."""
        return {
            "train.steps": self.steps,
            "train.epochs": "null",
            "train.until": "null",
            "train.log_every": 1,
            "train.eval_every": self.save_every + 2,
            "train.eval_rows": self.eval_rows,
            "train.early_stop": 0,
            "train.dry_run": "false",
            "train.record": "true",
            "checkpoint": "every",
            "checkpoint.every_steps": self.save_every,
            "checkpoint.delta_every": "null",
            "checkpoint.resume": "auto",
            "checkpoint.mirror": "''",
            "observer": "[jsonl,events]",
        }

    # ------------------------------------------------------------ doing it

    def _rehearse(
        self, composed: Composed, folder: Path, pairs: list[tuple[str, Subject]], heirs: list[Subject], stop: Stop
    ) -> int:
        from dtf.jobs.chaos import preload, results
        from dtf.jobs.chaos.faults import FAULTS
        from dtf.jobs.chaos.trial import run_trial

        def check() -> None:
            _stopped(stop, folder)

        library = preload.build(folder) if any(FAULTS[name].needs_control for name, _ in pairs) else None
        path, began = folder / TRIALS, time.monotonic()
        known = {(o.seed, o.number, o.fault, o.strategy) for o in results.read(path)}
        for number in range(self.trials):
            name, subject = self._dealt(pairs, number)
            if (self.seed, number, name, subject.strategy) in known:
                continue
            if self.minutes and time.monotonic() - began > self.minutes * 60:
                break
            if stop.count:
                self._report(composed, folder, results.read(path), 0)
            check()
            place = folder / f"trial_{self.seed}_{number}"
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(mode=0o700)
            others = [heir for heir in heirs if heir is not subject]
            outcome = run_trial(subject, name, self.seed, number, place, library, check, others)
            results.append(path, outcome)
            known.add((self.seed, number, name, subject.strategy))
            print(_line(outcome), flush=True)
            if not (self.keep and outcome.wrong):
                shutil.rmtree(place, ignore_errors=True)
        dealt = [(number, *self._dealt(pairs, number)) for number in range(self.trials)]
        left = sum((self.seed, number, name, subject.strategy) not in known for number, name, subject in dealt)
        return self._report(composed, folder, results.read(path), left)

    def _dealt(self, pairs: list[tuple[str, Subject]], number: int) -> tuple[str, Subject]:
        """Each pair of a fault and a strategy in turn, in another order each time round."""
        round, at = divmod(number, len(pairs))
        order = list(range(len(pairs)))
        random.Random(f"chaos order {self.seed} {round}").shuffle(order)
        return pairs[order[at]]

    def _report(self, composed: Composed, folder: Path, outcomes: list[Outcome], left: int) -> int:
        """`left`: trials of this command that were not begun."""
        from dtf.jobs.chaos import results
        from dtf.jobs.chaos.trial import SAMPLES

        rows = results.rows(outcomes)
        broken = [outcome for outcome in outcomes if outcome.wrong]
        missed = sum(outcome.missed for outcome in outcomes)
        config = composed.config
        report = {
            "recipe": config["recipe"]["name"],
            "optimizer": config["optimizer"]["name"],
            "precision": config["precision"]["name"],
            "cores": len(os.sched_getaffinity(0)),
            "seeds": sorted({outcome.seed for outcome in outcomes}),
            "ok": not broken,
            "rows": rows,
            "broken": [outcome.to_json() for outcome in broken],
        }
        apart = sorted({outcome.strategy for outcome in outcomes if outcome.equal == SAMPLES})
        notes = [f"{strategy}: two undisturbed runs differ, so samples alone are compared" for strategy in apart]
        replace_text(folder / REPORT, json.dumps(report, indent=1))
        replace_text(folder / "chaos.md", "\n".join([results.markdown(rows), "", *(f"- {note}" for note in notes), ""]))
        print("\n".join([results.table(rows), *([results.LEGEND] if rows else []), *notes]))
        for outcome in broken:
            print(f"broken: {_line(outcome)}")
        rest = f"; {count_text(left, 'trial')} of job.seed={self.seed} left, start again to go on" if left else ""
        most = f" (95 % sure: fewer than {results.rate(rows[-1]['bound'])})" if rows else ""
        print(f"{count_text(len(outcomes), 'trial')}, {len(broken)} broken{most}, {missed} met nothing{rest}")
        print("\n".join(str(folder / name) for name in (TRIALS, REPORT, "chaos.md")))
        if not rows:
            return Exit.OK
        if importlib.util.find_spec("matplotlib") is None:
            print(f"for the picture: {sys.executable} -m pip install 'matplotlib>=3.8'")
        else:
            from dtf.runs.charts import chaos

            chaos(report, folder / "chaos.png")
            print(folder / "chaos.png")
        return Exit.OK if not broken else Exit.BUG


def _no_heirs(composed: Composed, plans: list[Subject]) -> str:
    """Why a run cannot go on under another strategy with the same numbers. Empty: it can."""
    if len(plans) < 2:
        return "it needs two job.strategies or more"
    if not all(plan.exact for plan in plans):
        return "it needs precision=fp64, in which the numbers of all strategies are alike"
    if not composed.config["step"]["micro_batch_rows"]:
        return "it needs step.micro_batch_rows, so that all strategies have the same micro-batches"
    return ""


def _stopped(stop: Stop, folder: Path) -> None:
    if stop.count:
        raise Preempted(f"asked to stop; the trials that are done are kept, start again with run.dir={folder} to go on")


def _line(outcome: Outcome) -> str:
    where = f"{outcome.phase} step {outcome.step}" if outcome.step >= 0 else outcome.phase
    did = "; ".join(outcome.done) or outcome.fault
    did += " (does not count: it met nothing)" if outcome.missed else ""
    what = f"seed={outcome.seed} {outcome.number}: {outcome.strategy}, {where}: {did}"
    end = outcome.wrong and f"BROKEN: {outcome.wrong}"
    codes = ", ".join(str(code) if code >= 0 else strsignal(-code) or f"signal {-code}" for code in outcome.codes)
    timed = f", recovered in {outcome.recovered_s:.2f} s" if outcome.recovered_s is not None else ""
    return f"{what}: {end or f'exit {codes}, {outcome.lost_steps} steps again, {outcome.equal}{timed}'}"
