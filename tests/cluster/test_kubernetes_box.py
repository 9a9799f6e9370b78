"""Runs on a Kubernetes cluster of this machine (`tests/support/kubebox.py`): evicted again and again they end as they
would have undisturbed; their state, their logs and their end are what the cluster shows.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dtf.cluster.after_exit import newest_checkpoint
from tests.support.kubebox import KubeBox, Object, condition, is_over, kubebox

pytest.importorskip("kubernetes", reason="asks a cluster by the package kubernetes")

ROOT = Path(__file__).parents[2]
PATH = {"PYTHONPATH": str(ROOT)}
SMALL = [
    "recipe.data.train_rows=512",
    "recipe.data.eval_rows=16",
    "step.batch_size=16",
    "step.micro_batch_rows=8",
    "train.log_every=100",
    "checkpoint.every_steps=100",
    "launcher.devices=cpu",
    "launcher.threads=1",
    "observer=[jsonl]",
]
KINDS = {"jobset": "JobSet", "trainjob": "TrainJob", "job": "Job"}
WAIT_S = 240.0


@pytest.fixture
def box(tmp_path: Path) -> Iterator[KubeBox]:
    with kubebox(tmp_path / "box", PATH) as made:
        yield made


def dtf(box: KubeBox, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **PATH, "KUBECONFIG": str(box.kubeconfig)}
    return subprocess.run(
        [sys.executable, "-m", "dtf", *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60
    )


def submit(box: KubeBox, tmp_path: Path, kind: str, *words: str) -> tuple[Path, str]:
    """Submit a run; returns its folder on this side and the name of its job."""
    claim = tmp_path / "claim"
    claim.mkdir(exist_ok=True)
    options = [f"launcher.kind={kind}", "launcher.image=dtf", "launcher.claim=runs", f"launcher.mount={claim}"]
    done = dtf(box, tmp_path, "launcher=kubernetes", *options, *SMALL, *words)
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "outputs").rglob("job.json")
    return record.parents[1], json.loads(record.read_text())["handle"]["names"]


def run_dir(folder: Path) -> Path:
    return Path(json.loads((folder / "job" / "job.json").read_text())["run_dir"])


def over(box: KubeBox, kind: str, name: str) -> Object | None:
    """The condition with which the job has ended."""
    job = box.find(KINDS[kind], name)
    assert job is not None
    known = (condition(job, text) for text in ("Complete", "Completed", "Failed"))
    return next((one for one in known if one), None)


def wait_for_end(box: KubeBox, kind: str, name: str) -> Object:
    deadline = time.monotonic() + WAIT_S
    while not (end := over(box, kind, name)):
        assert time.monotonic() < deadline, told(box)
        time.sleep(0.1)
    return end


def _exit_code(pod: Object) -> int | None:
    """None for a pod that went before it began."""
    states = [one["state"] for one in pod["status"].get("containerStatuses", [])]
    return states[0]["terminated"]["exitCode"] if states else None


def told(box: KubeBox) -> str:
    """What all pods said, for a test that fails."""
    pods = [*box.store.deleted, *box.pods()]
    return "\n".join(
        f"== {pod['metadata']['name']} {pod['status'].get('containerStatuses')}\n{box.kubelet.text(pod)[-3000:]}"
        for pod in pods
        if pod["kind"] == "Pod"
    )


def disturb(box: KubeBox, kind: str, name: str, saved: Callable[[], int], steps: int, chance: random.Random) -> int:
    """Evict pods, each time after a random part of the run, by the checkpoints that it has saved, and in every second
    turn once more at a random moment of the start that follows. Returns how often, until half of the steps were done
    or the job was over: how fast this machine is decides about no turn in a start.
    """
    evictions = turn = 0
    while (done := saved()) < steps // 2 and not over(box, kind, name):
        until = done + chance.randrange(1, max(2, steps // 6)) if turn % 2 else 0
        while until and saved() < until and not over(box, kind, name):
            time.sleep(0.05)
        if not until:
            time.sleep(chance.uniform(0.0, 8.0))  # a moment of the start, not a wait for something
        live = [pod["metadata"]["name"] for pod in box.pods() if not is_over(pod)]
        evictions += bool(live) and box.evict(chance.choice(live))
        turn += 1
    return evictions


def same_tensors(one: Path, other: Path, step: int) -> None:
    """Bit for bit, all that the last checkpoint holds."""
    names = sorted(path.name for path in (one / "checkpoints" / f"step_{step:06}").glob("*.safetensors"))
    assert names
    for name in names:
        ours, theirs = (load_file(folder / "checkpoints" / f"step_{step:06}" / name) for folder in (one, other))
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert ours[key].numpy().tobytes() == theirs[key].numpy().tobytes(), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "nodes", "steps", "words"),
    [
        ("jobset", "ddp", 2, 1000, []),
        ("jobset", "fsdp", 2, 1000, ["launcher.doctor=false"]),
        ("job", "ddp", 1, 5000, []),
        ("trainjob", "fsdp", 1, 2500, []),
        ("jobset", "pserver strategy.servers=2", 2, 5000, ["launcher.allow_insecure=true"]),
    ],
)
def test_a_job_that_is_evicted_again_and_again_ends_with_the_same_bits(
    box: KubeBox, tmp_path: Path, kind: str, strategy: str, nodes: int, steps: int, words: list[str]
) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    task = [*f"strategy={strategy}".split(), f"train.steps={steps}"]
    spread = [f"launcher.nodes={nodes}", f"launcher.processes={2 // nodes}"]
    folder, name = submit(box, tmp_path, kind, *task, *spread, *words)
    evictions = disturb(box, kind, name, lambda: newest_checkpoint(run_dir(folder)), steps, random.Random(seed))
    end = wait_for_end(box, kind, name)
    assert end["type"] in ("Complete", "Completed"), f"{end}\n{told(box)}"
    assert evictions >= 1
    alone = tmp_path / "alone"
    command = [sys.executable, "-m", "dtf", *SMALL, *task, "launcher.processes=2", f"run.dir={alone}"]
    subprocess.run(command, env={**os.environ, **PATH}, check=True, capture_output=True, timeout=600)
    same_tensors(run_dir(folder), alone, steps)
    ends = Counter(_exit_code(pod) for pod in [*box.store.deleted, *box.pods()] if pod["kind"] == "Pod")
    saved = sum("saved" in box.kubelet.text(pod) for pod in box.store.deleted if pod["kind"] == "Pod")
    for pod in box.store.deleted:
        if pod["kind"] == "Pod" and _exit_code(pod) not in (None, 0, 75, 143):
            print(pod["metadata"]["name"], box.kubelet.text(pod))
    print(f"{evictions} evictions; exit codes of pods {dict(ends)}; {saved} of the evicted said what they had saved")


@pytest.mark.slow
def test_a_sweep_is_the_pods_of_one_job_and_goes_on_after_an_eviction(box: KubeBox, tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    claim.mkdir()
    options = ["launcher.image=dtf", "launcher.claim=runs", f"launcher.mount={claim}", "launcher.processes=1"]
    values = ["optimizer.momentum=0.5,0.9", "train.steps=200"]
    words = ["-m", "launcher=kubernetes", *options, *SMALL, *values, "sweep.parallel=1"]
    done = dtf(box, tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("**/job/job.json")
    name = json.loads(record.read_text())["handle"]["names"]
    deadline = time.monotonic() + WAIT_S
    while not list(claim.glob("**/checkpoints/step_*")):
        assert time.monotonic() < deadline, told(box)
        time.sleep(0.1)
    (pod,) = (pod["metadata"]["name"] for pod in box.pods() if not is_over(pod))
    assert box.evict(pod)
    assert wait_for_end(box, "job", name)["type"] == "Complete", told(box)
    records = [json.loads(path.read_text()) for path in claim.glob("**/run.json")]
    assert [one["exit"] for one in records] == [0, 0]
    assert sorted(len(one.get("earlier", [])) for one in records) == [0, 1]
    assert "finished" in dtf(box, tmp_path, "job=status", f"job.run_folder={record.parents[1]}").stdout
    again = dtf(box, tmp_path, *words)
    assert again.returncode == 0 and "finished before; " in again.stdout, again.stderr


@pytest.mark.slow
def test_a_pod_whose_time_is_over_has_saved_and_the_next_goes_on(box: KubeBox, tmp_path: Path) -> None:
    words = ["launcher.processes=1", "train.steps=6000", "launcher.hours=0.01"]
    folder, name = submit(box, tmp_path, "job", *words)
    assert wait_for_end(box, "job", name)["type"] == "Complete", told(box)
    ends = [_exit_code(pod) for pod in box.pods()]
    assert len(ends) > 1 and set(ends) - {None} == {0, 75}, told(box)
    steps = [json.loads(line)["step"] for line in (run_dir(folder) / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 6000
