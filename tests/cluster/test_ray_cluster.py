"""launcher=ray on a real Ray cluster on loopback: what it places, and that nothing is lost when Ray takes it away."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dtf.cluster.after_exit import newest_checkpoint
from tests.support.raybox import WAIT_S, RayBox, parent, supervisors, until

pytest.importorskip("ray", reason="ray is not installed: python -m pip install 'dtf[ray]'")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 240
RUN = [
    "plugins=[tests.support.kill_trigger]",
    "recipe=slow_toy",
    "step.batch_size=16",
    f"train.steps={STEPS}",
    "train.log_every=5",
    "train.eval_every=80",
    "checkpoint.every_steps=20",
    "observer=[jsonl]",
    "launcher.devices=cpu",
    "launcher.threads=1",
]
PSERVER = ["strategy=pserver", "strategy.servers=2", "launcher.allow_insecure=true"]


def dtf(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtf", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayBox]:
    os.environ["PYTHONPATH"] = str(ROOT)
    box = RayBox(Path(os.path.realpath(tmp_path_factory.mktemp("r"))))
    try:
        for _ in range(3):
            box.add()
        yield box
    finally:
        box.close()


@pytest.fixture(params=["ddp", "pserver"])
def strategy(request: pytest.FixtureRequest) -> list[str]:
    return PSERVER if request.param == "pserver" else []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Strategy -> the final tensors of the same two ranks on this host alone."""
    found = {}
    for name, words in (("ddp", []), ("pserver", PSERVER[:-1])):
        folder = tmp_path_factory.mktemp(name)
        done = dtf(*RUN, *words, "launcher.processes=2", f"run.dir={folder}", cwd=folder)
        assert done.returncode == 0, done.stderr
        found[name] = tensors(folder)
    return found


def tensors(folder: Path, step: int = STEPS) -> dict[str, bytes]:
    """Name -> bytes, of all that the last checkpoint holds."""
    found = {}
    for path in sorted((folder / "checkpoints" / f"step_{step:06}").glob("*.safetensors")):
        found |= {f"{path.name}:{name}": tensor.tobytes() for name, tensor in load_file(path).items()}
    assert found
    return found


class Submitted:
    """A job in a run folder of its own."""

    def __init__(self, box: RayBox, folder: Path, words: list[str]) -> None:
        self.folder = folder / "run"
        self.job = self.folder / "job"
        launcher = ["launcher=ray", f"launcher.address={box.address}", "launcher.nodes=2", "launcher.processes=1"]
        done = dtf(*launcher, *RUN, *words, f"run.dir={self.folder}", cwd=folder)
        assert done.returncode == 0, done.stderr

    @property
    def state(self) -> dict:
        try:
            return json.loads((self.job / "ray-state.json").read_text())
        except FileNotFoundError:
            return {"state": "queued", "runs": {}, "detail": ""}

    def at_step(self, step: int, attempt: int = 1) -> None:
        """Wait until it has trained so far."""

        def there() -> bool:
            assert self.state["state"] not in ("failed", "finished"), (self.state, self.printed())
            lines = (self.folder / "metrics.jsonl").read_text().splitlines() if self.folder.is_dir() else []
            newest = max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
            return newest >= step and self.state["runs"][""]["attempt"] == attempt

        until(lambda: (self.folder / "metrics.jsonl").exists() and there(), f"step {step}: {self.state}")

    def newest(self) -> int:
        """The newest checkpoint."""
        return newest_checkpoint(str(self.folder))

    def ended(self) -> dict:
        until(lambda: self.state["state"] in ("failed", "finished", "cancelled"), str(self.state))
        return self.state

    def printed(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.job.glob("*.log")))

    def addresses(self) -> list[str]:
        """Where it is placed."""
        words = self.state["runs"][""]["detail"].removeprefix("on ").split(", ")
        return [word.split()[0] for word in words]


def finished_alike(job: Submitted, undisturbed: dict[str, dict[str, bytes]], words: list[str], attempts: int) -> None:
    state = job.ended()
    assert state["state"] == "finished", (state, job.printed())
    assert state["runs"][""]["attempt"] == attempts, state
    assert tensors(job.folder) == undisturbed["pserver" if words else "ddp"]
    assert not supervisors(job.job / "bundle.zip")


