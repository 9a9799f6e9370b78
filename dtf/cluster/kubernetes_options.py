"""The options of `launcher=kubernetes`, and what they must be like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from dtf.api.registry import option
from dtf.api.schema import KeyProblem, show
from dtf.cluster.kubernetes_patch import checked_patches
from dtf.cluster.paths_inside import below, folder_name
from dtf.cluster.platform import JobRequest, Platform
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

BUNDLE_FOLDER = "/dtf"
"""Where each pod sees the bundle, read-only."""

NAME = r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
_QUANTITY = r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?"
_NAMES = ("namespace", "claim", "queue", "service_account", "runtime")


class JobKind(Enum):
    jobset = "jobset"
    trainjob = "trainjob"
    job = "job"


@dataclass(kw_only=True)
class KubernetesOptions(Platform):
    """Where pods come from, what they ask for, and what becomes of them."""

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
            if value and not re.fullmatch(NAME, value):
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

    def place(self, run_dir: str, job: str) -> str:
        inside = below(run_dir, self.mount)
        if inside is None:
            raise KeyProblem(
                "run.dir",
                f"run.dir={show(run_dir)} must be a folder below launcher.mount={self.mount}, where pods see "
                f"launcher.claim={self.claim}, without '..'",
            )
        return folder_name(f"{self.claim}/{inside}")

    def is_indexed(self, request: JobRequest) -> bool:
        """Whether the trials of a sweep are the pods of one Job."""
        return bool(request.trials) and request.nodes == 1 and self.kind is not JobKind.trainjob
