"""Steps of dtf never wait for the device: torch raises where they would, and a trace has no call that waits."""

from __future__ import annotations

from bench.gpu import device
from bench.gpu.cases import deepfm, resnet
from bench.gpu.contest import STEP, Case, Engine
from bench.gpu.job import Job

STEPS = 5


def run(job: Job) -> None:
    small = 4 if job.rehearsed else 32
    for name, case in (("ResNet-50, bf16", resnet(job.rehearsed, small)), ("DeepFM, fp32", deepfm(job.rehearsed))):
        _prove(job, name, case)


def _prove(job: Job, name: str, case: Case) -> None:
    engine = Engine(case, device.name(job.rehearsed))
    engine.run(STEPS)  # what is made at first use may wait
    engine.clock.forbids = True
    try:
        engine.run(STEPS)
        job.lines.part(f"{name}: torch sees no wait in {STEPS} steps", True, "" if device.present() else "no GPU")
    except RuntimeError as error:
        job.lines.part(f"{name}: torch sees no wait in {STEPS} steps", False, str(error)[:400])
    finally:
        engine.clock.forbids = False
        device.forbid_waits(False)
    engine.clock.marks = True
    calls = device.calls_in(STEP, lambda: engine.run(STEPS))
    told = ", ".join(f"{count} x {name}" for name, count in calls.items() if count)
    job.lines.part(f"{name}: a trace of {STEPS} steps has no call that waits", not told, told)
