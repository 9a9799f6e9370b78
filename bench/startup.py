"""How long a person waits: from the command to the first optimizer step of two ranks, and to an answer.

    python -m bench.startup

The first step is the moment when its report appears on standard output: dtf beside torchrun, accelerate launch and
Lightning, which train the same network on the same rows (`bench.plain_script`). Answers of the command line are
compared with that of a bare Hydra application. Commands alternate; the first round warms up. Ends with status 1 when an
answer takes more than 0.25 s of the processor beyond that of bare Hydra, or a heartbeat more than a microsecond.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.commands import DTF, dtf_run, script, started
from bench.contest import ROOT
from bench.peers import Absent
from bench.rows import Row, against_dtf, table
from dtf.host.heartbeat import beat

FIRST = "from the command to the first step of two ddp ranks"
ANSWER = "from the command to its answer"
ALLOWED_S = 0.25  # an answer over that of a bare Hydra application, of the processor
BARE = """
import hydra
from omegaconf import DictConfig, OmegaConf
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    print(OmegaConf.to_yaml(config))
main()
"""
LAUNCHERS = ("torchrun", "accelerate launch", "Lightning")
SETTINGS = {
    "dtf": "launcher=local, strategy=ddp, checkpoint=off, the start checks of a later start",
    "torchrun": "--standalone, DistributedDataParallel by hand",
    "accelerate launch": "--cpu, one thread a process",
    "Lightning": "Trainer(barebones=True, devices=2)",
    "dtf under torchrun": "launcher=env",
}


def first_steps(folder: Path) -> tuple[dict[str, list[str]], list[Row]]:
    """Commands by name, and rows of those that have no environment."""
    once = ["checkpoint=off"]
    found, absent = {"dtf": dtf_run(2, 1, *once)}, []
    for launcher in LAUNCHERS:
        try:
            found[launcher] = script(launcher, 2, 1)
        except Absent as error:
            absent.append(Row(FIRST, launcher, settings=SETTINGS[launcher], not_run=str(error)))
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found["dtf under torchrun"] = [*agent, *dtf_run(2, 1, *once)[1:], "launcher=env"]
    found["dtf under torchrun"].remove("launcher.processes=2")
    return found, absent


def answers(folder: Path) -> dict[str, list[str]]:
    (folder / "conf" / "db").mkdir(parents=True)
    (folder / "conf" / "config.yaml").write_text("defaults:\n  - db: a\n  - _self_\nx: 1\n")
    (folder / "conf" / "db" / "a.yaml").write_text("y: 2\n")
    (folder / "bare.py").write_text(BARE)
    asked = (["--help"], ["--cfg", "job"], ["strategy=ddpp"], ["optimizer.lrr=1"])
    return {
        **{f"dtf {' '.join(words)}": [*DTF, *words] for words in asked},
        "a bare Hydra application": [sys.executable, "bare.py"],
        'python -c "import torch"': [sys.executable, "-c", "import torch"],
    }


def seconds_to_first_step(command: list[str], folder: Path) -> tuple[float, float]:
    """Wall time, and processor time until all of its processes have ended."""
    before = processor_s()
    with started(command, folder) as running:
        first = 0.0
        for seen in running.steps():
            first = first or seen.seconds - running.began
    if not first:
        raise RuntimeError(f"{command} made no step")
    return first, processor_s() - before


def seconds_to_end(command: list[str], folder: Path) -> tuple[float, float]:
    before, began = processor_s(), time.perf_counter()
    subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return time.perf_counter() - began, processor_s() - before


def processor_s() -> float:
    """Seconds of the processor that commands have used which have ended."""
    times = os.times()
    return times.children_user + times.children_system


def alternating(
    work: str, commands: dict[str, list[str]], timed: Callable[[list[str], Path], tuple[float, float]],
    rounds: int, folder: Path,
) -> list[Row]:  # fmt: skip
    """A row for each command; one that fails says why."""
    found: dict[str, list[tuple[float, float]]] = {who: [] for who in commands}
    failed: dict[str, str] = {}
    for number in range(rounds + 1):
        for who in list(commands)[:: -1 if number % 2 else 1]:
            if who not in failed:
                try:
                    found[who].append(timed(commands[who], folder))
                except RuntimeError as error:
                    failed[who] = str(error)
    rows = []
    for who, pairs in found.items():
        wall, cpu = ([pair[index] for pair in pairs[1:]] for index in (0, 1))
        settings = SETTINGS.get(who, "")
        if who in failed:
            rows.append(Row(work, who, settings=settings, not_run=failed[who]))
        else:
            rows.append(Row(work, who, "s", wall, cpu=cpu, cpu_unit="s", settings=settings))
    return rows


def measure(quick: bool, rounds: int = 7) -> list[Row]:
    rounds = 1 if quick else rounds
    with tempfile.TemporaryDirectory(prefix="dtf-bench-start-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        commands, absent = first_steps(folder)
        rows = against_dtf(alternating(FIRST, commands, seconds_to_first_step, rounds, folder)) + absent
        return rows + alternating(ANSWER, answers(folder), seconds_to_end, rounds, folder)


def beat_s() -> tuple[float, float]:
    """Of one heartbeat, and of one look at the clock in the same rounds: the least of 50 means of 1000."""

    def once(call: Callable[[int], object]) -> float:
        begun = time.perf_counter()
        for step in range(1000):
            call(step)
        return (time.perf_counter() - begun) / 1000

    rounds = [(once(lambda step: beat("step", step)), once(lambda step: time.monotonic())) for _ in range(50)]
    return min(each for each, _ in rounds), min(each for _, each in rounds)


def verdict(rows: list[Row]) -> int:
    """Say what is over its bound; the exit status."""
    used = {row.who: statistics.median(row.cpu) for row in rows if row.work == ANSWER}
    bare = used["a bare Hydra application"]
    over = {who: cpu - bare for who, cpu in used.items() if who.startswith("dtf ")}
    beating_s, looking_s = beat_s()
    print(f"a heartbeat: {beating_s * 1e6:.3f} us, time.monotonic: {looking_s * 1e6:.3f} us")
    slow = [f"{who} takes {more:.3f} s more than bare Hydra" for who, more in over.items() if more > ALLOWED_S]
    slow += ["a heartbeat takes more than a microsecond"] if beating_s >= 1e-6 else []
    print("\n".join(slow) or f"all answers within {ALLOWED_S} s of the processor of a bare Hydra application")
    return int(bool(slow))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rows = measure(False, parser.parse_args().rounds)
    print(table(rows))
    return verdict(rows)


if __name__ == "__main__":
    raise SystemExit(main())
