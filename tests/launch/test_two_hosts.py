"""Two hosts that know of each other by one address alone: launcher=static and launcher=torchrun, with what can happen
to hosts and cables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dtf.core.errors import Exit
from tests.support.namespaces import ADDRESSES, ROOT, Host, two_hosts

pytestmark = pytest.mark.slow

SMALL = [
    "recipe.data.train_rows=128",
    "recipe.data.eval_rows=32",
    "step.batch_size=16",
    "step.micro_batch_rows=8",
    "train.steps=16",
    "train.log_every=1",
]
SMALL += [
    "train.record=true",
    "checkpoint.every_steps=4",
    "launcher.devices=cpu",
    "launcher.threads=1",
    "observer=[jsonl]",
]
STATIC = [
    "launcher=static",
    "launcher.nodes=2",
    f"launcher.address={ADDRESSES[0]}:29500",
    "launcher.processes=1",
    "launcher.meet_timeout_s=120",
]
TORCHRUN = [
    "launcher=torchrun",
    "launcher.nodes=2",
    f"launcher.rendezvous={ADDRESSES[0]}:29500",
    "launcher.processes=1",
    "launcher.meet_timeout_s=120",
]

PLUGGED = [
    "plugins=[mine]", "recipe=mine", "step.batch_size=24", "train.steps=8", "launcher.devices=cpu",
    "launcher.threads=1",
]  # fmt: skip
PLUGIN = """
from dtf.api.registry import register
from tests.support.toy import Toy
{}

@register("recipe", "mine")
class Mine(Toy):
    def build_model(self):
        import mine.width
        return super().build_model()
"""


@pytest.fixture
def pair() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the same two ranks on one host."""
    folder = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "dtf", *SMALL, "launcher.processes=2", f"run.dir={folder / 'run'}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=200)
    return folder / "run"


def evidence(folder: Path) -> tuple[list[dict], list[list[dict]]]:
    """What was measured, but for times, and what each rank trained on and holds."""
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [
        [json.loads(line) for line in (folder / f"record_rank_{rank}.jsonl").read_text().splitlines()]
        for rank in range(2)
    ]
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "rows_per_s", "model_flops_per_s")}
        for line in measured
    ], records


def ends(*processes: subprocess.Popen[str]) -> list[tuple[int, str]]:
    """Exit codes and standard errors."""
    found = []
    try:
        for process in processes:
            _, err = process.communicate(timeout=200)
            found.append((process.returncode, err))
    finally:
        for process in processes:
            process.kill()
    return found


LAUNCHERS = {"static": STATIC, "torchrun": TORCHRUN}


def start(
    host: Host, node: int, tmp_path: Path, launcher: str, *more: str, path: str = "", base: Sequence[str] = SMALL
) -> subprocess.Popen[str]:
    """The command of host `node`."""
    place = [f"launcher.node_rank={node}"] if launcher == "static" else []
    words = [*base, *LAUNCHERS[launcher], *place, f"run.dir={tmp_path / 'run'}", *more]
    return host.dtf(*words, cwd=tmp_path, path=path)


def static(pair: tuple[Host, Host], tmp_path: Path, *more: str) -> list[subprocess.Popen[str]]:
    return [start(host, node, tmp_path, "static", *more) for node, host in enumerate(pair)]


