"""Jobs on a real Slurm that are preempted, signalled, timed out, drained and left without a node at random moments.

python -m tests.support.slurm_campaign FOLDER [--seed=1] [--only=ddp,fsdp,pserver,sweep] [--events=15]

Each run must end by itself, lose no step where it had notice, go back to its newest checkpoint where it had none, and
end with the bits of the same run without Slurm. What happened is written to FOLDER/events.jsonl, a line for each event.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dtf.checkpoint.storage import checkpoints, step_of
from tests.support.slurmbox import FINAL, Refused, SlurmBox, slurmbox

ROOT = Path(__file__).parents[2]
SMALL = [
    "recipe=resnet_shapes", "step.batch_size=32", "step.micro_batch_rows=16", "train.eval_rows=64", "train.log_every=1",
    "checkpoint.every_steps=25", "seed=5", "launcher.threads=1", "launcher.devices=cpu",
]  # fmt: skip
LONGER = ["step.batch_size=128", "step.micro_batch_rows=64"]
MODES = {
    "ddp": ["strategy=ddp", "train.steps=400", *LONGER],
    "fsdp": ["strategy=fsdp", "train.steps=400", *LONGER],
    "pserver": ["strategy=pserver", "strategy.servers=2", "train.steps=300", *LONGER],
}
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)
TRIALS = [f"lr.peak={rate}" for rate in RATES]
"""Names of a sweep's folders."""
TRIAL = ["train.steps=150", "launcher.processes=1"]
WITHOUT_NOTICE = {"lose_node", "kill_supervisor"}
PATIENCE_S = 120.0


@dataclass
class Event:
    """One disturbance. `after`: how long after a start of its job. `seen`: the last step that this start printed;
    `saved`: the newest checkpoint once the job had left; of a sweep the sums over the trials that ran. `hit`: False
    where the run had ended by itself before: then another one is hit instead.
    """

    mode: str
    kind: str
    after: str
    notice: bool
    seen: int = 0
    saved: int = 0
    hit: bool = True
    wrong: str = ""


