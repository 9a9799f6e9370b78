"""`job=relay`: one run handed from strategy to strategy, with processes killed on the way, against the same run
undisturbed under one strategy.
"""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.job import Job, Watchable
from dtf.api.registry import option, register
from dtf.config.strategy_spec import Entry, read_entry
from dtf.core.errors import ConfigError, DtfError, Exit, Preempted
from dtf.core.files import replace_text
from dtf.core.text import count_text, quoted, suggest
from dtf.host.signals import preempting
from dtf.jobs.fault_injection import KillRecord, KillTrigger, kill_launcher
from dtf.runs.run_folder import unique_id

if TYPE_CHECKING:
    from dtf.config.compose import Composed
    from dtf.runs.compare import Comparison
    from dtf.runs.recorded_run import RecordedRun


class Format(Enum):
    fp64 = "fp64"
    fp32 = "fp32"


STANDARD = (
    "dp processes=2",
    "ddp processes=2",
    "fsdp processes=3 kill=rank",
    "tensor processes=4",
    "pipeline processes=2 kill=launcher",
    "pserver processes=2 servers=1 kill=server",
)
LEGS = "job.legs"
RELAY, REFERENCE = "relay", "reference"
"""Run folders."""
ANY, LAUNCHER = "rank", "launcher"
STOP_REQUESTED = (
    "asked to stop in the middle of a relay, which says nothing of what it has not done, and cannot go on; start "
    "it again with another run.dir"
)
LATEST = 2
"""Steps before the end of a segment after which nobody is killed: the ranks are ahead of what they have reported."""


@dataclass(frozen=True)
class Kill:
    """A planned SIGKILL."""

    who: str  # `rank`, `launcher` or a role
    after: int  # reported steps
    rank: int  # of the process to kill, for all but the launcher


@dataclass(frozen=True)
class Segment:
    """Steps [first, last) of the run, under one strategy. `composed`: its config."""

    entry: Entry
    processes: int
    first: int
    last: int
    composed: Composed
    roles: dict[str, int]
    kill: Kill | None = None

    @property
    def world(self) -> str:
        """Its processes in words: `2 servers, 1 trainer` or `3 processes`."""
        if len(self.roles) > 1:
            return ", ".join(count_text(number, role) for role, number in self.roles.items())
        world = sum(self.roles.values())
        return count_text(world, "process") + (f", {self.processes} replicas" if world != self.processes else "")

    def called(self, rank: int) -> str:
        """`rank 2`; where there are several roles, the role and the number within it: `server 0`."""
        roles = _roles(self.roles)
        return f"{roles[rank]} {roles[:rank].count(roles[rank])}" if len(self.roles) > 1 else f"rank {rank}"


