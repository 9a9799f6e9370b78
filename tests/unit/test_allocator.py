"""Memory that a step has freed is there for the next one, unless the user says otherwise. Huge pages are the user's
choice, and the start-up table says whether they are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtf.host import allocator
from dtf.host.allocator import huge_pages

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
        (
            {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
            "True keeps freed memory (MALLOC_TRIM_THRESHOLD_=131072 gives it back)",
        ),
        ({"LD_PRELOAD": "libtcmalloc_none.so"}, "False LD_PRELOAD=libtcmalloc_none.so"),
    ],
)
def test_freed_memory_is_kept(variables: dict[str, str], said: str) -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run([sys.executable, "-c", CODE], env=own | variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


HUGE = """
import json, os, sys
import torch
from dtf.host.allocator import huge_pages

for value in sys.argv[1:]:
    if os.fork() == 0:  # torch reads the variable once
        if value == "late":
            torch.empty(1)
        os.environ["THP_MEM_ALLOC_ENABLE"] = value.replace("late", "1")
        text, large = huge_pages(), torch.ones(1 << 24)
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        huge = sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
        print(json.dumps([value, text, huge > 32_000]), flush=True)
        os._exit(0)
    os.wait()
"""


def _asks_for_huge_pages() -> bool:
    """Whether this system gives huge pages to who asks, and to nobody else."""
    try:
        return "[madvise]" in allocator._HUGE_PAGES_OF_SYSTEM.read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not _asks_for_huge_pages(), reason="this system gives huge pages to all processes, or to none")
def test_the_start_says_whether_torch_really_has_huge_pages() -> None:
    command = [sys.executable, "-c", HUGE, "0", "1", "late"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        ["0", "no huge pages (THP_MEM_ALLOC_ENABLE=1 asks for them)", False],
        ["1", "huge pages (THP_MEM_ALLOC_ENABLE=0 does without)", True],
        ["late", "no huge pages, as torch allocated before THP_MEM_ALLOC_ENABLE=1 was set", False],
    ]


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("[always] madvise never", "huge pages by this system's choice"),
        ("always madvise [never]", "no huge pages on this system"),
        (None, "no huge pages on this system"),
    ],
)
def test_a_system_decides_about_huge_pages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str | None, said: str
) -> None:
    if mode:
        (tmp_path / "enabled").write_text(mode)
    monkeypatch.setattr(allocator, "_HUGE_PAGES_OF_SYSTEM", tmp_path / "enabled")
    assert huge_pages() == said
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert "GLIBC_TUNABLES" not in huge_pages()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    (tmp_path / "enabled").write_text("always [madvise] never")
    assert huge_pages() == "huge pages as GLIBC_TUNABLES=glibc.malloc.hugetlb=1 says"
