"""The allocator of this process keeps memory that was freed, so that the next step need not get it from the system page
by page: activations are as large in each step. Says whether torch also asks for huge pages, which is the user's choice.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path

_MMAP_BYTES = 1 << 28, 1 << 25
"""Larger blocks are given back at once: a table that has grown leaves no hole. The second one where glibc, before 2.35,
does not take the first.
"""
_KEPT_BYTES = (1 << 31) - 1  # the largest that mallopt takes
_DEFAULT_BYTES = 1 << 17  # glibc's own of both
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold", "glibc.malloc.top_pad")
_PR_GET_THP_DISABLE = 42
_HUGE_PAGES_OF_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # of torch, which reads it at its first allocation
_LARGE = 1 << 21  # bytes of a tensor from which on torch asks for huge pages


def keep_freed_memory() -> str:
    """Do so from now on, in this process and in those that it forks. Returns a text for people: what is done, and how
    to have it otherwise.

    Left alone where the user has set glibc's own variables, which turn it off, where another allocator is preloaded,
    and on systems without glibc.
    """
    given = [name for name in _VARIABLES if os.environ.get(name)]
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in _TUNABLES):
        given.append("GLIBC_TUNABLES")
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


def give_freed_memory_back() -> None:
    """Undo `keep_freed_memory`: give the system what is free, and again what is freed from now on."""
    with contextlib.suppress(AttributeError):  # no glibc
        library = ctypes.CDLL(None)
        trim, mallopt = library.malloc_trim, library.mallopt
        if not any(os.environ.get(name) for name in _VARIABLES):
            mallopt(_TRIM_THRESHOLD, _DEFAULT_BYTES)
            mallopt(_MMAP_THRESHOLD, _DEFAULT_BYTES)
        trim(0)


def huge_pages() -> str:
    """A text for people: whether large tensors of the host are in huge pages, as the system says or two of them show,
    and how to have it otherwise.
    """
    import torch

    try:
        mode = re.search(r"\[(\w+)\]", _HUGE_PAGES_OF_SYSTEM.read_text())
    except OSError:
        mode = None
    denied = mode is None or ctypes.CDLL(None).prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1
    if denied or mode is None or mode[1] == "never":
        return "no huge pages on this system"
    if mode[1] == "always":
        return "huge pages by this system's choice"
    if re.search(r"glibc\.malloc\.hugetlb=0*[1-9]", os.environ.get("GLIBC_TUNABLES", "")):
        return f"huge pages as GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']} says"
    # torch aligns to pages what it asks huge pages for. Of two blocks in a row only one would be aligned by chance.
    tensors = [torch.empty(_LARGE + 64, dtype=torch.uint8) for _ in range(2)]
    if not any(tensor.data_ptr() % os.sysconf("SC_PAGESIZE") for tensor in tensors):
        return f"huge pages ({_HUGE_PAGES}=0 does without)"
    if os.environ.get(_HUGE_PAGES) == "1":
        return f"no huge pages, as torch allocated before {_HUGE_PAGES}=1 was set"
    return f"no huge pages ({_HUGE_PAGES}=1 asks for them)"
