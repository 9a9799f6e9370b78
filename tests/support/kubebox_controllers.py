"""The controllers of a `KubeBox`: Jobs, JobSets and TrainJobs. Called with the store's lock held, again and again."""

from __future__ import annotations

import copy
from typing import Any

from tests.support.kubebox import Object, Store, condition, is_over, set_condition

INDEX = "batch.kubernetes.io/job-completion-index"
RESTARTS = "jobset.sigs.k8s.io/restart-attempt"
_COUNTED = "kubebox/counted"


def reconcile(store: Store) -> None:
    for value in store.of_kind("TrainJob"):
        _trainjob(store, value)
    for value in store.of_kind("JobSet"):
        _jobset(store, value)
    for value in store.of_kind("Job"):
        _job(store, value)


def _leaves(value: Object) -> bool:
    return "deletionTimestamp" in value["metadata"]


# ---------------------------------------------------------------- Jobs


def _job(store: Store, job: Object) -> None:
    """An indexed Job, as docs.kubernetes.io/concepts/workloads/controllers/job has it."""
    if _leaves(job) or condition(job, "Complete") or condition(job, "Failed"):
        return
    spec, status, pods = job["spec"], job["status"], store.children(job, "Pod")
    status.setdefault("failed", 0)
    if spec.get("suspend"):
        for pod in pods:
            if not is_over(pod) and not _leaves(pod):
                store.delete(pod)
        return
    for pod in pods:
        if is_over(pod) and _COUNTED not in pod["metadata"]:
            pod["metadata"][_COUNTED] = True
            _count(store, job, pod)
            if condition(job, "Failed"):
                return
    done, lost = set(status.get("done", [])), set(status.get("lost", []))
    if len(done | lost) == spec["completions"]:
        if lost:
            set_condition(job, "Failed", "FailedIndexes", f"Job has failed indexes: {sorted(lost)}")
        else:
            set_condition(job, "Complete", "CompletionsReached")
        return
    active = {int(pod["metadata"]["annotations"][INDEX]) for pod in pods if not is_over(pod)}
    for index in range(spec["completions"]):
        if index not in done | lost | active and len(active) < spec["parallelism"]:
            active.add(index)
            _make_pod(store, job, index)


def _count(store: Store, job: Object, pod: Object) -> None:
    """What the end of a pod means for its job."""
    spec, status, index = job["spec"], job["status"], int(pod["metadata"]["annotations"][INDEX])
    if pod["status"]["phase"] == "Succeeded":
        status.setdefault("done", []).append(index)
        status["completedIndexes"] = ",".join(map(str, sorted(status["done"])))
        return
    number, action = _matching(spec.get("podFailurePolicy", {}).get("rules", []), pod)
    if action == "Ignore":
        return
    if action == "FailJob":
        code = _exit_code(pod)
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        text = f"Container node for pod {name} failed with exit code {code} matching FailJob rule at index {number}"
        _fail(store, job, "PodFailurePolicy", text)
        return
    if action == "FailIndex":
        status.setdefault("lost", []).append(index)
        return
    status["failed"] += 1
    if "backoffLimitPerIndex" in spec:
        failures = status.setdefault("failures", {})
        failures[str(index)] = failures.get(str(index), 0) + 1
        if failures[str(index)] > spec["backoffLimitPerIndex"]:
            status.setdefault("lost", []).append(index)
    elif status["failed"] > spec["backoffLimit"]:
        _fail(store, job, "BackoffLimitExceeded", "Job has reached the specified backoff limit")


def _fail(store: Store, job: Object, reason: str, text: str) -> None:
    set_condition(job, "Failed", reason, text)
    for pod in store.children(job, "Pod"):
        if not is_over(pod) and not _leaves(pod):
            store.delete(pod)


def _matching(rules: list[Object], pod: Object) -> tuple[int, str]:
    """Number and action of the first rule that matches a failed pod; none: it counts."""
    for number, rule in enumerate(rules):
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["operator"] == "In"
            matches = _exit_code(pod) in rule["onExitCodes"]["values"]
        else:
            matches = any(condition(pod, pattern["type"]) for pattern in rule["onPodConditions"])
        if matches:
            return number, rule["action"]
    return -1, "Count"


def _exit_code(pod: Object) -> int | None:
    states = [one["state"].get("terminated") for one in pod["status"].get("containerStatuses", [])]
    return states[0]["exitCode"] if states and states[0] else None


def _make_pod(store: Store, job: Object, index: int) -> None:
    template, metadata = copy.deepcopy(job["spec"]["template"]), job["metadata"]
    count = job["status"]["made"] = job["status"].get("made", 0) + 1
    labels = {**template["metadata"].get("labels", {}), "batch.kubernetes.io/job-name": metadata["name"]}
    labels |= {key: value for key, value in metadata["labels"].items() if key.startswith("jobset.sigs.k8s.io/")}
    spec = {**template["spec"], "hostname": f"{metadata['name']}-{index}"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{metadata['name']}-{index}-{count:05x}",
            "labels": labels,
            "annotations": {INDEX: str(index)},
        },
        "spec": spec,
    }
    store.add(pod, job)["status"]["phase"] = "Pending"


# ---------------------------------------------------------------- JobSets


