"""The objects of `launcher=kubernetes`: valid, and in meaning what JobSet's and Kubeflow's own examples say."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.cluster import kubernetes
from dtf.cluster.after_exit import FINAL
from dtf.cluster.kubernetes_objects import AGAIN
from dtf.core.errors import ConfigError, Exit
from dtf.strategies.ddp import Ddp
from tests.support.kubebox_controllers import _matching
from tests.support.kubernetes_requests import ROLES, Object, jobs_in, of_kind, platform, rendered, request, variables

VERSIONS = ("1.29.0", "1.33.0", "1.37.0")
EXAMPLES = yaml.safe_load((Path(__file__).parent / "data" / "kubernetes_examples.yaml").read_text())

SITE = ["{kind: Pod, spec: {nodeSelector: {pool: a100}, tolerations: [{key: gpu, operator: Exists}]}}"]
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one node": ({"gpus": 4, "cpu": 8, "memory": "64Gi"}, {"nodes": 1, "roles": {"trainer": 4}}),
    "two nodes": ({"extra": SITE, "queue": "team", "namespace": "ml", "service_account": "trainer"}, {}),
    "hours": ({"hours": 1.5}, {}),
    "roles on one node": ({}, {"nodes": 1, "roles": ROLES}),
    "roles": ({"gpus": 2}, {"roles": ROLES}),
    "a sweep": ({}, {"nodes": 1, "trials": ("a", "b", "c"), "parallel": 2}),
    "a sweep on two nodes": ({"queue": "team"}, {"trials": ("a", "b")}),
}
KINDS = ("jobset", "trainjob", "job")
SHORT = {("two nodes", "job"), ("a sweep", "jobset"), ("roles", "jobset"), ("roles", "trainjob")}
ALL = [
    pytest.param(case, kind, id=f"{case}, {kind}", marks=[] if (case, kind) in SHORT else [pytest.mark.slow])
    for case in CASES
    for kind in KINDS
    if (case, kind) != ("roles", "job")  # refused: a Job has pods of one role
]


def objects(case: str, kind: str) -> list[Object]:
    options, wanted = CASES[case]
    if kind == "trainjob" and case == "a sweep":
        wanted = {**wanted, "parallel": 0}
    return rendered(platform(kind, **options), request(**wanted))


@pytest.mark.parametrize(("case", "kind"), ALL)
def test_objects_are_valid_in_three_versions_of_kubernetes(case: str, kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="has the schemas").validate
    for value in objects(case, kind):
        if value["kind"] in ("Secret", "Service", "Job"):
            checked = [value]
        else:
            checked = [
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job}
                for job in jobs_in(value)
            ]
        for one in checked:
            for version in VERSIONS:
                validate(one, version, strict=True)


@pytest.mark.parametrize(("case", "kind"), ALL)
def test_jobsets_and_trainjobs_are_what_their_models_know(case: str, kind: str) -> None:
    """A field that a model does not know is dropped by it."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="has the models")
    known = {
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainJob": models.TrainerV1alpha1TrainJob,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    }
    for value in objects(case, kind):
        if value["kind"] in known:
            assert known[value["kind"]].from_dict(value).to_dict() == value


def test_a_site_runtime_gets_what_a_trainjob_may_say() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="has the models")
    secret, value = rendered(platform("trainjob", runtime="torch-distributed", extra=SITE), request())
    assert secret["kind"] == "Secret"
    assert models.TrainerV1alpha1TrainJob.from_dict(value).to_dict() == value
    (ours,), (theirs,) = value["spec"]["runtimePatches"], EXAMPLES["patches"]["spec"]["runtimePatches"]
    for key in ("trainingRuntimeSpec", "template", "spec"):
        ours, theirs = ours[key], theirs[key]
    (ours,), (theirs,) = ours["replicatedJobs"], theirs["replicatedJobs"]
    assert ours["name"] == theirs["name"] == "node"
    pod = ours["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "a100"} and pod["terminationGracePeriodSeconds"] == 30
    assert "env" not in pod["containers"][0], "Kubeflow forbids it there"
    assert value["spec"]["runtimeRef"] == EXAMPLES["queue"]["spec"]["runtimeRef"]


# ---------------------------------------------------------------- in meaning what others' examples say


def test_pods_meet_as_in_the_example_of_jobset() -> None:
    (theirs,) = jobs_in(EXAMPLES["meeting"])
    (ours,) = jobs_in(of_kind(rendered(platform(), request(nodes=4, roles={"trainer": 4})), "JobSet"))
    assert (ours["completions"], ours["parallelism"]) == (theirs["completions"], theirs["parallelism"])
    jobset, group = EXAMPLES["meeting"]["metadata"]["name"], EXAMPLES["meeting"]["spec"]["replicatedJobs"][0]["name"]
    address = variables(theirs)["MASTER_ADDR"].replace(group, "node").replace(jobset, "toy-01234567")
    assert variables(ours)["DTF_ADDRESS"] == f"{address}:29500"
    assert variables(ours)["DTF_NODE"] == variables(theirs)["RANK"]
    assert variables(ours)["DTF_NODES"] == "4"


def test_exit_codes_and_evictions_are_told_as_in_the_examples_of_jobset() -> None:
    value = of_kind(rendered(platform(), request()), "JobSet")
    (ours,), (theirs,) = jobs_in(value), jobs_in(EXAMPLES["failure"])
    final, evicted, again = ours["podFailurePolicy"]["rules"]
    (rule,) = theirs["podFailurePolicy"]["rules"]
    assert final["action"] == rule["action"] == "FailJob"
    assert final["onExitCodes"].keys() == rule["onExitCodes"].keys()
    assert final["onExitCodes"]["containerName"] == ours["template"]["spec"]["containers"][0]["name"]
    assert again["action"] == "Ignore" and again["onExitCodes"]["operator"] == rule["onExitCodes"]["operator"]
    assert ours["template"]["spec"]["restartPolicy"] == theirs["template"]["spec"]["restartPolicy"] == "Never"
    (maintenance,) = jobs_in(EXAMPLES["eviction"])[0]["podFailurePolicy"]["rules"]
    assert [one["type"] for one in evicted["onPodConditions"]] == [
        one["type"] for one in maintenance["onPodConditions"]
    ]
    (policy,), (reason,) = (one["spec"]["failurePolicy"]["rules"] for one in (value, EXAMPLES["failure"]))
    assert policy["onJobFailureReasons"] == reason["onJobFailureReasons"] and policy["action"] == "FailJobSet"


def test_trainers_wait_for_servers_as_in_the_example_of_jobset() -> None:
    server, trainer = of_kind(rendered(platform(), request(roles=ROLES)), "JobSet")["spec"]["replicatedJobs"]
    launcher, worker = EXAMPLES["order"]["spec"]["replicatedJobs"]
    assert "dependsOn" not in server and "dependsOn" not in launcher
    assert trainer["dependsOn"] == [{**worker["dependsOn"][0], "name": server["name"]}]
    endpoints = "toy-01234567-server-0-0.toy-01234567:29500,toy-01234567-server-0-1.toy-01234567:29500"
    for job, role in ((server, "server"), (trainer, "trainer")):
        told = variables(job["template"]["spec"])
        assert (told["DTF_ROLE"], told["DTF_ENDPOINTS"]) == (role, endpoints)
        assert told["DTF_ID"].endswith("['batch.kubernetes.io/job-completion-index']")
        assert job["template"]["spec"]["completions"] == ROLES[role]


def test_a_queue_of_kueue_and_what_a_node_gets_are_told_as_in_the_example_of_kubeflow() -> None:
    options = platform("trainjob", queue="training-queue", cpu=2, memory="4Gi", image="python:3.11-slim")
    ours = of_kind(rendered(options, request(nodes=3, roles={"trainer": 3})), "TrainJob")
    theirs = EXAMPLES["queue"]
    assert ours["metadata"]["labels"].items() >= theirs["metadata"]["labels"].items()
    assert ours["spec"]["suspend"] is theirs["spec"]["suspend"] is True
    for key in ("numNodes", "image"):
        assert ours["spec"]["trainer"][key] == theirs["spec"]["trainer"][key]
    resources, asked = ours["spec"]["trainer"]["resourcesPerNode"], theirs["spec"]["trainer"]["resourcesPerNode"]
    assert resources["requests"] == asked["requests"] and resources["limits"] == {"memory": "4Gi"}


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_all_that_is_queued_waits_suspended(kind: str) -> None:
    value = rendered(platform(kind, queue="team"), request())[-1]
    assert value["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team" and value["spec"]["suspend"] is True


def test_the_runtime_of_a_trainjob_is_built_as_in_the_example_of_kubeflow() -> None:
    made = rendered(platform("trainjob"), request())
    ours, theirs = of_kind(made, "TrainingRuntime"), EXAMPLES["runtime"]
    (job,), (example,) = (one["spec"]["template"]["spec"]["replicatedJobs"] for one in (ours, theirs))
    assert job["name"] == example["name"] and job["template"]["metadata"] == example["template"]["metadata"]
    names = [one["template"]["spec"]["template"]["spec"]["containers"][0]["name"] for one in (job, example)]
    assert names == ["node", "node"]
    trainjob = of_kind(made, "TrainJob")
    assert trainjob["spec"]["runtimeRef"]["name"] == ours["metadata"]["name"]
    assert trainjob["spec"]["trainer"]["numNodes"] == ours["spec"]["mlPolicy"]["numNodes"] == 2


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize("kind", KINDS)
def test_every_exit_code_is_decided_alike_in_all_kinds(kind: str) -> None:
    """0 is done; 69, 71, 73, 74, 75 and 143 start again; other codes of dtf are final; other ends are counted."""
    decided = {0: "done", 137: "Count", 139: "Count"} | dict.fromkeys(AGAIN, "Ignore") | dict.fromkeys(FINAL, "FailJob")
    assert {int(code) for code in Exit} <= {int(code) for code in decided}
    (job,) = (one for value in rendered(platform(kind), request()) if value["kind"] != "Secret" and "spec" in value
              and value["kind"] not in ("Service", "TrainJob") for one in jobs_in(value))  # fmt: skip
    for code, action in decided.items():
        status = {"containerStatuses": [{"state": {"terminated": {"exitCode": int(code)}}}]}
        if code:
            assert _matching(job["podFailurePolicy"]["rules"], {"status": status})[1] == action
            evicted = {**status, "conditions": [{"type": "DisruptionTarget", "status": "True"}]}
            expected = "Ignore" if action == "Count" else action
            assert _matching(job["podFailurePolicy"]["rules"], {"status": evicted})[1] == expected


def test_a_save_has_its_time() -> None:
    (job,) = jobs_in(of_kind(rendered(platform(), request(grace_s=90.5)), "JobSet"))
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 96
    (job,) = jobs_in(of_kind(rendered(platform(hours=2), request()), "JobSet"))
    pod = job["template"]["spec"]
    assert pod["activeDeadlineSeconds"] == 7200 + 3600, "an image that is pulled takes nothing from the time to save"
    assert "DTF_DEADLINE=$(($(date +%s) + 7200)); exec python -m dtf" in pod["containers"][0]["command"][-1]


def test_the_bundle_is_a_secret_that_pods_see_and_that_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kubernetes.MOST_BUNDLE_BYTES == 1 << 20, "of a Secret"
    monkeypatch.setattr(kubernetes, "MOST_BUNDLE_BYTES", 1 << 10)
    content = b"x" * (1 << 10)
    secret, job = rendered(platform(), request(content=content))
    assert base64.b64decode(secret["data"]["bundle.zip"]) == content and secret["immutable"]
    pod = jobs_in(job)[0]["template"]["spec"]
    assert pod["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
    assert (
        f"--bundle={pod['containers'][0]['volumeMounts'][0]['mountPath']}/bundle.zip" in pod["containers"][0]["command"]
    )
    with pytest.raises(ConfigError, match="a Secret of Kubernetes holds .*; install the plugins in launcher.image=dtf"):
        platform().render(request(content=content + b"x"))


def test_trials_on_one_node_are_the_pods_of_one_job() -> None:
    options, wanted = CASES["a sweep"]
    value = of_kind(rendered(platform(**options), request(**wanted)), "Job")
    (job,) = jobs_in(value)
    assert (job["completions"], job["parallelism"]) == (3, 2)
    assert job["podFailurePolicy"]["rules"][0]["action"] == "FailIndex", "a trial that fails leaves the others alone"
    assert job["template"]["spec"]["containers"][0]["command"][-1] == "--trial=$(DTF_TRIAL)"
    assert variables(job)["DTF_TRIAL"] == variables(jobs_in(EXAMPLES["meeting"])[0])["RANK"]


def test_trials_on_several_nodes_are_jobsets_of_one_secret() -> None:
    secret, *jobsets = rendered(platform(queue="team"), request(trials=("a", "b")))
    assert [value["metadata"]["name"] for value in jobsets] == ["toy-01234567-0", "toy-01234567-1"]
    for number, value in enumerate(jobsets):
        (job,) = jobs_in(value)
        assert job["template"]["spec"]["containers"][0]["command"][-1] == f"--trial={number}"
        assert job["template"]["spec"]["volumes"][0]["secret"]["secretName"] == secret["metadata"]["name"]
        name = value["metadata"]["name"]
        assert variables(job)["DTF_ADDRESS"] == f"{name}-node-0-0.{name}:29500"
    with pytest.raises(ConfigError, match="sweep.parallel=1.*launcher.queue"):
        platform().render(request(trials=("a", "b"), parallel=1))


def test_names_fit_whatever_a_run_is_called() -> None:
    value = of_kind(rendered(platform(), request(name="a" * 50, roles={"server": 1024, "trainer": 1024})), "JobSet")
    for job in value["spec"]["replicatedJobs"]:
        pod = f"{value['metadata']['name']}-999-{job['name']}-0-{job['template']['spec']['completions'] - 1}-abcde"
        assert len(pod) <= 63


def test_what_a_site_adds_is_merged_into_the_objects_of_its_kind() -> None:
    extra = [
        *SITE,
        "{kind: Pod, spec: {containers: [{name: node, env: [{name: HTTP_PROXY, value: x}]}, {name: side, image: y}]}}",
        "{kind: JobSet, metadata: {annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: rack}}}",
        "{kind: Pod, spec: {automountServiceAccountToken: null}}",
    ]
    value = of_kind(rendered(platform(extra=extra), request(roles=ROLES)), "JobSet")
    assert value["metadata"]["annotations"]["alpha.jobset.sigs.k8s.io/exclusive-topology"] == "rack"
    assert "dtf.dev/digest" in value["metadata"]["annotations"]
    for job in jobs_in(value):
        pod = job["template"]["spec"]
        assert pod["nodeSelector"] == {"pool": "a100"} and "automountServiceAccountToken" not in pod
        assert [one["name"] for one in pod["containers"]] == ["node", "side"]
        names = [one["name"] for one in pod["containers"][0]["env"]]
        assert names[-1] == "HTTP_PROXY" and "DTF_ROLE" in names


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"extra": ["nodeSelector: {a: b}"]}, "is no partial object with its kind"),
        ({"extra": ["{kind: Pod, apiVersion: v1}"]}, "has the key apiVersion; known are kind, metadata, spec"),
        ({"extra": ["{kind: Pod"]}, "is no YAML"),
        ({"image": ""}, "launcher.image='' must be the name of a container image"),
        ({"claim": ""}, "launcher.claim='' must name a PersistentVolumeClaim"),
        ({"claim": "My Claim"}, "launcher.claim=My Claim must be a name as Kubernetes has them"),
        ({"memory": "lots"}, "launcher.memory=lots must be a quantity of Kubernetes"),
        ({"mount": "runs"}, "launcher.mount=runs must be an absolute path below /"),
        ({"mount": "/dtf/runs"}, "launcher.mount=/dtf/runs: /dtf is needed for other things"),
        ({"runtime": "torch"}, "launcher.runtime=torch is for launcher.kind=trainjob, this is jobset"),
        ({"kind": "trainjob", "runtime": "torch", "hours": 1.0}, "launcher.hours=1 cannot be set in the pods"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        platform(**{"processes": 1, **options}).check(Ddp())
    assert text in str(refused.value)


def test_a_job_of_one_role_a_folder_elsewhere_and_an_unknown_kind_are_refused() -> None:
    for folder in ("/home/me", "/runs", "/runs/../tmp/x", "/runs/a/../../tmp", "runs/a"):
        with pytest.raises(ConfigError, match=f"run.dir={folder} must be a folder below launcher.mount=/runs"):
            platform().render(request(run_dir=folder))
    with pytest.raises(
        ConfigError, match="kind=Deployment is not among what is submitted; known are Pod, Secret, JobSet"
    ):
        platform(extra=["{kind: Deployment}"]).render(request())
    with pytest.raises(ConfigError, match="launcher.kind=job has pods of one role"):
        platform("job", nodes=2)._check_kind(roles=2)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("outputs/x", False),
        ("~/x", False),
        ("HERE/x", False),
        ("/runs/../HERE/x", False),
        ("/runs/x", True),
        ("/models/x", True),  # of the image
    ],
)
def test_a_model_that_no_pod_sees_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, seen: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").touch()
    path = path.replace("/HERE" if path.startswith("/") else "HERE", str(tmp_path))
    for config in ({"job": {"model": path}}, {"recipe": {"model": {"weights": path}}}):
        if seen:
            assert platform().render(request(configs=(config,)))
            continue
        with pytest.raises(ConfigError, match="which the job does not see; copy it to launcher.claim=runs"):
            platform().render(request(configs=(config,)))


def test_the_same_run_folder_has_the_same_folder_here() -> None:
    assert platform().place(platform().default_run_dir("toy", "1"), "toy-1") == "runs/toy/1"
    assert platform(mount="/a/b", claim="c.d").place("/a/b/my run/x/", "toy-2") == "c.d/my-run/x"
