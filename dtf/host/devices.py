"""The devices of this host: GPUs, cores and open files. Torch-free."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import platform
import re
import resource
from pathlib import Path
from typing import Literal, NamedTuple

from dtf.core.errors import ConfigError

MOST_PROCESSES = 1024
"""The most ranks, or replicas, on one host: as many as the largest machines have cores."""
MOST_THREADS = 1024
"""The most intra-op threads of one process."""


class Devices(NamedTuple):
    """The devices of ranks. `indices`: those of CUDA devices, as torch counts them; empty on CPU."""

    kind: str  # `cpu` or `cuda`
    indices: tuple[int, ...]


def host_reads(device_type: str) -> bool:
    """Whether the host reads tensors on a device of this type without waiting for it."""
    return device_type == "cpu"


def choose(devices: str) -> Devices:
    """The devices of this host that `launcher.devices` stands for. ConfigError for devices that are not there."""
    if devices == "cpu":
        return Devices("cpu", ())
    count = gpus()
    if devices in ("auto", "cuda"):
        if devices == "cuda" and not count:
            raise ConfigError(f"launcher.devices=cuda finds no GPU: {_why_none()}; use launcher.devices=cpu")
        return Devices("cuda", tuple(range(count))) if count else Devices("cpu", ())
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", devices):
        raise ConfigError(
            f"launcher.devices={devices} is no choice; use auto, cpu, cuda or numbers of GPUs such as "
            "launcher.devices='\"0,2\"'"
        )
    indices = tuple(int(part) for part in devices.split(","))
    if len(set(indices)) != len(indices):
        raise ConfigError(f"launcher.devices={devices} names a GPU twice")
    if max(indices) >= count:
        have = f"there are {count}, 0 to {count - 1}" if count else f"there are none ({_why_none()})"
        raise ConfigError(f"launcher.devices={devices} names GPU {max(indices)}; {have}")
    return Devices("cuda", indices)


def processes(asked: int | Literal["auto"], devices: Devices) -> int:
    """`launcher.processes` as a number: `auto` is one per GPU, without GPUs 2."""
    return processes_for(asked, len(devices.indices))


def processes_for(asked: int | Literal["auto"], gpus: int) -> int:
    """Ranks of a host with so many GPUs; where there are none, 2 show what a strategy does."""
    return (gpus or 2) if asked == "auto" else asked


def device_of(local_rank: int, local_size: int, devices: Devices, key: str = "launcher.processes") -> str:
    """`cpu` or `cuda:<index>`: the device of a rank, one GPU per rank.

    ConfigError when there are more ranks than GPUs. `key`: the config key that says how many ranks there are.
    """
    if devices.kind == "cpu":
        return "cpu"
    if local_size > len(devices.indices):
        raise ConfigError(
            f"{key}={local_size} needs as many GPUs, there are {len(devices.indices)}; lower it or use "
            "launcher.devices=cpu"
        )
    return f"cuda:{devices.indices[local_rank]}"


def allow_files(count: int) -> int:
    """Let this process, and those that it starts from now on, open `count` files. Returns how many they may open, which
    is less where the hard limit of the host is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:  # -1: no limit
        soft = count if hard < 0 else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft if soft >= 0 else count


def gpus() -> int:
    """The number of CUDA devices that torch would find: those in CUDA_VISIBLE_DEVICES, or all that NVML lists. 0 for a
    torch without CUDA.
    """
    present = _nvml_count() if _torch_has_cuda() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    count = 0
    for entry in visible.split(","):  # CUDA ignores what follows the first entry that names no device
        entry = entry.strip()
        if not entry.startswith(("GPU-", "MIG-")) and not (entry.isdecimal() and int(entry) < present):
            break
        count += 1
    return count


def processor() -> str:
    """The model of this host's processor, as the kernel calls it."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line.partition(":")[2].strip() for line in file if line.startswith(("model name", "CPU part"))]
    except OSError:
        lines = []
    return lines[0] if lines else platform.processor() or platform.machine()


def cores() -> int:
    """How many CPU cores this process may use, by its affinity mask and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def divided_cores(ranks: int) -> list[list[int]]:
    """For each of `ranks` the cores of its own, out of those that this process may use.

    Neighbours go together: first the hardware threads of one core, so that two ranks do not share it, then cores of one
    socket. With fewer cores than ranks hardware threads are divided. ConfigError where there are fewer of these too.
    """
    parts = parted_cores(ranks)
    if not parts:
        raise ConfigError(
            f"launcher.pin=true needs a core for each of {ranks} ranks, there are {len(os.sched_getaffinity(0))}; use "
            "launcher.pin=false"
        )
    return parts


def parted_cores(count: int) -> list[list[int]]:
    """The cores that this process may use in `count` parts of neighbours, see `divided_cores`; none where there are too
    few.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number in sorted(os.sched_getaffinity(0)):
        groups.setdefault(_core_of(number), []).append(number)
    cores = [groups[key] for key in sorted(groups)]
    if len(cores) < count:
        cores = [[number] for core in cores for number in core]
    if len(cores) < count:
        return []
    bounds = [len(cores) * part // count for part in range(count + 1)]
    return [list(itertools.chain(*cores[first:last])) for first, last in itertools.pairwise(bounds)]


def _core_of(number: int) -> tuple[int, int]:
    """Socket and core of a hardware thread, as the kernel numbers them."""
    folder = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, number


def _why_none() -> str:
    if not _torch_has_cuda():
        return "the installed torch is built without CUDA"
    if not _nvml_count():
        return "no NVIDIA driver answers"
    return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} hides all"


def _torch_has_cuda() -> bool:
    """Whether torch was built for CUDA, read from its version file: importing it takes a second."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return True
    version = re.search(r"^cuda\b[^=]*=\s*(.+)$", text, re.MULTILINE)
    return version is None or version[1].strip() != "None"


def _nvml_count() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2():
        return 0
    number = ctypes.c_uint(0)
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(number))
    nvml.nvmlShutdown()
    return 0 if failed else number.value
