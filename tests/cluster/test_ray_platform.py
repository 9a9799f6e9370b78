"""launcher=ray without Ray: what is submitted, what ends mean, what is refused, what is known from the job's folder."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dtf.cli.main import main
from dtf.cluster import ray_client, ray_platform, record
from dtf.cluster.followed_logs import followed
from dtf.cluster.platform import JobRequest, JobState, State, Unanswered
from dtf.cluster.ray_driver_state import SILENT_S, beat, is_cancelled, last_state, write_state
from dtf.cluster.ray_ends import verdict
from dtf.cluster.ray_platform import Ray
from dtf.cluster.submit import request_of
from dtf.config.compose import compose
from dtf.core.errors import BusyError, ConfigError, Exit, PeerError

PSERVER = ["strategy=pserver", "strategy.servers=2", "launcher.allow_insecure=true"]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., dict]:
    """The driver's job of a command line; `made` holds its platform and its request."""

    def render(*words: str, trials: tuple[str, ...] = ()) -> dict:
        composed = compose(["launcher=ray", "train.steps=2", *words])
        platform = composed.settings.launcher
        assert isinstance(platform, Ray)
        platform.check(composed.settings.strategy)
        request = request_of(platform, [composed] * max(1, len(trials)), tmp_path, str(tmp_path), "shapes-1", trials, 2)
        (name, text), *others = platform.render(request).items()
        assert name == "ray.json" and not others and platform.render(request) == {name: text}
        return {**json.loads(text), "request": request}

    return render


def test_the_whole_job_of_two_nodes(job: Callable[..., dict], tmp_path: Path) -> None:
    made = job("launcher.nodes=2", "launcher.gpus=4", "launcher.threads=2", "launcher.extra=['spot=1']")
    request: JobRequest = made.pop("request")
    assert made == {
        "id": request.digest[:16],
        "name": "shapes-1",
        "job_folder": f"{tmp_path}/job",
        "bundle": f"{tmp_path}/job/bundle.zip",
        "command": [
            sys.executable,
            *("-m", "dtf"),
            f"--bundle={tmp_path}/job/bundle.zip",
            f"--digest={request.digest}",
        ],
        "processes": [
            {"role": "", "id": node, "resources": {"CPU": 8.0, "GPU": 4.0, "spot": 1.0}} for node in range(2)
        ],
        "spread": "STRICT_SPREAD",
        "deciding": 2,
        "hours": None,
        "grace_s": 25.0,
        "trials": [],
        "parallel": 2,
    }


def test_processes_of_roles_are_placed_one_by_one_and_servers_decide(job: Callable[..., dict]) -> None:
    made = job(*PSERVER, "launcher.nodes=2", "launcher.processes=2", "launcher.gpus=2", "launcher.hours=1.5")
    assert [(one["role"], one["id"]) for one in made["processes"]] == [
        *(("server", number) for number in range(2)),
        *(("trainer", number) for number in range(4)),
    ]
    assert [one["resources"] for one in made["processes"]] == [{"CPU": 1.0}] * 2 + [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert (made["spread"], made["deciding"], made["hours"]) == ("SPREAD", 2, 1.5)
    on_one = job(*PSERVER[:-1], "launcher.python=/opt/python")
    assert [one["role"] for one in on_one["processes"]] == [""] and on_one["command"][0] == "/opt/python"


def test_trials_are_runs_of_one_job(job: Callable[..., dict]) -> None:
    made = job(trials=("lr.peak=0.1", "lr.peak=0.2", "lr.peak=0.3"))
    assert (made["trials"], made["parallel"]) == (["lr.peak=0.1", "lr.peak=0.2", "lr.peak=0.3"], 2)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher.extra=['spot']"], "launcher.extra=spot is no resource of Ray"),
        (["launcher.extra=['spot=-1']"], "launcher.extra=spot=-1 is no resource of Ray"),
        (["launcher.address=' '"], "launcher.address='' names no cluster"),
    ],
)
def test_what_ray_could_not_take_is_refused(job: Callable[..., dict], words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        job(*words)


def test_a_missing_ray_is_named_with_what_installs_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_platform, "find_spec", lambda name: None)
    assert main(["launcher=ray", "train.steps=2"]) == Exit.CONFIG
    assert "python -m pip install 'dtf[ray]'" in capsys.readouterr().err


