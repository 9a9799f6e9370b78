"""Requests for tests of `launcher=kubernetes`, and their objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.cluster.kubernetes import Kubernetes
from dtf.cluster.kubernetes_options import JobKind
from dtf.cluster.platform import JobRequest

Object = dict[str, Any]
ROLES = {"server": 2, "trainer": 4}
JOBSET_FIRST = [
    "jobset",
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("trainjob", "job")),
]
"""Kinds of jobs, for tests of what is alike in all."""


def platform(kind: str = "jobset", **options: Any) -> Kubernetes:
    return Kubernetes(**{"image": "dtf", "claim": "runs", "kind": JobKind(kind), **options})


def request(**values: Any) -> JobRequest:
    """Of two nodes, unless `values` say otherwise."""
    plain = {
        "name": "toy",
        "folder": Path("outputs/toy/1"),
        "run_dir": "/runs/toy/1",
        "content": b"a bundle",
        "digest": "0123456789abcdef" * 4,
        "roles": {"trainer": 2},
        "nodes": 2,
        "configs": ({},) * max(1, len(values.get("trials", ()))),
        "grace_s": 25.0,
    }
    return JobRequest(**{**plain, **values})


def rendered(options: Kubernetes, wanted: JobRequest) -> list[Object]:
    """All objects, as a client reads them."""
    return [value for text in options.render(wanted).values() for value in yaml.safe_load_all(text)]


def of_kind(objects: list[Object], kind: str) -> Object:
    """The only object of a kind."""
    (found,) = (value for value in objects if value["kind"] == kind)
    return found


def jobs_in(value: Object) -> list[Object]:
    """The specs of all Jobs that an object leads to."""
    spec = value["spec"]
    if value["kind"] == "Job":
        return [spec]
    if value["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [one["template"]["spec"] for one in spec.get("replicatedJobs", [])]


def variables(job: Object) -> dict[str, Any]:
    """Name -> value, or the path of a field, of the environment of a Job's pods."""
    (container,) = job["template"]["spec"]["containers"]
    return {one["name"]: one.get("value") or one["valueFrom"]["fieldRef"]["fieldPath"] for one in container["env"]}
