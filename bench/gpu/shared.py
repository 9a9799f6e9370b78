"""Two ranks on one GPU under each strategy, against one process: `job=verify` with tensors on the GPU, which ranks
exchange by gloo.
"""

from __future__ import annotations

import json

from bench.gpu.job import Job
from bench.gpu.numbers import DEVICES, RESNET

PLUGIN = ("plugins=[bench.gpu.parts]", "launcher=one_gpu")
CLICKS = (
    "recipe=ctr_clicks", "recipe.model.kind=deepfm", "recipe.model.dim=8", "recipe.model.hidden=[32,32]",
    "recipe.data.values=520", "recipe.data.train_rows=1000", "recipe.data.eval_rows=256",
)  # fmt: skip
OFFLOAD = ("job.strategies=['fsdp_gloo offload=true']",)


def resnet(job: Job) -> None:
    _verify(job, "ResNet, two ranks", RESNET, ["dp", *_STRATEGIES, "pserver"])


def clicks(job: Job) -> None:
    _verify(job, "DeepFM, two ranks", CLICKS, [*_STRATEGIES, "pserver"])


def offload(job: Job) -> None:
    if job.rehearsed:
        job.lines.not_run("offload", "strategy.offload needs a GPU")
        return
    _verify(job, "fsdp with parameters on the host", RESNET, ["'fsdp_gloo offload=true'"])


_STRATEGIES = ["'ddp backend=gloo'", "'zero1 backend=gloo'", "fsdp_gloo", "tensor_gloo", "pipeline_gloo"]


def _verify(job: Job, name: str, recipe: tuple[str, ...], strategies: list[str]) -> None:
    """A part for each strategy."""
    done = job.dtf(
        "job=verify", *PLUGIN, *recipe, f"launcher.devices={DEVICES[job.rehearsed][1]}",
        f"job.strategies=[{','.join(strategies)}]", "job.processes=[2]", "job.micro_batches=[1]",
        "job.precisions=[fp64]", "job.eval_rows=64", folder=name,
    )  # fmt: skip
    report = done.folder / "verify.json"
    if not report.exists():
        job.lines.part(name, False, f"exit code {done.code}: {done.last}")
        return
    found = json.loads(report.read_text())
    for row in found["runs"]:
        job.lines.part(f"{name}, {row['strategy']}", row["ok"], str(row.get("first") or ""), worst=row.get("worst"))
    for row in found["refused"]:
        job.lines.not_run(f"{name}, {row['strategy']}", row["refused"])
