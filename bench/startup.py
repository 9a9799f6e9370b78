"""How long a person waits: from the command to an answer, and from the command to the first optimizer step of two
ranks.

    python -m bench.startup

The commands alternate with `python -c "import torch"`; the medians and their spread are printed. The first step is the
moment when its report appears on standard output. It is compared with that of torchrun: two ranks of a script which
trains the same network on the same rows by hand, and two ranks of dtf under `launcher=env`. Ends with status 1 when an
answer takes more than 0.25 s of the processor beyond a bare Hydra application, or a heartbeat more than a microsecond.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dtf.host.heartbeat import beat

ROUNDS = 7
FIRST = "first step of 2 ddp ranks"
ALLOWED_S = 0.25  # an answer over that of a bare Hydra application, of the processor
ANSWERS = ("dtf --help", "dtf --cfg job", "dtf strategy=ddpp")
ROOT = Path(__file__).resolve().parent.parent
BARE = """
import hydra
from omegaconf import DictConfig, OmegaConf
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    print(OmegaConf.to_yaml(config))
main()
"""
PLAIN = """
import torch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from recipes.resnet.recipe import ResnetShapes

distributed.init_process_group("gloo")
torch.manual_seed(0)
rank, recipe = distributed.get_rank(), ResnetShapes()
model = DistributedDataParallel(recipe.build_model())
optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
rows = recipe.open_data("train", 0)
ids = torch.randperm(len(rows))[64 * rank : 64 * rank + 64]
inputs, targets = rows.fetch(ids.numpy(), 0)
loss = cross_entropy(model(inputs), targets)
loss.backward()
optimizer.step()
if rank == 0:
    print("step=1/1 loss", loss.item(), flush=True)
distributed.destroy_process_group()
"""


def seconds(command: list[str], folder: Path, until: str = "") -> float:
    """Wall time of a command, or until a line of its output starts with `until`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        passed = 0.0
        for line in process.stdout:
            if until and not passed and line.startswith(until):
                passed = time.perf_counter() - started
        process.wait()
    return passed or time.perf_counter() - started


def processor_s() -> float:
    """Seconds of the processor that commands have used which have ended."""
    times = os.times()
    return times.children_user + times.children_system


def beat_s() -> tuple[float, float]:
    """Of one heartbeat, and of one look at the clock in the same rounds: the least of 50 means of 1000."""

    def once(call: Callable[[int], object]) -> float:
        begun = time.perf_counter()
        for step in range(1000):
            call(step)
        return (time.perf_counter() - begun) / 1000

    rounds = [(once(lambda step: beat("step", step)), once(lambda step: time.monotonic())) for _ in range(50)]
    return min(each for each, _ in rounds), min(each for _, each in rounds)


def verdict(used: dict[str, list[float]]) -> int:
    """Say what is over its bound; the exit status."""
    over = {key: statistics.median(used[key][1:]) - statistics.median(used["bare hydra"][1:]) for key in ANSWERS}
    beating_s, looking_s = beat_s()
    print(
        json.dumps(
            {"what": "a heartbeat", "us": round(beating_s * 1e6, 3), "time.monotonic_us": round(looking_s * 1e6, 3)}
        )
    )
    slow = [f"{key} takes {more:.3f} s more than bare hydra" for key, more in over.items() if more > ALLOWED_S]
    slow += ["a heartbeat takes more than a microsecond"] if beating_s >= 1e-6 else []
    print("\n".join(slow) or f"all answers within {ALLOWED_S} s of the processor of a bare Hydra application")
    return int(bool(slow))


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conf" / "db").mkdir(parents=True)
        (folder / "conf" / "config.yaml").write_text("defaults:\n  - db: a\n  - _self_\nx: 1\n")
        (folder / "conf" / "db" / "a.yaml").write_text("y: 2\n")
        (folder / "bare.py").write_text(BARE)
        (folder / "plain.py").write_text(PLAIN)
        python = sys.executable
        dtf = [python, "-m", "dtf"]
        run = [
            *dtf,
            "strategy=ddp",
            "train.until=1",
            "train.log_every=1",
            "train.eval_every=0",
            "checkpoint=off",
        ]
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        cases = {
            "bare hydra": ([python, "bare.py"], ""),
            "dtf --help": ([*dtf, "--help"], ""),
            "dtf --cfg job": ([*dtf, "--cfg", "job"], ""),
            "dtf strategy=ddpp": ([*dtf, "strategy=ddpp"], ""),
            "dtf optimizer.lrr=1": ([*dtf, "optimizer.lrr=1"], ""),
            "import torch": ([python, "-c", "import torch"], ""),
            FIRST: ([*run, "launcher.processes=2"], "step=1/"),
            f"{FIRST}, torchrun and a script": ([*torchrun, "plain.py"], "step=1/"),
            f"{FIRST}, torchrun -m dtf": ([*torchrun, *run[1:], "launcher=env"], "step=1/"),
        }
        times: dict[str, list[float]] = {key: [] for key in cases}
        used: dict[str, list[float]] = {key: [] for key in cases}
        for _ in range(ROUNDS + 1):
            for key, (command, until) in cases.items():
                before = processor_s()
                times[key].append(seconds(command, folder, until))
                used[key].append(processor_s() - before)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; {ROUNDS} rounds after one "
        "to warm up"
    )
    for key, values in times.items():
        rest = sorted(values[1:])
        print(
            json.dumps(
                {
                    "what": key,
                    "median_s": round(statistics.median(rest), 3),
                    "min_s": round(rest[0], 3),
                    "max_s": round(rest[-1], 3),
                    "processor_s": round(statistics.median(used[key][1:]), 3),
                }
            )
        )
    for other in (key for key in times if key.startswith(f"{FIRST}, ")):
        ratios = sorted(ours / theirs for ours, theirs in zip(times[FIRST][1:], times[other][1:], strict=True))
        print(f"dtf / {other}: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    return verdict(used)


if __name__ == "__main__":
    raise SystemExit(main())
