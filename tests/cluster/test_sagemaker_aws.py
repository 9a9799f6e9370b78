"""launcher=sagemaker and AWS: jobs that are submitted, found again, cancelled and read, with moto in place of AWS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtf.cli.main import main
from dtf.cluster import record, sagemaker_aws
from dtf.cluster.bundle import digest_of
from dtf.cluster.kubernetes import Kubernetes
from dtf.cluster.platform import JobState, State
from dtf.cluster.sagemaker_aws import joint, state_of
from dtf.cluster.sagemaker_platform import SageMaker
from dtf.core.errors import Exit, PeerError
from dtf.runs.sweep_record import finished

REQUIRED: dict[str, Any] = {
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/dtf:1",
    "role": "arn:aws:iam::123456789012:role/dtf",
    "instance": "ml.g5.xlarge",
    "store": "s3://mine/dtf",
}
BASE = ["launcher=sagemaker", "train.steps=2", *(f"launcher.{name}={value}" for name, value in REQUIRED.items())]


def test_a_missing_boto3_is_named_with_what_installs_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sagemaker_aws, "find_spec", lambda name: None)
    assert main(BASE) == Exit.CONFIG
    assert "python -m pip install 'dtf[sagemaker]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "second", "state"),
    [
        ("InProgress", "Starting", State.queued),
        ("InProgress", "Downloading", State.queued),
        ("InProgress", "Training", State.running),
        ("InProgress", "Uploading", State.running),
        ("InProgress", "Interrupted", State.requeued),
        ("Completed", "Completed", State.finished),
        ("Failed", "Failed", State.failed),
        ("Stopping", "Stopping", State.running),
        ("Stopped", "Stopped", State.cancelled),
        ("Stopped", "MaxRuntimeExceeded", State.failed),
        ("Stopped", "MaxWaitTimeExceeded", State.failed),
    ],
)
def test_states(status: str, second: str, state: State) -> None:
    assert state_of({"TrainingJobStatus": status, "SecondaryStatus": second}).state is state


def test_the_reason_of_a_failure_is_in_the_state_also_of_a_sweep() -> None:
    reason = "AlgorithmError: dtf: error[E_DIVERGED] ..., exit code: 79"
    failed = state_of({"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed", "FailureReason": reason})
    assert failed == JobState(State.failed, f"Failed: {reason}")
    running = JobState(State.running, "Training")
    assert joint({"a-0": failed, "a-1": running, "a-2": running}) == JobState(
        State.running, f"1 failed, 2 running; a-0: Failed: {reason}"
    )
    assert joint({"a-0": JobState(State.finished), "a-1": failed}).state is State.failed


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """boto3 with moto in place of AWS, and the bucket of BASE."""
    moto = pytest.importorskip("moto")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    with moto.mock_aws():
        import boto3

        boto3.client("s3").create_bucket(Bucket="mine", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        yield boto3


def test_a_job_is_submitted_and_found_again(aws: Any, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "run.name=shapes"]) == Exit.OK
    folder = next(Path("outputs").rglob("job.json")).parents[1]
    known = record.find(folder)
    assert known is not None and known.run_dir == "/opt/ml/checkpoints"
    name = known.handle["jobs"]
    described = aws.client("sagemaker").describe_training_job(TrainingJobName=name)
    assert described["AlgorithmSpecification"]["ContainerEntrypoint"][-1] == f"--digest={known.digest}"
    key = f"dtf/{known.handle['job']}/bundle/{known.digest}/bundle.zip"
    body = aws.client("s3").get_object(Bucket="mine", Key=key)["Body"].read()
    assert body == (folder / "job" / "bundle.zip").read_bytes()
    assert described["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3Uri"] == f"s3://mine/{Path(key).parent}/"
    assert known.platform.state(known.handle).state is State.finished, "moto's jobs are Completed at once"
    capsys.readouterr()
    assert main(["job=status", f"job.run_folder={folder}"]) == Exit.OK
    assert "finished" in capsys.readouterr().out
    assert main(["job=cancel", f"job.run_folder={folder}"]) == Exit.OK


def test_a_sweep_is_submitted_again_without_the_trials_that_its_jobs_have_finished(
    aws: Any, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """moto's jobs are Completed at once."""
    words = ["-m", *BASE, "lr.peak=0.1,0.2", "run.name=shapes"]

    def submitted() -> int:
        return len(aws.client("sagemaker").list_training_jobs()["TrainingJobSummaries"])

    assert main(words) == Exit.OK and submitted() == 2
    (home,) = Path("outputs/shapes").iterdir()
    capsys.readouterr()
    assert main(words) == Exit.OK and submitted() == 2
    assert re.fullmatch("dtf: all trials were finished before; .*/sweep.json keeps that: .*\n", capsys.readouterr().out)
    assert sorted(finished(home)) == ["lr.peak=0.1", "lr.peak=0.2"]
    record.set_aside(home)
    assert main(words) == Exit.OK and submitted() == 2, "it is kept"
    assert main([*words, "launcher.store=s3://mine/other"]) == Exit.OK and submitted() == 4, "other folders"


def test_the_bundle_of_a_sweep_outlives_the_next_submission_of_it(aws: Any, elsewhere: Path) -> None:
    """Both have one name, and a trial of the first one may wait, or start again on another spot instance."""
    for peaks in ("0.1,0.2", "0.1,0.2,0.3"):
        assert main(["-m", *BASE, f"lr.peak={peaks}", "run.name=shapes", "run.dir=/opt/ml/checkpoints"]) == Exit.OK
    stored = aws.client("s3").list_objects_v2(Bucket="mine")["Contents"]
    digests = {Path(entry["Key"]).parent.name for entry in stored}
    assert len(stored) == len(digests) == 2, stored
    for entry in stored:
        body = aws.client("s3").get_object(Bucket="mine", Key=entry["Key"])["Body"].read()
        assert digest_of(body) == Path(entry["Key"]).parent.name


