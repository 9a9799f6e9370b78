"""The objects of a job on Kubernetes, as plain values: Secret, Service, Job, JobSet, TrainJob and its TrainingRuntime.

Pure. A pod that ends is replaced by the Job controller, which all three kinds of jobs have below them: so exit codes
are judged in one place, the Job's pod failure policy, and a JobSet only passes its verdict on.
"""

from __future__ import annotations

import base64
import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dtf.cluster.after_exit import ALWAYS, FINAL, WHILE_PROGRESS
from dtf.cluster.kubernetes_options import BUNDLE_FOLDER

if TYPE_CHECKING:
    from dtf.cluster.kubernetes_options import KubernetesOptions
    from dtf.cluster.platform import JobRequest

CONTAINER = "node"
"""The container of each pod, and the replicated job where there are no roles: Kubeflow's runtimes call both so."""
INSTANCE = "app.kubernetes.io/instance"
"""The label that all objects of a submission have."""
PORT = 29500
REASON_FILE = "/dev/termination-log"

AGAIN = (*ALWAYS, *WHILE_PROGRESS)
"""After these exit codes a pod is replaced, and the run goes on: `ends.py` counts them, in the run folder."""
CRASHES = 10
"""How often a pod may end in any other way, such as by running out of memory, before its job has failed. `ends.py`
counts losses from 0 again; Kubernetes counts over the whole life of the job, and for pods in which dtf does not begin.
"""

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_JOBSET_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_STEP_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MEET_TIMEOUT_S = 86_400
"""A pod may wait so long for a node that has room for it."""
_START_S = 3600
"""Beyond `hours`: they count from the start of the container, which leaves by itself, and Kubernetes counts from the
pod's, which pulls the image and mounts the claim first.
"""
_SHUTDOWN_S = 5
"""Seconds of the grace period for what follows the save."""


@dataclass(frozen=True)
class Group:
    """Pods that are alike but for their number, and run as one indexed Job."""

    name: str
    pods: int
    env: dict[str, str]
    gpus: int
    counts: bool = True
    """Whether its first pod makes the run folder, and counts there how the run ends."""


def objects_of(options: KubernetesOptions, request: JobRequest) -> list[dict[str, Any]]:
    """All objects of the request, in the order in which a cluster needs them."""
    return _Objects(options, request, unique_name(request)).all()


def unique_name(request: JobRequest) -> str:
    """The name of the job's objects: the run's, and eight digits of what is run. At most 35 characters, since pods get
    their role, their number and six characters more, and may have 63.
    """
    return f"{request.name[:26].rstrip('-')}-{request.digest[:8]}"


