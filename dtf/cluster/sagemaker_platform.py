"""Amazon SageMaker: a training job whose containers run the bundle, which is a file of its input in S3.

boto3 is imported when something is asked of AWS, and not before. What a container knows of its job: `allocation.py`.
"""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.registry import option, register
from dtf.api.schema import KeyProblem, show
from dtf.cluster.allocation import REASON_FILE, ROLES
from dtf.cluster.paths_inside import below, folder_name, refuse_unseen
from dtf.cluster.platform import JobRequest, JobState, Platform, State
from dtf.cluster.sagemaker_allocation import RESOURCES
from dtf.cluster.sagemaker_aws import aws, create_all, joint, new_events, state_of
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

ROOT = "/opt/ml"
CHECKPOINTS, FAILURE, INPUT = f"{ROOT}/checkpoints", f"{ROOT}/output/failure", f"{ROOT}/input/data"
RESOURCE_FILE = f"{ROOT}/input/config/resourceconfig.json"
_BUNDLE, _RUN = "dtf", "run"
"""Channels: with the bundle, and with the file system of the run folder."""
_NOTICE_S = 120
_DAY_H = 24.0


@register("launcher", "sagemaker")
class SageMaker(Platform):
    """Submit the run as a training job of Amazon SageMaker, on spot instances if you like.

    On one instance the run folder is /opt/ml/checkpoints, which SageMaker keeps in S3. Several need a file system.
    `extra`: further fields of CreateTrainingJob, as PATH=JSON.
    """

    image: str = option(doc="of the container, with dtf in it: ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME:TAG")
    role: str = option(doc="ARN of the IAM role that the job has")
    instance: str = option(doc="type of the instances, such as ml.g5.12xlarge; launcher.gpus: how many GPUs one has")
    store: str = option(doc="s3://BUCKET/PREFIX for the bundle, and for the run folder of a run on one instance")
    checkpoints: str = option(
        default="", doc="s3://BUCKET/PREFIX with the run folder of an earlier job, which goes on; empty: a new one"
    )
    file_system: str = option(
        default="",
        doc="efs:ID:/PATH or lustre:ID:/PATH, which all instances of the job see, for run folders; it needs subnets",
    )
    server_instance: str = option(default="", doc="type of the instances of other roles than trainer; empty: the same")
    spot: bool = option(default=False, doc="spare instances, which SageMaker takes away and replaces")
    wait_hours: float = option(
        default=_DAY_H, least=0, doc="how long a spot job may wait for instances, beside hours", unit="h"
    )
    channels: dict[str, str] = option(
        factory=dict, doc="data: NAME -> s3://BUCKET/PREFIX, which lies in /opt/ml/input/data/NAME"
    )
    volume_gb: int = option(default=50, least=1, most=16_384, doc="disk of each instance", unit="GB")
    keep_alive_s: int = option(
        default=0, least=0, most=21_600, doc="how long instances wait for a next job after the end", unit="s"
    )
    retries: int = option(default=3, least=0, most=30, doc="new starts after an internal error of SageMaker")
    subnets: list[str] = option(factory=list, doc="of your VPC")
    security_groups: list[str] = option(factory=list, doc="of your VPC")
    tags: dict[str, str] = option(factory=dict, doc="of the job")
    region: str = option(default="", doc="of AWS; empty: that of your AWS configuration")

    sees_folder = False

    def check(self, strategy: Strategy) -> None:
        super().check(strategy)
        for name in ("store", "checkpoints"):
            value = getattr(self, name)
            if (value or name == "store") and not _is_s3(value):
                raise KeyProblem(f"launcher.{name}", f"launcher.{name}={show(value)} must be s3://BUCKET/PREFIX")
        for name, value in self.channels.items():
            if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) or name in (_BUNDLE, _RUN) or not _is_s3(value):
                raise KeyProblem(
                    "launcher.channels",
                    f"launcher.channels.{show(name)}={show(value)} must be a name of letters, digits, '.', '-' and "
                    f"'_', not {_BUNDLE} or {_RUN}, and s3://BUCKET/PREFIX",
                )
        if self.grace_s > _NOTICE_S:
            raise KeyProblem(
                "launcher.grace_s",
                f"launcher.grace_s={self.grace_s:g}: SageMaker ends a container {_NOTICE_S} s after its notice; give "
                f"at most {_NOTICE_S}",
            )
        if self.spot and self.keep_alive_s:
            raise KeyProblem(
                "launcher.keep_alive_s",
                f"launcher.keep_alive_s={self.keep_alive_s}: SageMaker keeps no spot instances; give "
                "launcher.keep_alive_s=0, or launcher.spot=false",
            )
        if not self.spot and self.wait_hours != _DAY_H:
            raise KeyProblem(
                "launcher.wait_hours",
                f"launcher.wait_hours={self.wait_hours:g}: a job waits for spot instances alone; give "
                "launcher.spot=true, or leave launcher.wait_hours out",
            )
        if bool(self.subnets) != bool(self.security_groups):
            raise ConfigError(
                f"launcher.subnets={self.subnets} and launcher.security_groups={self.security_groups} belong together; "
                "give both, or none"
            )
        _extra(self.extra)
        self._check_folder()
        if len(strategy.roles(self.count())) > 1 and self.nodes > 1 and self.per_node() > 1:
            raise ConfigError(
                f"launcher.processes={self.per_node()}: on SageMaker each process of a role has an instance of its "
                "own; give launcher.processes=1 and launcher.nodes=TRAINERS"
            )
        if self.server_instance and (len(strategy.roles(self.count())) == 1 or self.nodes == 1):
            raise ConfigError(
                f"launcher.server_instance={self.server_instance} is for roles on several nodes, and this run has none"
            )

    def _check_folder(self) -> None:
        """The run folder must be where all instances see it, and lasts."""
        if self.nodes > 1 and not self.file_system:
            raise ConfigError(
                f"launcher.nodes={self.nodes} instances share no folder; give launcher.file_system=efs:ID:/PATH, or "
                "launcher.nodes=1 and a larger launcher.instance"
            )
        if self.file_system and not re.fullmatch(r"(efs|lustre):fs-[0-9a-f]{8,17}:/.*", self.file_system):
            raise KeyProblem(
                "launcher.file_system",
                f"launcher.file_system={show(self.file_system)} must be efs:fs-ID:/PATH or lustre:fs-ID:/PATH",
            )
        if self.file_system and not self.subnets:
            raise ConfigError(
                f"launcher.file_system={self.file_system} is reached from its VPC alone; give launcher.subnets and "
                "launcher.security_groups"
            )
        if self.file_system and self.checkpoints:
            raise ConfigError(
                f"launcher.checkpoints={self.checkpoints} is for a run folder in S3, and launcher.file_system has this "
                f"one; give run.dir={INPUT}/{_RUN}/NAME to go on"
            )

    def default_run_dir(self, name: str, id: str) -> str:
        return f"{INPUT}/{_RUN}/{name}-{id}" if self.file_system else CHECKPOINTS

    def place(self, run_dir: str, job: str) -> str:
        folder = f"{INPUT}/{_RUN}" if self.file_system else CHECKPOINTS
        inside = below(run_dir, folder)
        if self.file_system and inside is None:
            raise _lost(run_dir, f"{folder}/NAME")
        if inside is None and run_dir.rstrip("/") != folder:
            raise _lost(run_dir, folder)
        return folder_name(f"{self.file_system or self._run_uri(job).removeprefix('s3:')}/{inside or ''}")

    def _run_uri(self, job: str) -> str:
        """Where S3 has the run folder, without a file system. `job`: the name of the submission."""
        return self.checkpoints.rstrip("/") or f"{self.store.rstrip('/')}/{job}/run"

    def _bundle_uri(self, request: JobRequest) -> str:
        """By its digest: a job that waits, or starts again, finds its own one after another submission of the name."""
        return f"{self.store.rstrip('/')}/{request.name}/bundle/{request.digest}"

    def render(self, request: JobRequest) -> dict[str, str]:
        """One CreateTrainingJob for a run, and one for each trial of a sweep."""
        self.place(request.run_dir, request.name)
        refuse_unseen(request, ROOT, f"launcher.channels, which lie in {INPUT}")
        if request.parallel and len(request.trials) > request.parallel:
            raise ConfigError(
                f"sweep.parallel={request.parallel}: SageMaker starts all {len(request.trials)} trials that it has "
                "instances for; give sweep.parallel=0, and limit the instances by the quotas of your account"
            )
        numbers = range(len(request.trials)) if request.trials else [None]
        jobs = {_file(number): self._job(request, number) for number in numbers}
        return {name: json.dumps(job, indent=2) + "\n" for name, job in jobs.items()}

    def _job(self, request: JobRequest, trial: int | None) -> dict[str, Any]:
        # a name is taken for ever, and a sweep may be submitted again; the same request has the same name
        name = f"{request.name}-{request.digest[:6]}{'' if trial is None else f'-{trial}'}"
        entry = request.command(self.python or "python", f"{INPUT}/{_BUNDLE}/bundle.zip")
        job = {
            "TrainingJobName": name,
            "RoleArn": self.role,
            "AlgorithmSpecification": {
                "TrainingImage": self.image,
                "TrainingInputMode": "File",
                "ContainerEntrypoint": [*entry, *([] if trial is None else [f"--trial={trial}"])],
            },
            "InputDataConfig": self._inputs(request),
            "OutputDataConfig": {"S3OutputPath": f"{self.store.rstrip('/')}/{request.name}/output"},
            "ResourceConfig": self._resources(request),
            "StoppingCondition": self._times(),
            "EnableManagedSpotTraining": self.spot,
            "Environment": {REASON_FILE: FAILURE, RESOURCES: RESOURCE_FILE, **_roles(request)},
            "Tags": [{"Key": key, "Value": value} for key, value in self.tags.items()],
        }
        if not self.file_system:
            kept = self._run_uri(request.name)
            own = kept if trial is None else f"{kept}/{request.trials[trial]}"
            job["CheckpointConfig"] = {"S3Uri": own, "LocalPath": CHECKPOINTS}
        if self.retries:
            job["RetryStrategy"] = {"MaximumRetryAttempts": self.retries}
        if self.subnets:
            job["VpcConfig"] = {"Subnets": self.subnets, "SecurityGroupIds": self.security_groups}
        for path, value in _extra(self.extra):
            _set(job, path, value)
        return job

    def _inputs(self, request: JobRequest) -> list[dict[str, Any]]:
        sources = {_BUNDLE: f"{self._bundle_uri(request)}/", **self.channels}
        whole = {"S3DataType": "S3Prefix", "S3DataDistributionType": "FullyReplicated"}
        channels: list[dict[str, Any]] = [
            {"ChannelName": name, "DataSource": {"S3DataSource": {**whole, "S3Uri": uri}}}
            for name, uri in sources.items()
        ]
        if self.file_system:
            kind, id, path = self.file_system.split(":", 2)
            system = {
                "FileSystemId": id,
                "FileSystemType": {"efs": "EFS", "lustre": "FSxLustre"}[kind],
                "FileSystemAccessMode": "rw",
                "DirectoryPath": path,
            }
            channels.append({"ChannelName": _RUN, "DataSource": {"FileSystemDataSource": system}})
        return channels

    def _resources(self, request: JobRequest) -> dict[str, Any]:
        kept = {"KeepAlivePeriodInSeconds": self.keep_alive_s} if self.keep_alive_s else {}
        if not request.separate:
            size = {"InstanceType": self.instance, "InstanceCount": request.nodes}
            return {**size, "VolumeSizeInGB": self.volume_gb, **kept}
        groups = [
            {
                "InstanceGroupName": role,
                "InstanceType": self.instance if role == "trainer" else self.server_instance or self.instance,
                "InstanceCount": count,
            }
            for role, count in request.roles.items()
        ]
        return {"InstanceGroups": groups, "VolumeSizeInGB": self.volume_gb, **kept}

    def _times(self) -> dict[str, int]:
        runs = round(3600 * (self.hours or _DAY_H))
        waits = {"MaxWaitTimeInSeconds": runs + round(3600 * self.wait_hours)} if self.spot else {}
        return {"MaxRuntimeInSeconds": runs, **waits}

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        jobs = [json.loads(path.read_text()) for path in files.values()]
        bucket, _, folder = self._bundle_uri(request).removeprefix("s3://").partition("/")
        with aws(self.region) as client:
            client("s3").upload_fileobj(io.BytesIO(request.content), bucket, f"{folder}/bundle.zip")
            sagemaker = client("sagemaker")
            create_all(sagemaker, jobs)
            region = sagemaker.meta.region_name
        names = ",".join(job["TrainingJobName"] for job in jobs)
        return {"job": request.name, "jobs": names, "region": region, "kept": self._kept(jobs[0])}

    def _kept(self, job: dict[str, Any]) -> str:
        return job.get("CheckpointConfig", {}).get("S3Uri", self.file_system)

    def state(self, handle: dict[str, str]) -> JobState:
        states = self._states(handle)
        return states[0] if len(states) == 1 else joint(dict(zip(_names(handle), states, strict=True)))

    def _states(self, handle: dict[str, str]) -> list[JobState]:
        with aws(handle["region"]) as client:
            sagemaker = client("sagemaker")
            return [state_of(sagemaker.describe_training_job(TrainingJobName=name)) for name in _names(handle)]

    def finished_trials(self, handle: dict[str, str], count: int) -> set[int]:
        return {number for number, one in enumerate(self._states(handle)) if one.state is State.finished}

    def cancel(self, handle: dict[str, str]) -> None:
        with aws(handle["region"]) as client:
            sagemaker = client("sagemaker")
            for name in _names(handle):
                known = state_of(sagemaker.describe_training_job(TrainingJobName=name))
                if known.state.is_live and known.detail != "Stopping":
                    sagemaker.stop_training_job(TrainingJobName=name)

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        with aws(handle["region"]) as client:
            logs = client("logs")
            tokens: dict[str, str] = {}
            while True:
                going = follow and self.state(handle).state.is_live
                for name in _names(handle):
                    yield from new_events(logs, f"{name}/", tokens)
                if not going:
                    return
                time.sleep(5)


