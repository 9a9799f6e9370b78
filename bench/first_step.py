"""How long a person waits from the command to the first optimizer step: dtf, torchrun, accelerate launch, Lightning.

    python -m bench.first_step [--rounds 7]

Two ddp ranks train the same network on the same rows. dtf draws them as it trains; the others read them from a file and
import nothing of dtf (`bench.plain_script`). All have the threads of dtf's ranks, and keep freed memory. The first step
is the moment when its report appears on standard output; processor time is that of all processes until then. Commands
alternate; the first round warms up. Answers of the command line are measured by `bench.startup`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.commands import dtf_run, script, started
from bench.peers import Absent
from bench.rounds import in_turn
from bench.rows import Row, print_measured, with_ratios

FIRST = "from the command to the first step of two ddp ranks"
LAUNCHERS = ("torchrun", "accelerate launch", "Lightning")
SETTINGS = {
    "dtf": "launcher=local, strategy=ddp, checkpoint=off, the start checks of a later start",
    "torchrun": "--standalone, DistributedDataParallel by hand",
    "accelerate launch": "--cpu",
    "Lightning": "Trainer(barebones=True, devices=2)",
    "dtf under torchrun": "launcher=env",
}


def first_steps(launchers: Sequence[str] = LAUNCHERS) -> tuple[dict[str, list[str]], list[Row]]:
    """Commands by name, and rows of those that have no environment."""
    once = ["checkpoint=off"]
    found, absent = {"dtf": dtf_run(2, 1, *once)}, []
    for launcher in launchers:
        try:
            found[launcher] = script(launcher, 2, 1)
        except Absent as error:
            absent.append(Row(FIRST, launcher, settings=SETTINGS[launcher], not_run=str(error)))
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found["dtf under torchrun"] = [*agent, *dtf_run(2, 1, *once)[1:], "launcher=env"]
    found["dtf under torchrun"].remove("launcher.processes=2")
    return found, absent


def seconds_to_first_step(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall time, and processor time of all that it started."""
    with started(command, folder) as running:
        seen = next(running.steps())
        return seen.seconds - running.began, running.cpu_s()


def rows_of(commands: dict[str, list[str]], rounds: int, folder: Path) -> list[Row]:
    """A row for each command; one that fails says why."""
    found, failed = in_turn(rounds + 1, commands, partial(seconds_to_first_step, folder=folder))
    rows = [Row(FIRST, who, settings=SETTINGS[who], not_run=why) for who, why in failed.items()]
    for who, pairs in found.items():
        wall, cpu = ([pair[index] for pair in pairs[1:]] for index in (0, 1))
        rows.append(Row(FIRST, who, "s", wall, cpu=cpu, cpu_unit="s", settings=SETTINGS[who]))
    return rows


def measure(quick: bool, rounds: int = 7) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="dtf-bench-start-", ignore_cleanup_errors=True) as name:
        commands, absent = first_steps()
        return with_ratios(rows_of(commands, 1 if quick else rounds, Path(name))) + absent


if __name__ == "__main__":
    print_measured(measure, __doc__)
