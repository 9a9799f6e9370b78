"""What has become of a job on Kubernetes, from its objects as the cluster shows them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dtf.cluster.kubernetes_objects import CONTAINER
from dtf.cluster.platform import JobState, State

_FINISHED, _FAILED = ("Complete", "Completed"), ("Failed",)
_WORST = (State.failed, State.running, State.requeued, State.queued, State.unknown, State.cancelled, State.finished)
"""Of several jobs, as trials are, the first of these that any has; but a failed one only where all have ended."""


def state_of(jobs: Sequence[dict[str, Any] | None], pods: Sequence[dict[str, Any]]) -> JobState:
    """Of the Jobs, JobSets or TrainJobs of a submission, and the pods that there are of them. None: one is gone."""
    states = [_one(job, pods) for job in jobs]
    if len(states) == 1:
        return states[0]
    counts = Counter(one.state for one in states)
    live = any(state.is_live for state in counts)
    worst = next(state for state in _WORST if state in counts and (state.is_live or not live))
    return JobState(worst, ", ".join(f"{number} {state.value}" for state, number in counts.items()))


def finished_trials(jobs: Sequence[dict[str, Any] | None], count: int) -> set[int]:
    """Numbers of the trials, of `count`, that have ended well: each is a job, or they are the pods of one Job."""
    first = jobs[0]
    if len(jobs) == 1 and first and first.get("spec", {}).get("completions") == count:
        parts = [part.split("-") for part in first.get("status", {}).get("completedIndexes", "").split(",") if part]
        return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}
    return {number for number, job in enumerate(jobs) if _one(job, ()).state is State.finished}


def _one(job: dict[str, Any] | None, pods: Sequence[dict[str, Any]]) -> JobState:
    if job is None:
        return JobState(State.cancelled, "it was deleted")
    status = job.get("status", {})
    true = {one["type"]: one for one in status.get("conditions", []) if one.get("status") == "True"}
    for state, kinds in ((State.finished, _FINISHED), (State.failed, _FAILED)):
        condition = next((true[kind] for kind in kinds if kind in true), None)
        if condition:
            told = ["" if state is State.finished else _condition(condition), _restarts(status), *_reasons(pods, state)]
            return JobState(state, _joined(told))
    if job["metadata"].get("deletionTimestamp"):
        return JobState(State.running, "it is being deleted: its pods save and end")
    if job.get("spec", {}).get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return JobState(State.queued, f"suspended{f', in the queue {queue}' if queue else ''}")
    phases = Counter(pod.get("status", {}).get("phase", "Pending") for pod in pods)
    if phases["Running"]:
        return JobState(State.running, _joined([f"{phases['Running']} pod(s)", _restarts(status)]))
    state = State.requeued if phases["Failed"] or status.get("restarts") or status.get("failed") else State.queued
    return JobState(state, _joined([_restarts(status), *_reasons(pods, state)]))


def _restarts(status: dict[str, Any]) -> str:
    number = status.get("restarts", 0)
    return f"restarted {number} time(s)" if number else ""


def _reasons(pods: Sequence[dict[str, Any]], state: State) -> list[str]:
    """Why pods wait, or why they failed: in their own words, the newest two."""
    if state is State.finished:
        return []
    told = [text for pod in pods if (text := _waits(pod) if state.is_live else _ended(pod))]
    return told[-2:] or [text for pod in pods if (text := _ended(pod))][-2:]


def _waits(pod: dict[str, Any]) -> str:
    status = pod.get("status", {})
    if status.get("phase") != "Pending":
        return ""
    waiting = [one.get("state", {}).get("waiting", {}) for one in status.get("containerStatuses", [])]
    blocked = [
        one for one in status.get("conditions", []) if one["type"] == "PodScheduled" and one["status"] == "False"
    ]
    causes = [_condition(one) for one in [*blocked, *waiting] if one.get("reason")]
    return f"{pod['metadata']['name']} waits: {causes[0]}" if causes else ""


def _ended(pod: dict[str, Any]) -> str:
    for one in pod.get("status", {}).get("containerStatuses", []):
        ended = one.get("state", {}).get("terminated")
        if one.get("name") == CONTAINER and ended and ended.get("exitCode"):
            text = " ".join(str(ended.get("message") or ended.get("reason") or "").split())
            return f"{pod['metadata']['name']} ended with {ended['exitCode']}{f': {text}' if text else ''}"
    return ""


def _condition(condition: dict[str, Any]) -> str:
    return ": ".join(str(condition[key]) for key in ("reason", "message") if condition.get(key))


def _joined(texts: Sequence[str]) -> str:
    return "; ".join(text for text in texts if text)