def _lost(run_dir: str, folder: str) -> KeyProblem:
    return KeyProblem("run.dir", f"run.dir={show(run_dir)} would be lost with the instance; give {folder}")


def _roles(request: JobRequest) -> dict[str, str]:
    return {ROLES: ",".join(request.roles)} if request.separate else {}


def _names(handle: dict[str, str]) -> list[str]:
    return handle["jobs"].split(",")


def _file(number: int | None) -> str:
    return "training-job.json" if number is None else f"training-job-{number}.json"


def _is_s3(text: str) -> bool:
    return re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/\S*)?", text) is not None


def _extra(given: list[str]) -> list[tuple[list[str], Any]]:
    """Path of a field -> value. ConfigError for what is no such pair."""
    fields = []
    for text in given:
        path, _, value = text.partition("=")
        try:
            assert re.fullmatch(r"[A-Za-z0-9]+(\.[A-Za-z0-9]+)*", path)
            fields.append((path.split("."), json.loads(value)))
        except (AssertionError, ValueError) as error:
            raise KeyProblem(
                "launcher.extra",
                f"launcher.extra={show(text)} is no field of CreateTrainingJob; give PATH=JSON, as in "
                "launcher.extra=['EnableNetworkIsolation=true']",
            ) from error
    return fields


def _set(job: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        job = job.setdefault(key, {})
    job[path[-1]] = value