def _jobset(store: Store, jobset: Object) -> None:
    if _leaves(jobset) or condition(jobset, "Completed") or condition(jobset, "Failed"):
        return
    spec, status = jobset["spec"], jobset["status"]
    for key in ("restarts", "restartsCountTowardsMax"):
        status.setdefault(key, 0)
    jobs, old = [], []
    for job in store.children(jobset, "Job"):
        (old if int(job["metadata"]["labels"][RESTARTS]) < status["restarts"] else jobs).append(job)
    for job in old:
        if not _leaves(job):
            store.delete(job)
    failed = [job for job in jobs if condition(job, "Failed")]
    if failed:
        _apply_failure_policy(store, jobset, jobs, failed)
        return
    targets = spec.get("successPolicy", {}).get("targetReplicatedJobs") or [
        one["name"] for one in spec["replicatedJobs"]
    ]
    done = {
        job["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"] for job in jobs if condition(job, "Complete")
    }
    if set(targets) <= done:
        set_condition(jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")
        _end_jobs(store, jobs)
        return
    for job in jobs:
        job["spec"]["suspend"] = bool(spec.get("suspend"))
    if not old and not spec.get("suspend"):
        _make_jobs(store, jobset, jobs)


def _apply_failure_policy(store: Store, jobset: Object, jobs: list[Object], failed: list[Object]) -> None:
    """The first rule that any failed job matches; without one RestartJobSet."""
    policy, status, action = jobset["spec"].get("failurePolicy", {}), jobset["status"], "RestartJobSet"
    for rule in policy.get("rules", []):
        reasons = rule.get("onJobFailureReasons", [])
        names = rule.get("targetReplicatedJobs", [])
        if any(_applies(job, reasons, names) for job in failed):
            action = rule["action"]
            break
    first = failed[0]["metadata"]["name"]
    if action == "FailJobSet":
        set_condition(jobset, "Failed", "FailJobSetFailurePolicyAction", f"first failed job: {first}")
    elif action == "RestartJobSet" and status["restartsCountTowardsMax"] >= policy.get("maxRestarts", 0):
        set_condition(jobset, "Failed", "ReachedMaxRestarts", f"first failed job: {first}")
    else:
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += action == "RestartJobSet"
        return
    _end_jobs(store, jobs)


def _applies(job: Object, reasons: list[str], names: list[str]) -> bool:
    failure = condition(job, "Failed")
    assert failure
    name = job["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]
    return (not reasons or failure["reason"] in reasons) and (not names or name in names)


def _end_jobs(store: Store, jobs: list[Object]) -> None:
    """Of a JobSet that is over: those that are not."""
    for job in jobs:
        if not condition(job, "Complete") and not condition(job, "Failed"):
            store.delete(job)


def _make_jobs(store: Store, jobset: Object, jobs: list[Object]) -> None:
    known = {job["metadata"]["labels"]["jobset.sigs.k8s.io/replicatedjob-name"]: job for job in jobs}
    for replicated in jobset["spec"]["replicatedJobs"]:
        name = replicated["name"]
        waits = [one for one in replicated.get("dependsOn", []) if not _is_ready(store, known.get(one["name"]))]
        if name in known or waits:
            continue
        assert replicated["replicas"] == 1
        labels = {
            "jobset.sigs.k8s.io/jobset-name": jobset["metadata"]["name"],
            "jobset.sigs.k8s.io/replicatedjob-name": name,
            RESTARTS: str(jobset["status"]["restarts"]),
        }
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{jobset['metadata']['name']}-{name}-0", "labels": labels},
            "spec": copy.deepcopy(replicated["template"]["spec"]),
        }
        store.add(job, jobset)


def _is_ready(store: Store, job: Object | None) -> bool:
    if job is None:
        return False
    running = [pod for pod in store.children(job, "Pod") if pod["status"]["phase"] == "Running"]
    return len(running) + len(job["status"].get("done", [])) >= job["spec"]["completions"]


# ---------------------------------------------------------------- TrainJobs


def _trainjob(store: Store, trainjob: Object) -> None:
    if _leaves(trainjob) or condition(trainjob, "Complete") or condition(trainjob, "Failed"):
        return
    children = store.children(trainjob, "JobSet")
    if not children:
        if not trainjob["spec"].get("suspend"):
            _make_jobset(store, trainjob)
        return
    (jobset,) = children
    jobset["spec"]["suspend"] = bool(trainjob["spec"].get("suspend"))
    for mine, theirs in (("Complete", "Completed"), ("Failed", "Failed")):
        if known := condition(jobset, theirs):
            set_condition(trainjob, mine, known["reason"], known["message"])


def _make_jobset(store: Store, trainjob: Object) -> None:
    reference = trainjob["spec"]["runtimeRef"]
    runtime = store.objects[reference["kind"], reference["name"]]
    spec: dict[str, Any] = copy.deepcopy(runtime["spec"]["template"]["spec"])
    trainer = trainjob["spec"]["trainer"]
    for replicated in spec["replicatedJobs"]:
        labels = replicated["template"].get("metadata", {}).get("labels", {})
        if labels.get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
            continue
        job = replicated["template"]["spec"]
        job["completions"] = job["parallelism"] = trainer["numNodes"]
        container = next(one for one in job["template"]["spec"]["containers"] if one["name"] == "node")
        container |= {"image": trainer["image"], "command": trainer["command"]}
        names = {one["name"] for one in trainer["env"]}
        container["env"] = [one for one in container["env"] if one["name"] not in names] + trainer["env"]
    value = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": trainjob["metadata"]["name"], "labels": {}},
        "spec": spec,
    }
    store.add(value, trainjob)