def saved(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a checkpoint of at least this step is there."""
    deadline = time.monotonic() + 150
    while newest(folder) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (child, *descendants(child))]


def newest(folder: Path) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max(
        (int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_" + "[0-9]" * 6)),
        default=0,
    )


def test_two_hosts_train_as_one_does(pair: tuple[Host, Host], alone: Path, tmp_path: Path) -> None:
    processes = static(pair, tmp_path, f"launcher.log_dir={tmp_path / 'logs'}")
    for code, err in ends(*processes):
        assert code == Exit.OK, err
    assert evidence(tmp_path / "run") == evidence(alone)
    assert sorted(path.name for path in (tmp_path / "logs" / "run").iterdir()) == ["rank_0.log", "rank_1.log"]


def test_two_hosts_that_know_a_token_and_ipv6_alone(
    pair: tuple[Host, Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTF_TOKEN", "a secret")
    for node, host in enumerate(pair):
        host.call("ip", "address", "flush", "dev", host.cable)
        host.call("ip", "address", "add", f"fd77::{node + 1}/64", "dev", host.cable, "nodad")
    for code, err in ends(*static(pair, tmp_path, "launcher.address='[fd77::1]:29500'")):
        assert code == Exit.OK, err
    assert len(evidence(tmp_path / "run")[1]) == 2


def test_a_killed_rank_is_replaced_on_all_hosts(pair: tuple[Host, Host], alone: Path, tmp_path: Path) -> None:
    a, b = static(pair, tmp_path)
    saved(tmp_path / "run", 4, a)
    (server,) = children(b.pid)
    os.kill(children(server)[-1], signal.SIGKILL)
    for code, err in ends(a, b):
        assert code == Exit.OK, err
    assert "---- attempt 1" in (tmp_path / "run" / "rank_0.log").read_text(), "it was in time"
    assert evidence(tmp_path / "run") == evidence(alone)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_host_that_was_killed_may_come_back(launcher: str, pair: tuple[Host, Host], tmp_path: Path) -> None:
    a, b = (start(host, node, tmp_path, launcher, "train.steps=20000") for node, host in enumerate(pair))
    saved(tmp_path / "run", 4, a)
    mine = descendants(b.pid)
    b.kill()
    b.communicate()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in mine):
        assert time.monotonic() < deadline, "its ranks train on"
        time.sleep(0.02)
    again = start(pair[1], 1, tmp_path, launcher, "train.steps=20000")
    saved(tmp_path / "run", newest(tmp_path / "run") + 8, a)
    a.send_signal(signal.SIGTERM)
    for code, err in ends(a, again):
        assert code == Exit.PREEMPTED, err
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"train"' in line
    ]
    assert steps == sorted(set(steps)), "each step was measured once"


def test_a_cut_cable_is_noticed_on_both_sides(pair: tuple[Host, Host], tmp_path: Path) -> None:
    processes = static(pair, tmp_path, "train.steps=5000", "launcher.hang_timeout_s=3", "launcher.max_restarts=0")
    saved(tmp_path / "run", 4, processes[0])
    pair[0].call("ip", "link", "set", pair[0].cable, "down")
    (code_a, err_a), (code_b, err_b) = ends(*processes)
    assert code_a == code_b == Exit.PEER
    assert "hang_timeout_s=3" in err_a and "hang_timeout_s=3" in err_b


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_mixture_of_versions_is_refused(launcher: str, pair: tuple[Host, Host], tmp_path: Path) -> None:
    other = tmp_path / "other" / "numpy-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n")
    a = start(pair[0], 0, tmp_path, launcher)
    b = start(pair[1], 1, tmp_path, launcher, path=str(other.parent))
    (code_a, err_a), (code_b, err_b) = ends(a, b)
    assert code_a == code_b == Exit.CONFIG
    first = "host 0" if launcher == "static" else "rank 0"
    how = f'host-b differs from {first}: versions.numpy="0.0.1", {first} has '
    assert how in err_a
    assert (how if launcher == "torchrun" else "differs from host 0 in versions.numpy; host 0 says how") in err_b
    assert not (tmp_path / "run").exists(), "nothing was written"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("at_once", [True, False])
def test_another_file_of_a_plugin_is_named(
    launcher: str, at_once: bool, pair: tuple[Host, Host], tmp_path: Path
) -> None:
    """The versions are the same. Not `at_once`: ranks alone import it, for the model."""
    processes = []
    for node, host in enumerate(pair):
        folder = tmp_path / host.name
        (folder / "mine").mkdir(parents=True)
        (folder / "mine" / "__init__.py").write_text(PLUGIN.format("import mine.width" if at_once else ""))
        (folder / "mine" / "width.py").write_text(f"WIDTH = 4  # {node}\n")
        processes.append(start(host, node, tmp_path, launcher, path=str(folder), base=PLUGGED))
    found = ends(*processes)
    assert [code for code, _ in found] == [Exit.CONFIG] * 2, found
    assert "host-b" in found[0][1] and "code.mine/width.py=" in found[0][1], found
    assert "code.mine/width.py" in found[1][1], found
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_torchrun_trains_on_two_hosts(pair: tuple[Host, Host], alone: Path, tmp_path: Path) -> None:
    words = [*SMALL, *TORCHRUN, f"run.dir={tmp_path / 'run'}"]
    for code, err in ends(*(host.dtf(*words, cwd=tmp_path) for host in pair)):
        assert code == Exit.OK, err
    assert evidence(tmp_path / "run") == evidence(alone)


def test_torchrun_goes_on_after_a_lost_rank(pair: tuple[Host, Host], tmp_path: Path) -> None:
    words = [*SMALL, *TORCHRUN, f"run.dir={tmp_path / 'run'}", "train.steps=2000"]
    a, b = (host.dtf(*words, cwd=tmp_path) for host in pair)
    saved(tmp_path / "run", 4, a)
    os.kill(children(b.pid)[0], signal.SIGKILL)
    saved(tmp_path / "run", newest(tmp_path / "run") + 8, a)
    a.send_signal(signal.SIGTERM)
    for code, err in ends(a, b):
        assert code == Exit.PREEMPTED, err


def test_torchrun_takes_in_a_host_that_comes_later(pair: tuple[Host, Host], tmp_path: Path) -> None:
    words = [*SMALL, *TORCHRUN, "launcher.nodes=1:2", f"run.dir={tmp_path / 'run'}", "train.steps=4000"]
    a = pair[0].dtf(*words, cwd=tmp_path)
    saved(tmp_path / "run", 4, a)
    assert not (tmp_path / "run" / "record_rank_1.jsonl").exists()
    b = pair[1].dtf(*words, cwd=tmp_path)
    deadline = time.monotonic() + 150
    while not (tmp_path / "run" / "record_rank_1.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    saved(tmp_path / "run", newest(tmp_path / "run") + 8, a)
    a.send_signal(signal.SIGTERM)
    for code, err in ends(a, b):
        assert code == Exit.PREEMPTED, err
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"train"' in line
    ]
    assert steps == sorted(set(steps)), "each step was measured once"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_folder_that_one_host_does_not_see_is_refused(
    launcher: str, pair: tuple[Host, Host], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    a = start(pair[0], 0, tmp_path, launcher)
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path}; cd /; exec "$0" "$@"']
    b = start(Host(pair[1].pid, pair[1].name, pair[1].cable, hidden), 1, tmp_path, launcher)
    text = f"host 1 (host-b) does not see the run folder {tmp_path / 'run'}"
    for code, err in ends(a, b):
        assert code == Exit.CONFIG, err
        assert (text if launcher == "static" else "rank 1 on host-b: finds the run folder=false") in err


def test_doctor_finds_nothing_wrong_and_then_a_slow_link(pair: tuple[Host, Host], tmp_path: Path) -> None:
    words = ["job=doctor", "job.megabytes=8", *STATIC, "launcher.devices=cpu", f"run.dir={tmp_path / 'run'}"]
    for more, code, text in (
        (["job.slow_mb_s=0"], Exit.OK, "nothing is wrong"),
        (["job.slow_mb_s=1e9"], Exit.CONFIG, "host-a to host-b: "),
    ):
        a, b = (host.dtf(*words, *more, f"launcher.node_rank={node}", cwd=tmp_path) for node, host in enumerate(pair))
        out, err = a.communicate(timeout=200)
        assert (a.returncode, b.wait(timeout=60)) == (code, Exit.OK), err
        assert text in out and f"host-a reaches {ADDRESSES[0]} from {ADDRESSES[0]}" in out
    assert list(tmp_path.iterdir()) == []


def test_doctor_names_a_dead_address(pair: tuple[Host, Host], tmp_path: Path) -> None:
    words = [
        "job=doctor",
        "launcher=static",
        "launcher.nodes=2",
        "launcher.devices=cpu",
        "launcher.processes=1",
        "launcher.meet_timeout_s=1",
    ]
    for address, text in (
        ("10.77.0.9:29500", "10.77.0.9:29500 does not answer within 3 s"),
        ("10.99.0.1:29500", "there is no way from host-b to 10.99.0.1: Network is unreachable"),
        ("no-such-host:29500", "this host, host-b, knows no address of no-such-host"),
    ):
        b = pair[1].dtf(*words, "launcher.node_rank=1", f"launcher.address={address}", cwd=tmp_path)
        out, err = b.communicate(timeout=60)
        assert b.returncode in (Exit.CONFIG, Exit.PEER), err
        assert f"wrong: {text}" in out, out + err
