"""Random numbers as a function of names. There is no generator state to save: the same names give the same numbers,
anywhere and at any time.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_MASK = (1 << 63) - 1


def seed_of(*parts: int | str) -> int:
    """A seed in [0, 2**63) from any sequence of numbers and texts (BLAKE2b)."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _MASK


def draws(seed: int, epoch: int, ids: np.ndarray, count: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for augmentation, float64 (len(ids), count). A function of (seed, epoch, id, column)
    alone.

    `ids`: (B,) sample ids. Source: the output function of SplitMix64 (Steele, Lea & Flood 2014,
    doi:10.1145/2714064.2660195), applied twice.
    """
    import numpy as np

    with np.errstate(over="ignore"):
        key = np.uint64(seed_of(seed, "augment", epoch))
        x = mix(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)
        columns = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = mix(x[:, None] + columns)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def mix(x: np.ndarray) -> np.ndarray:
    """A bijective hash of uint64 numbers. Source: as of `draws`."""
    import numpy as np

    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
