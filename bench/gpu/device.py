"""All that the kit asks of CUDA itself. Each function has a way without a GPU, by which its callers are rehearsed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of the CUDA runtime in which a host thread waits for the device."""

PAGEABLE = "Pageable -> Device"
"""Of the names of copies in a trace: for memory that is not pinned the driver may wait for the stream."""


def name(rehearsed: bool) -> str:
    return "cpu" if rehearsed else "cuda:0"


def present() -> bool:
    return torch.cuda.is_available()


def settle() -> None:
    """Wait until the device has done all that it was given."""
    if present():
        torch.cuda.synchronize()


def choose_kernels(benchmark: bool) -> None:
    """Let cuDNN use any of its kernels, in fp32 without TF32. `benchmark`: it tries them at first use of a shape."""
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def peak_bytes(work: Callable[[], object]) -> int:
    """The most that torch had allocated at one time while `work` ran; 0 without a GPU."""
    if not present():
        work()
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    work()
    settle()
    return torch.cuda.max_memory_allocated()


def forbid_waits(forbid: bool) -> None:
    """Let torch raise RuntimeError where an operation makes the host wait for the device."""
    if present():
        torch.cuda.set_sync_debug_mode("error" if forbid else "default")


def calls_in(section: str, work: Callable[[], object], names: Sequence[str] = WAITS) -> dict[str, int]:
    """How often `work` entered the calls `names` within sections of this name, see `record_function`, as a trace says.
    And, wherever that was, PAGEABLE copies to the device: the trace has them by the time of the device.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if present() else [])]
    with profile(activities=activities) as trace:
        work()
        settle()
    events = trace.events() or ()
    # a trace shows sections once more, by when the device did what they gave it
    sections = [event.time_range for event in events if event.name == section and event.device_type == DeviceType.CPU]
    if not sections:
        raise RuntimeError(f"the trace has no section {section}")
    counts = dict.fromkeys((*names, PAGEABLE), 0)
    for event in events:
        start = event.time_range.start
        if event.name in names and any(part.start <= start <= part.end for part in sections):
            counts[event.name] += 1
        elif PAGEABLE in event.name:
            counts[PAGEABLE] += 1
    return counts


def captured(step: Callable[[], object], warmups: int = 3) -> Callable[[], object]:
    """`step` as one CUDA graph: a function that replays it. Its inputs and outputs stay where they are in memory.
    Without a GPU: `step` itself.
    """
    if not present():
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # torch asks for warm-up passes on a stream of their own
        for _ in range(warmups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def timed(work: Callable[[], object]) -> float:
    """Seconds of `work`, and of what it gave the device."""
    settle()
    started = time.perf_counter()
    work()
    settle()
    return time.perf_counter() - started
