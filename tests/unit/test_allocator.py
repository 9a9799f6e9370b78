"""Memory that a step has freed is there for the next one, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource
from dtf.host.allocator import keep_freed_memory

size = 100_000_000

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"1" * size  # 100 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

text = keep_freed_memory()
faults()
print(faults() < 1000, text)
"""


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "True keeps freed memory (MALLOC_TRIM_THRESHOLD_=131072 gives it back)"),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, "False as MALLOC_TRIM_THRESHOLD_ says"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, "False as GLIBC_TUNABLES says"),
        ({"LD_PRELOAD": "libtcmalloc_none.so"}, "False LD_PRELOAD=libtcmalloc_none.so"),
    ],
)
def test_freed_memory_is_kept(variables: dict[str, str], said: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", CODE], env=own | variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said
