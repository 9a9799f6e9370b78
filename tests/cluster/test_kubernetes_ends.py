"""What becomes of a job after each way in which its pods may end; what counts inside a pod; names that come late."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtf.cluster import inside, names
from dtf.cluster.after_exit import MOST
from dtf.cluster.allocation import Allocation
from dtf.cluster.bundle import Bundle, digest_of
from dtf.cluster.ends import count_end, count_start, is_finished
from dtf.cluster.kubernetes import Kubernetes
from dtf.cluster.kubernetes_objects import CRASHES
from dtf.cluster.platform import JobRequest, State
from dtf.config.compose import compose
from dtf.core.errors import BusyError, ConfigError, DataError, Exit, NoProgressError, Preempted
from dtf.core.run_record import SUBMISSION, SUBMITTED_FOLDER
from dtf.launch.manual_checks import TOKEN
from dtf.runs.run_folder import Run as OpenRun
from tests.support.kubebox import KubeBox, kubebox
from tests.support.kubernetes_requests import JOBSET_FIRST, platform, request

ONE = {"nodes": 1, "roles": {"trainer": 1}}
END_S = 30.0
Run = Callable[..., tuple[State, str, list[str]]]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeBox]:
    pytest.importorskip("kubernetes", reason="asks a cluster by the package kubernetes")
    from kubernetes.config import kube_config

    with kubebox(tmp_path / "box", {}) as made:
        # the library has read KUBECONFIG when it was imported
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(made.kubeconfig))
        yield made


@pytest.fixture
def run(box: KubeBox, tmp_path: Path) -> Run:
    """`run(kind, script, **request)`: a job whose interpreter is a shell script. Returns its state, its detail and the
    numbers of its pods' starts.
    """

    def go(kind: str, script: str, **values: object) -> tuple[State, str, list[str]]:
        starts, program = tmp_path / "starts", tmp_path / "program"
        program.write_text(
            f'#!/bin/sh\necho "$DTF_NODE$DTF_ROLE$DTF_ID" >> {starts}\nn=$(wc -l < {starts})\n{script}\n'
        )
        program.chmod(0o755)
        options, wanted = platform(kind, python=str(program)), request(**values)
        handle = submit(options, wanted, tmp_path)
        deadline = time.monotonic() + END_S
        while (known := options.state(handle)).state.is_live:
            assert time.monotonic() < deadline, known
            time.sleep(0.02)
        return known.state, known.detail, starts.read_text().split()

    return go


def submit(options: Kubernetes, wanted: JobRequest, tmp_path: Path) -> dict[str, str]:
    files = {}
    for name, text in options.render(wanted).items():
        files[name] = tmp_path / name
        files[name].write_text(text)
    return options.submit(wanted, files)


def test_a_pod_that_may_start_again_does(run: Run) -> None:
    """More often than crashes may."""
    codes = "69 71 73 74 75 143 69 71 73 74 75 143"
    state, detail, starts = run(
        "job", f"for code in {codes}; do n=$((n - 1)); [ $n = 0 ] && exit $code; done; exit 0", **ONE
    )
    assert (state, detail, len(starts)) == (State.finished, "", 1 + len(codes.split()))


@pytest.mark.parametrize("kind", JOBSET_FIRST)
def test_a_final_code_fails_the_job_at_once_with_its_reason(run: Run, kind: str) -> None:
    script = 'echo "dtf: error[E_CONFIG] lr=-1" > $DTF_REASON_FILE; [ $DTF_NODE = 1 ] && exit 2; exec sleep 60'
    state, detail, starts = run(kind, script)
    assert state is State.failed and sorted(starts) == ["0", "1"]
    assert "ended with 2: dtf: error[E_CONFIG] lr=-1" in detail


def test_crashes_are_counted(run: Run) -> None:
    """Ten of a pod, where dtf does not come to count; a JobSet starts all anew once."""
    state, detail, starts = run("jobset", "exit 137", **ONE)
    assert (state, len(starts)) == (State.failed, 2 * (CRASHES + 1))
    assert detail.startswith("ReachedMaxRestarts") and "restarted 1 time(s)" in detail


def test_trials_end_each_for_itself(run: Run) -> None:
    script = 'case "$*" in *trial=1) exit 2;; esac; exit 0'
    state, detail, starts = run("jobset", script, nodes=1, roles={"trainer": 1}, trials=("a", "b", "c"), parallel=1)
    assert state is State.failed and detail.startswith("FailedIndexes: Job has failed indexes: [1]")
    assert len(starts) == 3


def test_a_jobset_is_done_when_its_servers_are(run: Run) -> None:
    script = "[ $DTF_ROLE = server ] && sleep 0.3 && exit 0; exec sleep 60"
    state, _, starts = run("jobset", script, roles={"server": 1, "trainer": 2})
    assert state is State.finished and starts[0] == "server0", "trainers wait for servers"
    assert sorted(starts) == ["server0", "trainer0", "trainer1"]


def test_a_pod_that_is_evicted_gets_its_notice_and_is_replaced(box: KubeBox, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/told ] && exit 0\ntrap 'touch {tmp_path}/told; exit 75' TERM\n"
        f"touch {tmp_path}/began\nwhile :; do sleep 0.05; done\n"
    )
    program.chmod(0o755)
    options = platform("job", python=str(program))
    handle = submit(options, request(**ONE), tmp_path)
    deadline = time.monotonic() + END_S
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (pod,) = box.pods()
    assert box.evict(pod["metadata"]["name"]) and not box.evict(pod["metadata"]["name"])
    while (known := options.state(handle)).state.is_live:
        assert time.monotonic() < deadline, known
        time.sleep(0.02)
    assert known.state is State.finished and len(box.kubelet.started) == 2


# ---------------------------------------------------------------- inside a pod


def checkpoint(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step_{step:06}").mkdir(parents=True)


def ends(folder: Path, *codes: int | None, digest: str = "abc") -> None:
    """Starts of the job that end so; None: it is killed, and can note nothing."""
    for code in codes:
        count_start(folder, digest)
        if code is not None:
            count_end(code, folder, digest)


@pytest.mark.parametrize("last", [Exit.PEER, Exit.BUSY, 139])
def test_a_run_that_makes_no_progress_is_given_up(tmp_path: Path, last: int) -> None:
    ends(tmp_path, Exit.PEER, Exit.IO)
    ends(tmp_path, *[Exit.PREEMPTED] * MOST)  # says nothing against the run
    checkpoint(tmp_path, 999_990)
    ends(tmp_path, Exit.PEER, Exit.HARDWARE)
    checkpoint(tmp_path, 1_000_000)
    ends(tmp_path, Exit.PEER, Exit.HARDWARE)
    known = {"digest": "abc", "newest": 1_000_000, "lost": MOST - 1, "open": False}
    assert json.loads((tmp_path / "job" / "ends.json").read_text()) == known
    with pytest.raises(NoProgressError, match=f"started 3 times without a new checkpoint and ended with {int(last)}"):
        ends(tmp_path, last)


def test_a_start_that_was_killed_counts_as_the_next_one_begins(tmp_path: Path) -> None:
    """Nothing that a container could note says so."""
    ends(tmp_path, None, None, None)
    with pytest.raises(NoProgressError, match="started 3 times .* killed or lost its node at last"):
        ends(tmp_path, Exit.OK)
    checkpoint(tmp_path, 10)
    ends(tmp_path, None, None, Exit.PREEMPTED, None)
    checkpoint(tmp_path, 20)
    ends(tmp_path, None, None)


def test_a_job_that_is_submitted_anew_counts_from_0(tmp_path: Path) -> None:
    with pytest.raises(NoProgressError):
        ends(tmp_path, *[Exit.PEER] * MOST)
    ends(tmp_path, *[Exit.PEER] * (MOST - 1), digest="abd")


def test_a_signal_before_the_run_begins_is_no_loss(tmp_path: Path) -> None:
    with pytest.raises(Preempted), inside._ends(Allocation(counts_ends=True), tmp_path, "abc"):
        signal.raise_signal(signal.SIGTERM)
    assert not json.loads((tmp_path / "job" / "ends.json").read_text())["open"]


def test_a_process_that_comes_after_the_end_knows_it(tmp_path: Path) -> None:
    assert not is_finished(tmp_path, "abc")
    for exit, finished in ((None, False), (75, False), (0, True)):
        (tmp_path / "run.json").write_text(json.dumps({"exit": exit, "submission": "abc"}))
        assert is_finished(tmp_path, "abc") is finished
    assert not is_finished(tmp_path, "abd") and not is_finished(tmp_path, ""), "it may be submitted again, to go on"
    ended = {"exit": 0, "submission": "abc"}
    (tmp_path / "run.json").write_text(json.dumps({"exit": None, "submission": "abd", "earlier": [ended]}))
    assert is_finished(tmp_path, "abc") and not is_finished(tmp_path, "abd")


def test_a_submission_says_that_a_run_is_its_own_once_it_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one of the same folder is refused and leaves no trace: the first one's processes still know its end."""
    composed = compose(["recipe=resnet_shapes", "train.steps=2", f"run.dir={tmp_path / 'run'}"])
    monkeypatch.setenv(SUBMISSION, "abc")
    first = OpenRun.open(composed.config, composed.settings, 1, "cpu")
    monkeypatch.setenv(SUBMISSION, "abd")
    with pytest.raises(BusyError, match="in use by a live run"):
        OpenRun.open(composed.config, composed.settings, 1, "cpu")
    first.end(0)
    assert is_finished(tmp_path / "run", "abc") and not is_finished(tmp_path / "run", "abd")