def test_an_address_where_nobody_listens_is_named_at_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray itself would try for ever."""
    monkeypatch.setattr(ray_platform, "find_spec", lambda name: object())
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        port = unheard.getsockname()[1]
        for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
            assert main(["launcher=ray", "train.steps=2", f"launcher.address={address}"]) == Exit.PEER
            assert f"launcher.address={address}: no Ray cluster answers there" in capsys.readouterr().err
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        assert main(["launcher=ray", "train.steps=2"]) == Exit.PEER
        assert f"RAY_ADDRESS=127.0.0.1:{port}" in capsys.readouterr().err


LOST = None


@pytest.mark.parametrize(
    ("codes", "deciding", "expected"),
    [
        ([0, 0], 2, 0),
        ([0, 0, 75, 1, LOST], 2, 0),  # what trainers say once their servers have finished
        ([0, LOST], 2, LOST),
        ([69, LOST], 2, LOST),
        ([75, 137], 2, LOST),
        ([69, 139], 2, LOST),
        ([73, 69], 2, 73),
        ([75, 75], 2, 75),
        ([143, 75], 2, 143),
        ([75, 69], 2, 69),
        ([75, 2], 2, 2),
        ([LOST, 79], 2, 79),
        ([75, 75, 0], 2, 75),
    ],
)
def test_one_code_of_all_processes(codes: list[int | None], deciding: int, expected: int | None) -> None:
    assert verdict(codes, deciding) == expected


def test_what_the_driver_wrote_last_needs_no_cluster(tmp_path: Path) -> None:
    handle = {"job": "shapes-1", "id": "1", "folder": str(tmp_path)}
    file, submitted = tmp_path / "ray-state.json", tmp_path / "ray.json"
    submitted.touch()
    assert Ray().state(handle) == JobState(State.queued), "its driver begins"
    for state in State:
        file.write_text(json.dumps({"id": "1", "state": state.value, "detail": "exit code 0"}))
        assert Ray().state(handle) == JobState(state, "exit code 0")
        Ray().cancel(handle)
        may_live = state.is_live or state is State.unknown
        assert is_cancelled(tmp_path, "1") is may_live and not is_cancelled(tmp_path, "2")
        (tmp_path / "cancel").unlink(missing_ok=True)
    other = {**handle, "id": "2"}
    assert Ray().state(other) == JobState(State.queued), "the file is of an earlier job in this folder"
    silent = time.time() - SILENT_S - 1
    os.utime(submitted, (silent, silent))
    assert Ray().state(other).state is State.unknown and "may not see" in Ray().state(other).detail
    submitted.unlink()
    assert Ray().state(other).state is State.unknown
    with pytest.raises(ConfigError, match="is not there, in which the job is told to end: its run folder was moved"):
        Ray().cancel(other)
    file.write_text('{"id": "1", "state": "well"}')
    assert Ray().state(handle).state is State.unknown


def test_a_driver_whose_heart_stands_still_is_not_known_to_live(tmp_path: Path) -> None:
    """The head node is gone, or its storage: the last state, and what to do. One that has ended needs no heart."""
    handle, silent = {"job": "shapes-1", "id": "1", "folder": str(tmp_path)}, time.time() - SILENT_S - 1
    for state in ("running", "finished"):
        write_state(tmp_path, {"id": "1", "state": state, "detail": "on a"})
        os.utime(tmp_path / "ray-state.json", (silent, silent))
        found = Ray().state(handle)
        if state == "running":
            assert found.state is State.unknown
            assert re.match(
                r"its driver is silent for \d+ s; at last: running, on a; the cluster may be gone", found.detail
            )
            beat(tmp_path)
            assert Ray().state(handle) == JobState(State.running, "on a")
    assert found == JobState(State.finished, "on a")


def test_the_clock_of_the_storage_says_how_old_a_beat_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the host that asks, which may be an hour ahead or behind."""
    write_state(tmp_path, {"id": "1", "state": "running", "detail": ""})
    now = time.time()
    for wrong in (now + 3600, now - 3600):
        monkeypatch.setattr(time, "time", lambda wrong=wrong: wrong)
        assert Ray().state({"job": "shapes-1", "id": "1", "folder": str(tmp_path)}).state is State.running
    assert os.listdir(tmp_path) == ["ray-state.json"]
    (tmp_path / "ray-state.json").write_text("[" * 100_000)
    assert last_state(tmp_path, "1") is None


