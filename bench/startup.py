"""How long a person waits: from the command to an answer, and from the command to the first optimizer step of two
ranks.

    python -m bench.startup [--rounds 7] [--part answers | steps] [--cold]

An answer is compared with that of a bare Hydra application over the same tree of config files, which prints the same
config. The first step is that of `bench.first_step`: dtf, torchrun with a script, and dtf under torchrun. The commands
take turns; medians and their spread are printed. `--cold`: nothing of Python and its packages is in the page cache when
a command of `steps` starts, as on a host that has just been taken. Ends with status 1 when an answer takes more of the
processor beyond Hydra's than `ALLOWED_S`, the first step more than `MOST_OF_TORCHRUN` of torchrun's (not with
`--cold`), or a heartbeat a microsecond.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench import first_step
from bench.first_step import seconds_to_first_step
from bench.medians import interval, machine
from bench.processes import PATIENCE_S, ROOT
from bench.rounds import alternating
from dtf.host.heartbeat import beat

ANSWERS = {"--help": ["--help"], "--cfg job": ["--cfg", "job"], "strategy=ddpp": ["strategy=ddpp"]}
ALLOWED_S = {"--help": 0.2, "--cfg job": 0.2, "strategy=ddpp": 0.4}
"""Over the same answer of a bare Hydra application, of the processor."""
FIRST, TORCHRUN, ENV = "dtf", "torchrun", "dtf under torchrun"
MOST_OF_TORCHRUN = 0.75
BARE = """
import hydra
from omegaconf import DictConfig, OmegaConf
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    print(OmegaConf.to_yaml(config))
main()
"""


class Waited(NamedTuple):
    """Of one command: seconds to its end, or to the first step, and processor seconds until then."""

    wall: float
    processor: float


def wait_for(command: list[str], folder: Path) -> Waited:
    """Run a command to its end."""
    before, started = _processor_s(), time.perf_counter()
    environment, null = _environment(), subprocess.DEVNULL
    subprocess.run(command, cwd=folder, env=environment, check=False, timeout=PATIENCE_S, stdout=null, stderr=null)
    return Waited(time.perf_counter() - started, _processor_s() - before)


def _environment() -> dict[str, str]:
    """With compiled modules, as an installation has them."""
    return {
        name: value
        for name, value in (os.environ | {"PYTHONPATH": str(ROOT)}).items()
        if name != "PYTHONDONTWRITEBYTECODE"
    }


def _processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def answers(rounds: int, folder: Path) -> dict[str, list[Waited]]:
    """`hydra WORDS` and `dtf WORDS` -> what each round took, after one to warm up."""
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "bare.py").write_text(BARE)
    python = sys.executable
    commands = {
        f"{who} {name}": [*start, *words]
        for name, words in ANSWERS.items()
        for who, start in (("hydra", [python, "bare.py"]), ("dtf", [python, "-m", "dtf"]))
    }
    return _in_turn(rounds, commands, lambda command: wait_for(command, folder))


def first_steps(rounds: int, folder: Path, cold: bool = False) -> dict[str, list[Waited]]:
    """FIRST, TORCHRUN and ENV -> what each round took until the first step."""

    def once(command: list[str]) -> Waited:
        if cold:
            forget_files()
        return Waited(*seconds_to_first_step(command, folder))

    return _in_turn(rounds, first_step.first_steps([TORCHRUN])[0], once)


def _in_turn(
    rounds: int, commands: Mapping[str, list[str]], once: Callable[[list[str]], Waited]
) -> dict[str, list[Waited]]:
    found: dict[str, list[Waited]] = {name: [] for name in commands}
    for number, name in alternating(rounds + 1, commands):
        waited = once(commands[name])
        if number:
            found[name].append(waited)
    return found


def forget_files() -> None:
    """Let the page cache forget Python's library, all of its packages, and dtf."""
    for root in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {str(ROOT / "dtf")}:
        for path in Path(root).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


def beat_s() -> tuple[float, float]:
    """Of one heartbeat, and of one look at the clock in the same rounds: the least of 50 means of 1000."""

    def once(call: Callable[[int], object]) -> float:
        begun = time.perf_counter()
        for step in range(1000):
            call(step)
        return (time.perf_counter() - begun) / 1000

    rounds = [(once(lambda step: beat("step", step)), once(lambda step: time.monotonic())) for _ in range(50)]
    return min(each for each, _ in rounds), min(each for _, each in rounds)


def show(what: str, found: dict[str, list[Waited]]) -> None:
    for name, waits in found.items():
        walls = sorted(each.wall for each in waits)
        seconds = {"median_s": statistics.median(walls), "min_s": walls[0], "max_s": walls[-1]}
        print(json.dumps({"what": f"{what}{name}"} | {key: round(value, 3) for key, value in seconds.items()}))


def slow_answers(found: dict[str, list[Waited]]) -> list[str]:
    """Print what answers take beyond those of Hydra; returns those over their bound."""
    slow = []
    for name, allowed in ALLOWED_S.items():
        pairs = list(zip(found[f"dtf {name}"], found[f"hydra {name}"], strict=True))
        wall, processor = ([own[at] - bare[at] for own, bare in pairs] for at in (0, 1))
        text = f"dtf {name} - hydra {name}: {statistics.median(processor):.3f} s of the processor"
        print(
            f"{text} ({interval(processor)}), at most {allowed}; wall {statistics.median(wall):.3f} ({interval(wall)})"
        )
        slow += [text] if statistics.median(processor) > allowed else []
    return slow


def slow_steps(found: dict[str, list[Waited]]) -> list[str]:
    """Print how much of the others' time dtf takes; returns what is over the bound."""
    slow = []
    for name in (TORCHRUN, ENV):
        ratios = [own.wall / other.wall for own, other in zip(found[FIRST], found[name], strict=True)]
        text = f"first step, {FIRST} / {name}: {statistics.median(ratios):.2f} ({interval(ratios)})"
        print(text)
        slow += [text] if name == TORCHRUN and statistics.median(ratios) > MOST_OF_TORCHRUN else []
    return slow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", choices=("answers", "steps"))
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    print(f"{machine()}; {options.rounds} rounds after one to warm up")
    slow: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        if options.part != "steps":
            found = answers(options.rounds, Path(name))
            show("answer of ", found)
            slow += slow_answers(found)
            beating_s, looking_s = beat_s()
            print(f"a heartbeat: {beating_s * 1e6:.3f} us, time.monotonic: {looking_s * 1e6:.3f} us")
            slow += ["a heartbeat takes more than a microsecond"] if beating_s >= 1e-6 else []
        if options.part != "answers":
            found = first_steps(options.rounds, Path(name), options.cold)
            show("first step of 2 ddp ranks, ", found)
            slow += slow_steps(found)
    if options.cold:
        return 0
    print("\n".join(["too slow:", *slow]) if slow else "all within their bounds")
    return int(bool(slow))


if __name__ == "__main__":
    raise SystemExit(main())