def test_a_drained_node_is_left_with_a_save(box, tmp_path, strategy, undisturbed) -> None:
    job = Submitted(box, tmp_path, strategy)
    job.at_step(50)
    gone = job.addresses()[-1]
    box.drain(gone)
    job.at_step(90, attempt=2)
    assert gone not in job.addresses()
    finished_alike(job, undisturbed, strategy, 2)
    assert job.state["runs"][""]["ends"][0].startswith("exit code 75: Ray drains the node"), job.state
    box.kill(gone)
    box.add()


def test_a_node_that_is_told_to_stop_drains_first(box, tmp_path, undisturbed) -> None:
    """As in a pod that is evicted."""
    job = Submitted(box, tmp_path, [])
    job.at_step(50)
    gone = job.addresses()[-1]
    box.nodes[gone].send_signal(signal.SIGTERM)
    box.add()
    finished_alike(job, undisturbed, [], 2)
    assert job.state["runs"][""]["ends"][0].startswith("exit code 75: Ray drains the node"), job.state
    assert box.nodes.pop(gone).wait(WAIT_S) is not None


def test_a_killed_actor_takes_its_processes_with_it_and_the_run_goes_on(box, tmp_path, strategy, undisturbed) -> None:
    job = Submitted(box, tmp_path, strategy)
    job.at_step(50)
    pids = supervisors(job.job / "bundle.zip")
    assert len(pids) == (4 if strategy else 2)
    actor = parent(pids[-1])
    assert b"NodeActor" in Path(f"/proc/{actor}/cmdline").read_bytes()
    os.kill(actor, signal.SIGKILL)
    until(lambda: pids[-1] not in supervisors(job.job / "bundle.zip"), "it outlived its actor", 20)
    finished_alike(job, undisturbed, strategy, 2)


def test_a_killed_node_is_replaced(box, tmp_path, strategy, undisturbed) -> None:
    job = Submitted(box, tmp_path, strategy)
    job.at_step(50)
    box.kill(job.addresses()[0])
    box.add()
    finished_alike(job, undisturbed, strategy, 2)


def test_a_killed_driver_goes_on_from_its_file(box, tmp_path, undisturbed) -> None:
    job = Submitted(box, tmp_path, [])
    job.at_step(50)
    drivers = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if b"ray::Driver" in _read(path)]
    assert len(drivers) == 1
    os.kill(drivers[0], signal.SIGKILL)
    finished_alike(job, undisturbed, [], 2)


