"""Computes the shares of the parts of a step from a trace of torch.profiler (Chrome's trace events). Needs no torch.

Each moment counts for one thing, so that shares add up to the whole: what this rank computes, or, while it computes
nothing, the message that is under way. On a CPU, work is what the named sections of the host's threads say; on CUDA it
is what kernels run, each for the section in which it was launched, whichever thread launched it. Where several things
run side by side (replicas in threads, streams), a moment is divided among them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from dtf.core.types import TRACE_PREFIX

WORK = ("data", "forward", "backward", "communication", "optimizer")
"""What a step is made of; the rest is `other`."""

MICRO = 1e-6
"""A trace counts microseconds."""

_NO_STEP = ("evaluate", "save")  # sections that lie between steps
_CHANNELS = ("gloo:", "mpi:", "ucc:")  # how backends of a CPU name their messages
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Shares(NamedTuple):
    """`parts`: share of a step, by what is in WORK and `other`; their sum is 1.

    `hidden`: of communication beside computation, not in `parts`.
    """

    steps: int
    step_s: float
    parts: dict[str, float]
    hidden: float


class _Span(NamedTuple):
    start: float
    end: float
    # work, busy (a computation), message, host (a section while kernels say what is work) or outside (of all steps)
    kind: str
    label: str = ""


def shares(events: Iterable[dict[str, Any]]) -> Shares | None:
    """The shares of the whole steps in a trace; None when there is none. `events`: the list `traceEvents`."""
    spans = [event for event in events if event.get("ph") == "X" and "dur" in event]
    steps = [
        (event["ts"], event["ts"] + event["dur"])
        for event in spans
        if event["name"].startswith("ProfilerStep#") and event["cat"] == "user_annotation"
    ]
    if not steps:
        return None
    first, last = min(start for start, _ in steps), max(end for _, end in steps)
    totals: defaultdict[str, float] = defaultdict(float)
    hidden = 0.0
    for duration, active in _moments(_classified(spans), first, last):
        kinds = {kind for kind, _ in active}
        if "outside" in kinds:
            continue
        work = (
            {label for kind, label in active if kind == "work"}
            or {label for kind, label in active if kind == "host"}
            or {"other"}
        )
        if "message" in kinds and "busy" not in kinds:
            work = {"communication"}
        elif "message" in kinds:
            hidden += duration
        for label in work:
            totals[label] += duration / len(work)
    whole = sum(totals.values()) or 1.0
    return Shares(
        len(steps),
        whole * MICRO / len(steps),
        {label: totals[label] / whole for label in (*WORK, "other")},
        hidden / whole,
    )


def _moments(spans: Iterable[_Span], first: float, last: float) -> Iterator[tuple[float, set[tuple[str, str]]]]:
    """Intervals in which the same spans are active: their durations in microseconds, and (kind, label) of the spans."""
    ends: list[tuple[float, int, tuple[str, str]]] = []
    for start, end, kind, label in spans:
        start, end = max(start, first), min(end, last)
        if start < end:
            ends += [(start, 1, (kind, label)), (end, -1, (kind, label))]
    active: Counter[tuple[str, str]] = Counter()
    before = first
    for at, change, what in sorted(ends):
        if at > before:
            yield at - before, set(active)
            before = at
        active[what] += change
        if not active[what]:
            del active[what]
    if last > before:
        yield last - before, set(active)


def _classified(events: list[dict[str, Any]]) -> Iterator[_Span]:
    """The span of each event that counts, with its kind."""
    sections = [
        event for event in events if event["name"].startswith(TRACE_PREFIX) and event["cat"] == "user_annotation"
    ]
    kernels = [event for event in events if event["cat"] in _DEVICE]
    for event in sections:
        label = event["name"].removeprefix(TRACE_PREFIX)
        if label in _NO_STEP:
            yield _span(event, "outside")
        elif label in WORK:
            yield _span(event, "host" if kernels else "work", label)
    if not kernels:
        for event in events:
            if event["name"].startswith("aten::"):
                yield _span(event, "busy")
            elif event["name"].startswith(_CHANNELS):
                yield _span(event, "message")
        return
    launches = {
        event["args"].get("correlation"): event["ts"]
        for event in events
        if event["cat"] in ("cuda_runtime", "cuda_driver") and "args" in event
    }
    for event in kernels:
        if "nccl" in event["name"].lower():
            yield _span(event, "message")
            continue
        at = launches.get(event.get("args", {}).get("correlation"), event["ts"])
        names = (
            section["name"].removeprefix(TRACE_PREFIX)
            for section in sections
            if section["ts"] <= at < section["ts"] + section["dur"]
        )
        yield _span(event, "busy")
        yield _span(event, "work", next((name for name in names if name in WORK), "other"))


def _span(event: dict[str, Any], kind: str, label: str = "") -> _Span:
    return _Span(event["ts"], event["ts"] + event["dur"], kind, label)
