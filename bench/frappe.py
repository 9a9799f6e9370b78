"""Models of click-through rates on Frappe against the figures published for them: trains each with some seeds, one
after the other, and prints a table.

    python -m bench.frappe FOLDER_OF_FRAPPE [--models dnn fm] [--seeds 0 1 2] [--out outputs/frappe] [key=value ...]

Each run is `experiment=frappe_<model>` on two processes; its best checkpoint is then evaluated on the test split. Runs
that are there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

PUBLISHED = {
    "lr": (0.9356, 0.3076),
    "fm": (0.9671, 0.2065),
    "dnn": (0.98405, 0.1584),
    "wide_deep": (0.98307, 0.1540),
    "deepfm": (0.98395, 0.1495),
    "dcn": (0.98342, 0.1507),
    "dcnv2": (0.98382, 0.1520),
    "xdeepfm": (0.98414, 0.1461),
    "dlrm": (0.9840, 0.1444),
}
"""Test AUC and log loss of BARS Frappe_x1: the mean of five runs, of lr, fm and dlrm one run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=["lr", "fm", "dnn", "deepfm"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/frappe"))
    options, overrides = parser.parse_known_args()
    print(
        "| model | published AUC / log loss | test AUC, mean of seeds | each | log loss | seconds a run |\n| --- | "
        "--- | --- | --- | --- | --- |"
    )
    for model in options.models:
        found = [run(model, seed, options.data, options.out / f"{model}_{seed}", overrides) for seed in options.seeds]
        areas = [each["auc"] for each in found]
        published = "{:.4f} / {:.4f}".format(*PUBLISHED[model])
        each = ", ".join(f"{area:.4f}" for area in areas)
        loss, seconds = (statistics.mean(each[key] for each in found) for key in ("loss", "seconds"))
        print(
            f"| {model} | {published} | {statistics.mean(areas):.4f} | {each} | {loss:.4f} | {seconds:.0f} |",
            flush=True,
        )


def run(model: str, seed: int, data: Path, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """Test metrics and wall seconds of one training run."""
    root = f"recipe.data.root={data}"
    if not (folder / "test" / "evaluation.json").is_file():
        train = [
            f"experiment=frappe_{model}",
            root,
            f"seed={seed}",
            f"run.dir={folder}",
            "launcher.processes=2",
            "observer=[console,jsonl]",
            *overrides,
        ]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.txt", "w") as log:
            subprocess.run([sys.executable, "-m", "dtf", *train], check=True, stdout=log, stderr=log)
            judge = [
                "job=evaluate",
                f"job.model={folder}/best",
                "job.split=test",
                f"run.dir={folder}/test",
                "launcher.processes=2",
            ]
            subprocess.run([sys.executable, "-m", "dtf", *judge], check=True, stdout=log, stderr=log)
    ended = json.loads((folder / "run.json").read_text())
    return json.loads((folder / "test" / "evaluation.json").read_text())["metrics"] | {"seconds": ended["seconds"]}


if __name__ == "__main__":
    main()
