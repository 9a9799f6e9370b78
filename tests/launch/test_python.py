"""Runs from Python: results are returned, errors are raised, and the process is left as it was found."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtf
from dtf.api import registry
from dtf.api.registry import register
from dtf.config.compose import Composed
from dtf.core.types import Ended, Event, Measured, Note, Saved, Started
from dtf.jobs import calls
from dtf.launch import rank_process, supervised
from tests.support import mistakes, toy
from tests.support.toy import Toy

TOY: list[Any] = ["recipe=toy", "launcher=inline", "observer=[jsonl]", {"launcher.threads": 1, "step.batch_size": 16}]


@pytest.fixture(autouse=True)
def _own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs are kept below the test's folder, and what the test registers is gone after it."""
    dtf.compose(plugins=[toy])
    monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in registry._CLASSES.items()})
    monkeypatch.chdir(tmp_path)
    yield


def composed(**keys: Any) -> Composed:
    given = {"train.steps": 8, "train.eval_every": 4, "train.log_every": 1}
    return dtf.compose([*TOY, given | {key.replace("__", "."): value for key, value in keys.items()}])


def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what the clock says."""
    timed = ("seconds", "rows_per_s", "model_flops_per_s")
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


def state() -> dict[str, Any]:
    """What a run may change in its process."""
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
    return {
        "signals": [signal.getsignal(number) for number in numbers],
        "threads": {thread.ident for thread in threading.enumerate() if thread.is_alive()},
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "files": {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)},
        "intra-op threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "generators": [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())],
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "process groups": torch.distributed.is_initialized(),
        "gc": gc.isenabled(),
        "hooks": [sys.excepthook, threading.excepthook],
        "streams": [sys.stdout, sys.stderr],
    }


def _is_open(fd: str) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


@pytest.fixture
def odd_process() -> Iterator[None]:
    """torch as a notebook may have set it."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.slow
def test_two_runs_in_a_row_are_alike_and_leave_the_process_as_it_was(odd_process: None) -> None:
    config = composed()
    dtf.train(config.with_({"train.steps": 1}))  # what is imported stays
    before = state()
    with torch.no_grad(), torch.autocast("cpu"):
        first = dtf.train(config)
    for name, value in state().items():
        assert value == before[name], f"{name} was changed by a run"
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    second = dtf.train(config)
    assert plain(first.history) == plain(second.history) and first.folder != second.folder
    one, other = first.load_model().state_dict(), second.load_model().state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_within_a_block_of_a_device_is_refused() -> None:
    with torch.device("meta"), pytest.raises(dtf.ConfigError, match=r"within `with torch.device\('meta'\)`.* outside"):
        dtf.train(composed())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dtf.Result:
    """A run whose best evaluation is not its last."""
    dtf.compose(plugins=[toy])
    folder = tmp_path_factory.mktemp("trained") / "run"
    result = dtf.train(composed(precision="fp64", train__eval_every=1, lr__peak=5.0, run__dir=folder))
    assert result.best is not None and result.best.step < 8
    return result


def test_a_result_says_what_the_run_folder_says(trained: dtf.Result) -> None:
    lines = [json.loads(line) for line in (trained.folder / "metrics.jsonl").read_text().splitlines()]
    assert trained.history == lines and len(lines) == 16
    evaluated = {row["step"]: row for row in lines if row["split"] == "eval"}
    assert trained.curve("top1") == [(step, row["top1"]) for step, row in evaluated.items()]
    assert trained.last == {name: evaluated[8][name] for name in ("loss", "top1")}
    assert trained.best is not None and trained.best.metric == "top1"
    assert trained.best.value == max(row["top1"] for row in evaluated.values())
    assert trained.best.value == evaluated[trained.best.step]["top1"]
    assert trained.best_checkpoint == trained.folder / "checkpoints" / f"step_{trained.best.step:06}"
    assert trained.newest_checkpoint == trained.folder / "checkpoints" / "step_000008"
    assert (trained.step, trained.cause) == (8, "finished")
    assert json.loads((trained.folder / "run.json").read_text())["exit"] == 0
    with pytest.raises(dtf.ConfigError, match="eval top5 was not measured; choices: .*eval top1"):
        trained.curve("top5")
    silent = dtf.train(trained.config.with_({"observer": [], "run.dir": ""}))
    assert plain(silent.history) == plain(trained.history), "without metrics.jsonl they are what was heard"


