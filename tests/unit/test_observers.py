"""Observers look and do not touch: what one of them does changes neither the run nor the others.

The JSON lines of a resumed run.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.api import registry
from dtf.api.observer import Observer, Observers
from dtf.api.registry import lookup
from dtf.core.types import Ended, Event, Failed, Measured, Note, Saved, Started, event_from_json, event_to_json
from dtf.observers.console import Console
from dtf.observers.jsonl import Jsonl, forget_after, line_of

ROOT = Path(__file__).parents[2]
CONFIG = {
    "recipe": {"name": "shapes"},
    "strategy": {"name": "ddp", "bucket_mb": 25.0},
    "precision": {"name": "bf16"},
    "seed": 0,
    "plugins": [],
}


def started(step: int = 0, attempt: int = 0) -> Started:
    return Started(step, 480, 120, {"parameters": 272474, "ranks": 2, "batch": "64 rows = 2 x 32"}, attempt)


def train(step: int, loss: float | None = None, seconds: float | None = None) -> Measured:
    loss = 1 / step if loss is None else loss
    values = {"loss": loss, "top1": 1 - loss, "grad_norm": 1.5, "lr": 0.1, "rows_per_s": 5120.0}
    return Measured("train", step, step / 120, step / 10 if seconds is None else seconds, values)


def evaluation(step: int, best: bool = False) -> Measured:
    return Measured("eval", step, step / 120, step / 10, {"loss": 0.25, "top1": 0.95}, best)


def whole_run() -> list[Event]:
    """One of everything, with a restart and unpleasant text."""
    return [
        Note("info", "données · データ \x1b[2J\n[bold]not markup[/bold] " + "x" * 600),
        started(),
        train(20),
        train(40, float("nan")),
        train(60, float("inf")),
        evaluation(60, best=True),
        Saved(60, "/runs/a/checkpoints/step_000060", True, 0.31),
        train(80),
        Failed(1, 90, 1, "killed", ""),
        Note("warning", "rank 1 was killed; restart 1 of 3"),
        started(60, attempt=1),
        train(80, seconds=2.0),
        evaluation(120),
        Saved(120, "/elsewhere/step_000120", False, 0.2),
        Ended(480, "finished", {"loss": 0.25, "top1": 0.95, "best_top1": 0.96, "best_step": 440.0}),
    ]


def watch(observer: Observer, events: Iterable[Event], folder: Path) -> None:
    observer.open(folder, CONFIG)
    for event in events:
        observer.see(event)
    observer.close()


class Recorder(Observer):
    def __init__(self, fail: str = "", error: type[BaseException] = RuntimeError) -> None:
        self.calls: list[str] = []
        self._fail, self._error = fail, error

    def open(self, folder: Path, config: dict) -> None:
        self._called("open")

    def see(self, event: Event) -> None:
        self._called("see")

    def close(self) -> None:
        self._called("close")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fail:
            raise self._error("no space left")


@pytest.mark.parametrize(
    ("fail", "calls"),
    [
        ("open", ["open", "close"]),
        ("see", ["open", "see", "close"]),
        ("close", ["open", "see", "see", "close", "close"]),
    ],
)
def test_an_observer_that_raises_is_dropped_with_one_warning(fail, calls, tmp_path):
    broken, sound, warnings = Recorder(fail), Recorder(), []
    observers = Observers({"broken": broken, "sound": sound}, warnings.append)
    observers.open(tmp_path, CONFIG)
    observers.see(train(1))
    observers.see(train(2))
    observers.close()
    observers.close()
    assert warnings == ["observer.broken stops watching, the run goes on: RuntimeError: no space left"]
    assert broken.calls == calls
    assert sound.calls == ["open", "see", "see", "close"]


def test_ctrl_c_is_not_swallowed(tmp_path):
    observers = Observers({"a": Recorder("see", KeyboardInterrupt)})
    observers.open(tmp_path, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        observers.see(train(1))


def test_warnings_go_to_standard_error(tmp_path, capsys):
    Observers({"a": Recorder("open")}).open(tmp_path, CONFIG)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "dtf: warning: observer.a stops watching, the run goes on: RuntimeError: no space left\n"


def test_warnings_of_the_run_are_seen_whatever_observers_there_are(tmp_path, capsys):
    for chosen in ({}, {"jsonl": Jsonl()}, {"console": Console()}):
        observers = Observers(chosen)
        observers.open(tmp_path, CONFIG)
        observers.see(Note("warning", "a checkpoint is skipped"))
        observers.see(Note("info", "all is well"))
        observers.close()
        captured = capsys.readouterr()
        if "console" in chosen:
            assert captured.err == "" and "warning: a checkpoint is skipped" in captured.out
        else:
            assert (captured.out, captured.err) == ("", "dtf: warning: a checkpoint is skipped\n")


def test_events_survive_the_way_from_rank_to_parent():
    sent = [event for event in whole_run() if "nan" not in str(event)]  # nan is not equal to itself
    sent.append(
        Started(
            8,
            480,
            120,
            {},
            1,
            (Measured("train", 4, 0.1, 0.5, {"loss": 1.0}), Measured("eval", 8, 0.2, 0.9, {"loss": 0.5}, True)),
        )
    )
    assert [event_from_json(json.loads(json.dumps(event_to_json(event)))) for event in sent] == sent


# ---------------------------------------------------------------- metrics.jsonl


def lines(folder: Path) -> list[dict]:
    """Strict: NaN and Infinity are refused, as most parsers do."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return [json.loads(line, parse_constant=refuse) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timeless(folder: Path) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines(folder)]


