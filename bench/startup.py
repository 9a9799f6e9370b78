"""How long a person waits: from the command to an answer, and from the command to the first optimizer step of two
ranks.

    python bench/startup.py

The commands alternate with `python -c "import torch"`; the medians and their spread are printed. The first step is the
moment when its report appears on standard output.
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
from pathlib import Path

ROUNDS = 7
ROOT = Path(__file__).resolve().parent.parent
BARE = """
import hydra
from omegaconf import DictConfig, OmegaConf
@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    print(OmegaConf.to_yaml(config))
main()
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


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "conf" / "db").mkdir(parents=True)
        (folder / "conf" / "config.yaml").write_text("defaults:\n  - db: a\n  - _self_\nx: 1\n")
        (folder / "conf" / "db" / "a.yaml").write_text("y: 2\n")
        (folder / "bare.py").write_text(BARE)
        python = sys.executable
        dtf = [python, "-m", "dtf"]
        run = [
            *dtf,
            "strategy=ddp",
            "launcher.processes=2",
            "train.until=1",
            "train.log_every=1",
            "train.eval_every=0",
            "checkpoint=off",
        ]
        cases = {
            "bare hydra": ([python, "bare.py"], ""),
            "dtf --help": ([*dtf, "--help"], ""),
            "dtf --cfg job": ([*dtf, "--cfg", "job"], ""),
            "dtf strategy=ddpp": ([*dtf, "strategy=ddpp"], ""),
            "dtf optimizer.lrr=1": ([*dtf, "optimizer.lrr=1"], ""),
            "import torch": ([python, "-c", "import torch"], ""),
            "first step of 2 ddp ranks": (run, "step=1/"),
        }
        times: dict[str, list[float]] = {key: [] for key in cases}
        for _ in range(ROUNDS + 1):
            for key, (command, until) in cases.items():
                times[key].append(seconds(command, folder, until))
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
                }
            )
        )


if __name__ == "__main__":
    main()