def test_without_checkpoints_there_is_no_model_to_load() -> None:
    result = dtf.train(composed(checkpoint="off", train__eval_every=0))
    assert result.best is result.best_checkpoint is result.newest_checkpoint is None and not result.last
    with pytest.raises(dtf.DataError, match="holds no checkpoint"):
        result.load_model()


@pytest.mark.parametrize("which", ["best", pytest.param("newest", marks=pytest.mark.slow)])
def test_a_loaded_model_is_the_one_that_was_measured(which: Any, trained: dtf.Result) -> None:
    model, settings = trained.load_model(which), trained.config.settings
    assert not model.training and {p.dtype for p in model.parameters()} == {torch.float64}
    rows = settings.recipe.open_data("eval", settings.seed)
    inputs, targets = rows.fetch(np.arange(len(rows)), 0)
    with torch.no_grad():
        top1 = (model(inputs.double()).argmax(1) == targets).double().mean().item()
    step = trained.best.step if which == "best" and trained.best else trained.step
    assert dict(trained.curve("top1"))[step] == pytest.approx(top1)
    again = dtf.load_model(trained.checkpoint(which)).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert dtf.evaluate(trained.checkpoint(which), ["launcher=inline"]).metrics["top1"] == pytest.approx(top1)


def test_evaluations_and_predictions_of_a_result_are_those_of_its_best_weights(
    trained: dtf.Result, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained.best is not None
    found = dtf.evaluate(trained)
    assert found.metrics["top1"] == pytest.approx(trained.best.value) and found.rows == toy.EVAL_ROWS
    assert sum(row["rows"] for row in found.classes) == found.rows and f"top1={trained.best.value:.4f}" in str(found)
    predictions = dtf.predict(trained, {"job.top": 1})
    assert [row["row"] for row in predictions] == list(range(toy.EVAL_ROWS)) == [row["row"] for row in predictions]
    with pytest.raises(dtf.ConfigError, match="job.format=csv is for programs"):
        dtf.predict(trained, {"job.format": "csv"})
    with pytest.raises(dtf.ConfigError, match="strategy=pserver has"):
        dtf.evaluate(trained, ["strategy=pserver", "launcher=local"])
    assert capsys.readouterr().out == "", "what is returned is not printed"


def test_a_result_brings_what_an_experiment_chose(tmp_path: Path) -> None:
    """Launcher, strategy and their keys, but for what is chosen anew."""
    Path("mine", "experiment").mkdir(parents=True)
    defaults = "# @package _global_\ndefaults: [{override /launcher: inline}, {override /strategy: fsdp}]\n"
    Path("mine", "experiment", "own.yaml").write_text(f"{defaults}strategy: {{unit: layer}}\n")
    given = ["recipe=toy", "experiment=own", {"launcher.threads": 1, "launcher.devices": "cpu"}]
    run = dtf.compose(given, config_dir=tmp_path / "mine")
    brought = dtf.compose([*calls._spread(run, []), "recipe=toy"])
    assert brought.config["launcher"] == run.config["launcher"]
    assert brought.config["strategy"] == run.config["strategy"] and brought.choices["strategy"] == "fsdp"
    assert calls._spread(run, ["strategy=ddp"]) == ["launcher=inline", "launcher.devices=cpu", "launcher.threads=1"]


def test_a_second_run_is_refused_while_ranks_of_one_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would hear of each other's ranks."""
    monkeypatch.setattr(supervised, "fork_server", lambda environment: pytest.fail("a rank was started"))
    with (
        supervised._uses_fork_server,
        pytest.raises(dtf.BusyError, match="another run goes on in this process") as refused,
    ):
        dtf.train(composed().with_("launcher=local"))
    assert refused.value.exit == dtf.Exit.BUSY and not supervised._uses_fork_server.locked()


def test_what_goes_wrong_is_raised_and_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(dtf.ConfigError, match="lr.peek=1 is no known key; did you mean peak") as unknown:
        dtf.compose(["lr.peek=1"])
    assert "command line" not in str(unknown.value) and unknown.value.__cause__ is None
    config = composed()
    with pytest.raises(dtf.ConfigError, match="job=describe is none of this function"):
        dtf.train(dtf.compose(["job=describe"]))
    with pytest.raises(dtf.ConfigError, match="is no config; give dtf.compose"):
        dtf.train(["recipe=toy"])  # type: ignore[arg-type]
    with pytest.raises(dtf.ConfigError, match="train.dry_run tries a run"):
        dtf.train(config.with_("train.dry_run=true"))
    with pytest.raises(dtf.DataError, match="does not exist"):
        dtf.evaluate("nowhere.pt", ["recipe=toy", "launcher=inline"])
    with pytest.raises(dtf.ConfigError, match="launcher=torchrun does not tell this process"):
        dtf.train(config.with_(["launcher=torchrun", "run.dir=x", "launcher.rendezvous=localhost:1"]))
    assert not Path("outputs").exists(), "no run began"
    with pytest.raises(dtf.DivergedError) as diverged:
        dtf.train(composed(recipe__bad_row=3, train__skip_nonfinite=0))
    assert diverged.value.exit == 79 and diverged.value.folder is not None
    record = json.loads((diverged.value.folder / "run.json").read_text())
    assert record["exit"] == 79 and record["cause"] == str(diverged.value)
    assert capsys.readouterr() == ("", "")


def test_an_authors_error_is_the_cause(capsys: pytest.CaptureFixture[str]) -> None:
    @register("recipe", "broken_toy")
    class Broken(Toy):
        def loss(self, outputs: Any, targets: Any) -> Any:
            raise IndexError("one too many")

    with pytest.raises(dtf.ConfigError, match=r"loss\(\) raised IndexError: one too many") as caught:
        dtf.train(composed(recipe="broken_toy"))
    assert isinstance(caught.value.__cause__, IndexError) and capsys.readouterr().err == ""
    assert caught.value.__cause__.__traceback__ is not None


class Interrupting(dtf.Observer):
    """Sends SIGINT to this process `times` times when training was measured at `step`."""

    step: int = dtf.option(default=3, doc="when")
    times: int = dtf.option(default=1, doc="how often")

    def see(self, event: Event) -> None:
        if isinstance(event, Measured) and event.split == "train" and event.step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_where_it_was_saved(times: int) -> None:
    register("observer", "interrupting")(Interrupting)
    whole = dtf.train(composed(checkpoint__every_steps=2))
    config = composed(checkpoint__every_steps=2).with_(["observer=[jsonl,interrupting]"])
    before = state()
    with pytest.raises(dtf.Preempted, match="the state is saved" if times == 1 else "stopped at once") as caught:
        dtf.train(config.with_({"observer.interrupting.times": times}))
    folder = caught.value.folder
    assert folder is not None and caught.value.exit == 75 and f"run folder: {folder}" in caught.value.__notes__
    assert caught.value.__cause__ is None, "its frames would hold the model"
    for thread in threading.enumerate():
        if thread.name == "saves":
            thread.join(60)
    assert state() == before
    rest = dtf.train(composed(checkpoint__every_steps=2, run__dir=folder))
    assert plain(rest.history) == plain(whole.history), "the history is that of the whole run"
    assert rest.best == whole.best and rest.last == whole.last


def test_callbacks_hear_all_in_order_and_slow_nothing() -> None:
    ended, waited, heard = threading.Event(), [], list[Event]()

    @register("observer", "ending")
    class Ending(dtf.Observer):
        def see(self, event: Event) -> None:
            if isinstance(event, Ended):
                ended.set()

    def slow(event: Event) -> None:
        waited.append(ended.wait(60))

    def wrong(event: Event) -> None:
        raise KeyError("mine")

    config = composed().with_(["observer=[jsonl,ending]"])
    result = dtf.train(config, callbacks=[slow, wrong, sys.exit, heard.append])  # type: ignore[list-item]
    assert all(waited) and len(waited) == len(heard), "the run went to its end while a callback waited"
    assert isinstance(heard[0], Started) and isinstance(heard[-1], Ended)
    measured = [event for event in heard if isinstance(event, Measured)]
    assert [(event.split, event.step) for event in measured] == [(row["split"], row["step"]) for row in result.history]
    assert [event.step for event in heard if isinstance(event, Saved)] == [4, 6, 8]
    ((name, error), (other, left)) = result.callback_errors.items()
    assert "wrong" in name and isinstance(error, KeyError)
    assert "exit" in other and isinstance(left, SystemExit)
    with pytest.raises(dtf.ConfigError, match="is no function"):
        dtf.train(config, callbacks=[3])  # type: ignore[list-item]


def test_a_class_that_is_registered_anew_is_the_one_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(text: str, cls: str) -> None:
        exec(
            "import dtf\nfrom tests.support.toy import Toy\n@dtf.register('recipe', 'cell')\n"
            f"class {cls}(Toy):\n    {text}",
            {"__name__": "__main__"},
        )

    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    cell("width: int = dtf.option(default=1, doc='w')", "First")
    config = composed(recipe="cell", recipe__width=2)
    assert config.config["plugins"] == [] and not config.is_outdated
    cell("width: int = dtf.option(default=1, doc='w'); depth: int = dtf.option(default=7, doc='d')", "Second")
    assert config.is_outdated
    assert dtf.train(config).config.config["recipe"]["depth"] == 7
    with pytest.raises(
        dtf.ConfigError, match="is the class Second of this notebook .* launcher=local .* use launcher=inl"
    ):
        dtf.train(config.with_("launcher=local"))
    monkeypatch.delattr(sys, "ps1")
    with pytest.raises(dtf.ConfigError, match="registered twice"):
        cell("pass", "Third")


@pytest.mark.parametrize("stopped", [False, True])
def test_no_model_of_a_run_stays_in_memory(stopped: bool) -> None:
    """Neither by itself nor by the exception that a notebook keeps."""
    models: list[weakref.ref[Any]] = []

    @register("recipe", "counted")
    class Counted(Toy):
        def build_model(self) -> Any:
            model = super().build_model()
            models.append(weakref.ref(model))
            return model

    register("observer", "interrupting")(Interrupting)
    config = composed(recipe="counted").with_("observer=[interrupting]" if stopped else "observer=[]")
    with pytest.raises(dtf.Preempted) if stopped else contextlib.nullcontext() as kept:
        dtf.train(config)
    assert models and not [model for model in models if model() is not None], kept


@pytest.mark.slow
def test_one_run_at_a_time_is_in_a_process() -> None:
    refused: list[BaseException] = []

    @register("observer", "nested")
    class Nested(dtf.Observer):
        def see(self, event: Event) -> None:
            if isinstance(event, Started):
                with pytest.raises(dtf.BusyError, match="another run goes on in this process") as caught:
                    dtf.train(composed())
                refused.append(caught.value)

    assert dtf.train(composed().with_(["observer=[nested]"])).step == 8 and len(refused) == 1


def test_a_rank_that_imports_a_script_starts_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_process, "_ranks", [0])
    with pytest.raises(dtf.ConfigError, match="__name__ == '__main__'"):
        dtf.train(composed())


