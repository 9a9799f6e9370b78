"""`experiment=cifar10_94`: how long a GPU takes to 94 % on CIFAR-10's test images. Data: $DTF_CIFAR10."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from bench.gpu.job import Job
from bench.gpu.steps import CIFAR10

GOAL = 0.94


def run(job: Job) -> None:
    started = time.perf_counter()
    rehearsal = (
        "recipe.data.train_rows=64", "recipe.data.eval_rows=64", "recipe.model.arch=resnet8", "step.batch_size=32",
        "train.epochs=2", "launcher.devices=cpu",
    )  # fmt: skip
    cache = job.scratch / "cache"
    done = job.dtf(
        "experiment=cifar10_94", f"recipe.data.root={os.environ[CIFAR10]}", f"recipe.data.cache={cache}",
        "launcher.processes=1", "launcher.devices=cuda", "observer=[jsonl]", *(rehearsal if job.rehearsed else ()),
        folder="cifar10",
    )  # fmt: skip
    wall = time.perf_counter() - started
    evaluated = _evaluations(done.folder)
    best = max((line["top1"] for line in evaluated), default=0.0)
    reached = next((line for line in evaluated if line["top1"] >= GOAL), None)
    job.lines.figure("best top-1", round(best, 4), "", evaluations=len(evaluated), data=os.environ[CIFAR10])
    job.lines.figure("wall time, start and decoding of the files included", round(wall, 1), "s")
    if evaluated:
        job.lines.figure("training time, without evaluations", round(evaluated[-1]["seconds"], 1), "s")
    if reached:
        job.lines.figure("training time until 94 %", round(reached["seconds"], 1), "s", epoch=reached["epoch"])
    job.lines.part("the run ends with 0", done.code == 0, f"{done.code}: {done.last}" if done.code else "")
    ok = bool(reached) or job.rehearsed
    job.lines.part("94 %", ok, "" if ok else f"the best evaluation has {100 * best:.2f} %")


def _evaluations(folder: Path) -> list[dict[str, float]]:
    path = folder / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["split"] == "eval"]
