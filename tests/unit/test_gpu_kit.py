"""The kit for a machine with a GPU, rehearsed without one. All of it: the slow test."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import device, figures, images, kernels
from bench.gpu.__main__ import Kit, main
from bench.gpu.cases import deepfm
from bench.gpu.contest import STEP, Engine
from bench.gpu.job import ROOT, Job
from bench.gpu.record import FAILED, NOT_RUN, PASSED, Lines, NotRun, read, state_of, summary
from bench.gpu.steps import BY_NAME, STEPS


def job(folder: Path, name: str) -> Job:
    return Job(Lines(folder / "results.jsonl", name), True, time.monotonic() + 60, folder)


def ends(folder: Path) -> dict[str, tuple[str, str]]:
    lines = read(folder / "results.jsonl")
    return {line["step"]: (line["state"], line["reason"]) for line in lines if line["kind"] == "end"}


def test_each_step_has_its_function() -> None:
    for step in STEPS:
        if step.name != "compiled":  # imports the compiler
            module, _, function = step.entry.partition(":")
            assert callable(getattr(importlib.import_module(module), function))
        assert step.least_s < step.limit_s


@pytest.mark.parametrize("work", [figures.deepfm, kernels.run, images.run])
def test_a_step_passes_in_rehearsal(work: Callable[[Job], None], tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    work(job(tmp_path, "step"))
    torch.set_num_threads(threads)
    lines = read(tmp_path / "results.jsonl")
    assert state_of(lines)[0] == PASSED
    assert all(part["state"] in (PASSED, NOT_RUN) for part in lines if part["kind"] == "part")
    assert work is kernels.run or any(line["kind"] == "figure" for line in lines)


def test_the_loop_by_hand_trains_what_dtf_trains(tmp_path: Path) -> None:
    """Else a ratio of their times compares two things."""
    figures.deepfm(job(tmp_path, "deepfm"))
    (part, *_) = [line for line in read(tmp_path / "results.jsonl") if line.get("name") == "both train the same"]
    assert float(part["losses_apart"]) < 1e-6


def test_waits_are_forbidden_in_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report waits for the device, and so does the end of a turn."""
    told: list[bool] = []
    monkeypatch.setattr("bench.gpu.device.forbid_waits", told.append)
    engine = Engine(deepfm(True), "cpu")
    engine.run(1)
    assert told and not any(told)
    engine.clock.forbids = True
    told.clear()
    engine.run(2)
    assert told.count(True) == 2 and told[-2:] == [False, False]


def test_a_trace_tells_what_steps_call() -> None:
    """Not what a report calls after them."""
    engine = Engine(deepfm(True), "cpu")
    engine.run(1)
    engine.clock.marks = True
    calls = device.calls_in(STEP, lambda: engine.run(2), ["aten::mm", "aten::addmm", "aten::_fused_adam_"])
    assert calls["aten::_fused_adam_"] == 2 and calls["aten::addmm"]
    with pytest.raises(RuntimeError, match="no section"):
        device.calls_in("another", lambda: None)


def test_a_missing_package_is_named_and_its_steps_do_not_run(tmp_path: Path) -> None:
    kit, step = Kit(tmp_path, 1, True), replace(BY_NAME["images"], modules=("torch", "no_such_module"))
    assert kit.run([step])
    assert ends(tmp_path) == {"images": (NOT_RUN, "not installed: no_such_module")}
    assert "no_such_module" in (tmp_path / "summary.md").read_text()


def test_no_step_begins_that_the_time_does_not_suffice_for(tmp_path: Path) -> None:
    kit = Kit(tmp_path, 0.3, True)  # three seconds beside the reserve
    assert kit.run([BY_NAME["kernels"]])
    state, reason = ends(tmp_path)["kernels"]
    assert state == NOT_RUN and "it needs 15" in reason


def test_a_step_that_crashes_or_takes_too_long_fails_and_keeps_what_it_has(tmp_path: Path) -> None:
    kit, step = Kit(tmp_path, 1, True), BY_NAME["kernels"]
    Lines(kit.path, step.name).part("first", True)
    kit.ended(step, -11, False, 3.0)
    assert ends(tmp_path)["kernels"] == (FAILED, "its process ended with -11, see log.txt")
    kit.ended(step, 0, True, 90.0)
    state, reason = ends(tmp_path)["kernels"]
    assert state == FAILED and "more than its 90 s" in reason
    with kit.path.open("a") as file:
        file.write('{"step": "kernels", "kind": "pa')  # a process that was killed
    assert "first: **passed**" in summary(read(kit.path), "dtf", True)


def test_a_part_that_failed_decides(tmp_path: Path) -> None:
    lines = Lines(tmp_path / "results.jsonl", "step")
    lines.part("one", True)
    lines.part("two", False, "wrong | numbers")
    lines.not_run("three", "no time")
    found = read(lines.path)
    assert state_of(found) == (FAILED, "two: wrong | numbers; three: no time")
    assert state_of(found[2:]) == (NOT_RUN, "no time")
    assert state_of([]) == (NOT_RUN, "it says nothing")


def test_a_command_does_not_begin_without_time(tmp_path: Path) -> None:
    late = replace(job(tmp_path, "step"), until=time.monotonic() + 9)
    with pytest.raises(NotRun, match="time is up"):
        late.dtf(folder="none")


def test_a_step_that_is_stopped_stops_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would go on beside the figures of the next steps."""

    class Command(subprocess.Popen):
        def communicate(self, *arguments: Any, **options: Any) -> Any:
            if not stopped:
                stopped.append(self)
                raise SystemExit(143)  # as the signal does
            return super().communicate(*arguments, **options)

    stopped: list[Command] = []
    monkeypatch.setattr(subprocess, "Popen", Command)
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 600\n")
    endless.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(endless))
    with pytest.raises(SystemExit):
        job(tmp_path, "step").dtf(folder="none")
    assert stopped[0].returncode == -signal.SIGTERM


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["--only", "machine", "--out", str(tmp_path / "out")]) == 2
    assert "torch finds no GPU; --rehearse goes" in capsys.readouterr().err
    monkeypatch.setattr("bench.gpu.__main__.find_spec", lambda name: None)
    assert main(["--only", "machine", "--out", str(tmp_path / "out")]) == 2
    assert "torch is not installed for" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_ranks_share_the_first_gpu() -> None:
    """In a process of its own: the plugin registers strategies."""
    code = """if True:
        import json
        from dtf.host import devices
        devices.gpus = lambda: 1
        from bench.gpu.parts import FsdpGloo, OneGpu
        places, _ = OneGpu(processes=2)._places(FsdpGloo())
        print(json.dumps([[place["device"], place["devices"]] for place in places]))
        print(FsdpGloo().communication("cuda"))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    places, backend = done.stdout.splitlines()
    assert json.loads(places) == [["cuda:0", ["cuda:0", "cuda:0"]]] * 2
    assert backend == "cpu:gloo,cuda:gloo"


@pytest.mark.slow
def test_all_steps_pass_in_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--minutes", "20", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1300)
    found = ends(tmp_path)
    assert done.returncode == 0, (found, (tmp_path / "log.txt").read_text()[-4000:])
    may_be_missing = {"offload", "compiled", "cifar10"}
    assert {name for name, (state, _) in found.items() if state != PASSED} <= may_be_missing
    assert set(found) == set(BY_NAME)