def test_cancelling_saves_and_the_folder_goes_on(box, tmp_path, undisturbed) -> None:
    job = Submitted(box, tmp_path, [])
    job.at_step(10)
    done = dtf("job=cancel", f"job.run_folder={job.folder}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert job.ended()["state"] == "cancelled"
    assert "asked to stop" in job.printed()
    status = dtf("job=status", f"job.run_folder={job.folder}", cwd=tmp_path)
    assert "cancelled" in status.stdout, status
    job = Submitted(box, tmp_path, [])
    twice = dtf("launcher=ray", f"launcher.address={box.address}", *RUN, f"run.dir={job.folder}", cwd=tmp_path)
    assert twice.returncode == 73 and "wait for it, or end it" in twice.stderr, twice.stderr
    finished_alike(job, undisturbed, [], 1)
    logs = dtf("job=logs", f"job.run_folder={job.folder}", cwd=tmp_path)
    assert logs.stdout.count("== placement 1") == 4, logs.stdout


def test_what_would_only_repeat_itself_is_not_placed_again(box, tmp_path) -> None:
    job = Submitted(box, tmp_path, ["lr.peak=1e30", "train.skip_nonfinite=0"])
    state = job.ended()
    assert state["state"] == "failed" and state["runs"][""]["attempt"] == 1
    assert "exit code 79" in state["detail"] and "E_DIVERGED" in state["detail"], state


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_node_that_does_not_see_the_run_folder_is_named(box, tmp_path) -> None:
    address = box.add(hidden=tmp_path)
    try:
        state = Submitted(box, tmp_path, ["launcher.nodes=4"]).ended()
    finally:
        box.kill(address)
    assert state["state"] == "failed" and state["runs"][""]["attempt"] == 1
    assert f"exit code 2: {address}" in state["detail"] and "does not see" in state["detail"], state


def disturb(box: RayBox, job: Submitted, kind: str, draw: random.Random) -> None:
    """Take a node or an actor of the job away at a random moment of its placement, and wait for the next one."""
    until(lambda: job.state["runs"] and job.state["runs"][""]["state"] in ("running", "finished"), str(job.state))
    run = job.state["runs"][""]
    if kind in ("actor", "node"):
        newest = job.newest()
        until(lambda: job.newest() != newest or job.state["state"] == "finished", str(job.state))
    time.sleep(draw.uniform(0, 6))
    if job.state["state"] == "finished":
        return
    node = draw.choice(job.addresses())
    if kind == "drain":
        box.drain(node)
    elif kind == "stop":
        box.nodes[node].send_signal(signal.SIGTERM)
    elif kind == "node":
        box.kill(node)
    elif pids := supervisors(job.job / "bundle.zip"):
        os.kill(parent(draw.choice(pids)), signal.SIGKILL)
    if kind != "actor":
        box.add()
    until(lambda: job.state["runs"][""]["attempt"] > run["attempt"] or job.state["state"] == "finished", str(job.state))


@pytest.mark.parametrize("seed", [1, 2])
def test_disturbances_at_random_moments(box, tmp_path, seed: int) -> None:
    """Notices at any moment, starts included; losses once a step was made."""
    steps, draw = 1000, random.Random(seed)
    alone = tmp_path / "alone"
    done = dtf(*RUN, f"train.steps={steps}", "launcher.processes=2", f"run.dir={alone}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = Submitted(box, tmp_path, [f"train.steps={steps}"])
    for kind in draw.choices(["drain", "stop", "actor", "node"], k=8):
        disturb(box, job, kind, draw)
    state = job.ended()
    assert state["state"] == "finished" and len(state["runs"][""]["ends"]) > 4, (state, job.printed())
    assert tensors(job.folder, steps) == tensors(alone, steps)


def test_a_time_limit_ends_in_a_save_and_the_next_start_goes_on(box, tmp_path) -> None:
    job = Submitted(box, tmp_path, ["launcher.hours=0.008", "launcher.grace_s=5", "train.steps=900"])
    state = job.ended()
    assert state["state"] == "finished" and state["runs"][""]["attempt"] > 1, (state, job.printed())
    assert {end.split(":")[0] for end in state["runs"][""]["ends"][:-1]} == {"exit code 75"}, state


def test_trials_of_a_sweep_are_placements_of_one_job_and_one_that_fails_ends_no_other(box, tmp_path) -> None:
    launcher = ["launcher=ray", f"launcher.address={box.address}", "launcher.processes=1"]
    sweep = ["-m", "lr.peak=0.05,1e30,0.1", "sweep.parallel=2", f"run.dir={tmp_path / 'sweep'}"]
    done = dtf(*sweep, *launcher, *RUN, "train.skip_nonfinite=0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file, most = tmp_path / "sweep" / "job" / "ray-state.json", 0

    def ended() -> bool:
        nonlocal most
        if not file.exists():
            return False
        state = json.loads(file.read_text())
        most = max(most, [run["state"] for run in state["runs"].values()].count("running"))
        return state["state"] in ("failed", "finished")

    until(ended, "the sweep does not end")
    state = json.loads(file.read_text())
    assert {name: run["state"] for name, run in state["runs"].items()} == {
        "lr.peak=0.05": "finished",
        "lr.peak=1e+30": "failed",
        "lr.peak=0.1": "finished",
    }
    assert state["state"] == "failed" and "3 trials" in state["detail"] and most == 2, state
    assert all(tensors(tmp_path / "sweep" / f"lr.peak={peak}") for peak in ("0.05", "0.1"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