def test_a_folder_that_cannot_be_written_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(MOST + 1):
        count_start(tmp_path / "file" / "run", "abc")
        count_end(Exit.IO, tmp_path / "file" / "run", "abc")


def test_names_are_waited_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def lookup(host: str, port: int, **kind: object) -> list[object]:
        asked.append(host)
        if host == "late" and asked.count("late") < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr(names.socket, "getaddrinfo", lookup)
    monkeypatch.setattr(names.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(names, "_PATIENCE_S", -1.0)
    names.wait_for_names(["known:1", "late:1"], 60.0)
    assert (asked.count("known"), asked.count("late")) == (1, 3)
    assert capsys.readouterr().err == "dtf: waiting for an address of late\n"
    asked.clear()
    names.wait_for_names(["late:1"], -1.0)  # whoever connects says what is wrong
    with pytest.raises(ConfigError, match="DTF_ADDRESS or DTF_ENDPOINTS=late must be HOST:PORT"):
        names.wait_for_names(["late"], 1.0)


def test_a_bundle_that_is_tried_by_hand_in_a_pod_waits_for_no_other_pod(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = compose(["launcher=kubernetes", "launcher.image=dtf", "launcher.claim=runs", "launcher.nodes=2"])
    content, file = Bundle.of([composed], ["/runs/a"], "", "t" * 64, 25.0).to_bytes([composed]), tmp_path / "bundle.zip"
    file.write_bytes(content)
    waited, ran = [], []
    pod = {"DTF_NODES": "2", "DTF_NODE": "1", "DTF_ADDRESS": "gone:1", SUBMISSION: "", SUBMITTED_FOLDER: "", TOKEN: ""}
    for name, value in pod.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(inside, "wait_for_names", lambda names, timeout_s: waited.append(names))
    monkeypatch.setattr(inside, "prestart", lambda words: None)
    monkeypatch.setattr(inside, "sent_by_scheduler", lambda: None)
    monkeypatch.setattr(inside, "_prepare", lambda content, allocation: None)
    monkeypatch.setattr(type(composed.job), "run", lambda self, composed: ran.append(composed) or 0)
    assert inside.run_bundle(file, "", None, ["launcher=local", f"run.dir={tmp_path / 'try'}"]) == Exit.OK
    assert not waited and ran[0].config["launcher"]["name"] == "local"
    monkeypatch.setattr(inside, "_is_to_examine", lambda *arguments: False)
    assert inside.run_bundle(file, digest_of(content), None, [f"run.dir={tmp_path / 'try'}"]) == Exit.OK
    assert waited == [["gone:1"]] and os.environ[SUBMISSION] == digest_of(content)
    assert os.environ.pop(SUBMITTED_FOLDER) == "/runs/a"
    monkeypatch.delenv("DTF_NODES")
    assert inside.run_bundle(file, "", None, ["launcher=local", f"run.dir={tmp_path / 'try'}"]) == Exit.OK
    assert SUBMITTED_FOLDER not in os.environ, "no scheduler started it"


@pytest.mark.parametrize("what", ["folder", "pipe", "[]", '{"digest": "abc", "newest": "x", "lost": 0, "open": false}'])
def test_a_count_that_no_job_wrote_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    path = tmp_path / "job" / "ends.json"
    path.parent.mkdir()
    {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}.get(what, lambda: path.write_text(what))()
    with pytest.raises(DataError, match="ends.json cannot be read"):
        count_start(tmp_path, "abc")
