"""What the figures hold for."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu import device
from bench.gpu.job import Job
from bench.medians import processor
from dtf.core.version import __version__

NAMES = (
    "torchvision", "triton", "numpy", "hydra-core", "omegaconf", "grpcio", "numba", "simplejpeg", "nvidia-dali-cuda130",
)  # fmt: skip


def run(job: Job) -> None:
    figure = job.lines.figure
    figure("dtf", __version__)
    figure("torch", torch.__version__, python=platform.python_version())
    figure("CUDA of torch", torch.version.cuda or "none")
    figure("cuDNN", torch.backends.cudnn.version() if device.present() else "not asked")
    nccl = torch.cuda.nccl.version() if device.present() else ()  # type: ignore[attr-defined]
    figure("NCCL", ".".join(map(str, nccl)) or "not asked")
    for name in NAMES:
        try:
            figure(name, version(name))
        except PackageNotFoundError:
            figure(name, "not installed")
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figure("processor", processor(), cores=len(os.sched_getaffinity(0)))
    figure("memory", round(pages / 2**30), "GiB")
    if device.present():
        properties = torch.cuda.get_device_properties(0)
        figure("GPU", properties.name, multiprocessors=properties.multi_processor_count)
        figure("memory of the GPU", round(properties.total_memory / 2**30, 1), "GiB")
        figure("compute capability", ".".join(map(str, torch.cuda.get_device_capability(0))))
        figure("bf16", torch.cuda.is_bf16_supported())
    _driver(job)
    job.lines.part("a product on the device", _product(device.name(job.rehearsed)))


def _driver(job: Job) -> None:
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit,compute_mode"
    try:
        done = subprocess.run(["nvidia-smi", query, "--format=csv"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        job.lines.figure("nvidia-smi", f"not there: {error}")
        return
    job.lines.figure("nvidia-smi", " | ".join(done.stdout.split("\n")).strip(" |") or done.stderr.strip())


def _product(name: str) -> bool:
    one = torch.randn(64, 64, dtype=torch.float64)
    there = one.to(name)
    return torch.allclose((there @ there).cpu(), one @ one, rtol=1e-12)
