"""What TensorBoard's own reader finds in the event files."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import (
    SESSION_END_INFO_TAG,
    SESSION_START_INFO_TAG,
    parse_session_start_info_plugin_data,
)

from dtf.core.types import Ended, Event
from dtf.observers.tensorboard import Tensorboard, flatten
from tests.unit.test_observers import CONFIG, evaluation, started, train, watch


def read(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def steps(reader: EventAccumulator, tag: str) -> list[int]:
    return [scalar.step for scalar in reader.Scalars(tag)]


def test_scalars_by_split_and_metric(tmp_path):
    watch(
        Tensorboard(),
        [started(), train(20, 0.5), train(40, float("nan")), evaluation(40), Ended(40, "finished", {})],
        tmp_path,
    )
    reader = read(tmp_path)
    assert set(reader.Tags()["scalars"]) == {
        "train/loss",
        "train/top1",
        "train/lr",
        "train/grad_norm",
        "train/rows_per_s",
        "eval/loss",
        "eval/top1",
    }
    first, second = reader.Scalars("train/loss")
    assert (first.step, first.value) == (20, 0.5) and math.isnan(second.value)
    assert steps(reader, "eval/top1") == [40]


@pytest.mark.parametrize("parent_too", [False, True])
def test_a_restart_leaves_no_doubled_part(parent_too, tmp_path):
    before: list[Event] = [started(), train(20), train(40), evaluation(40), train(60), train(80)]
    after: list[Event] = [started(40, attempt=1), train(60), train(80), train(100), evaluation(120)]
    if parent_too:
        watch(Tensorboard(), before, tmp_path)
        watch(Tensorboard(), after, tmp_path)
    else:
        watch(Tensorboard(), [*before, *after], tmp_path)
    reader = read(tmp_path)
    assert steps(reader, "train/loss") == [20, 40, 60, 80, 100]
    assert steps(reader, "eval/top1") == [40, 120]


def test_a_killed_run_can_be_read(tmp_path):
    observer = Tensorboard()
    observer.open(tmp_path, CONFIG)
    observer.see(started())
    observer.see(train(20))
    assert steps(read(tmp_path), "train/loss") == [20]  # nothing waits for close
    observer.close()


def test_the_config_as_text_and_as_hyperparameters(tmp_path):
    watch(Tensorboard(), [started(), Ended(40, "finished", {})], tmp_path)
    reader = read(tmp_path)
    (text,) = reader.Tensors("config")
    assert b'"bucket_mb": 25.0' in text.tensor_proto.string_val[0]
    tags = reader.PluginTagToContent("hparams")
    info = parse_session_start_info_plugin_data(tags[SESSION_START_INFO_TAG])
    assert info.hparams["strategy.bucket_mb"].number_value == 25.0
    assert info.hparams["recipe.name"].string_value == "shapes"
    assert SESSION_END_INFO_TAG in tags


def test_flatten_gives_the_keys_of_the_command_line():
    assert flatten({"lr": {"name": "cosine", "peak": 0.1}, "seed": 0, "empty": {}}) == {
        "lr.name": "cosine",
        "lr.peak": 0.1,
        "seed": 0,
    }
