"""launcher=sagemaker: the request, what AWS's own model of it says, and what a container knows."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtf.cluster.allocation import Allocation
from dtf.cluster.allocation_of import allocation_of
from dtf.cluster.platform import JobRequest
from dtf.cluster.sagemaker_allocation import from_hosts
from dtf.cluster.sagemaker_platform import SageMaker
from dtf.core.errors import ConfigError

IMAGE, ROLE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/dtf:1", "arn:aws:iam::123456789012:role/dtf"
BASE = [
    "launcher=sagemaker",
    f"launcher.image={IMAGE}",
    f"launcher.role={ROLE}",
    "launcher.instance=ml.g5.xlarge",
    "launcher.store=s3://mine/dtf",
    "train.steps=2",
]
REQUIRED: dict[str, Any] = {"image": IMAGE, "role": ROLE, "instance": "ml.g5.xlarge", "store": "s3://mine/dtf"}
VPC: dict[str, Any] = {"subnets": ["subnet-1"], "security_groups": ["sg-1"]}
SHARED = {**VPC, "file_system": "lustre:fs-0123456789abcdef0:/x/dtf"}
SERVERS = 2
PSERVER = {"allow_insecure": True, "processes": 1}


class OneRole:
    """What a platform asks of a strategy."""

    def roles(self, processes: int) -> dict[str, int]:
        return {"trainer": processes}


class TwoRoles:
    def roles(self, processes: int) -> dict[str, int]:
        return {"server": SERVERS, "trainer": processes}


def jobs(
    strategy: Any = None,
    trials: tuple[str, ...] = (),
    parallel: int = 0,
    run_dir: str = "",
    configs: tuple[Any, ...] = (),
    **options: Any,
) -> list[dict[str, Any]]:
    """The CreateTrainingJob requests of a run with these options of the launcher."""
    strategy = strategy or OneRole()
    platform = SageMaker(**(REQUIRED | options))
    platform.check(strategy)
    request = JobRequest(
        name="shapes-1",
        folder=Path("here"),
        run_dir=run_dir or platform.default_run_dir("shapes", "1"),
        content=b"",
        digest="0" * 64,
        roles=strategy.roles(platform.count()),
        nodes=platform.nodes,
        configs=configs or ({},) * max(1, len(trials)),
        grace_s=platform.grace_s,
        trials=trials,
        parallel=parallel,
    )
    return [json.loads(text) for text in platform.render(request).values()]


def test_the_whole_request_of_a_spot_job() -> None:
    (job,) = jobs(
        gpus=1,
        spot=True,
        hours=2.0,
        wait_hours=1.0,
        channels={"photos": "s3://mine/photos"},
        tags={"team": "vision"},
        extra=["EnableNetworkIsolation=true", 'ResourceConfig.VolumeKmsKeyId="k"'],
        **VPC,
    )
    entry = job["AlgorithmSpecification"].pop("ContainerEntrypoint")
    bundle = "--bundle=/opt/ml/input/data/dtf/bundle.zip"
    assert entry == ["python", "-m", "dtf", bundle, f"--digest={'0' * 64}"]

    def channel(name: str, uri: str) -> dict:
        source = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated", "S3Uri": uri}
        return {"ChannelName": name, "DataSource": {"S3DataSource": source}}

    assert job == {
        "TrainingJobName": "shapes-1-000000",
        "RoleArn": ROLE,
        "AlgorithmSpecification": {"TrainingImage": IMAGE, "TrainingInputMode": "File"},
        "InputDataConfig": [
            channel("dtf", f"s3://mine/dtf/shapes-1/bundle/{'0' * 64}/"),
            channel("photos", "s3://mine/photos"),
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://mine/dtf/shapes-1/output"},
        "ResourceConfig": {
            "InstanceType": "ml.g5.xlarge",
            "InstanceCount": 1,
            "VolumeSizeInGB": 50,
            "VolumeKmsKeyId": "k",
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 7200, "MaxWaitTimeInSeconds": 10800},
        "EnableManagedSpotTraining": True,
        "Environment": {
            "DTF_REASON_FILE": "/opt/ml/output/failure",
            "DTF_SAGEMAKER_RESOURCES": "/opt/ml/input/config/resourceconfig.json",
        },
        "Tags": [{"Key": "team", "Value": "vision"}],
        "CheckpointConfig": {"S3Uri": "s3://mine/dtf/shapes-1/run", "LocalPath": "/opt/ml/checkpoints"},
        "RetryStrategy": {"MaximumRetryAttempts": 3},
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "EnableNetworkIsolation": True,
    }


def test_several_instances_keep_the_run_on_a_file_system() -> None:
    (job,) = jobs(nodes=2, processes=1, keep_alive_s=600, **SHARED)
    assert job["InputDataConfig"][1] == {
        "ChannelName": "run",
        "DataSource": {
            "FileSystemDataSource": {
                "FileSystemId": "fs-0123456789abcdef0",
                "FileSystemType": "FSxLustre",
                "FileSystemAccessMode": "rw",
                "DirectoryPath": "/x/dtf",
            }
        },
    }
    assert "CheckpointConfig" not in job
    assert job["StoppingCondition"] == {"MaxRuntimeInSeconds": 86400}
    assert job["ResourceConfig"] == {
        "InstanceType": "ml.g5.xlarge",
        "InstanceCount": 2,
        "VolumeSizeInGB": 50,
        "KeepAlivePeriodInSeconds": 600,
    }


def test_roles_are_groups_of_instances() -> None:
    (job,) = jobs(TwoRoles(), nodes=3, server_instance="ml.r5.large", **PSERVER, **SHARED)
    assert job["ResourceConfig"]["InstanceGroups"] == [
        {"InstanceGroupName": "server", "InstanceType": "ml.r5.large", "InstanceCount": 2},
        {"InstanceGroupName": "trainer", "InstanceType": "ml.g5.xlarge", "InstanceCount": 3},
    ]
    assert "InstanceType" not in job["ResourceConfig"] and job["Environment"]["DTF_ROLES"] == "server,trainer"


def test_each_trial_of_a_sweep_is_a_job() -> None:
    made = jobs(trials=("lr.peak=0.1", "lr.peak=0.2"))
    assert [job["TrainingJobName"] for job in made] == ["shapes-1-000000-0", "shapes-1-000000-1"]
    assert [job["AlgorithmSpecification"]["ContainerEntrypoint"][-1] for job in made] == ["--trial=0", "--trial=1"]
    kept = [job["CheckpointConfig"]["S3Uri"] for job in made]
    assert kept == [f"s3://mine/dtf/shapes-1/run/lr.peak={peak}" for peak in ("0.1", "0.2")]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"store": "mine"}, "launcher.store=mine must be s3://"),
        ({"checkpoints": "/mine"}, "launcher.checkpoints=/mine must be s3://"),
        ({"channels": {"dtf": "s3://mine/a"}}, "launcher.channels.dtf"),
        ({"grace_s": 200.0}, "launcher.grace_s=200"),
        ({"spot": True, "keep_alive_s": 60}, "launcher.keep_alive_s=60"),
        ({"wait_hours": 1.0}, "launcher.wait_hours=1"),
        ({"subnets": ["subnet-1"]}, "belong together"),
        ({"nodes": 2}, "launcher.nodes=2 instances share no folder"),
        ({**VPC, "file_system": "nfs:1:/"}, "launcher.file_system=nfs:1:/ must be"),
        ({"file_system": SHARED["file_system"]}, "is reached from its VPC alone"),
        ({**SHARED, "checkpoints": "s3://mine/run"}, "launcher.checkpoints=s3://mine/run is for a run folder in S3"),
        ({"run_dir": "/tmp/mine"}, "run.dir=/tmp/mine would be lost"),
        ({"run_dir": "/opt/ml/checkpoints2"}, "run.dir=/opt/ml/checkpoints2 would be lost"),
        ({"run_dir": "/opt/ml/checkpoints/../x"}, "run.dir=/opt/ml/checkpoints/../x would be lost"),
        ({**SHARED, "run_dir": "/opt/ml/input/data/run/../x"}, "run.dir=/opt/ml/input/data/run/../x would be lost"),
        ({"configs": ({"job": {"model": "outputs/x"}},)}, "job.model=outputs/x is a path of this machine"),
        (
            {"trials": ("a", "b"), "configs": ({}, {"job": {"model": "outputs/x"}})},
            "trial b: job.model=outputs/x is a path of this machine",
        ),
        (
            {**SHARED, "strategy": TwoRoles(), "nodes": 2, "processes": 2, "allow_insecure": True},
            "launcher.processes=2",
        ),
        ({"server_instance": "ml.r5.large"}, "launcher.server_instance=ml.r5.large"),
        ({"extra": ["Tags"]}, "is no field of CreateTrainingJob"),
        ({"extra": ["A.b={"]}, "is no field of CreateTrainingJob"),
        ({"trials": ("a", "b"), "parallel": 1}, "sweep.parallel=1"),
    ],
)
def test_what_sagemaker_could_not_run_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        jobs(**options)


# ---------------------------------------------------------------- AWS's model of the request


@pytest.fixture(scope="module")
def shapes() -> dict[str, Any]:
    botocore = pytest.importorskip("botocore")
    path = Path(botocore.__file__).parent / "data" / "sagemaker" / "2017-07-24" / "service-2.json.gz"
    return json.loads(gzip.decompress(path.read_bytes()))["shapes"]


_KINDS: dict[str, type] = {"structure": dict, "map": dict, "list": list, "string": str, "boolean": bool, "integer": int}


def wrong(shapes: dict[str, Any], name: str, value: Any, where: str = "") -> Iterator[str]:
    """What is against the model: unknown and missing fields, types, patterns, lengths, names of choices."""
    shape = shapes[name]
    if type(value) is not _KINDS[shape["type"]]:
        yield f"{where}: {value!r} is no {shape['type']}"
        return
    size: int = value if shape["type"] in ("integer", "boolean") else len(value)
    if not shape.get("min", size) <= size <= shape.get("max", size):
        yield f"{where}: {value!r} is too long or too short"
    if "enum" in shape and value not in shape["enum"]:
        yield f"{where}: {value!r} is none of its choices"
    if "pattern" in shape and "\\p{" not in shape["pattern"] and not re.fullmatch(shape["pattern"], value):
        yield f"{where}: {value!r} does not match {shape['pattern']}"
    if shape["type"] == "structure":
        yield from (f"{where}.{key} is missing" for key in set(shape.get("required", ())) - value.keys())
        for key, inner in value.items():
            if key not in shape["members"]:
                yield f"{where}.{key} is unknown"
            else:
                yield from wrong(shapes, shape["members"][key]["shape"], inner, f"{where}.{key}")
    elif shape["type"] == "list":
        for inner in value:
            yield from wrong(shapes, shape["member"]["shape"], inner, f"{where}[]")
    elif shape["type"] == "map":
        for key, inner in value.items():
            yield from wrong(shapes, shape["key"]["shape"], key, f"{where}[{key}]")
            yield from wrong(shapes, shape["value"]["shape"], inner, f"{where}[{key}]")


def test_requests_are_what_awss_model_allows(shapes: dict[str, Any]) -> None:
    every = [
        *jobs(spot=True, channels={"a": "s3://mine/a"}, tags={"a": "b"}, **VPC),
        *jobs(nodes=2, keep_alive_s=60, **SHARED),
        *jobs(TwoRoles(), nodes=3, **PSERVER, **SHARED),
        *jobs(trials=("a", "b")),
    ]
    for job in every:
        assert not list(wrong(shapes, "CreateTrainingJobRequest", job))
    every[0]["StoppingCondition"]["Hours"] = 2
    every[0]["TrainingJobName"] = "a_b"
    assert len(list(wrong(shapes, "CreateTrainingJobRequest", every[0]))) == 2


# ---------------------------------------------------------------- inside


def test_a_container_knows_its_place(tmp_path: Path) -> None:
    file = tmp_path / "resourceconfig.json"
    hosts = ["algo-10", "algo-2", "algo-1"]
    environment = {"DTF_SAGEMAKER_RESOURCES": str(file), "DTF_REASON_FILE": "/opt/ml/output/failure"}
    for host, node in (("algo-1", 0), ("algo-2", 1), ("algo-10", 2)):
        file.write_text(json.dumps({"current_host": host, "hosts": hosts}))
        expected = Allocation(nodes=3, node=node, address="algo-1:29500", reason_file="/opt/ml/output/failure")
        assert allocation_of(environment) == expected
        assert allocation_of({"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host}).node == node
    file.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    assert allocation_of(environment) == Allocation(reason_file="/opt/ml/output/failure")
    file.unlink()
    with pytest.raises(ConfigError, match="resourceconfig.json cannot be read"):
        allocation_of(environment)


@pytest.mark.parametrize("hosts", ["[algo-1", '["algo-2"]', "3", '{"a": 1}', "[1]", "null"])
def test_hosts_that_make_no_sense_are_named_with_their_variable(tmp_path: Path, hosts: str) -> None:
    with pytest.raises(ConfigError, match="SM_HOSTS"):
        allocation_of({"SM_HOSTS": hosts, "SM_CURRENT_HOST": "algo-1"})
    file = tmp_path / "resourceconfig.json"
    file.write_text(f'{{"current_host": "algo-1", "hosts": {hosts}}}')
    with pytest.raises(ConfigError, match="DTF_SAGEMAKER_RESOURCES"):
        allocation_of({"DTF_SAGEMAKER_RESOURCES": str(file)})
    file.write_text('{"current_host": "algo-1", "instance_groups": []}')
    with pytest.raises(ConfigError, match="DTF_SAGEMAKER_RESOURCES"):
        allocation_of({"DTF_SAGEMAKER_RESOURCES": str(file), "DTF_ROLES": "server,trainer"})


def test_groups_of_instances_are_roles() -> None:
    groups = [
        {"instance_group_name": "trainer", "hosts": ["algo-4", "algo-2"]},
        {"instance_group_name": "server", "hosts": ["algo-3", "algo-1"]},
    ]
    found = [
        from_hosts({"current_host": f"algo-{n}", "hosts": [], "instance_groups": groups}, ["server", "trainer"], {})
        for n in range(1, 5)
    ]
    assert [(one.role, one.number) for one in found] == [("server", 0), ("trainer", 0), ("server", 1), ("trainer", 1)]
    assert {one.endpoints for one in found} == {("algo-1:29500", "algo-3:29500")}


def test_the_same_run_folder_has_the_same_folder_here() -> None:
    """Also where it goes on by `launcher.checkpoints`."""
    first = SageMaker(**REQUIRED)
    place = first.place(first.default_run_dir("shapes", "1"), "shapes-1")
    assert place == "mine/dtf/shapes-1/run"
    again = SageMaker(**REQUIRED, checkpoints=f"s3://{place}/")
    assert again.place(again.default_run_dir("shapes", "2"), "shapes-2") == place
    shared = SageMaker(**REQUIRED, **SHARED)
    place = shared.place(shared.default_run_dir("shapes", "1"), "shapes-1")
    assert place == "lustre-fs-0123456789abcdef0-/x/dtf/shapes-1"
