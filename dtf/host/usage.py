"""How busy the devices of this host are at a moment: CPU time and memory of a process tree from /proc, GPUs from NVML.

Keeps no history. Torch-free.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Load(NamedTuple):
    """How busy a device is. `utilisation`: in per cent; `memory`: in bytes."""

    device: str  # cpu, or cuda:<index>
    utilisation: float
    memory: int


class Process(NamedTuple):
    parent: int
    cpu_s: float  # since it began
    memory: int  # resident bytes


def process_tree(root: int) -> dict[int, Process]:
    """A process and all its descendants, by process id."""
    known: dict[int, Process] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError, ValueError, IndexError):  # it ended while it was read
                # behind the name; the first is field 3 of proc(5)
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                known[int(entry)] = Process(
                    int(fields[1]), (int(fields[11]) + int(fields[12])) * _TICK_S, int(fields[21]) * _PAGE_BYTES
                )
    children: dict[int, list[int]] = {}
    for number, process in known.items():
        children.setdefault(process.parent, []).append(number)
    tree, waiting = {}, [root]
    while waiting:
        number = waiting.pop()
        if number in known:
            tree[number] = known[number]
            waiting += children.get(number, [])
    return tree


def cpu_load(before: dict[int, Process], now: dict[int, Process], seconds: float, cores: int) -> Load:
    """The load between two calls of `process_tree`: CPU time as a share of `cores`, and memory at the second call.
    Memory that processes share is counted for each of them.
    """
    used = sum(
        max(0.0, process.cpu_s - (before[number].cpu_s if number in before else 0.0)) for number, process in now.items()
    )
    return Load("cpu", 100 * used / (seconds * cores), sum(process.memory for process in now.values()))


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Gpus:
    """GPUs by the indices that torch gives them. NVML sees whole cards, with what other programs do on them.

    OSError without a driver, and for a GPU that the driver does not know.
    """

    def __init__(self, indices: Sequence[int]) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        self._handles: list[tuple[int, ctypes.c_void_p]] = []
        for index in indices:
            handle, name = ctypes.c_void_p(), visible[index] if visible else str(index)
            if name.isdecimal():
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(name)), ctypes.byref(handle))
            else:
                self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
            self._handles.append((index, handle))

    def loads(self) -> list[Load]:
        """The load of each GPU at this moment."""
        loads = []
        for index, handle in self._handles:
            rates, memory = _Rates(), _Memory()
            self._call("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates))
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            loads.append(Load(f"cuda:{index}", float(rates.gpu), int(memory.used)))
        return loads

    def close(self) -> None:
        self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._nvml, name)(*arguments)
        if code:
            raise OSError(f"{name} of NVML failed with code {code}")