def test_one_json_object_per_measurement(tmp_path):
    watch(Jsonl(), [started(), train(20), evaluation(120, best=True), Note("info", "x")], tmp_path)
    assert lines(tmp_path) == [
        {
            "split": "train",
            "step": 20,
            "epoch": 20 / 120,
            "seconds": 2.0,
            "loss": 0.05,
            "top1": 0.95,
            "grad_norm": 1.5,
            "lr": 0.1,
            "rows_per_s": 5120.0,
        },
        {"split": "eval", "step": 120, "epoch": 1.0, "seconds": 12.0, "loss": 0.25, "top1": 0.95},
    ]


def test_what_is_not_finite_is_null(tmp_path):
    watch(Jsonl(), [started(), train(1, float("nan")), train(2, float("-inf"))], tmp_path)
    assert [line["loss"] for line in lines(tmp_path)] == [None, None]


def test_a_metric_hides_none_of_the_fixed_keys():
    line = json.loads(line_of(Measured("eval", 3, 0.5, 1.0, {"step": 99.0, "précision": 1.0})))
    assert line == {"split": "eval", "step": 3, "epoch": 0.5, "seconds": 1.0, "précision": 1.0}


def test_a_line_is_on_disk_before_the_next_event(tmp_path):
    observer = Jsonl()
    observer.open(tmp_path, CONFIG)
    observer.see(started())
    observer.see(train(1))
    assert len(lines(tmp_path)) == 1
    observer.close()


@settings(deadline=None, max_examples=40)
@given(
    kills=st.lists(st.tuples(st.integers(0, 30), st.booleans(), st.integers(0, 60)), max_size=4),
    every=st.integers(1, 8),
)
def test_a_run_killed_anywhere_leaves_the_file_of_an_undisturbed_one(kills, every, tmp_path_factory):
    disturbed, undisturbed = tmp_path_factory.mktemp("disturbed"), tmp_path_factory.mktemp("undisturbed")

    def steps(first: int, last: int) -> list[Event]:
        return [event for step in range(first + 1, last + 1) for event in (train(step), evaluation(step))]

    watch(Jsonl(), [started(), *steps(0, 30)], undisturbed)
    at, observer, attempt = 0, Jsonl(), 0
    observer.open(disturbed, CONFIG)
    for died, parent_too, torn in kills:
        observer.see(started(at, attempt))
        reached = max(at, died)
        for event in steps(at, reached):
            observer.see(event)
        at, attempt = reached - reached % every, attempt + 1  # the newest checkpoint
        if parent_too:
            observer.close()
            with (disturbed / "metrics.jsonl").open("a") as file:
                file.write(line_of(train(reached + 1))[:torn])
            observer, attempt = Jsonl(), 0
            observer.open(disturbed, CONFIG)
    for event in [started(at, attempt), *steps(at, 30)]:
        observer.see(event)
    observer.close()
    assert timeless(disturbed) == timeless(undisturbed)


