"""Intervals of medians, and the machine that they hold for."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def machine() -> str:
    """Processor, cores that may be used, and versions; figures hold for these."""
    import torch

    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} cores, torch {torch.__version__}, python {platform.python_version()}"


def processor() -> str:
    """Its name, and the features that decide how fast numbers are computed."""
    names, flags = [platform.machine()], set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            names = [value.strip()]
        elif key.strip() == "flags":
            flags = set(value.split())
    return f"{names[0]} ({', '.join(flag for flag in ('avx2', 'avx512f', 'avx512_bf16', 'amx_bf16') if flag in flags)})"


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by ranks: no shape is assumed. With fewer than six values: all of them."""
    ordered, count = sorted(values), len(values)
    tail, below = 0.0, 0
    for rank in range(count // 2):
        tail += math.comb(count, rank) / 2**count  # how likely the median lies below the value of this rank
        if tail > 0.025:
            break
        below = rank
    return ordered[below], ordered[count - 1 - below]


def interval(values: Sequence[float]) -> str:
    """`bounds`, as a text."""
    low, high = bounds(values)
    return f"{low:.2f} to {high:.2f}"
