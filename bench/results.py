"""Figures that were measured, in files of JSON lines: bench/results/MACHINE.jsonl, one line for each part. What makes
another machine, makes another file: processor, cores, memory, system with its release, Python.

A line holds raw figures, the machine, versions, the date, and the last commit that changed what was measured.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.medians import processor
from bench.rows import Row, as_json, row_of

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).with_name("results")
MEASURED = ("dtf", "recipes", "conf", "bench", ":!bench/results")


@dataclass(frozen=True)
class Machine:
    """What figures hold for."""

    processor: str
    cores: int
    memory_gb: int
    system: str
    python: str

    def name(self) -> str:
        """Of its file."""
        return re.sub(r"[^a-z0-9]+", "-", self.text().lower()).strip("-")

    def text(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.memory_gb} GB, {self.system}, Python {self.python}"


@dataclass(frozen=True)
class Record:
    """One part, measured once."""

    part: str
    machine: Machine
    commit: str
    date: str
    seconds: float
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)


def this_machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    return Machine(processor(), cores, round(memory), system, platform.python_version())


def this_commit() -> str:
    """The last one that changed what is measured; with "+" where files differ from it."""
    last = _git("log", "-1", "--format=%h", "--", *MEASURED)
    return (last or "unknown") + ("+" if _git("status", "--porcelain", "--", *MEASURED) else "")


def own_versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "torchvision", "numpy", "safetensors", "grpcio", "numba", "simplejpeg"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def record(part: str, commit: str, rows: list[Row], seconds: float, peers: dict[str, str]) -> Record:
    """`commit`: when it began. `peers`: the versions of what dtf was compared with."""
    today = date.today().isoformat()
    return Record(part, this_machine(), commit, today, round(seconds, 1), own_versions() | peers, rows)


def read(path: Path) -> dict[str, Record]:
    """By part; empty where there is no such file."""
    if not path.exists():
        return {}
    return {found.part: found for found in map(_from_json, path.read_text().splitlines())}


def write(path: Path, records: dict[str, Record]) -> None:
    """All of them, in the order of their names: the file differs where figures do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text("".join(f"{json.dumps(_to_json(records[part]))}\n" for part in sorted(records)))
    os.replace(draft, path)


def _to_json(one: Record) -> dict[str, Any]:
    return {**vars(one), "machine": vars(one.machine), "rows": [as_json(row) for row in one.rows]}


def _from_json(line: str) -> Record:
    found = json.loads(line)
    rows = [row_of(row) for row in found.pop("rows")]
    return Record(**{**found, "machine": Machine(**found["machine"]), "rows": rows})


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
