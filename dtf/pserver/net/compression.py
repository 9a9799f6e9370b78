"""Numbers that travel in a narrower format than they have: half the bytes, rounded on the way and nowhere else."""

from __future__ import annotations

import numpy as np
import torch

WIRE_DTYPES = {"same": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What `strategy.wire` chooses -> format of fp32 numbers on their way."""


def compress(array: np.ndarray, wire: torch.dtype | None) -> np.ndarray:
    """An array of float32 as it travels; bf16 as its bits, uint16."""
    if wire is None:
        return array
    found = torch.from_numpy(np.ascontiguousarray(array)).to(wire)
    return found.view(torch.int16).numpy().view(np.uint16) if wire is torch.bfloat16 else found.numpy()


def decompress(array: np.ndarray, name: str) -> np.ndarray:
    """Inverse of `compress`, but for what was rounded; `name` of the format as the message has it."""
    if name == "f16":
        return array.astype(np.float32)
    if name == "bf16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array


def rounded(array: np.ndarray, wire: torch.dtype | None) -> np.ndarray:
    """What arrives of an array that travels."""
    return array if wire is None else torch.from_numpy(np.ascontiguousarray(array)).to(wire).float().numpy()
