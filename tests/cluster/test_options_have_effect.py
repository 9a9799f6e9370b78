"""Every option of a platform changes what is submitted, or is refused where it could not."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dtf.api.schema import keys
from dtf.cluster.platform import Platform
from dtf.cluster.submit import request_of
from dtf.config.compose import compose
from dtf.core.errors import ConfigError
from dtf.launch.rank_options import RankOptions

SHARED = [
    "launcher.file_system=efs:fs-01234567:/a",
    "launcher.subnets=[subnet-1]",
    "launcher.security_groups=[sg-1]",
]
PSERVER = ["strategy=pserver", "strategy.servers=1"]
REQUIRED = {
    "slurm": [],
    "ray": [],
    "kubernetes": ["launcher.image=a", "launcher.claim=b"],
    "sagemaker": [
        "launcher.image=123456789012.dkr.ecr.eu-west-1.amazonaws.com/dtf:1",
        "launcher.role=arn:aws:iam::123456789012:role/dtf",
        "launcher.instance=ml.g5.xlarge",
        "launcher.store=s3://mine/dtf",
    ],
}
INSIDE = {field.name for field in fields(RankOptions)} | {"doctor", "tls", "allow_insecure"}
"""They are of the launcher inside the job, which the bundle tells."""
WHEN_ASKED = {"dry_run", "address", "context", "region"}
"""They say which scheduler is asked, and whether."""
ALL: dict[str, tuple[list[str], list[str]]] = {
    "nodes": ([], ["launcher.nodes=2"]),
    "gpus": ([], ["launcher.gpus=2"]),
    "hours": ([], ["launcher.hours=3"]),
    "python": ([], ["launcher.python=/opt/python"]),
}
"""Option -> the words without it, and those that set it."""
OWN: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "slurm": {
        **{name: ([], [f"launcher.{name}=a"]) for name in ("partition", "account", "qos", "constraint", "export")},
        "memory": ([], ["launcher.memory=8G"]),
        "cpus": ([], ["launcher.cpus=3"]),
        "setup": ([], ["launcher.setup=['module load a']"]),
        "srun": ([], ["launcher.srun=['--mpi=none']"]),
        "extra": ([], ["launcher.extra=['--exclusive']"]),
        "role_extra": (
            [*PSERVER, "launcher.nodes=2", "launcher.allow_insecure=true"],
            ["launcher.role_extra.server=['--exclusive']"],
        ),
    },
    "ray": {"extra": ([], ["launcher.extra=['spot=1']"])},
    "kubernetes": {
        **{name: ([], [f"launcher.{name}=c"]) for name in ("image", "claim", "namespace", "queue", "service_account")},
        "mount": (["launcher.mount=/a", "run.dir=/a/b/c"], ["launcher.mount=/a/b"]),
        "kind": ([], ["launcher.kind=job"]),
        "runtime": (["launcher.kind=trainjob"], ["launcher.runtime=c"]),
        "cpu": ([], ["launcher.cpu=2"]),
        "memory": ([], ["launcher.memory=8Gi"]),
        "extra": ([], ["launcher.extra=['spec.suspend=true']"]),
    },
    "sagemaker": {
        **{name: ([], [f"launcher.{name}=c"]) for name in ("image", "role", "instance")},
        "nodes": (SHARED, ["launcher.nodes=2"]),
        "gpus": ([], ["launcher.gpus=2"]),
        "store": ([], ["launcher.store=s3://other/dtf"]),
        "checkpoints": ([], ["launcher.checkpoints=s3://other/dtf"]),
        "file_system": ([], [*SHARED, "run.dir=/opt/ml/input/data/run/a"]),
        "server_instance": (
            [*PSERVER, *SHARED, "launcher.nodes=2", "launcher.processes=1", "launcher.allow_insecure=true"],
            ["launcher.server_instance=ml.r5.large"],
        ),
        "spot": ([], ["launcher.spot=true"]),
        "wait_hours": (["launcher.spot=true"], ["launcher.wait_hours=3"]),
        "channels": ([], ["launcher.channels={a: 's3://mine/a'}"]),
        "volume_gb": ([], ["launcher.volume_gb=60"]),
        "keep_alive_s": ([], ["launcher.keep_alive_s=60"]),
        "retries": ([], ["launcher.retries=4"]),
        "subnets": (SHARED, ["launcher.subnets=[subnet-2]"]),
        "security_groups": (SHARED, ["launcher.security_groups=[sg-2]"]),
        "tags": ([], ["launcher.tags={a: b}"]),
        "extra": ([], ["launcher.extra=['EnableNetworkIsolation=true']"]),
    },
}


def rendered(platform: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would be submitted, where nothing of it comes from the bundle's digest, nor from chance."""
    monkeypatch.setattr("dtf.cluster.submit.digest_of", lambda content: "0" * 64)
    composed = compose([f"launcher={platform}", "train.steps=2", *REQUIRED[platform], *words])
    launcher = composed.settings.launcher
    assert isinstance(launcher, Platform)
    launcher.check(composed.settings.strategy)
    run_dir = "/a/b" if launcher.sees_folder else launcher.default_run_dir("a", "b")
    run_dir = composed.config["run"]["dir"] or run_dir
    request = request_of(launcher, [composed], Path("/a/b"), run_dir, "a-1")
    return {name: text for name, text in launcher.render(request).items() if name != "secret.yaml"}


@pytest.mark.parametrize("platform", REQUIRED)
def test_each_option_has_an_effect(platform: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plain = compose([f"launcher={platform}", "train.steps=2", *REQUIRED[platform]])
    rows = ALL | OWN[platform]
    if platform == "sagemaker":
        del rows["gpus"]  # an instance has what it has: they are ranks
    named = {key.name for key in keys(type(plain.settings.launcher))}
    assert named - INSIDE - WHEN_ASKED - {"gpus"} == rows.keys() - {"gpus"}, "an option has no row here, or no longer is"
    for name, (before, after) in rows.items():
        without, with_it = rendered(platform, before, monkeypatch), rendered(platform, [*before, *after], monkeypatch)
        assert with_it != without, f"launcher.{name} has no effect"


def test_hours_that_nobody_waits_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="launcher.wait_hours=3: a job waits for spot instances alone"):
        rendered("sagemaker", ["launcher.wait_hours=3"], monkeypatch)
