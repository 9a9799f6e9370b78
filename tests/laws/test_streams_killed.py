"""Law: rows of archives, Parquet files, folders and Hugging Face's form are trained on once each, whoever is killed."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from dtf.data.batches import Epochs
from dtf.data.samplers import Shuffle
from dtf.runs.recorded_run import RecordedRun
from tests.support import pictures

ROWS = 60
RUN = ["plugins=[tests.support.pictures]", "recipe=pictures", "step.batch_size=14", "step.micro_batch_rows=5"]


def written(root: Path, form: str) -> list[str]:
    """Pictures to train on and others to evaluate on; the words that name them."""
    for split, rows in (("train", ROWS), ("eval", 20)):
        pictures.write(root / split / form, form, rows)
    return [*RUN, f"recipe.root={root}", f"recipe.form={form}"]


def test_a_rank_that_is_killed_in_the_middle_of_an_epoch_costs_no_picture(run_dtf: Any, tmp_path: Path) -> None:
    words = written(tmp_path / "data", "tar")
    words[0] = "plugins=[tests.support.pictures,tests.support.kill_once]"
    run = [*words, "launcher.processes=2", "train.steps=10", "train.log_every=1", "checkpoint.every_steps=2",
           "train.eval_every=0", "train.record=true", "precision=fp64"]  # fmt: skip
    killed = run_dtf(*run, "observer=[jsonl,kill_once]", "observer.kill_once.step=6")
    assert killed.code == 0, killed.err
    assert "killed by SIGKILL" in killed.err and "restart 1" in killed.err
    epochs = Epochs(Shuffle(), ROWS, 14, seed=0)
    expected = [sorted(epochs.ids(*divmod(step, epochs.batches)).tolist()) for step in range(10)]
    found = RecordedRun.read(killed.folder).ids
    assert [sorted(chain.from_iterable(found[step])) for step in range(10)] == expected and len(found) == 10


@pytest.mark.slow
@pytest.mark.parametrize("form", pictures.FORMS)
def test_25_kills_of_each_form_lose_and_repeat_no_picture(form: str, run_dtf: Any, tmp_path: Path) -> None:
    """A hundred in all: of ranks, launchers and fork servers, on 1 to 4 ranks, at random moments. Each trial's ids of
    each step, weights and metrics are those of the run left alone.
    """
    if form == "hugging_face":
        pytest.importorskip("datasets")
    folder = tmp_path / "chaos"
    strategies = "job.strategies=['dp processes=1','ddp processes=2','fsdp processes=3','ddp processes=4']"
    faults = "job.faults=[kill_rank,kill_launcher,kill_forkserver]"
    done = run_dtf(
        *written(tmp_path / "data", form), "job=chaos", strategies, faults, "job.trials=25", "job.steps=9",
        "job.save_every=2", "job.eval_rows=10", "precision=fp64", folder=folder,
    )  # fmt: skip
    assert done.code == 0, done.err + done.out
    assert len((folder / "trials.jsonl").read_text().splitlines()) == 25
