"""The allocator of this process keeps memory that was freed, so that the next step need not get it from the system page
by page: activations are as large in each step.
"""

from __future__ import annotations

import ctypes
import os

_MMAP_BYTES = 1 << 28, 1 << 25
"""Larger blocks are given back at once: a table that has grown leaves no hole. The second one where glibc, before 2.35,
does not take the first.
"""
_KEPT_BYTES = (1 << 31) - 1  # the largest that mallopt takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> str:
    """Do so from now on, in this process and in those that it forks. Returns a text for people: what is done, and how
    to have it otherwise.

    Left alone where the user has set glibc's own variables, which turn it off, where another allocator is preloaded,
    and on systems without glibc.
    """
    given = [name for name in _VARIABLES if os.environ.get(name)]
    if given:
        return f"as {given[0]} says"
    if "malloc" in os.environ.get("LD_PRELOAD", ""):
        return f"LD_PRELOAD={os.environ['LD_PRELOAD']}"
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return "the system's"
    if not (any(mallopt(_MMAP_THRESHOLD, size) for size in _MMAP_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)):
        return "the system's"
    return "keeps freed memory (MALLOC_TRIM_THRESHOLD_=131072 gives it back)"
