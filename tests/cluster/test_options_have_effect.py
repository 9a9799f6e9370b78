"""Every option of a platform changes what is submitted, or is refused where it could not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dtf.api.schema import keys
from dtf.cluster.kubernetes import Kubernetes
from dtf.cluster.kubernetes_options import JobKind
from dtf.cluster.platform import JobRequest, Platform
from dtf.cluster.ray_platform import Ray
from dtf.cluster.sagemaker_platform import SageMaker
from dtf.cluster.slurm import Slurm
from dtf.launch.rank_options import RankOptions
from tests.cluster.test_sagemaker_platform import REQUIRED, SHARED, OneRole, TwoRoles

INSIDE = {field.name for field in fields(RankOptions)} | {"doctor", "tls", "allow_insecure"}
"""Of the launcher inside the job, which the bundle tells."""
WHEN_ASKED = {"dry_run", "address", "context", "region"}
"""Which scheduler is asked, and whether."""
ROLES: dict[str, Any] = {"nodes": 2, "processes": 1, "allow_insecure": True}
NEEDED: dict[type[Platform], dict[str, Any]] = {
    Slurm: {},
    Ray: {},
    Kubernetes: {"image": "a", "claim": "b"},
    SageMaker: REQUIRED,
}
OF_ALL: dict[str, Any] = {"nodes": 2, "gpus": 2, "hours": 3.0, "python": "/opt/python"}
"""Option -> another value than its default; or that value, and the options beside which it is tried."""
OWN: dict[type[Platform], dict[str, Any]] = {
    Slurm: {
        **dict.fromkeys(("partition", "account", "qos", "constraint", "memory", "export"), "a"),
        "cpus": 3,
        "setup": ["module load a"],
        "srun": ["--mpi=none"],
        "extra": ["--exclusive"],
        "role_extra": ({"server": ["--exclusive"]}, ROLES),
    },
    Ray: {"extra": ["spot=1"]},
    Kubernetes: {
        **dict.fromkeys(("image", "claim", "namespace", "queue", "service_account"), "c"),
        "mount": "/runs/a",
        "kind": JobKind.job,
        "runtime": ("c", {"kind": JobKind.trainjob}),
        "cpu": 2.0,
        "memory": "8Gi",
        "extra": ["{kind: Pod, spec: {nodeSelector: {a: b}}}"],
    },
    SageMaker: {
        **dict.fromkeys(("image", "role", "instance"), "c"),
        **dict.fromkeys(("store", "checkpoints"), "s3://other/dtf"),
        "nodes": (2, SHARED),
        "file_system": (SHARED["file_system"], {name: SHARED[name] for name in ("subnets", "security_groups")}),
        "server_instance": ("ml.r5.large", {**ROLES, **SHARED}),
        "spot": True,
        "wait_hours": (3.0, {"spot": True}),
        "channels": {"a": "s3://mine/a"},
        "volume_gb": 60,
        "keep_alive_s": 60,
        "retries": 4,
        "subnets": (["subnet-2"], SHARED),
        "security_groups": (["sg-2"], SHARED),
        "tags": {"a": "b"},
        "extra": ["EnableNetworkIsolation=true"],
    },
}


def rendered(cls: type[Platform], options: dict[str, Any]) -> dict[str, str]:
    platform = cls(**(NEEDED[cls] | options))
    strategy: Any = TwoRoles() if options.keys() >= ROLES.keys() else OneRole()
    platform.check(strategy)
    request = JobRequest(
        name="a-1",
        folder=Path("/runs/a/b"),
        run_dir="/runs/a/b" if cls is not SageMaker else platform.default_run_dir("a", "b"),
        content=b"",
        digest="0" * 64,
        roles=strategy.roles(platform.count()),
        nodes=platform.nodes,
        configs=({},),
        grace_s=platform.grace_s,
    )
    return platform.render(request)


@pytest.mark.parametrize("cls", NEEDED)
def test_each_option_has_an_effect(cls: type[Platform]) -> None:
    rows = OF_ALL | OWN[cls]
    if cls is SageMaker:
        del rows["gpus"]  # as many as its instances have: how many ranks there are
    named = {key.name for key in keys(cls)} - INSIDE - WHEN_ASKED
    assert named - {"gpus"} == rows.keys() - {"gpus"}, "an option has no row here, or a row has no option any more"
    for name, row in rows.items():
        value, beside = row if isinstance(row, tuple) else (row, {})
        assert rendered(cls, {**beside, name: value}) != rendered(cls, beside), f"{name} has no effect"
