"""How long it takes from `kill -9` of a rank to the next step, and how many steps are done again: dtf beside torchrun.

    python -m bench.recovery [--rounds 7]

Two ranks train the default recipe's network; a checkpoint follows every 10th step. The last rank is killed after step
25. `next step` is the first that the new ranks make, whichever it is; `where it was` the first that is new. A round in
which no step follows within a minute is counted and has no figures.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from bench.commands import dtf_run, script, started
from bench.peers import Absent
from bench.rounds import alternating, starts
from bench.rows import Row, print_measured, with_ratios

KILL_AFTER, UNTIL, PATIENCE_S = 25, 60, 60.0
SETTINGS = {
    "dtf": "launcher=local, checkpoint.every_steps=10",
    "torchrun": "--standalone --max-restarts 3, torch.save every 10 steps by rank 0",
    "torchrun, keys apart": "the same; each attempt has keys of its own in the agent's store",
}
KINDS = {
    "from kill -9 of a rank to the next step": ("s", "next_s"),
    "from kill -9 of a rank to the step after the last one before it": ("s", "back_s"),
    "steps done again after kill -9 of a rank": ("steps", "lost"),
}


class Recovered(NamedTuple):
    next_s: float
    back_s: float
    lost: int


def once(who: str) -> Recovered:
    """Absent where no step follows."""
    with tempfile.TemporaryDirectory(prefix="dtf-bench-recovery-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if who == "dtf":
            command = dtf_run(2, UNTIL, "checkpoint.every_steps=10", f"run.dir={folder}/run")
        else:
            command = script("torchrun", 2, UNTIL, "--save", name, *(["--keys-apart"] if "apart" in who else []))
        with started(command, folder) as running:
            steps = running.steps(PATIENCE_S)
            last = next(seen for seen in steps if seen.step >= KILL_AFTER)
            os.kill(running.ranks()[-1], signal.SIGKILL)
            killed = time.perf_counter()
            again = next(steps)
            while again.step > last.step:  # said before it died
                last, again = again, next(steps)
            back = next(seen for seen in steps if seen.step > last.step)
            return Recovered(again.seconds - killed, back.seconds - killed, last.step - again.step + 1)


def measure(quick: bool, rounds: int = 7) -> list[Row]:
    found: dict[str, list[Recovered]] = {who: [] for who in SETTINGS}
    failed: dict[str, list[str]] = {who: [] for who in SETTINGS}
    rounds = 1 if quick else rounds
    for number, who in alternating(rounds, SETTINGS):
        if number == 0:
            starts(who)
        try:
            found[who].append(once(who))
        except Absent as error:
            failed[who].append(str(error))
    rows = []
    for work, (unit, key) in KINDS.items():
        for who, some in found.items():
            settings = SETTINGS[who]
            if failed[who]:
                settings += f"; in {len(failed[who])} of {rounds} rounds no step followed: {failed[who][0]}"
            values = [float(getattr(one, key)) for one in some]
            rows.append(Row(work, who, unit, values, settings=settings, not_run="" if values else settings))
    return with_ratios(rows)


if __name__ == "__main__":
    print_measured(measure, __doc__)
