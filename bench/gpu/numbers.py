"""A GPU gives the numbers of the CPU, and precisions those of fp32 but for rounding."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from bench.gpu.job import Job

STEPS = 8
RESNET = ("recipe=resnet_shapes", "recipe.data.train_rows=512", "recipe.data.eval_rows=64")
RECORDED = ("train.record=true", "train.log_every=1", "observer=[jsonl]", "checkpoint.keep_best=0")
DEVICES = {False: ("cpu", "cuda"), True: ("cpu", "cpu")}
STRATEGIES = "dp,pserver,ddp,fsdp,zero1,tensor,pipeline"
WITHIN = {"tf32": 0.02, "bf16": 0.05, "bf16_master": 0.05, "bf16_params": 0.1, "fp16": 0.05}
"""How far the mean loss of the last steps may be from that of fp32, as a share of it."""

SMALL_STEPS = "lr.peak=0.001"
"""Each kernel of a GPU rounds fp32 in another order than the CPU's; large steps would make much of it."""


class Failed(Exception):
    """A run of dtf ended with an error."""


def run(job: Job) -> None:
    for precision in ("fp64", "fp32"):
        _as_on_the_cpu(job, precision)
    _one_process_strategies(job)
    _precisions(job)


def _train(job: Job, folder: str, where: str, precision: str, *more: str) -> Path:
    """A short run; its folder. Failed where it ended with an error."""
    overrides = [
        *RESNET, *RECORDED, f"precision={precision}", f"launcher.devices={where}", "launcher.processes=1",
        "launcher.threads=4", "step.batch_size=26", "step.micro_batch_rows=13", f"train.until={STEPS}",
        f"train.eval_every={STEPS}", f"checkpoint.every_steps={STEPS}", *more,
    ]  # fmt: skip
    done = job.dtf(*overrides, folder=folder)
    if done.code:
        raise Failed(f"{folder} ended with {done.code}: {done.last}")
    return done.folder


def _as_on_the_cpu(job: Job, precision: str) -> None:
    """Losses, gradient norms, weights and evaluation of the same steps, without TF32 on the GPU."""
    from dtf.runs.compare import compare
    from dtf.runs.recorded_run import RecordedRun

    name = f"{precision}: the GPU has the CPU's numbers"
    more = (SMALL_STEPS,) if precision == "fp32" else ()
    try:
        one, other = (
            RecordedRun.read(_train(job, f"{precision}-{number}", where, precision, *more))
            for number, where in enumerate(DEVICES[job.rehearsed])
        )
    except Failed as reason:
        job.lines.part(name, False, str(reason))
        return

    def noisy() -> list[RecordedRun]:
        """What one rounding at the start makes of fp32 on the processor."""
        runs = (_train(job, f"{precision}-noise-{n}", "cpu", precision, *more, f"train.perturb={n}") for n in (1, 2))
        return [RecordedRun.read(folder) for folder in runs]

    found = compare(one, other, precision == "fp64", noisy).to_json()
    job.lines.part(name, bool(found["ok"]), str(found.get("first") or ""), worst=str(found.get("worst") or ""))


def _one_process_strategies(job: Job) -> None:
    """Of the strategies with one rank, dp and pserver are programs of their own; the others are ddp's."""
    where = DEVICES[job.rehearsed][1]
    precisions = "fp64" if job.rehearsed else "fp64,fp32"
    job.check(
        "verify one rank", "job=verify", *RESNET, f"launcher.devices={where}", f"job.strategies=[{STRATEGIES}]",
        "job.processes=[1]", "job.micro_batches=[2]", f"job.precisions=[{precisions}]", "job.eval_rows=64",
    )  # fmt: skip


def _precisions(job: Job) -> None:
    """Sixty steps in each precision."""
    steps, where = (8 if job.rehearsed else 60), DEVICES[job.rehearsed][1]
    names = ["fp32", "bf16"] if job.rehearsed else ["fp32", *WITHIN]
    means: dict[str, float] = {}
    for precision in names:
        try:
            folder = _train(job, f"long-{precision}", where, precision, f"train.until={steps}", "step.batch_size=104")
        except Failed as reason:
            job.lines.part(f"{steps} steps in {precision}", False, str(reason))
            continue
        means[precision] = mean_loss(folder, steps // 2)
        if "fp32" not in means or precision == "fp32":
            continue
        apart = abs(means[precision] - means["fp32"]) / means["fp32"]
        ok = apart <= WITHIN[precision]
        text = f"loss {means[precision]:.4f}, fp32 {means['fp32']:.4f}"
        job.lines.part(f"{steps} steps in {precision}", ok, "" if ok else text, apart=f"{apart:.1e}")


def mean_loss(folder: Path, after: int) -> float:
    """Of the training steps after so many. NaN where there are none."""
    lines: list[dict[str, Any]] = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["split"] == "train" and line["step"] > after]
    return sum(losses) / len(losses) if losses else math.nan
