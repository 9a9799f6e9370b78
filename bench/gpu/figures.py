"""Steps of dtf against a loop written by hand, and against the fastest that loop can be."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.gpu import device
from bench.gpu.cases import deepfm as deepfm_case
from bench.gpu.cases import resnet
from bench.gpu.contest import Case, Engine, Graphed, Hand, Outcome, contest
from bench.gpu.job import Job
from bench.gpu.record import NotRun

APART = 0.05
"""Losses of two contestants that train the same rows from the same start differ by less, whatever bf16 rounds."""


def resnet50(job: Job) -> None:
    _against_hand(job, resnet(job.rehearsed), steps=2 if job.rehearsed else 10, rows="images")


def deepfm(job: Job) -> None:
    _against_hand(job, deepfm_case(job.rehearsed), steps=3 if job.rehearsed else 60, rows="rows")


def _against_hand(job: Job, case: Case, steps: int, rows: str) -> None:
    place = device.name(job.rehearsed)
    rounds = 3 if job.rehearsed else 25
    runs: dict[str, Any] = {
        "dtf": Engine(case, place),
        "by hand": Hand(case, place),
        "by hand, cudnn.benchmark": Hand(case, place, benchmark=True),
    }
    outcome = contest(runs, steps, rounds, lambda: job.left_s - 30)
    tell(job, case, outcome, rows)
    tell_same(job, outcome)
    tell_peaks(job, runs)
    if job.left_s < 20:
        raise NotRun("no time is left for a CUDA graph")
    try:
        runs = {"dtf": runs["dtf"], "by hand": runs["by hand"], "one CUDA graph": Graphed(case, place)}
    except RuntimeError as error:  # a model that no graph can hold
        job.lines.not_run("one CUDA graph", f"{type(error).__name__}: {str(error)[:300]}")
        return
    tell(job, case, contest(runs, steps, rounds, lambda: job.left_s - 5), rows)


def tell(job: Job, case: Case, outcome: Outcome, rows: str, base: str = "by hand") -> None:
    """The figures of a contest."""
    for name, seconds in outcome.seconds.items():
        value = case.batch / median(seconds)
        ms = 1e3 * median(seconds)
        job.lines.figure(name, round(value), f"{rows}/s", ms=round(ms, 3), rounds=len(seconds), batch=case.batch)
    for name in outcome.seconds:
        if name != base:
            job.lines.figure(f"time of {name} / {base}", outcome.text(name, base), "(95 % interval of the median)")


def tell_same(job: Job, outcome: Outcome, base: str = "by hand") -> None:
    """A part that fails where losses show that not the same was trained."""
    one, other = outcome.losses["dtf"], outcome.losses[base]
    apart = abs(one - other) / abs(other)
    reason = "" if apart < APART else f"dtf {one:.4f}, {base} {other:.4f}"
    job.lines.part("both train the same", apart < APART, reason, losses_apart=f"{apart:.1e}")


def tell_peaks(job: Job, runs: dict[str, Any]) -> None:
    """Of one step of each, beside what all of them hold."""
    for name, run in runs.items():
        bytes_ = device.peak_bytes(lambda run=run: run.run(1))
        job.lines.figure(f"peak memory of a step of {name}, models of all included", round(bytes_ / 2**20), "MiB")


def compiled(job: Job) -> None:
    """`step.compile=model` against torch.compile by hand; both compile the same graph, one of them from its cache."""
    from torch._dynamo.utils import counters

    place = device.name(job.rehearsed)
    case = resnet(job.rehearsed, compiled=True)
    hand, plain = Hand(case, place, compiled=True), Hand(case, place)
    for name, run in (("by hand", hand), ("plain", plain)):
        seconds = device.timed(lambda run=run: run.run(2))
        job.lines.figure(f"first two steps {name}", round(seconds, 1), "s")
    before = counters["stats"]["unique_graphs"]  # "frames" counts no modules that are compiled whole
    engine = Engine(case, place)
    seconds = device.timed(lambda: engine.run(2))
    job.lines.figure("first two steps of dtf", round(seconds, 1), "s")
    job.lines.part("dtf compiles", counters["stats"]["unique_graphs"] > before, "step.compile=model made no graph")
    if job.left_s < 15:
        raise NotRun("the time is up after compiling")
    runs = {"dtf": engine, "by hand": hand, "by hand, not compiled": plain}
    steps, rounds = (2, 3) if job.rehearsed else (10, 25)
    outcome = contest(runs, steps, rounds, lambda: job.left_s - 10)
    tell(job, case, outcome, "images")
    tell_same(job, outcome)
