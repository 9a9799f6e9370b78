"""Kubernetes: `launcher=kubernetes` makes a JobSet, a TrainJob or a Job of this command line.

The rendering is pure, see `kubernetes_objects.py`; a cluster is asked by `kubernetes_cluster.py`, whose client library
is imported only then.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dtf.api.registry import register
from dtf.api.schema import show
from dtf.cluster.kubernetes_objects import INSTANCE, objects_of, unique_name
from dtf.cluster.kubernetes_options import NAME, KubernetesOptions
from dtf.cluster.kubernetes_patch import checked_patches, patched
from dtf.cluster.paths_inside import refuse_unseen
from dtf.cluster.platform import JobRequest, JobState
from dtf.core.errors import ConfigError, DtfError
from dtf.core.text import bytes_text

if TYPE_CHECKING:
    from dtf.cluster.kubernetes_cluster import Cluster

_JOBS = ("Job", "JobSet", "TrainJob")
MOST_BUNDLE_BYTES = 1 << 20
"""Of a Secret."""

_DUMPER, _LOADER = getattr(yaml, "CSafeDumper", yaml.SafeDumper), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The faster ones, where they are: a Secret is up to 1.4 MB of text."""


@register("launcher", "kubernetes")
class Kubernetes(KubernetesOptions):
    """Submit this run to Kubernetes: each node is a pod, which is replaced when it is evicted, and the run goes on."""

    def render(self, request: JobRequest) -> dict[str, str]:
        self.place(request.run_dir, request.name)
        refuse_unseen(request, self.mount, f"launcher.claim={self.claim}")
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
            text = yaml.dump(value, Dumper=_DUMPER, sort_keys=False, width=100_000)
            files[name] = f"{files.get(name, '')}---\n{text}"
        return files

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        cluster = self._cluster()
        objects = [value for path in files.values() for value in yaml.load_all(path.read_text(), _LOADER)]
        made: list[dict[str, Any]] = []
        try:
            made += (cluster.create(value) for value in objects)
        except BaseException:
            for value in made:
                with suppress(DtfError):
                    cluster.delete(value["kind"], value["metadata"]["name"])
            raise
        jobs = [value for value in made if _is_job(value)]
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
        jobs = [cluster.find(handle["kind"], name) for name in _names(handle)]
        return state_of(jobs, cluster.pods(f"{INSTANCE}={handle['job']}"))

    def finished_trials(self, handle: dict[str, str], count: int) -> set[int]:
        from dtf.cluster.kubernetes_state import finished_trials

        cluster = self._cluster(handle)
        return finished_trials([cluster.find(handle["kind"], name) for name in _names(handle)], count)

    def cancel(self, handle: dict[str, str]) -> None:
        cluster = self._cluster(handle)
        for name in _names(handle):
            cluster.delete(handle["kind"], name)

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        cluster = self._cluster(handle)
        return cluster.logs(
            f"{INSTANCE}={handle['job']}", (lambda: self.state(handle).state.is_live) if follow else None
        )

    def _cluster(self, handle: dict[str, str] | None = None) -> Cluster:
        from dtf.cluster.kubernetes_cluster import Cluster

        if handle is not None:
            _names(handle)
        where = handle or {"context": self.context, "namespace": self.namespace}
        return Cluster(where["context"], where["namespace"])


def _is_job(value: dict[str, Any]) -> bool:
    return value["kind"] in _JOBS


def _names(handle: dict[str, str]) -> list[str]:
    """Of the objects of a job. ConfigError for a handle that `submit` never made: it comes from a file, which may be a
    stranger's, and decides what is deleted.
    """
    names = handle["names"].split()
    texts = (*names, handle["namespace"] or "default", handle["job"])
    wrong = [text for text in texts if not re.fullmatch(NAME, text)]
    if wrong or handle["kind"] not in _JOBS:
        raise ConfigError(
            f"job/job.json names {show(handle['kind'])} {', '.join(map(show, wrong or names))}, which no submission of "
            "dtf has made; nothing was asked of the cluster"
        )
    return names