@dataclass
class Campaign:
    box: SlurmBox
    folder: Path
    rng: random.Random
    events: list[Event] = field(default_factory=list)

    def dtf(self, *words: str, login: bool = True) -> str:
        """What a dtf command prints, on the login node or without Slurm."""
        command = [sys.executable, "-m", "dtf", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            self.box.command(*command) if login else command,
            cwd=self.folder, env=environment, capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        if done.returncode:
            raise AssertionError(f"{' '.join(words)}: {done.returncode}: {done.stderr or done.stdout}")
        return done.stdout

    def submit(self, run: Path, *words: str, doctor: bool = False) -> str:
        """Submit a run, or with `-m` a sweep; returns the number of its job. job=doctor takes seconds of its start."""
        self.dtf(*SMALL, *words, "launcher=slurm", f"launcher.doctor={str(doctor).lower()}", f"run.dir={run}")
        return str(json.loads((run / "job" / "job.json").read_text())["handle"]["job"])

    # ------------------------------------------------------------ events

    def preempt(self, job: str) -> None:
        with self.box.preempted(len(self.box.nodes)):
            self._left(job)

    def signal(self, job: str) -> None:
        try:
            self.box.call("scancel", "--state=RUNNING", "--signal=TERM", job)
        except Refused:  # it has ended just now
            if self.box.state(job) not in FINAL:
                raise
        self._left(job)

    def time_out(self, job: str) -> None:
        """With the notice that launcher.grace_s asks for: Slurm gives it up to a minute early."""
        try:
            self.box.call("scontrol", "update", f"JobId={job}", "EndTime=now+20")
        except Refused:
            if self.box.state(job) not in FINAL:
                raise
        self._left(job)
        if self.box.state(job) == "PENDING":
            self.box.call("scontrol", "update", f"JobId={job}", "TimeLimit=UNLIMITED")

    def drain(self, job: str) -> None:
        """As before maintenance: nothing new starts there, and what runs is asked to leave."""
        node = self.rng.choice(list(self.box.nodes))
        self.box.drain(node)
        self.signal(job)
        self.box.resume(node)

    def lose_node(self, job: str) -> None:
        """Power fails; a health check tells Slurm."""
        node = self.rng.choice(self._used(job))
        self.box.kill_node(node)
        self.box.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power")
        self._left(job)
        self.box.start_node(node)

    def kill_supervisor(self, job: str) -> None:
        """The process that watches ranks is killed, as for want of memory."""
        for pid in self.box.processes("--bundle=", node=self.rng.choice(self._used(job)))[:1]:
            os.kill(pid, 9)
        self._left(job)

    def _used(self, job: str) -> list[str]:
        text = self.box.call("squeue", "-h", "-j", job, "-o", "%N").split()
        names = self.box.call("scontrol", "show", "hostnames", ",".join(text)).split()
        return names or list(self.box.nodes)

    def _left(self, job: str) -> None:
        """Wait until the job waits again, or has ended. With notice of a preemption it is COMPLETING for a while.

        Of an array: until all tasks that run now have.
        """
        running = [record["JobId"] for record in self.box.jobs(job) if record["JobState"] not in ("PENDING", *FINAL)]
        gone = ("PENDING", *(state for state in FINAL if state != "PREEMPTED"))
        for number in running or [job]:
            self.box.wait_state(number, *gone, patience_s=PATIENCE_S)

    # ------------------------------------------------------------ a run

    def disturb(self, mode: str, run: Path, job: str, acts: list[Callable[[str], None]]) -> None:
        """Let each happen to a run, at a random moment after its job has started again, and take it from the list."""
        losses: list[int] = []  # the newest checkpoint at each
        while acts and self._started(job):
            moment = self._moment(run, job)
            if acts[-1].__name__ in WITHOUT_NOTICE:
                if losses[-2:] == [newest(run)] * 2:  # a third without a new checkpoint would rightly end the job
                    self.box.wait(
                        lambda: newest(run) > losses[-1] or self.box.state(job) != "RUNNING", "a save", PATIENCE_S
                    )
                losses.append(newest(run))
            if self.box.state(job) != "RUNNING":
                continue
            act = acts.pop()
            event = Event(mode, act.__name__, moment, act.__name__ not in WITHOUT_NOTICE)
            before, restarts = newest(run), self.box.job(job)["Restarts"]
            act(job)
            event.hit = self.box.job(job)["Restarts"] != restarts
            if not event.hit:
                acts.append(act)
            event.seen, event.saved = max(seen(log_of(run, job)), before), newest(run)
            if event.notice and event.saved < event.seen:
                event.wrong = "a step was lost"
            if event.saved < before:
                event.wrong = "a checkpoint was lost"
            self.note(event)

    def _moment(self, run: Path, job: str) -> str:
        """Let a job that has just started go on for a random time of its start, or for some steps."""
        if self.rng.random() < 0.4:
            after_s = self.rng.random() * 5
            time.sleep(after_s)  # the moment is what is varied; nothing is waited for
            return f"{after_s:.2f} s"
        steps = self.rng.randrange(1, 40)
        first: list[int] = []

        def trained() -> bool:
            at = seen(log_of(run, job))
            first.extend([at] if at and not first else [])
            return (bool(first) and at >= first[0] + steps) or self.box.state(job) != "RUNNING"

        self.box.wait(trained, f"{steps} steps of job {job}", PATIENCE_S)
        return f"{steps} steps"

    def note(self, event: Event) -> None:
        self.events.append(event)
        with (self.folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(asdict(event)) + "\n")
        print(f"{len(self.events):3} {event}", flush=True)

    def _started(self, job: str) -> bool:
        """Whether the job runs again; False when it has ended."""

        def running() -> str:
            record = self.box.job(job)
            self.box.release(record)
            return record["JobState"] if record["JobState"] not in ("PENDING", "COMPLETING", "REQUEUED") else ""

        return self.box.wait(running, f"job {job} runs", PATIENCE_S) == "RUNNING"

    def finish(self, mode: str, run: Path, job: str) -> None:
        """Wait for the end, and compare with the same run that nothing happened to."""
        state = self.box.wait_end(job, 400.0)
        told = self.dtf("job=status", f"job.run_folder={run}")
        # a run that ends a second after its time limit, which Slurm had no time to announce, is TIMEOUT to Slurm
        if state != "COMPLETED" and f"slurm job {job}: finished (" not in told:
            raise AssertionError(f"{mode}: job {job} ended as {state}: {told}")
        plain = self.folder / f"{mode}-undisturbed"
        differs = unlike(run, plain)
        print(f"{mode}: {'UNLIKE: ' + differs if differs else 'the same bits'}", flush=True)
        if differs:
            raise AssertionError(f"{mode}: {differs}")

    def one(self, mode: str, events: int) -> None:
        """Runs of one mode, one after the other, until so many events have happened."""
        plain, words = self.folder / f"{mode}-undisturbed", MODES[mode]
        self.dtf("launcher=local", "launcher.processes=2", f"run.dir={plain}", *SMALL, *words, login=False)
        where = ["launcher.nodes=2", "launcher.processes=1"]
        kinds = [self.preempt, self.lose_node, self.signal, self.drain, self.kill_supervisor, self.time_out]
        acts = [kinds[at % len(kinds)] for at in range(events)]
        self.rng.shuffle(acts)
        number = 0
        while acts:
            number += 1
            run = self.folder / f"{mode}{number}"
            roles = ["launcher.allow_insecure=true"] if mode == "pserver" else []
            job = self.submit(run, *words, *where, *roles)
            self.disturb(mode, run, job, acts)
            self.finish(mode, run, job)

    # ------------------------------------------------------------ a sweep

    def sweep(self, events: int) -> None:
        """Sweeps of eight trials, each one array of which four run at once, until so many events have happened; what
        happens, happens to all that run.
        """
        for trial in TRIALS:
            plain = self.folder / "sweep-undisturbed" / trial
            self.dtf("launcher=local", *SMALL, *TRIAL, trial, f"run.dir={plain}", login=False)
        kinds = [self.lose_node, self.signal, self.preempt]
        acts = [kinds[at % len(kinds)] for at in range(events, 0, -1)]
        number = 0
        while acts:
            number += 1
            folder = self.folder / f"sweep{number}"
            rates = f"lr.peak={','.join(map(str, RATES))}"
            words = ["-m", *TRIAL, rates, "sweep.parallel=4", "launcher.grace_s=20"]
            job = self.submit(folder, *words)
            self.disturb_all(folder, job, acts)
            self.finish_all(folder, job)

    def disturb_all(self, folder: Path, job: str, acts: list[Callable[[str], None]]) -> None:
        """Let each happen to all that runs of a sweep, every second time after a save."""
        while acts:
            saved = sum(newest(folder / trial) for trial in TRIALS)
            self.box.wait(
                lambda: self._running(job) or not self._running(job, waiting=True), "tasks that run", PATIENCE_S
            )
            after = "a save"
            if len(acts) % 2:  # in the middle of the training of some
                self.box.wait(
                    lambda saved=saved: (
                        sum(newest(folder / trial) for trial in TRIALS) > saved or not self._running(job, waiting=True)
                    ),
                    after,
                    PATIENCE_S,
                )
            else:
                after_s = self.rng.random() * 8
                time.sleep(after_s)  # the moment is what is varied; nothing is waited for
                after = f"{after_s:.2f} s"
            tasks = [int(task) for task in self._running(job)]
            if not tasks and not self._running(job, waiting=True):
                return
            if tasks:
                self.note(self._to_all(folder, job, acts, after, tasks))

    def _to_all(self, folder: Path, job: str, acts: list[Callable[[str], None]], after: str, tasks: list[int]) -> Event:
        act = acts.pop()
        event = Event("sweep", act.__name__, after, act.__name__ not in WITHOUT_NOTICE)
        before, restarts = {trial: newest(folder / trial) for trial in TRIALS}, self._restarts(job)
        act(job)
        event.hit = self._restarts(job) > restarts
        if not event.hit:
            acts.append(act)
        printed = {task: max(seen(log_of(folder, f"{job}_{task}")), before[TRIALS[task]]) for task in tasks}
        saved = {task: newest(folder / TRIALS[task]) for task in tasks}
        event.seen, event.saved = sum(printed.values()), sum(saved.values())
        if event.notice and (lost := [TRIALS[task] for task in tasks if saved[task] < printed[task]]):
            event.wrong = f"steps of {lost} were lost"
        if lost := [trial for trial in TRIALS if newest(folder / trial) < before[trial]]:
            event.wrong = f"checkpoints of {lost} were lost"
        return event

    def _restarts(self, array: str) -> int:
        return sum(int(record["Restarts"]) for record in self.box.jobs(array))

    def finish_all(self, folder: Path, job: str) -> None:
        """Wait for the end of a sweep, and compare each trial with the same one that nothing happened to."""
        self.box.wait(lambda: not self._running(job, waiting=True), "the end of the array", 400.0)
        states = [record["JobState"] for record in self.box.jobs(job)]
        plain = self.folder / "sweep-undisturbed"
        differ = {trial: text for trial in TRIALS if (text := unlike(folder / trial, plain / trial))}
        print(f"sweep: {states}, {differ or 'the same bits in all trials'}", flush=True)
        if differ or set(states) != {"COMPLETED"}:
            raise AssertionError(f"sweep: {states}, {differ}")

    def _running(self, array: str, waiting: bool = False) -> list[str]:
        """The numbers of the tasks that run, after those that were requeued were let start again; with `waiting` all
        that live.
        """
        records = self.box.jobs(array)
        for record in records:
            self.box.release(record)
        live = ("RUNNING", "PENDING", "COMPLETING", "REQUEUED") if waiting else ("RUNNING",)
        return [record["ArrayTaskId"] for record in records if record["JobState"] in live]


def newest(run: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((step_of(path.name) or 0 for path in checkpoints(run / "checkpoints")), default=0)


def log_of(run: Path, job: str) -> Path:
    return run / "job" / f"slurm-{job}.log"


def seen(log: Path) -> int:
    """The last step that the newest start of a job, or of a task of an array, has printed."""
    last = log.read_text().rpartition(": start ")[2] if log.exists() else ""
    return max((int(step) for step in re.findall(r"^(?:started |ended )?step=(\d+)/", last, re.MULTILINE)), default=0)


def unlike(run: Path, other: Path) -> str:
    """In what the newest checkpoints of two runs differ; empty where they have the same tensors, bit for bit."""
    from dtf.checkpoint.boxes import StoredCheckpoint
    from tests.support.checkpoints import same_bits

    step = newest(other)
    if newest(run) != step:
        return f"steps {newest(run)} and {step}"
    ones, others = (StoredCheckpoint(folder / "checkpoints" / f"step_{step:06d}") for folder in (run, other))
    if set(ones.names()) != set(others.names()):
        return f"names {set(ones.names()) ^ set(others.names())}"
    different = [name for name in ones.names() if not same_bits(ones.read(name), others.read(name))]
    return f"tensors {different[:4]}" if different else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="ddp,fsdp,pserver,sweep")
    parser.add_argument("--events", type=int, default=15)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    with slurmbox(folder / "slurm", nodes=3, grace_s=60) as box:
        campaign = Campaign(box, folder, random.Random(options.seed))
        for mode in options.only.split(","):
            if mode == "sweep":
                campaign.sweep(options.events)
            else:
                campaign.one(mode, options.events)
    wrong = [event for event in campaign.events if event.wrong]
    hit = sum(event.hit for event in campaign.events)
    print(f"{hit} events, {len(wrong)} wrong")
    return int(bool(wrong) or hit != options.events * len(options.only.split(",")))


if __name__ == "__main__":
    sys.exit(main())
