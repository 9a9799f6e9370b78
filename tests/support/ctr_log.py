"""A small Criteo log whose rows tell their numbers, and the options that read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dtf.api.recipe import Dataset
from dtf.recipes.ctr.log_data import Integers, LogOptions

ROWS = 1000


def line(number: int) -> bytes:
    """A row of a Criteo log that tells its number: in its first integer, and as its first category."""
    rest = [b"%d" % (number % 7 - 2) if number % 5 else b""] * 12
    return b"\t".join(
        [b"%d" % (number % 3 == 0), b"%d" % number, *rest, b"%x" % number, *[b"%08x" % (number % 50)] * 24, b""]
    )


def content(first: int, last: int) -> bytes:
    return b"".join(line(i) + b"\n" for i in range(first, last))


def options(root: Path, **values: Any) -> LogOptions:
    defaults: dict[str, Any] = {
        "train": str(root / "train"),
        "eval": str(root / "train"),
        "cache": str(root / "cache"),
        "integers": Integers.raw,
        "threads": 2,
    }
    made = LogOptions(**defaults | values)
    made.check()
    return made


def written(root: Path, *parts: bytes, suffix: str = ".tsv") -> Path:
    (root / "train").mkdir(exist_ok=True)
    for i, part in enumerate(parts):
        (root / "train" / f"part_{i}{suffix}").write_bytes(part)
    return root


def numbers(data: Dataset, ids: np.ndarray | None = None) -> list[int]:
    return data.fetch(np.arange(len(data)) if ids is None else ids, 0)[0]["dense"][:, 0].int().tolist()
