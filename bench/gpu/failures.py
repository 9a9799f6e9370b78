"""A GPU without memory left: what the user is told, and the exit code."""

from __future__ import annotations

from bench.gpu.job import Job
from bench.gpu.numbers import DEVICES
from bench.gpu.shared import PLUGIN

SAID = ("there is not enough memory", "out of memory", "step.micro_batch_rows", "step.remat=blocks")


def run(job: Job) -> None:
    rows = 64 if job.rehearsed else 4096
    pixels, width = (24, 8) if job.rehearsed else (64, 64)
    done = job.dtf(
        *PLUGIN, "recipe=gpu_crowded", f"launcher.devices={DEVICES[job.rehearsed][1]}", "launcher.processes=1",
        f"recipe.data.train_rows={2 * rows}", "recipe.data.eval_rows=64", f"recipe.data.pixels={pixels}",
        f"recipe.model.width={width}", f"step.batch_size={rows}", "train.epochs=1", "checkpoint=off",
        "launcher.max_restarts=0", folder="crowded",
    )  # fmt: skip
    job.lines.part("exit code 2", done.code == 2, f"it is {done.code}" if done.code != 2 else "")
    missing = [text for text in SAID if text not in done.err]
    job.lines.part(
        "the message names cause and remedies", not missing, f"without {missing}: {done.last}" if missing else ""
    )
    job.lines.figure("the message", done.last)
