"""observer=resources: what processes and GPUs use, as the kernel and NVML tell it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time

import pytest

from dtf.core.types import Ended
from dtf.host import usage
from dtf.host.usage import Load, Process, cpu_load, process_tree
from dtf.observers.resources import Resources
from tests.support.launching import HANG_S
from tests.unit.test_observers import started

_CHILD = (
    "import sys; block = bytearray(50_000_000); print(flush=True); sys.stdin.readline(); sum(range(10_000_000)); "
    "print(flush=True); sys.stdin.readline()"
)


def test_a_tree_has_children_their_memory_and_their_time():
    child = subprocess.Popen([sys.executable, "-c", _CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdin and child.stdout
        child.stdout.readline()
        before = process_tree(os.getpid())
        assert {os.getpid(), child.pid} <= set(before) and before[child.pid].memory > 50_000_000
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        after = process_tree(os.getpid())
        assert after[child.pid].cpu_s > before[child.pid].cpu_s
        assert set(process_tree(child.pid)) == {child.pid}
    finally:
        child.kill()
        child.communicate()
    assert child.pid not in process_tree(os.getpid())


def test_load_counts_new_processes_from_zero_and_forgets_ended_ones():
    before = {1: Process(0, 10.0, 100), 2: Process(1, 50.0, 200)}
    now = {1: Process(0, 10.5, 100), 3: Process(1, 1.0, 300)}
    assert cpu_load(before, now, seconds=1.0, cores=2) == Load("cpu", 75.0, 400)


class FakeNvml:
    """Two cards, 7 % and 93 %; refuses a third."""

    def __getattr__(self, name: str):
        if name == "nvmlDeviceGetUtilizationRates":
            return lambda handle, out: self._rates(handle, out)
        if name == "nvmlDeviceGetMemoryInfo":
            return lambda handle, out: self._memory(handle, out)
        if name == "nvmlDeviceGetHandleByIndex_v2":
            return lambda index, out: self._handle(index.value, out)
        if name == "nvmlDeviceGetHandleByUUID":
            return lambda name, out: self._handle({b"GPU-b": 1}[name], out)
        return lambda *arguments: 0

    @staticmethod
    def _handle(index, out):
        out._obj.value = index + 1
        return 0 if index < 2 else 6

    @staticmethod
    def _rates(handle, out):
        out._obj.gpu = {1: 7, 2: 93}[handle.value]
        return 0

    @staticmethod
    def _memory(handle, out):
        out._obj.used = handle.value * 10**9
        return 0


@pytest.mark.parametrize(("visible", "expected"), [("", [7.0, 93.0]), ("1,0", [93.0, 7.0]), ("GPU-b,0", [93.0, 7.0])])
def test_gpus_are_counted_as_torch_counts_them(visible, expected, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    cards = usage.Gpus([0, 1])
    loads = cards.loads()
    assert [load.device for load in loads] == ["cuda:0", "cuda:1"] and [load.utilisation for load in loads] == expected
    cards.close()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OSError, match="nvmlDeviceGetHandleByIndex_v2 of NVML failed with code 6"):
        usage.Gpus([2])


def test_samples_of_a_run_and_their_curves(run_dtf):
    small = (
        "recipe.data.train_rows=256",
        "recipe.data.eval_rows=32",
        "step.batch_size=16",
        "train.epochs=1",
        "checkpoint=off",
        "launcher.threads=1",
    )
    done = run_dtf(
        "launcher=inline", "observer=[jsonl,tensorboard,resources]", "observer.resources.every_s=0.05", *small
    )
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (done.folder / "resources.jsonl").read_text().splitlines()]
    assert len(lines) >= 2 and {line["device"] for line in lines} == {"cpu"}
    assert max(line["utilisation"] for line in lines) > 0 and all(line["memory"] > 1e6 for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(done.folder / "tensorboard" / "resources")).Reload()
    assert set(reader.Tags()["scalars"]) == {"resources/cpu/utilisation", "resources/cpu/memory_gb"}


def test_a_watcher_that_fails_says_so_and_closes(tmp_path):
    observer = Resources(every_s=0.05)
    observer.open(tmp_path / "gone", {"launcher": {"devices": "cpu"}, "observer": {}})
    observer.see(started())
    assert observer._thread is not None
    observer._thread.join()
    with pytest.raises(FileNotFoundError):
        observer.see(Ended(1, "finished"))
    observer.close()


@pytest.mark.slow
def test_the_curve_goes_on_after_that_of_the_launch_before(tmp_path):
    """The seconds of a later launch come after those that the file has, and hide none of them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = {"launcher": {"devices": "cpu"}, "observer": {"tensorboard": {"path": "tensorboard"}}}
    seconds: dict[int, list[int]] = {}
    for launch in range(2):
        if launch:  # what a launch of five minutes left, killed while it wrote
            early = "".join(json.dumps({"time": 1000.0 + i, "step": i, "device": "cpu"}) + "\n" for i in range(300))
            (tmp_path / "resources.jsonl").write_text(early + '{"time": 1')
        observer = Resources(every_s=1.0 if launch else 0.05)
        observer.open(tmp_path, config)
        observer.see(started())
        file = tmp_path / "resources.jsonl"
        before = file.stat().st_size if file.exists() else 0
        deadline = time.monotonic() + HANG_S
        while not file.exists() or file.stat().st_size == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        observer.close()
        reader = EventAccumulator(str(tmp_path / "tensorboard" / "resources")).Reload()
        seconds[launch] = [event.step for event in reader.Scalars("resources/cpu/utilisation")]
    assert seconds[0] and seconds[1][: len(seconds[0])] == seconds[0]
    assert min(seconds[1][len(seconds[0]) :]) >= 300