def test_ranks_import_the_modules_of_chosen_classes() -> None:
    """`recipe=toy` is known here, and no plugin was named."""
    config = dtf.compose(["recipe=toy", "lr=constant"])
    assert config.config["plugins"] == ["tests.support.toy"] == config.with_("seed=3").config["plugins"]
    assert "plugins=[tests.support.toy]" in config.command
    assert dtf.compose(["recipe=toy"], plugins=["tests.support.toy"]).config["plugins"] == ["tests.support.toy"]
    assert dtf.compose().config["plugins"] == []


@pytest.mark.slow
def test_each_run_may_have_a_thread_of_its_own() -> None:
    """The fork server dies with the thread that started it: the next run starts another one, and loses no rank."""
    spread = {"launcher": "local", "launcher.processes": 1, "launcher.devices": "cpu", "train.eval_every": 0}
    events: list[Event] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: dtf.train(composed(**spread), callbacks=[events.append]))
        thread.start()
        thread.join()
    assert sum(isinstance(event, Ended) for event in events) == 2
    assert not [event for event in events if isinstance(event, Note) and event.level == "warning"]


def test_an_authors_error_in_another_process_has_its_traceback_in_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"launcher": "local", "launcher.processes": 2, "launcher.devices": "cpu", "launcher.threads": 1}
    config = dtf.compose(["recipe=mistake_arguments", "observer=[]", spread, {"train.steps": 2}], plugins=[mistakes])
    with pytest.raises(dtf.ConfigError, match=r"WrongArguments\.loss\(\) raised TypeError") as caught:
        dtf.train(config)
    notes = "\n".join(caught.value.__notes__)
    assert "Traceback (most recent call last)" in notes and "TypeError" in notes and capsys.readouterr().err == ""
