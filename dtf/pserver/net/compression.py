"""Numbers of fp32 that travel in a format of half the bytes (`strategy.wire`); they are rounded on the way only."""

from __future__ import annotations

import numpy as np
import torch

WIRE_DTYPES = {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Value of `strategy.wire` -> dtype in which fp32 numbers travel, None: unchanged."""


def compress(array: np.ndarray, wire: torch.dtype | None) -> np.ndarray:
    """An array of float32 in the dtype `wire`; bf16 as its bits, uint16."""
    if wire is None:
        return array
    compressed = torch.from_numpy(np.ascontiguousarray(array)).to(wire)
    return compressed.view(torch.int16).numpy().view(np.uint16) if wire is torch.bfloat16 else compressed.numpy()


def decompress(array: np.ndarray, name: str) -> np.ndarray:
    """Inverse of `compress`, up to the rounding. `name`: the dtype's name in the message."""
    if name == "f16":
        return array.astype(np.float32)
    if name == "bf16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def rounded(array: np.ndarray, wire: torch.dtype | None) -> np.ndarray:
    """The array as it arrives after `compress` and `decompress`."""
    return array if wire is None else torch.from_numpy(np.ascontiguousarray(array)).to(wire).float().numpy()
