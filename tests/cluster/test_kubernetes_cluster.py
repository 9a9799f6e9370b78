"""What `launcher=kubernetes` asks of a cluster, and what it makes of its answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtf.cluster.kubernetes import Kubernetes
from dtf.cluster.kubernetes_cluster import Cluster
from dtf.cluster.kubernetes_state import finished_trials, state_of
from dtf.cluster.platform import JobRequest, State
from dtf.core.errors import ConfigError, PeerError
from tests.support import kubebox as box_module
from tests.support.kubebox import KubeBox, kubebox
from tests.support.kubernetes_requests import JOBSET_FIRST, platform, request

KINDS = {"jobset": "JobSet", "trainjob": "TrainJob", "job": "Job"}


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeBox]:
    pytest.importorskip("kubernetes", reason="asks a cluster by the package kubernetes")
    from kubernetes.config import kube_config

    with kubebox(tmp_path / "box", {}) as made:
        # the library has read KUBECONFIG when it was imported
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(made.kubeconfig))
        yield made


def submitted(tmp_path: Path, options: Kubernetes, wanted: JobRequest) -> dict[str, str]:
    files = {}
    for name, text in options.render(wanted).items():
        files[name] = tmp_path / name
        files[name].write_text(text)
    return options.submit(wanted, files)


@pytest.mark.parametrize("kind", JOBSET_FIRST)
def test_a_submission_is_the_same_when_it_is_repeated_and_goes_as_a_whole(
    box: KubeBox, tmp_path: Path, kind: str
) -> None:
    options = platform(kind, queue="team")  # suspended: no pod begins
    handle = submitted(tmp_path, options, request())
    made = set(box.store.objects)
    assert {name for name, _ in made} >= {"Secret", KINDS[kind]}
    assert submitted(tmp_path, options, request()) == handle and set(box.store.objects) == made
    assert handle == {
        "job": "toy-01234567",
        "kind": KINDS[kind],
        "names": "toy-01234567",
        "namespace": "default",
        "context": "",
    }
    state = options.state(handle)
    assert (state.state, state.detail) == (State.queued, "suspended, in the queue team")
    options.cancel(handle)
    deadline = time.monotonic() + 20
    while box.store.objects:
        assert time.monotonic() < deadline, set(box.store.objects)
        time.sleep(0.02)
    assert options.state(handle).state is State.cancelled
    options.cancel(handle)
    assert list(options.logs(handle, tmp_path, follow=False)) == []


def test_a_cluster_without_the_kind_is_told_by_name(
    box: KubeBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(box_module._KINDS, "jobsets")
    with pytest.raises(ConfigError, match="the cluster has no JobSet in namespace default.*launcher.kind=job"):
        submitted(tmp_path, platform(queue="team"), request())
    with box.store.lock:
        assert all("deletionTimestamp" in value["metadata"] for value in box.store.objects.values()), "nothing stays"


def test_a_cluster_that_does_not_answer_may_later(box: KubeBox) -> None:
    handle = {"job": "a", "kind": "JobSet", "names": "a", "namespace": "", "context": ""}
    text = box.kubeconfig.read_text().replace(str(box._server.server_port), "1")
    box.kubeconfig.write_text(text)
    with pytest.raises(PeerError, match="the cluster at http://127.0.0.1:1 does not answer"):
        platform().state(handle)
    with pytest.raises(ConfigError, match=r"finds no cluster: .*[^.]; give KUBECONFIG, launcher.context"):
        platform().state({**handle, "context": "elsewhere"})


# ---------------------------------------------------------------- states


def job(*conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    """An object with these conditions: type, reason, message."""
    made = [{"type": kind, "status": "True", "reason": reason, "message": text} for kind, reason, text in conditions]
    return {"metadata": {}, "spec": {}, "status": {"conditions": made, **status}}


def pod(name: str, phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase, **status}}


def terminated(code: int, message: str) -> list[dict[str, Any]]:
    return [{"name": "node", "state": {"terminated": {"exitCode": code, "message": message}}}]


def waiting(reason: str, message: str) -> list[dict[str, Any]]:
    return [{"name": "node", "state": {"waiting": {"reason": reason, "message": message}}}]


UNSCHEDULED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have GPUs"}]


@pytest.mark.parametrize(
    ("jobs", "pods", "state", "detail"),
    [
        ([job()], [], State.queued, ""),
        ([job(("Completed", "AllJobsCompleted", ""), restarts=2)], [], State.finished, "restarted 2 time(s)"),
        ([job(("Complete", "", ""))], [], State.finished, ""),
        (
            [job(("Failed", "FailJobSetFailurePolicyAction", "first failed job: toy-node-0"))],
            [pod("toy-0", "Failed", containerStatuses=terminated(2, "dtf: error[E_CONFIG] lr=-1 must be 0 or more"))],
            State.failed,
            "FailJobSetFailurePolicyAction: first failed job: toy-node-0; toy-0 ended with 2: dtf: error[E_CONFIG] "
            "lr=-1 must be 0 or more",
        ),
        ([job()], [pod("toy-0", "Running"), pod("toy-1", "Pending")], State.running, "1 pod(s)"),
        (
            [job()],
            [pod("toy-0", "Pending", conditions=UNSCHEDULED)],
            State.queued,
            "toy-0 waits: Unschedulable: 0/3 nodes have GPUs",
        ),
        (
            [job()],
            [pod("toy-0", "Pending", containerStatuses=waiting("ErrImagePull", "not found"))],
            State.queued,
            "toy-0 waits: ErrImagePull: not found",
        ),
        (
            [job()],
            [pod("toy-0", "Failed", containerStatuses=terminated(75, "asked to stop")), pod("toy-1", "Pending")],
            State.requeued,
            "toy-0 ended with 75: asked to stop",
        ),
        ([None], [], State.cancelled, "it was deleted"),
        ([{**job(), "metadata": {"deletionTimestamp": "now"}}], [pod("a", "Running")], State.running, "it is being "
         "deleted: its pods save and end"),
        ([job(("Complete", "", "")), job()], [pod("a", "Running")], State.running, "1 finished, 1 running"),
        ([job(("Complete", "", "")), job(("Failed", "", ""))], [], State.failed, "1 finished, 1 failed"),
    ],
)  # fmt: skip
def test_a_state_is_told_in_the_words_of_the_cluster(jobs: list, pods: list, state: State, detail: str) -> None:
    known = state_of(jobs, pods)
    assert (known.state, known.detail) == (state, detail)


def test_trials_that_have_finished_are_told_by_the_indexes_of_a_job_or_by_a_job_each() -> None:
    def job(completions: int, **status: Any) -> dict[str, Any]:
        return {"metadata": {}, "spec": {"completions": completions}, "status": status}

    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert finished_trials([job(9, completedIndexes="0,2-4,8")], 9) == {0, 2, 3, 4, 8}
    assert finished_trials([job(9)], 9) == set() == finished_trials([None], 9)
    assert finished_trials([job(2, **complete), None, job(2)], 3) == {0}
    assert finished_trials([job(2, completedIndexes="0")], 1) == set(), "a node of one trial"


@pytest.mark.parametrize(
    "foreign",
    [
        {"names": "../../../../v1/namespaces/default/pods"},
        {"names": "a?propagationPolicy=Orphan"},
        {"namespace": "../kube-system"},
        {"kind": "Secret"},
        {"job": "a,b!=c"},
    ],
)
def test_a_record_that_no_submission_made_asks_nothing_of_the_cluster(foreign: dict[str, str]) -> None:
    """A run folder may be a stranger's, and its record decides what job=cancel deletes."""
    made = {"job": "toy-1", "kind": "JobSet", "names": "toy-1 toy-2", "namespace": "default", "context": ""}
    for ask in (platform().state, platform().cancel, lambda handle: platform().logs(handle, Path(), follow=False)):
        with pytest.raises(ConfigError, match="which no submission of dtf has made"):
            ask(made | foreign)


def test_names_are_parts_of_a_path_whatever_they_are() -> None:
    cluster = object.__new__(Cluster)
    cluster.namespace = "a/b"
    assert cluster._path("Pod", name="../x?y") == "/api/v1/namespaces/a%2Fb/pods/..%2Fx%3Fy"