def test_a_line_that_lost_only_its_end_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(line_of(train(1)))
    watch(Jsonl(), [started(5), train(6)], tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 6]


def test_lines_of_no_measurement_are_left_and_told(tmp_path, capsys):
    odd = [b'{"step": 1}', b'{"split": "train", "step": "x"}', b"[1]", b"\0\0", b"[" * 100_000, b""]
    whole = [line_of(train(step)).encode() for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([whole[0], *odd, whole[1], b'{"split": "tr']))
    watch(Jsonl(), [started(1), train(2)], tmp_path)
    left = (tmp_path / "metrics.jsonl").read_bytes().split(b"\n")
    assert left[:-2] == [whole[0], *odd] and json.loads(left[-2])["step"] == 2
    assert f"{tmp_path / 'metrics.jsonl'} has 6 lines of no measurement, left as they are" in capsys.readouterr().err


def test_a_crash_while_forgetting_keeps_the_old_file(tmp_path, monkeypatch):
    watch(Jsonl(), [started(), train(1), train(2)], tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def crash(*_: object) -> None:
        raise OSError("crash")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", crash)
        with pytest.raises(OSError, match="crash"):
            forget_after(tmp_path / "metrics.jsonl", 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    forget_after(tmp_path / "metrics.jsonl", 1)
    assert [line["step"] for line in lines(tmp_path)] == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


# ---------------------------------------------------------------- all of them in a process of their own

_WATCH = """
import sys, pathlib
sys.path.insert(0, {root!r})
from dtf.api.observer import Observers
from dtf.observers.console import Console
from dtf.observers.jsonl import Jsonl
from dtf.observers.tensorboard import Tensorboard
from dtf.core.types import Ended, Measured, Started
observers = Observers({{"console": Console(), "jsonl": Jsonl(), "tensorboard": Tensorboard()}})
observers.open(pathlib.Path({folder!r}), {{}})
early = {{"rich", "tensorboard", "numpy"}} & set(sys.modules)
observers.see(Started(0, 10000, 100, {{}}, 0))
for step in range(1, 10001):
    observers.see(Measured("train", step, step / 100, step / 10, {{"loss": 1 / step, "lr": 0.1}}))
observers.see(Ended(10000, "finished", {{}}))
observers.close()
print("a job may still print")
print("early", early, "heavy", {{"torch", "tensorflow"}} & set(sys.modules), file=sys.stderr)
"""


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    """`python -m dtf | head`; also: 10,000 measurements, no torch, and tensorboard imported only once ranks have
    started.
    """
    script = _WATCH.format(root=str(ROOT), folder=str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    head = [process.stdout.readline() for _ in range(2)]
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert head[0].startswith("started step=0/10000") and head[1].startswith("step=1/10000 ")
    assert errors.splitlines() == [
        "dtf: warning: observer.console stops watching, the run goes on: BrokenPipeError: nobody reads standard "
        "output any more",
        "early set() heavy set()",
    ]
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 10001))


# ---------------------------------------------------------------- docs/watching.md


def test_the_observer_in_the_documentation_works(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "watching.md").read_text(), flags=re.DOTALL)
    (tmp_path / "my_observers.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    # the name is gone after this test
    monkeypatch.setitem(registry._CLASSES, "observer", registry.registered("observer"))
    importlib.import_module("my_observers")
    watch(lookup("observer", "csv")(path="table.csv"), whole_run(), tmp_path)
    assert (tmp_path / "table.csv").read_text().splitlines() == ["step,loss,top1", "60,0.25,0.95", "120,0.25,0.95"]
