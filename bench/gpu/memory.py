"""Peak memory of a rank under each strategy, two ranks on one GPU, beside what dtf planned."""

from __future__ import annotations

import json
from typing import Any

from bench.gpu.job import Done, Job
from bench.gpu.numbers import DEVICES
from bench.gpu.record import NotRun
from bench.gpu.shared import PLUGIN

STRATEGIES = {
    "one process": ("strategy=ddp", "launcher.processes=1"),
    "ddp": ("strategy=ddp", "strategy.backend=gloo"),
    "zero1": ("strategy=zero1", "strategy.backend=gloo"),
    "fsdp": ("strategy=fsdp_gloo",),
    "tensor": ("strategy=tensor_gloo",),
    "pipeline": ("strategy=pipeline_gloo",),
    "fsdp, offload": ("strategy=fsdp_gloo", "strategy.offload=true"),
    "ddp, remat": ("strategy=ddp", "strategy.backend=gloo", "step.remat=blocks"),
    "pserver": ("strategy=pserver",),
}


def run(job: Job) -> None:
    """ResNet-50 of 64-pixel images with AdamW in fp32, four steps of 64 rows: small enough for all to fit."""
    arch, rows = ("resnet8", 16) if job.rehearsed else ("resnet50", 64)
    for name in STRATEGIES:
        if job.rehearsed and "strategy.offload=true" in STRATEGIES[name]:
            continue
        try:
            done = job.dtf(
                *PLUGIN, "recipe=resnet_shapes", f"launcher.devices={DEVICES[job.rehearsed][1]}",
                "launcher.processes=2", f"recipe.model.arch={arch}", "recipe.data.pixels=64",
                f"recipe.data.train_rows={8 * rows}", "recipe.data.eval_rows=16", "optimizer=adamw",
                f"step.batch_size={rows}", f"step.micro_batch_rows={rows // 2}", "train.until=4",
                "train.eval_every=0", "checkpoint=off", "observer=[events]", *STRATEGIES[name],
                folder=f"memory of {name}",
            )  # fmt: skip
        except NotRun as reason:
            job.lines.not_run(name, str(reason))
            continue
        memory = _memory(done)
        if done.code or not memory:
            job.lines.part(name, False, f"exit code {done.code}: {done.last}")
            continue
        peak = memory.get("allocated", memory.get("resident", 0))
        mib = {key: round(memory[key] / 2**20) for key in ("planned",) if key in memory}
        job.lines.figure(f"peak of {name}", round(peak / 2**20), "MiB", **{f"{k} MiB": v for k, v in mib.items()})
        job.lines.part(name, True)


def _memory(done: Done) -> dict[str, Any]:
    """Of the event that ended the run; empty where it has none."""
    path = done.folder / "events.jsonl"
    events = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    return next((event["memory"] for event in reversed(events) if event.get("memory")), {})
