"""`train.dry_run`: every part of a run on a few steps, a line for each, and nothing left behind."""

from __future__ import annotations

from typing import Any

import pytest

from dtf.core.errors import Exit

TOY = ["plugins=[tests.support.mistakes]", "launcher.devices=cpu", "step.batch_size=16", "train.steps=1"]
DRY = [*TOY, "train.dry_run=true"]
PARTS = ["start", "data", "model", "fetch", "step", "evaluate", "save"]
AGAIN = ["resume", "step", "evaluate", "save", "predict"]


def parts(out: str) -> list[str]:
    """The first words of the lines with a time."""
    return [line.split()[0] for line in out.splitlines() if len(line.split()) > 2 and line.split()[2] == "s"]


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(("strategy=ddp", "launcher=inline"), id="inline", marks=pytest.mark.slow),
        pytest.param(("strategy=mesh", "launcher.processes=2"), id="mesh", marks=pytest.mark.slow),
        pytest.param(("strategy=pserver", "launcher.processes=2"), id="servers"),
    ],
)
def test_each_part_is_tried_and_nothing_is_left(run_dtf: Any, how: tuple[str, ...]) -> None:
    done = run_dtf("recipe=toy", *DRY, *how)
    assert done.code == Exit.OK, done.err
    assert sorted(parts(done.out)) == sorted([*PARTS, *AGAIN])
    assert "inputs float32 (B, 8), targets int64 (B,), outputs float32 (B, 4)" in done.out
    assert "loss of the first 1." in done.out and "a uniform guess would have 1.3863 (ln 4)" in done.out
    assert "from the save of step 2" in done.out and "probability 0." in done.out
    assert "memory: " in done.out
    assert ("mesh: shard 2 (ranks 0 1)\nsends: shard " in done.out) == ("strategy=mesh" in how)
    assert not done.folder.exists()


def test_a_failure_names_the_part_and_the_method(run_dtf: Any) -> None:
    """The evaluation's first rows are good: only an evaluation of more rows finds it."""
    done = run_dtf("recipe=mistake", "recipe.mistake=fetch_late", *DRY, "strategy=ddp", "launcher.processes=2")
    assert done.code == Exit.CONFIG
    assert "MistakenRows.fetch() raised KeyError" in done.err
    assert done.err.count("Traceback (most recent call last)") == 1  # the log of the rank is not kept
    assert "dry run: failed in the part evaluate" in done.out
    assert done.out.count("FAILED") == 1 and "save" not in parts(done.out)
    assert parts(done.out)[-1] == "evaluate"


def test_a_failure_in_a_trainer_is_one_of_the_model(run_dtf: Any) -> None:
    """A server has the parts of the engine."""
    servers = ["strategy=pserver", "launcher.processes=2"]
    done = run_dtf("recipe=mistake", "recipe.mistake=forward_raises", *DRY, *servers)
    assert done.code == Exit.CONFIG and "the forward pass of tail.1 (Part) raised RuntimeError" in done.err
    assert "dry run: failed in the part model" in done.out
    assert parts(done.out)[-1] == "model" and done.out.count("FAILED") == 1
    assert not done.folder.exists()


def test_what_cannot_start_ranks_again_is_refused(run_dtf: Any) -> None:
    done = run_dtf("recipe=toy", *DRY, "launcher=env")
    assert done.code == Exit.CONFIG
    assert "train.dry_run starts all ranks of a run several times" in done.err
