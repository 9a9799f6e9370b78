"""What is asked of Amazon SageMaker, S3 and CloudWatch about jobs, by boto3, which is imported only then."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from dtf.cluster.platform import JobState, State
from dtf.core.errors import ConfigError, PeerError

_LOG_GROUP = "/aws/sagemaker/TrainingJobs"
_STARTING = {"Starting", "LaunchingMLInstances", "PreparingTrainingStack", "Pending", "Downloading"}
_AGAIN = {"Interrupted", "Restarting"}


def state_of(job: dict[str, Any]) -> JobState:
    """What DescribeTrainingJob says."""
    status, second = job["TrainingJobStatus"], job.get("SecondaryStatus", "")
    said = [transition.get("StatusMessage", "") for transition in job.get("SecondaryStatusTransitions", ())]
    detail = ": ".join(filter(None, [second, job.get("FailureReason") or (said[-1] if said else "")]))
    if status == "InProgress":
        state = State.requeued if second in _AGAIN else State.queued if second in _STARTING else State.running
        return JobState(state, detail)
    if status == "Stopping":
        return JobState(State.running, "Stopping")
    if status == "Stopped" and second in ("MaxRuntimeExceeded", "MaxWaitTimeExceeded"):
        return JobState(State.failed, f"{second}; it goes on as a new job with launcher.checkpoints")
    known = {"Completed": State.finished, "Failed": State.failed, "Stopped": State.cancelled}
    return JobState(known.get(status, State.unknown), detail or status)


def joint(states: dict[str, JobState]) -> JobState:
    """The state of a sweep, from those of its jobs."""
    every = [known.state for known in states.values()]
    counts = ", ".join(f"{every.count(state)} {state.value}" for state in dict.fromkeys(every))
    order = (State.running, State.requeued, State.queued, State.unknown, State.failed, State.cancelled)
    state = next((state for state in order if state in every), State.finished)
    failed = [f"{name}: {known.detail}" for name, known in states.items() if known.state is State.failed]
    return JobState(state, "; ".join([counts, *failed]))


@contextmanager
def aws(region: str) -> Iterator[Callable[[str], Any]]:
    """A context with a function that makes clients of services. Its errors become PeerError and ConfigError."""
    if find_spec("boto3") is None:
        raise ConfigError(
            "launcher=sagemaker asks AWS by boto3, which is not installed: python -m pip install 'dtf[sagemaker]'"
        )
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, ParamValidationError

    session = boto3.Session(region_name=region or None)
    try:
        yield session.client
    except NoRegionError as error:
        raise ConfigError("launcher.region is empty, and your AWS configuration names none; give it") from error
    except NoCredentialsError as error:
        raise ConfigError("AWS does not know you: there are no credentials; see `aws configure`") from error
    except ParamValidationError as error:
        raise ConfigError(f"AWS takes no such request: {' '.join(str(error).split())}") from error
    except (ClientError, BotoCoreError) as error:
        raise PeerError(f"AWS: {error}") from error


def create_all(sagemaker: Any, jobs: Sequence[dict[str, Any]]) -> None:
    """Create all jobs, or stop those that there are. PeerError with the names of those that cannot be stopped."""
    from botocore.exceptions import BotoCoreError, ClientError

    made: list[str] = []
    try:
        for job in jobs:
            _create(sagemaker, job)
            made.append(job["TrainingJobName"])
    except BaseException as error:
        live = []
        for name in made:
            try:
                sagemaker.stop_training_job(TrainingJobName=name)
            except (ClientError, BotoCoreError):
                live.append(name)
        if live:
            raise PeerError(
                f"AWS: {error}; {len(made)} of {len(jobs)} jobs had been created by then, and these could not be "
                f"stopped: {', '.join(live)}; stop them by aws sagemaker stop-training-job --training-job-name NAME"
            ) from error
        raise


def _create(sagemaker: Any, job: dict[str, Any]) -> None:
    """The same request twice makes one job."""
    from botocore.exceptions import ClientError

    try:
        sagemaker.create_training_job(**job)
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceInUse":
            raise
        known = sagemaker.describe_training_job(TrainingJobName=job["TrainingJobName"])
        entry = "ContainerEntrypoint"  # it has the digest of the bundle
        if known["AlgorithmSpecification"].get(entry) != job["AlgorithmSpecification"][entry]:
            raise


def new_events(logs: Any, prefix: str, tokens: dict[str, str]) -> Iterator[str]:
    """Lines of the job's streams, of which there is one for each instance, behind those that were read."""
    from botocore.exceptions import ClientError

    try:
        streams = logs.describe_log_streams(logGroupName=_LOG_GROUP, logStreamNamePrefix=prefix)["logStreams"]
    except ClientError as error:
        if error.response["Error"]["Code"] == "ResourceNotFoundException":
            return  # no job of this account has printed anything yet
        raise
    for name in sorted(stream["logStreamName"] for stream in streams):
        label = f"{name.removeprefix(prefix).rpartition('-')[0]}: " if len(streams) > 1 else ""
        while True:
            token = {"nextToken": tokens[name]} if name in tokens else {}
            page = logs.get_log_events(logGroupName=_LOG_GROUP, logStreamName=name, startFromHead=True, **token)
            yield from (f"{label}{event['message'].rstrip()}" for event in page["events"])
            if tokens.get(name) == page["nextForwardToken"]:
                break
            tokens[name] = page["nextForwardToken"]
