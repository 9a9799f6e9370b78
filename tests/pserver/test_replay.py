"""Recorded runs of parameter servers, done once more in this process: the same numbers, whatever the order was."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.core.errors import DataError, Exit
from dtf.core.types import Place
from dtf.jobs import rank_replay, verify_text
from dtf.pserver.record.recorder import Pull, Recorder, path_of, read
from dtf.pserver.record.replay import Replay

slow = pytest.mark.slow
RUN = [
    "plugins=[tests.support.toy,tests.support.sparse_toy]",
    "step.batch_size=24",
    "train.steps=12",
    "train.log_every=4",
    "lr.warmup=0",
    "precision=fp64",
]
RUN += [
    "train.eval_every=5",
    "checkpoint.every_steps=6",
    "observer=[jsonl]",
    "launcher.processes=2",
    "launcher.threads=1",
]
TABLED = ["recipe=tabled", "recipe.rows=100", "sparse=adagrad"]
CLICKS = [
    "recipe=ctr_clicks_sparse",
    "recipe.data.values=2000",
    "recipe.data.train_rows=400",
    "recipe.data.eval_rows=50",
    "train.epochs=null",
]
RECORD = ["strategy=pserver", "strategy.servers=2", "strategy.min_block=1", "strategy.record=order"]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Path], tuple[Replay, dict[str, Any]]]:
    """The replay of a run at its end, and what is said of it."""

    def run(folder: Path) -> tuple[Replay, dict[str, Any]]:
        made: list[Replay] = []
        monkeypatch.setattr(rank_replay, "Replay", lambda *given: made.append(Replay(*given)) or made[0])
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["run"]["dir"] = str(folder)
        assert rank_replay.work(config, str(tmp_path), "", Place(), lambda event: None) == 0
        return made[0], json.loads((tmp_path / rank_replay.RESULT).read_text())

    return run


@pytest.mark.parametrize(
    "words",
    [
        [*TABLED, "strategy.mode=async"],
        pytest.param([*TABLED, "strategy.mode=half_async"], marks=slow),
        pytest.param([*TABLED, "strategy.mode=geo", "strategy.geo_steps=3"], marks=slow),
    ],
    ids=lambda words: words[3],
)
def test_a_recorded_run_has_the_same_numbers_again_and_needs_no_memory_of_what_is_done(
    words: list[str], run_dtf: Any, replayed: Any, tmp_path: Path
) -> None:
    disk = [f"sparse.disk={tmp_path / 'rows'}", "sparse.memory_gb=0.0001"]  # it is of no account for the replay
    run = run_dtf(*RUN, *RECORD, *words, *disk)
    assert run.code == 0, run.err
    made, result = replayed(run.folder)
    assert result["tensor"] <= 1e-10 and result["start"] == 0 and all(result["updates"])
    assert not (made._replies or made._computed or made._prepared or made._met)
    assert (
        "job.steps is of no account with job.replay"
        in run_dtf("job=verify", f"job.replay={run.folder}", "job.steps=3").err
    )


@slow
@pytest.mark.parametrize("recipe", [["recipe=toy"], CLICKS], ids=["toy", "clicks"])
def test_a_replay_starts_from_the_weights_that_the_run_started_from(
    recipe: list[str], run_dtf: Any, replayed: Any
) -> None:
    """Rows of tables included; they must still be there as they were."""
    before = run_dtf(*RUN, *recipe, "train.until=2")
    assert before.code == 0, before.err
    run = run_dtf(*RUN, *RECORD, *recipe, "strategy.mode=async", f"recipe.model.weights={before.folder}")
    assert run.code == 0, run.err
    assert replayed(run.folder)[1]["tensor"] <= 1e-10
    assert run_dtf(*RUN, *recipe, "train.until=4", folder=before.folder).code == 0
    with pytest.raises(DataError, match="has changed since the run started from it"):
        replayed(run.folder)


def test_half_a_line_of_a_killed_server_does_not_spoil_the_record(tmp_path: Path) -> None:
    for start in (0, 5):
        recorder = Recorder(tmp_path, 0, start)
        recorder.pulled(Pull(1, start, 0, start), 3)
        recorder.close()
        with path_of(tmp_path, 0).open("a") as file:
            file.write('{"pull": [1, 2')
    start, updates, (events,) = read(tmp_path, 1)
    assert start == 5 and updates == [0] and [*events] == [{"pull": [1, 5, 0, 5], "applied": 3}]
    with pytest.raises(DataError, match=r"strategy\.record=PATH"):
        read(tmp_path, 2)


def test_a_replay_that_breaks_says_the_bound_and_what_may_be_the_cause() -> None:
    result = {
        "updates": [20, 20],
        "start": 0,
        "tensor": 2.6e-10,
        "bound": 1e-10,
        "ok": False,
        "beyond": 2,
        "tensors": 9,
        "worst": "model/a",
        "checkpoint": "C",
    }
    message = verify_text.replayed(result | {"losses": [0.7, 5.0]}, "fp64", 1)
    assert (
        "BREAK, within 2.6e-10, the bound of fp64 is 1e-10: 2 of 9 tensors after the last update beyond it, most of "
        "all model/a" in message
    )
    assert "loss grew from 0.7000 to 5.0000" in message and "launcher.threads=1" in message
    assert "loss grew" not in verify_text.replayed(result | {"losses": [0.7, 0.5]}, "fp64", 1)


def test_a_replay_that_is_told_to_stop_says_how_far_it_was(
    run_dtf: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = run_dtf(*RUN, *RECORD, "recipe=toy", "strategy.mode=async", "train.until=2")
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    config["run"]["dir"] = str(run.folder)
    monkeypatch.setattr(rank_replay, "stop_signals", lambda: nullcontext([15]))
    sent: list[Any] = []
    assert rank_replay.work(config, str(tmp_path), "", Place(), sent.append) == Exit.PREEMPTED
    assert (
        "replay of 2 updates from step 0" in sent[0].text and "asked to stop after 0 of 2 updates" in sent[-1].message
    )
