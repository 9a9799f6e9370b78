"""How many floating-point operations a GPU makes a second at most, by its name and the number format. Torch-free.

Sources: NVIDIA's data sheets of each GPU, rates without sparsity and at the boost clock: V100 (2018), T4 (2019), A100
(2021), A30, A40, A10 (2021), H100 (2023), H200 (2024), L4, L40, L40S (2023), HGX B200 (2025, its eighth); for GeForce
and RTX the white papers of Turing, Ampere, Ada and Blackwell, with sums in fp32, as torch has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_TERA = 1e12


def _rates(fp64: float, fp32: float, tf32: float, half: float, bf16: bool = True) -> Mapping[str, float]:
    """In TFLOP/s; tensor cores count where torch uses them. 0: there is no such rate."""
    rates = {"fp64": fp64, "fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half if bf16 else 0.0}
    return {name: _TERA * rate for name, rate in rates.items() if rate}


_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    (r"\bB200\b", _rates(37, 75, 1125, 2250)),
    (r"\bH200 NVL\b", _rates(60, 60, 417.5, 835.5)),
    (r"\bG?H200\b", _rates(67, 67, 494.7, 989.4)),
    (r"\bH100 NVL\b", _rates(60, 60, 417.5, 835.5)),
    (r"\bH100 PCIe\b", _rates(51, 51, 378, 756.5)),
    (r"\bH100 (\d+GB HBM3|SXM)", _rates(67, 67, 494.7, 989.4)),
    (r"\bA100\b", _rates(19.5, 19.5, 156, 312)),
    (r"\bA30\b", _rates(10.3, 10.3, 82, 165)),
    (r"\bA40\b", _rates(0, 37.4, 74.8, 149.7)),
    (r"\bA10\b", _rates(0, 31.2, 62.5, 125)),
    (r"\bL40S\b", _rates(0, 91.6, 183, 362)),
    (r"\bL40\b", _rates(0, 90.5, 90.5, 181)),
    (r"\bL4\b", _rates(0, 30.3, 60, 121)),
    (r"\bV100S\b", _rates(8.2, 16.4, 0, 130, bf16=False)),
    (r"\bV100-PCIE\b", _rates(7, 14, 0, 112, bf16=False)),
    (r"\bV100-SXM", _rates(7.8, 15.7, 0, 125, bf16=False)),
    (r"\bT4\b", _rates(0, 8.1, 0, 65, bf16=False)),
    (r"\bRTX 6000 Ada\b", _rates(0, 91.1, 182.1, 364.2)),
    (r"\bRTX A6000\b", _rates(0, 38.7, 77.4, 154.8)),
    (r"\bRTX 5090$", _rates(0, 104.8, 104.8, 209.5)),
    (r"\bRTX 4090$", _rates(0, 82.6, 82.6, 165.2)),
    (r"\bRTX 3090$", _rates(0, 35.6, 35.6, 71)),
)
"""Pattern in the name that the driver gives, the special before the general -> number format -> operations a second."""


def peak_flops(name: str, number_format: str) -> float | None:
    """Operations a second of the GPU of this name in `fp64`, `fp32`, `tf32`, `bf16` or `fp16`. None: not known, as of a
    part of a GPU (MIG).
    """
    if "MIG" in name.split():
        return None
    return next((rates.get(number_format) for pattern, rates in _PEAKS if re.search(pattern, name)), None)