@dataclass(frozen=True)
class _Objects:
    options: KubernetesOptions
    request: JobRequest
    name: str

    def all(self) -> list[dict[str, Any]]:
        options, request = self.options, self.request
        secret = self._manifest(
            "v1", "Secret", self.name, type="Opaque", immutable=True,
            data={"bundle.zip": base64.b64encode(request.content).decode()},
        )  # fmt: skip
        if options.is_indexed(request):
            return [secret, self._trials()]
        names = [f"{self.name}-{number}" for number in range(len(request.trials))] or [self.name]
        runs = [(name, number if request.trials else None) for number, name in enumerate(names)]
        match options.kind.value:
            case "job":
                jobs = [self._job(name, trial) for name, trial in runs]
                return [secret, *([self._service()] if request.nodes > 1 else []), *jobs]
            case "jobset":
                return [secret, *(self._jobset(name, trial) for name, trial in runs)]
        runtimes = [] if options.runtime else [self._runtime(name, trial) for name, trial in runs]
        return [secret, *runtimes, *(self._trainjob(name, trial) for name, trial in runs)]

    # ------------------------------------------------------------ jobs

    def _job(self, name: str, trial: int | None) -> dict[str, Any]:
        """A Job alone: pods of one kind, on any cluster."""
        (group,) = self._groups(name)
        template = self._pods(group, trial)
        if self.request.nodes > 1:
            template["spec"]["subdomain"] = self.name
        spec = self._suspended() | self._job_spec(group, template)
        return self._manifest("batch/v1", "Job", name, queued=True, spec=spec)

    def _trials(self) -> dict[str, Any]:
        """A sweep whose trials are a pod each: the pods of one Job, at most `parallel` at once. A trial that fails
        leaves the others alone.
        """
        trials, request = len(self.request.trials), self.request
        group = Group(CONTAINER, trials, {"DTF_NODES": "1", "DTF_NODE": "0"}, self.options.gpus)
        template = self._pods(group, None)
        container = template["spec"]["containers"][0]
        container["env"].append({"name": "DTF_TRIAL", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
        container["command"] = self._command("$(DTF_TRIAL)")
        spec = self._job_spec(group, template, fail="FailIndex")
        spec |= {"parallelism": min(trials, request.parallel or trials), "backoffLimitPerIndex": CRASHES}
        del spec["backoffLimit"]
        return self._manifest("batch/v1", "Job", self.name, queued=True, spec=self._suspended() | spec)

    def _jobset(self, name: str, trial: int | None) -> dict[str, Any]:
        spec = self._suspended() | self._jobset_spec(name, trial)
        return self._manifest("jobset.x-k8s.io/v1alpha2", "JobSet", name, queued=True, spec=spec)

    def _jobset_spec(self, name: str, trial: int | None, step: str = "") -> dict[str, Any]:
        """`step`: the group that is a TrainJob's trainer."""
        groups = self._groups(name)
        first, *others = groups
        jobs = []
        for group in groups:
            template: dict[str, Any] = {"spec": self._job_spec(group, self._pods(group, trial, restarts=True))}
            if group.name == step:
                template = {"metadata": {"labels": {_STEP_LABEL: "trainer"}}} | template
            # the others ask the first role's processes for the run, by names that exist once these run
            waits = {"dependsOn": [{"name": first.name, "status": "Ready"}]} if group is not first else {}
            jobs.append({"name": group.name, **waits, "replicas": 1, "template": template})
        done = {"successPolicy": {"operator": "All", "targetReplicatedJobs": [first.name]}} if others else {}
        rules = [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
        return {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            **done,
            # anything else, a group that crashed too often, starts all groups anew: once, then it is given up
            "failurePolicy": {"maxRestarts": 1, "rules": rules},
            "replicatedJobs": jobs,
        }

    def _runtime(self, name: str, trial: int | None) -> dict[str, Any]:
        """The TrainingRuntime of a TrainJob. The job's own, as only a runtime can have a pod failure policy."""
        step = self._groups(name)[-1]
        spec = {
            "mlPolicy": {"numNodes": step.pods},
            "template": {"spec": self._jobset_spec(name, trial, step.name)},
        }
        return self._manifest("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", name, spec=spec)

    def _trainjob(self, name: str, trial: int | None) -> dict[str, Any]:
        options = self.options
        group = self._groups(name)[-1]
        pods = self._pods(group, trial, restarts=True)
        container = pods["spec"]["containers"][0]
        trainer = {
            "image": options.image,
            "command": container["command"],
            "env": container["env"],
            "numNodes": group.pods,
            **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
        }
        kind = "ClusterTrainingRuntime" if options.runtime else "TrainingRuntime"
        reference = {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": options.runtime or name}
        patches = {"runtimePatches": [self._patch(pods)]} if options.runtime else {}
        spec = {"runtimeRef": reference, "trainer": trainer, **patches, **self._suspended()}
        return self._manifest("trainer.kubeflow.org/v1alpha1", "TrainJob", name, queued=True, spec=spec)

    def _patch(self, pods: dict[str, Any]) -> dict[str, Any]:
        """What a site's own runtime lacks, as far as a TrainJob may say it: volumes, grace period, service account."""
        allowed = ("serviceAccountName", "terminationGracePeriodSeconds", "volumes")
        spec = {key: pods["spec"][key] for key in allowed if key in pods["spec"]}
        mounts = pods["spec"]["containers"][0]["volumeMounts"]
        template = {
            "metadata": pods["metadata"],
            "spec": {**spec, "containers": [{"name": CONTAINER, "volumeMounts": mounts}]},
        }
        jobs = [{"name": CONTAINER, "template": {"spec": {"template": template}}}]
        return {"manager": "dtf.dev/launcher", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}

    def _job_spec(self, group: Group, template: dict[str, Any], fail: str = "FailJob") -> dict[str, Any]:
        """The Job of a group. `fail`: what a final exit code ends, `FailJob` or `FailIndex`."""
        return {
            "completionMode": "Indexed",
            "completions": group.pods,
            "parallelism": group.pods,
            "backoffLimit": CRASHES * group.pods,
            "podFailurePolicy": {
                "rules": [
                    {"action": fail, "onExitCodes": _codes(FINAL)},
                    # evicted, preempted, its node drained or lost: never the run's fault
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {"action": "Ignore", "onExitCodes": _codes(AGAIN)},
                ]
            },
            "template": template,
        }

    def _service(self) -> dict[str, Any]:
        """Names of the pods of a Job, as a JobSet makes them by itself."""
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # they meet before any of them is ready
            "selector": {INSTANCE: self.name},
        }
        return self._manifest("v1", "Service", self.name, spec=spec)

    # ------------------------------------------------------------ pods

    def _groups(self, name: str) -> list[Group]:
        """The pods of a run: one a node, or one for each process where roles are separate."""
        request, options = self.request, self.options
        if not request.separate:
            env = {"DTF_NODES": str(request.nodes)}
            if request.nodes > 1:
                env["DTF_ADDRESS"] = f"{self._host(name, CONTAINER, 0)}:{PORT}"
            return [Group(CONTAINER, request.nodes, env, options.gpus)]
        first = next(iter(request.roles))
        endpoints = ",".join(f"{self._host(name, first, number)}:{PORT}" for number in range(request.roles[first]))
        return [
            Group(
                role,
                pods,
                {"DTF_ROLE": role, "DTF_ENDPOINTS": endpoints},
                gpus=1 if options.gpus and role != first else 0,
                counts=role == first,
            )
            for role, pods in request.roles.items()
        ]

    def _host(self, name: str, group: str, number: int) -> str:
        """The name of a pod on the cluster's network."""
        return (
            f"{name}-{number}.{self.name}" if self.options.kind.value == "job" else f"{name}-{group}-0-{number}.{name}"
        )

    def _pods(self, group: Group, trial: int | None, restarts: bool = False) -> dict[str, Any]:
        """The template of a group's pods. `restarts`: below a JobSet, which counts how often it started all anew."""
        options, request = self.options, self.request
        labels = {INSTANCE: self.name, "app.kubernetes.io/name": "dtf"}
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(request.grace_s) + _SHUTDOWN_S,
            # process 1 of a namespace is deaf to signals until it has handlers, and inherits orphans
            "shareProcessNamespace": True,
        }
        if options.hours:
            spec["activeDeadlineSeconds"] = self._seconds + _START_S
        if options.service_account:
            spec["serviceAccountName"] = options.service_account
        else:
            spec["automountServiceAccountToken"] = False
        spec["containers"] = [self._container(group, trial, restarts)]
        spec["volumes"] = [
            {"name": "bundle", "secret": {"secretName": self.name, "defaultMode": 0o444}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ]
        return {"metadata": {"labels": labels}, "spec": spec}

    def _container(self, group: Group, trial: int | None, restarts: bool) -> dict[str, Any]:
        numbered = "DTF_ID" if "DTF_ROLE" in group.env else "DTF_NODE"
        fields = {} if numbered in group.env else {numbered: _INDEX}
        if restarts:
            fields["DTF_RESTARTS"] = _JOBSET_RESTARTS
        env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in group.env.items()]
        env += [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]
        if group.counts:
            env.append({"name": "DTF_COUNTS_ENDS", "value": "1"})
        if self.request.separate or self.request.nodes > 1:  # pods come one by one
            env.append({"name": "DTF_MEET_TIMEOUT_S", "value": str(_MEET_TIMEOUT_S)})
        env += [{"name": "DTF_REASON_FILE", "value": REASON_FILE}, {"name": "PYTHONUNBUFFERED", "value": "1"}]
        resources = self._resources(group)
        return {
            "name": CONTAINER,
            "image": self.options.image,
            "command": self._command("" if trial is None else str(trial)),
            "env": env,
            **({"resources": resources} if resources else {}),
            "volumeMounts": [
                {"name": "bundle", "mountPath": BUNDLE_FOLDER, "readOnly": True},
                {"name": "runs", "mountPath": self.options.mount},
                {"name": "memory", "mountPath": "/dev/shm"},  # 64 MiB otherwise: too little for NCCL
            ],
            "terminationMessagePath": REASON_FILE,
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    def _command(self, trial: str) -> list[str]:
        words = self.request.command(self.options.python or "python", f"{BUNDLE_FOLDER}/bundle.zip")
        words += [f"--trial={trial}"] if trial else []
        if not self.options.hours:
            return words
        line = " ".join(word if word.startswith("--trial=") else shlex.quote(word) for word in words)
        return ["sh", "-c", f"export DTF_DEADLINE=$(($(date +%s) + {self._seconds})); exec {line}"]

    @property
    def _seconds(self) -> int:
        assert self.options.hours
        return max(1, round(self.options.hours * 3600))

    def _resources(self, group: Group) -> dict[str, dict[str, str]]:
        """Memory that is asked for is also the limit, as more of it may be taken away; cores beyond those asked for may
        be used while they are idle.
        """
        options = self.options
        memory = {"memory": options.memory} if options.memory else {}
        requests = ({"cpu": f"{options.cpu:g}"} if options.cpu else {}) | memory
        limits = memory | ({"nvidia.com/gpu": str(group.gpus)} if group.gpus else {})
        return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}

    # ------------------------------------------------------------ all

    def _suspended(self) -> dict[str, bool]:
        """Kueue starts what waits in its queues."""
        return {"suspend": True} if self.options.queue else {}

    def _manifest(self, version: str, kind: str, name: str, queued: bool = False, **rest: Any) -> dict[str, Any]:
        options = self.options
        labels = {INSTANCE: self.name, "app.kubernetes.io/name": "dtf"}
        if queued and options.queue:
            labels[_QUEUE_LABEL] = options.queue
        metadata: dict[str, Any] = {"name": name}
        if options.namespace:
            metadata["namespace"] = options.namespace
        metadata["labels"] = labels
        if queued:
            metadata["annotations"] = {"dtf.dev/run-dir": self.request.run_dir, "dtf.dev/digest": self.request.digest}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _codes(codes: tuple[int, ...]) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(int(code) for code in codes)}