@register("job", "relay")
class Relay(Job):
    """Train on from one checkpoint under one strategy after the other, kill processes meanwhile, and compare with an
    undisturbed run; exit 1 on a break.
    """

    trains = True

    legs: list[str] = option(
        factory=lambda: list(STANDARD),
        doc="strategies, each for one segment of the run, in order, with options after a blank; options of the segment "
        "are `processes` (1), `steps` (job.steps) and `kill`: `rank` (any one), `launcher` or a role such as `server`, "
        "killed by SIGKILL in the middle",
    )
    reference: str = option(
        default="ddp processes=1",
        doc="the strategy of the undisturbed run, written as in job.legs, without `steps` and `kill`",
    )
    steps: int = option(default=30, least=2, doc="length of a segment without `steps`", unit="steps")
    save_every: int = option(
        default=8, least=1, doc="steps between two saves; each segment also saves at its end", unit="steps"
    )
    precision: Format = option(
        default=Format.fp64, doc="fp64: every tensor within 1e-10; fp32: all parameters together within 1e-5"
    )
    eval_rows: int = option(
        default=256,
        least=1,
        doc="evaluation rows by which the models are compared, every job.steps steps and at the end",
        unit="rows",
    )
    keep: bool = option(default=False, doc="keep the run folders of both runs beside relay.json")

    def run(self, composed: Composed) -> int:
        run = composed.config["run"]
        folder = Path(run["dir"] or Path("outputs", run["name"] or "relay", unique_id())).absolute()
        segments, reference = self._segments(composed, folder)
        folder.mkdir(parents=True, mode=0o700, exist_ok=bool(run["dir"]))
        if any(folder.iterdir()):
            raise ConfigError(
                f"run.dir={folder} is not empty, and a relay is run from its start; remove the folder or choose another"
            )
        with preempting(STOP_REQUESTED):
            try:
                return self._compare(composed, folder, segments, reference)
            finally:
                if not self.keep:
                    for name in (RELAY, REFERENCE):
                        shutil.rmtree(folder / name, ignore_errors=True)

    def _compare(self, composed: Composed, folder: Path, segments: list[Segment], reference: Segment) -> int:
        from dtf.runs.compare import compare
        from dtf.runs.recorded_run import RecordedRun

        print(f"{'steps':<9} {'strategy':<24} {'world':<22} {'seconds':>7}  killed", flush=True)
        rows = []
        for segment in [*segments, reference]:
            began = time.monotonic()
            killed = _run_segment(segment, folder / RELAY)
            rows.append(_row(segment, killed, time.monotonic() - began))
            print(_line(rows[-1], "nobody: the reference" if segment is reference else ""), flush=True)
        reference_row = rows.pop()
        a, b = RecordedRun.read(folder / REFERENCE), RecordedRun.read(folder / RELAY)
        verdict = compare(a, b, exact=self.precision is Format.fp64)
        config = composed.config
        report = {
            "recipe": config["recipe"]["name"],
            "optimizer": config["optimizer"]["name"],
            "precision": self.precision.value,
            "legs": rows,
            "reference": reference_row,
            **verdict.to_json(),
            "samples": sum(len(ids) for ranks in b.ids.values() for ids in ranks),
            "steps": _steps(a, b),
        }
        report["title"] = _title(report)
        replace_text(folder / "relay.json", json.dumps(report, indent=1))
        print(_summary(report, verdict))
        if importlib.util.find_spec("matplotlib") is None:
            print(f"{folder / 'relay.json'}; for the picture: {sys.executable} -m pip install 'matplotlib>=3.8'")
        else:
            from dtf.runs.charts import relay

            relay(report, folder / "relay.png")
            print(folder / "relay.png")
        return Exit.OK if verdict.ok else Exit.BUG

    # ------------------------------------------------------------ what is to be done

    def _segments(self, composed: Composed, folder: Path) -> tuple[list[Segment], Segment]:
        """All segments, and the reference run as one more. ConfigError for what cannot run."""
        config = composed.config
        if config["launcher"]["name"] != "local":
            raise ConfigError(
                f"launcher={config['launcher']['name']} has no ranks that job=relay could kill; use launcher=local"
            )
        if not self.legs:
            raise ConfigError(
                "job.legs=[] must hold at least one; job.legs=['ddp processes=2','fsdp processes=3 kill=rank']"
            )
        entries = [self._entry(composed, LEGS, text, ("processes", "steps", "kill")) for text in self.legs]
        widths = [_number(LEGS, entry, "processes", 1) for entry in entries]
        bounds = [0, *accumulate(_number(LEGS, entry, "steps", self.steps) for entry in entries)]
        micro = config["step"]["micro_batch_rows"] or -(-config["step"]["batch_size"] // max(widths))
        shared = {"train.steps": bounds[-1], "step.micro_batch_rows": micro, "checkpoint.delta_every": "null"}
        segments = []
        for number, (entry, width, (first, last)) in enumerate(zip(entries, widths, pairwise(bounds), strict=True)):
            more = {
                **shared,
                "checkpoint.every_steps": self.save_every,
                "checkpoint.resume": "auto",
                "run.dir": quoted(folder / RELAY),
            }
            segment = self._segment(composed, LEGS, entry, width, first, last, more)
            segments.append(replace(segment, kill=self._kill(segment, random.Random(f"{config['seed']} {number}"))))
        entry = self._entry(composed, "job.reference", self.reference, ("processes",))
        width, more = (
            _number("job.reference", entry, "processes", 1),
            {**shared, "checkpoint.every_steps": bounds[-1], "run.dir": quoted(folder / REFERENCE)},
        )
        return segments, self._segment(composed, "job.reference", entry, width, 0, bounds[-1], more)

    def _segment(
        self, composed: Composed, place: str, entry: Entry, processes: int, first: int, last: int, more: dict[str, Any]
    ) -> Segment:
        overrides = {
            "job": "train",
            **entry.overrides,
            "precision": self.precision.value,
            "launcher.processes": processes,
            "launcher.threads": 1,  # the same kernels everywhere: what is left to differ is the order of sums
            "train.until": last,
            "train.log_every": 1,
            "train.eval_every": self.steps,
            "train.eval_rows": self.eval_rows,
            "train.early_stop": 0,
            "train.dry_run": "false",
            "train.record": "true",
            "checkpoint": "every",
            "checkpoint.keep_best": 0,
            "checkpoint.mirror": "''",
            "checkpoint.resume": "never",
            "observer": "[jsonl]",
            **more,
        }
        try:
            again = composed.recompose([f"{key}={value}" for key, value in overrides.items()])
            settings = again.check()
            settings.launcher.check(settings.strategy)
        except ConfigError as refusal:
            raise ConfigError(f"{place} has '{entry.text}': {refusal}") from refusal
        return Segment(entry, processes, first, last, again, settings.strategy.roles(processes))

    def _entry(self, composed: Composed, place: str, text: str, list_options: tuple[str, ...]) -> Entry:
        return read_entry(composed, place, text, list_options, {"launcher.processes": "write processes=N"})

    def _kill(self, segment: Segment, chance: random.Random) -> Kill | None:
        """Which process to kill, and when: so late between two saves that at least half of job.save_every is lost."""
        who, has = segment.entry.list_options.get("kill"), f"job.legs has '{segment.entry.text}'"
        if who is None:
            return None
        if who not in (ANY, LAUNCHER, *segment.roles):
            raise ConfigError(f"{has}, but kill={who} names nobody; {suggest(who, (ANY, LAUNCHER, *segment.roles))}")
        every, lost = self.save_every, max(1, self.save_every // 2)
        moments = [
            step
            for step in range(segment.first + 1, segment.last - LATEST)
            if step - max(segment.first, step - step % every) >= lost
        ]
        if not moments:
            raise ConfigError(
                f"{has}, but no step between two saves to kill somebody at; use more steps, or a larger job.save_every"
            )
        ranks = [rank for rank, role in enumerate(_roles(segment.roles)) if who in (role, ANY, LAUNCHER)]
        return Kill(who, chance.choice(moments), chance.choice(ranks))


def _run_segment(segment: Segment, folder: Path) -> KillRecord | None:
    """Train one segment to its end. DtfError when it ends before a kill is noticed, or fails."""
    if segment.kill is None:
        _train(segment)
        return None
    if segment.kill.who == LAUNCHER:
        who = "the launcher"
        trigger = KillTrigger(at=kill_launcher(segment.composed.command, folder, segment.kill.after))
    else:
        from dtf.launch.forkserver_cache import fork_server

        server, rank = fork_server(segment.composed.config["launcher"]["env"]), segment.kill.rank
        who = segment.called(rank)
        trigger = KillTrigger(segment.kill.after, lambda: server.signal(rank, signal.SIGKILL))
    _train(segment, trigger)
    killed = trigger.record(who)
    if killed is None:
        raise DtfError(
            f"the segment '{segment.entry.text}' was over before {who} was missed, killed at step "
            f"{segment.kill.after}; give it more steps"
        )
    return killed


def _train(segment: Segment, trigger: KillTrigger | None = None) -> None:
    job = segment.composed.job
    if trigger is not None and isinstance(job, Watchable):
        job.watch = trigger.see
    code = job.run(segment.composed)
    if code == Exit.PREEMPTED:
        raise Preempted(STOP_REQUESTED)
    if code:
        raise DtfError(f"the segment '{segment.entry.text}' ended with exit code {code}; its own error line says why")


def _roles(roles: dict[str, int]) -> list[str]:
    """The role of each rank. Ranks are numbered role by role."""
    return [role for role, number in roles.items() for _ in range(number)]


def _number(place: str, entry: Entry, key: str, default: int) -> int:
    text = entry.list_options.get(key, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{place} has '{entry.text}'; {key}={text} must be a whole number from 1 on")
    return int(text)


# ---------------------------------------------------------------- what is printed


def _row(segment: Segment, killed: KillRecord | None, seconds: float) -> dict[str, Any]:
    options = " ".join(
        f"{key}={value}"
        for key, value in segment.entry.options.items()
        if not (key in ("servers", "trainers") and len(segment.roles) > 1)
    )
    row = {
        "strategy": f"{segment.entry.strategy} {options}".strip(),
        "world": segment.world,
        "first": segment.first,
        "last": segment.last,
        "seconds": round(seconds, 1),
    }
    return row | ({"killed": asdict(killed)} if killed else {})


def _line(row: dict[str, Any], remark: str) -> str:
    if killed := row.get("killed"):
        remark = f"{killed['who']} at step {killed['at']}, done again from {killed['again']}"
    steps = f"{row['first']}-{row['last']}"
    return f"{steps:<9} {row['strategy']:<24} {row['world']:<22} {row['seconds']:7.1f}  {remark}".rstrip()


def _steps(a: RecordedRun, b: RecordedRun) -> list[dict[str, Any]]:
    """Loss and gradient norm of the reference and of the relay, by finished steps."""
    return [
        {"step": step, **{key: [a.metrics[step][key], b.metrics[step][key]] for key in ("loss", "grad_norm")}}
        for step in sorted(a.metrics.keys() & b.metrics)
    ]


def _title(report: dict[str, Any]) -> str:
    """What a picture says in one line."""
    segments = report["legs"]
    killed = count_text(sum("killed" in segment for segment in segments), "kill")
    near = (
        f"every tensor within {report['tensor']:.0e}"
        if report["precision"] == Format.fp64.value
        else f"all parameters within {report['parameters']:.0e}"
    )
    end = f"{near} of the undisturbed run" if report["ok"] else f"broken: {report['first']}"
    return f"One run, {count_text(len(segments), 'segment')}, {killed}, the same {report['samples']:,} samples: {end}"


def _summary(report: dict[str, Any], verdict: Comparison) -> str:
    segments = report["legs"]
    killed = [segment["killed"] for segment in segments if "killed" in segment]
    done = f"{segments[-1]['last']} steps in {count_text(len(segments), 'segment')}, {count_text(len(killed), 'kill')}"
    done += f", {count_text(sum(kill['at'] - kill['again'] for kill in killed), 'step')} done again" if killed else ""
    if not verdict.ok:
        step = re.search(r" at step (\d+)", verdict.first)
        segment = next(
            (segment for segment in segments if step and segment["first"] <= int(step[1]) < segment["last"]), None
        )
        where = f", under {segment['strategy']} ({segment['world']})" if segment else ""
        return f"{done}\nBREAK{where}: {verdict.first}"
    return (
        f"{done}; {report['samples']:,} samples, the same ones in the same order as the reference\n"
        f"differences: loss {verdict.loss:.1e}, gradient norm {verdict.grad_norm:.1e}, evaluation "
        f"{verdict.evaluation:.1e}, all parameters {verdict.parameters:.1e}, worst tensor {verdict.tensor:.1e} "
        f"({verdict.worst}); bound {verdict.bound:.0e}"
    )