def test_asking_for_a_job_connects_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder from elsewhere names no address: whoever answers there would run code here."""
    monkeypatch.setattr(socket, "socket", None)
    monkeypatch.setattr(ray_platform, "ray_client", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "job").mkdir()
    launcher = {**compose(["launcher=ray"]).config["launcher"], "address": "evil:6379"}
    handle = {"job": "a", "id": "1", "actor": "dtf-1", "address": "evil:6379", "folder": str(tmp_path / "job")}
    record.keep(tmp_path, record.JobRecord(launcher, handle, "2026-11-26T20:00:00", "", ""))
    write_state(tmp_path / "job", {"id": "1", "state": "running", "detail": "on a"})
    (tmp_path / "job" / "ray.json").touch()
    for job, text in (("status", "ray job a: running (on a)"), ("logs", ""), ("cancel", "was asked to end")):
        assert main([f"job={job}", f"job.run_folder={tmp_path}"]) == Exit.OK
        assert text in capsys.readouterr().out


class FakeRay:
    """As much of Ray as a submission uses. `holds`: what the driver of the actor's name answers, None where there is
    none; `begins`: what a new one answers, or raises.
    """

    class exceptions:
        class RayError(Exception): ...

        RayActorError = GetTimeoutError = type("RayActorError", (RayError,), {})

    def __init__(self, holds: Any, begins: Any) -> None:
        self.holds, self.killed = holds, False
        self._new = SimpleNamespace(ready=SimpleNamespace(remote=lambda: begins))

    def remote(self, driver: type) -> Any:
        def register(job: dict) -> Any:
            if self.holds is not None:
                raise ValueError("the name is taken")
            return self._new

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=register))

    def get_actor(self, name: str) -> Any:
        return SimpleNamespace(ready=SimpleNamespace(remote=lambda: self.holds))

    def get(self, answer: Any, timeout: float) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, driver: Any) -> None:
        self.killed = True


def test_ray_is_imported_early_for_a_submission_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for an answer about the config nor for a job that is printed."""
    monkeypatch.setattr(ray_client, "RayClient", object)
    monkeypatch.setattr(ray_client, "find_spec", lambda name: name)
    monkeypatch.setattr(ray_client, "_started", [])
    for words in (["--cfg", "job"], ["job=describe", "launcher.dry_run=true"]):
        assert main(["launcher=ray", *words]) == Exit.OK
        assert not ray_client._started
    ray_client.start_client(["launcher=ray", "train.steps=2"])
    assert len(ray_client._started) == 1


def test_a_folder_has_one_driver_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same submission again finds its own one; that of another job is in the way as long as it lives."""
    monkeypatch.setattr(ray_client, "_ENDS_S", 0.0)
    job = {"id": "1", "job_folder": str(tmp_path)}
    ray_client._start(FakeRay(("1", ""), None), object, "dtf-1", job)
    with pytest.raises(BusyError, match="has another job on this cluster, the actor dtf-1"):
        ray_client._start(FakeRay(("2", ""), None), object, "dtf-1", job)


@pytest.mark.parametrize(
    ("begins", "told"),
    [
        (("1", ""), ""),
        (("1", "a does not see /x"), "Ray's head node a does not see /x"),
        (FakeRay.exceptions.RayError("...\nno such class"), "did not start the job's driver: no such class"),
    ],
)
def test_a_driver_that_cannot_begin_is_told_in_its_place(tmp_path: Path, begins: Any, told: str) -> None:
    """As it may not see the folder itself. Nobody waits for that at submission."""
    job, ray = {"id": "1", "job_folder": str(tmp_path)}, FakeRay(None, begins)
    ray_client._see_it_begin(ray, ray_client._start(ray, object, "dtf-1", job), job)
    state = last_state(tmp_path, "1")
    assert ray.killed is bool(told) and (state is not None) is bool(told)
    assert state is None or (state["state"] == "failed" and told in state["detail"])


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("pass", Unanswered),
        ('print(\'["BusyError", "taken"]\')', BusyError),
        ('print(\'["PeerError", "nobody"]\')', PeerError),
        ('print(\'["", ""]\')', None),
    ],
)
def test_what_rays_client_answers(code: str, error: type[Exception] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_client, "_START", f"import sys; sys.stdin.read(); {code}")
    client = ray_client.RayClient()
    with pytest.raises(error) if error else nullcontext():
        client.submit("auto", "dtf-1", {"id": "1"})
    assert client._process.wait() == 0 or error is Unanswered


def test_lines_of_files_that_grow(tmp_path: Path) -> None:
    one, two = tmp_path / "node-0.log", tmp_path / "node-1.log"
    one.write_text("a\nb")
    lives = iter([True, True, False])
    lines = followed(lambda: sorted(tmp_path.glob("*.log")), lambda: next(lives))
    assert next(lines) == "a"
    with one.open("a") as file:
        file.write("c\n")
    two.write_text("d\nlast")
    assert list(lines) == ["bc", "==> node-1.log <==", "d", "last"]
