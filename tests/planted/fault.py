"""One planted fault: a small change of the code that named tests must find."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which the file holds exactly once, becomes `new`; then one of `tests` (pytest node ids) must fail."""

    name: str
    file: str  # from the root of the checkout
    old: str
    new: str
    tests: tuple[str, ...]
