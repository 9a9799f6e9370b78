"""Kubernetes: `launcher=kubernetes` makes a JobSet, a TrainJob or a Job of this command line.

The rendering is pure, see `kubernetes_objects.py`; a cluster is asked by `kubernetes_cluster.py`, whose client library
is imported only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from dtf.api.registry import option, register
from dtf.cluster.kubernetes_objects import BUNDLE_FOLDER, INSTANCE, objects_of, unique_name
from dtf.cluster.kubernetes_patch import checked_patches, patched
from dtf.cluster.platform import JobRequest, JobState, Platform
from dtf.core.errors import ConfigError
from dtf.core.text import bytes_text

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy
    from dtf.cluster.kubernetes_cluster import Cluster

MOST_BUNDLE_BYTES = 1 << 20
"""Of a Secret."""

_NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
_NAMES = ("namespace", "claim", "queue", "service_account", "runtime")


class JobKind(Enum):
    jobset = "jobset"
    trainjob = "trainjob"
    job = "job"


@register("launcher", "kubernetes")
class Kubernetes(Platform):
    """Submit this run to Kubernetes: each node is a pod, which is replaced when it is evicted, and the run goes on."""

    image: str = option(doc="container image with dtf and what the recipe needs, such as the one of the Dockerfile")
    claim: str = option(
        doc="PersistentVolumeClaim for run folders; on several nodes one that many pods can write (ReadWriteMany)"
    )
    mount: str = option(default="/runs", doc="where pods see the claim; run folders are below it")
    kind: JobKind = option(
        default=JobKind.jobset,
        doc="`jobset`; `trainjob`: of Kubeflow Trainer v2; `job`: of Kubernetes alone, for pods of one role",
    )
    runtime: str = option(
        default="",
        doc="of kind=trainjob: a ClusterTrainingRuntime that the site keeps; empty: one that comes with the job",
    )
    namespace: str = option(default="", doc="empty: that of the context")
    context: str = option(default="", doc="of the kubeconfig file; empty: its current one")
    queue: str = option(default="", doc="LocalQueue of Kueue, which then starts the job when there is room")
    cpu: float = option(default=0.0, least=0, doc="cores that each pod asks for; 0: says nothing of them")
    memory: str = option(default="", doc="memory that each pod asks for and gets at most, such as 16Gi")
    service_account: str = option(default="", doc="of the pods; empty: they get no credentials of the cluster")

    sees_folder: ClassVar[bool] = False

    def check(self, strategy: Strategy) -> None:
        super().check(strategy)
        if not re.fullmatch(r"[^\s]+", self.image):
            raise ConfigError(f"launcher.image={self.image!r} must be the name of a container image")
        if not self.claim:
            raise ConfigError("launcher.claim='' must name a PersistentVolumeClaim, where checkpoints outlive pods")
        for key in _NAMES:
            value = getattr(self, key)
            if value and not re.fullmatch(_NAME, value):
                raise ConfigError(
                    f"launcher.{key}={value} must be a name as Kubernetes has them: a-z, 0-9, dashes and dots"
                )
        if self.memory and not re.fullmatch(_QUANTITY, self.memory):
            raise ConfigError(f"launcher.memory={self.memory} must be a quantity of Kubernetes, such as 16Gi or 500M")
        self._check_mount()
        self._check_kind(len(strategy.roles(self.count())))
        checked_patches(self.extra)

    def _check_mount(self) -> None:
        mount = PurePosixPath(self.mount)
        if not mount.is_absolute() or ".." in mount.parts or ":" in self.mount or len(mount.parts) < 2:
            raise ConfigError(f"launcher.mount={self.mount} must be an absolute path below /, such as /runs")
        taken = next((path for path in (BUNDLE_FOLDER, "/dev", "/proc", "/sys") if mount.is_relative_to(path)), "")
        if taken:
            raise ConfigError(f"launcher.mount={self.mount}: {taken} is needed for other things; use /runs")

    def _check_kind(self, roles: int) -> None:
        separate = roles > 1 and self.nodes > 1
        if self.kind is JobKind.job and separate:
            raise ConfigError(
                f"launcher.kind=job has pods of one role, and this strategy needs {roles} on launcher.nodes="
                f"{self.nodes}; use launcher.kind=jobset, or launcher.nodes=1"
            )
        if self.runtime and self.kind is not JobKind.trainjob:
            raise ConfigError(
                f"launcher.runtime={self.runtime} is for launcher.kind=trainjob, this is {self.kind.value}"
            )
        if self.runtime and separate:
            raise ConfigError(
                f"launcher.runtime={self.runtime} has pods of one role, and this strategy needs {roles}; leave "
                "launcher.runtime empty"
            )
        if self.runtime and self.hours:
            raise ConfigError(
                f"launcher.hours={self.hours:g} cannot be set in the pods of launcher.runtime={self.runtime}; leave "
                "one of them out, or use budget.hours"
            )

    def default_run_dir(self, name: str, id: str) -> str:
        return str(PurePosixPath(self.mount, name, id))

    def is_indexed(self, request: JobRequest) -> bool:
        """Whether the trials of a sweep are the pods of one Job."""
        return bool(request.trials) and request.nodes == 1 and self.kind is not JobKind.trainjob

    def render(self, request: JobRequest) -> dict[str, str]:
        if not PurePosixPath(request.run_dir).is_relative_to(self.mount):
            raise ConfigError(
                f"run.dir={request.run_dir} must be below launcher.mount={self.mount}, where pods see "
                f"launcher.claim={self.claim}"
            )
        if len(request.content) > MOST_BUNDLE_BYTES:
            raise ConfigError(
                f"what is submitted, with the plugins' code, is {bytes_text(len(request.content))}, and a Secret of "
                f"Kubernetes holds {bytes_text(MOST_BUNDLE_BYTES)}; install the plugins in launcher.image={self.image}"
            )
        if request.parallel and not self.is_indexed(request):
            raise ConfigError(
                f"sweep.parallel={request.parallel}: trials of launcher.nodes={self.nodes} nodes, or of "
                f"launcher.kind=trainjob, are a {self.kind.value} each, and Kubernetes starts all of them; give "
                "sweep.parallel=0 and launcher.queue=NAME, a queue of Kueue with room for so many"
            )
        objects = patched(objects_of(self, request), checked_patches(self.extra))
        files: dict[str, str] = {}
        for value in objects:
            name = f"{value['kind'].lower()}.yaml"
            files[name] = files.get(name, "") + "---\n" + yaml.safe_dump(value, sort_keys=False, width=100_000)
        return files

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        cluster = self._cluster()
        objects = [value for path in files.values() for value in yaml.safe_load_all(path.read_text())]
        made = [cluster.create(value) for value in objects]
        jobs = [value for value in made if INSTANCE in value["metadata"].get("labels", {}) and _is_job(value)]
        for value in made:  # what the jobs need goes with the last of them
            if not _is_job(value):
                cluster.own(value, jobs)
        return {
            "job": unique_name(request),
            "kind": jobs[0]["kind"],
            "names": " ".join(value["metadata"]["name"] for value in jobs),
            "namespace": cluster.namespace,
            "context": self.context,
        }

    def state(self, handle: dict[str, str]) -> JobState:
        from dtf.cluster.kubernetes_state import state_of

        cluster = self._cluster(handle)
        jobs = [cluster.find(handle["kind"], name) for name in handle["names"].split()]
        return state_of(jobs, cluster.pods(f"{INSTANCE}={handle['job']}"))

    def cancel(self, handle: dict[str, str]) -> None:
        cluster = self._cluster(handle)
        for name in handle["names"].split():
            cluster.delete(handle["kind"], name)

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        cluster = self._cluster(handle)
        return cluster.logs(
            f"{INSTANCE}={handle['job']}", (lambda: self.state(handle).state.is_live) if follow else None
        )

    def _cluster(self, handle: dict[str, str] | None = None) -> Cluster:
        from dtf.cluster.kubernetes_cluster import Cluster

        where = handle or {"context": self.context, "namespace": self.namespace}
        return Cluster(where["context"], where["namespace"])


def _is_job(value: dict[str, Any]) -> bool:
    return value["kind"] in ("Job", "JobSet", "TrainJob")
