"""Runs of the platform of `here.py`, their bundles, and what these make inside a job."""

from __future__ import annotations

from pathlib import Path

from dtf.cluster import inside
from dtf.cluster.allocation import Allocation
from dtf.cluster.bundle import Bundle, digest_of, unpacked
from dtf.config.compose import Composed

HERE = ["plugins=[here_platform]", "launcher=here", "launcher.devices=cpu"]
SMALL = [*HERE, "step.batch_size=48", "train.steps=2", "train.eval_rows=96", "launcher.processes=1"]


def bundle(tmp_path: Path, *composed: Composed) -> tuple[Path, str]:
    """A bundle of these runs, and its digest."""
    run_dirs = [str(tmp_path / f"run{number}") for number in range(len(composed))]
    content = Bundle.of(composed, run_dirs, "", "t" * 64, 300.0).to_bytes(composed)
    path = tmp_path / "bundle.zip"
    path.write_bytes(content)
    return path, digest_of(content)


def composed_inside(path: Path, allocation: Allocation, *overrides: str) -> Composed:
    with unpacked(path, "") as content:
        return inside._composed(content, content.bundle.runs[0], allocation, overrides, path.parent)