def test_what_aws_refuses_is_told(aws: Any, elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE, "launcher.store=s3://another/dtf"]) == Exit.PEER
    assert "NoSuchBucket" in capsys.readouterr().err
    assert main([*BASE, "launcher.extra=['ResourceConfig.InstanceCount=\"two\"']"]) == Exit.CONFIG
    assert "ResourceConfig.InstanceCount" in capsys.readouterr().err


class Client:
    """A client that answers as it is told; `calls` has what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, dict]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(**words: Any) -> Any:
            self.calls.append((name, words))
            answer = self._answers[name]
            answer = answer(**words) if callable(answer) else answer
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call


def test_the_same_request_twice_is_one_job() -> None:
    from_boto = pytest.importorskip("botocore.exceptions")
    taken = from_boto.ClientError({"Error": {"Code": "ResourceInUse", "Message": "taken"}}, "CreateTrainingJob")
    job = {"TrainingJobName": "a", "AlgorithmSpecification": {"ContainerEntrypoint": ["--digest=1"]}}
    sagemaker_aws._create(Client(create_training_job=taken, describe_training_job=job), job)
    other = {"AlgorithmSpecification": {"ContainerEntrypoint": ["--digest=2"]}}
    with pytest.raises(from_boto.ClientError):
        sagemaker_aws._create(Client(create_training_job=taken, describe_training_job=other), job)


def test_cancelling_stops_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"a-0": "InProgress", "a-1": "Completed", "a-2": "Stopping"}
    client = Client(
        describe_training_job=lambda TrainingJobName: {"TrainingJobStatus": states[TrainingJobName]},
        stop_training_job={},
    )
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setattr(boto3.Session, "client", lambda self, name: client)
    SageMaker(**REQUIRED).cancel({"jobs": "a-0,a-1,a-2", "region": "eu-west-1"})
    assert [words for name, words in client.calls if name == "stop_training_job"] == [{"TrainingJobName": "a-0"}]


def test_lines_of_all_instances_are_read_once() -> None:
    pages = {
        ("a/algo-1-9", ""): (["one", "two"], "1"),
        ("a/algo-1-9", "1"): ([], "1"),
        ("a/algo-2-9", ""): (["three"], "2"),
        ("a/algo-2-9", "2"): (["four"], "3"),
        ("a/algo-2-9", "3"): ([], "3"),
    }

    def events(logStreamName: str, nextToken: str = "", **_: Any) -> dict:
        lines, token = pages[logStreamName, nextToken]
        return {"events": [{"message": line} for line in lines], "nextForwardToken": token}

    streams = {"logStreams": [{"logStreamName": "a/algo-2-9"}, {"logStreamName": "a/algo-1-9"}]}
    client, tokens = Client(describe_log_streams=streams, get_log_events=events), dict[str, str]()
    pytest.importorskip("botocore")
    lines = list(sagemaker_aws.new_events(client, "a/", tokens))
    assert lines == ["algo-1: one", "algo-1: two", "algo-2: three", "algo-2: four"]
    assert not list(sagemaker_aws.new_events(client, "a/", tokens))


@pytest.mark.parametrize("stops", [True, False])
def test_a_sweep_that_aws_does_not_take_as_a_whole_leaves_nothing_that_runs(stops: bool) -> None:
    from_boto = pytest.importorskip("botocore.exceptions")
    names, quota = [f"a-{number}" for number in range(4)], "ResourceLimitExceeded"
    full = from_boto.ClientError({"Error": {"Code": quota, "Message": "quota"}}, "CreateTrainingJob")
    client = Client(
        create_training_job=lambda TrainingJobName: full if TrainingJobName == "a-2" else {},
        stop_training_job={} if stops else full,
    )
    with pytest.raises(from_boto.ClientError if stops else PeerError, match=quota) as raised:
        sagemaker_aws.create_all(client, [{"TrainingJobName": name} for name in names])
    assert [words["TrainingJobName"] for name, words in client.calls if name == "stop_training_job"] == names[:2]
    assert stops or "a-0, a-1; stop them by" in str(raised.value)


def test_a_run_folder_in_s3_whose_job_lives_is_refused(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by `launcher.checkpoints`, where the first job made the folder."""
    monkeypatch.setattr(SageMaker, "submit", lambda self, request, files: {"job": request.name})
    monkeypatch.setattr(SageMaker, "state", lambda self, handle: JobState(State.running))
    assert main(BASE) == Exit.OK
    (made,) = Path("outputs").rglob("job.json")
    store = "/".join(made.parent.parent.relative_to(Path("outputs", "sagemaker")).parts)
    assert main([*BASE, f"launcher.checkpoints=s3://{store}"]) == Exit.BUSY
    assert "belongs to sagemaker job" in capsys.readouterr().err
    assert main([*BASE, "launcher.checkpoints=s3://mine/other"]) == Exit.OK


def test_a_run_folder_on_a_claim_whose_job_lives_is_refused(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kubernetes, "submit", lambda self, request, files: {"job": request.name})
    monkeypatch.setattr(Kubernetes, "state", lambda self, handle: JobState(State.queued))
    base = ["launcher=kubernetes", "launcher.image=dtf", "launcher.claim=runs", "train.steps=2"]
    assert main(base) == Exit.OK
    (made,) = Path("outputs").rglob("job.json")
    run = "/".join(made.parent.parent.relative_to(Path("outputs", "kubernetes", "runs")).parts)
    assert main([*base, f"run.dir=/runs/{run}"]) == Exit.BUSY
    assert main([*base, "run.dir=/runs/other"]) == Exit.OK
