"""launcher=sagemaker: the rendered request as processes on this host, that are interrupted as SageMaker says it does.

AWS is not asked: what SageMaker itself does is what its documentation says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from dtf.core.errors import Exit
from tests.support.namespaces import ROOT
from tests.support.sagemaker_box import Instances, network

pytestmark = pytest.mark.slow

STEPS = 200
RUN = [
    "plugins=[tests.support.kill_trigger]",
    "recipe=slow_toy",
    "step.batch_size=16",
    f"train.steps={STEPS}",
    "train.log_every=5",
    "train.eval_every=80",
    "checkpoint.every_steps=10",
    "observer=[console,jsonl]",
    "launcher.devices=cpu",
    "launcher.threads=1",
]
SUBMITTED = [
    "launcher=sagemaker",
    "launcher.image=image",
    "launcher.role=arn:aws:iam::123456789012:role/dtf",
    "launcher.instance=ml.m5.large",
    "launcher.store=s3://mine/dtf",
    f"launcher.python={sys.executable}",
]
SHARED = [
    "launcher.file_system=efs:fs-01234567:/",
    "launcher.subnets=[subnet-1]",
    "launcher.security_groups=[sg-1]",
    "launcher.processes=1",
    "launcher.nodes=2",
]
PSERVER = ["strategy=pserver", "strategy.servers=2"]

Start = Callable[..., Instances]


def dtf(*words: str, code: str = "from dtf.cli.main import main; sys.exit(main(sys.argv[1:]))") -> str:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def tensors(folder: Path) -> dict[str, bytes]:
    """Name -> bytes, of all that the last checkpoint holds."""
    found = {}
    for path in sorted((folder / "checkpoints" / f"step_{STEPS:06}").glob("*.safetensors")):
        found |= {f"{path.name}:{name}": tensor.tobytes() for name, tensor in load_file(path).items()}
    assert found
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, bytes]]:
    known: dict[tuple[str, ...], dict[str, bytes]] = {}

    def run(*words: str) -> dict[str, bytes]:
        if words not in known:
            folder = tmp_path_factory.mktemp("local")
            dtf(*RUN, *words, "launcher.processes=2", f"run.dir={folder / 'run'}")
            known[words] = tensors(folder / "run")
        return known[words]

    return run


_RENDER = """
from pathlib import Path
from dtf.cluster.submit import request_of
from dtf.config.compose import compose
composed = compose(sys.argv[2:])
platform = composed.settings.launcher
platform.check(composed.settings.strategy)
request = request_of(platform, [composed], Path(sys.argv[1]), platform.default_run_dir("toy", "1"), "toy-1")
(text,) = platform.render(request).values()
bundle = Path(sys.argv[1], f"s3/mine/dtf/toy-1/bundle/{request.digest}/bundle.zip")
bundle.parent.mkdir(parents=True)
bundle.write_bytes(request.content)
print(text)
"""


@pytest.fixture
def submit(tmp_path: Path) -> Iterator[Callable[..., Start]]:
    """Render a job and put its bundle into S3; returns what starts its instances."""
    with network() as pid:
        started: list[Instances] = []

        def render(*words: str) -> Start:
            job = json.loads(dtf(str(tmp_path), *SUBMITTED, *RUN, *words, code=f"exec({_RENDER!r})"))
            (tmp_path / "systems").mkdir()

            def start() -> Instances:
                folder = tmp_path / f"start-{len(started)}"
                started.append(Instances(job, pid, folder, tmp_path / "s3", tmp_path / "systems"))
                return started[-1]

            return start

        yield render
        for instances in started:
            instances.kill()


def test_a_spot_interruption_loses_no_step(submit: Callable[..., Start], undisturbed) -> None:
    start = submit("launcher.spot=true", "launcher.processes=2")
    first = start()
    first.at_step(52)
    first.processes["algo-1"].terminate()
    assert first.codes() == {Exit.PREEMPTED}, first.printed()
    assert "E_PREEMPTED" in first.failure("algo-1")
    step = max(int(path.name[5:]) for path in (first.run_folder() / "checkpoints").glob("step_0*"))
    assert step >= 52
    first.sync()
    second = start()
    assert second.codes() == {0}, second.printed()
    assert f"started step={step}/{STEPS}" in second.printed() and not second.failure("algo-1")
    assert tensors(second.run_folder()) == undisturbed()


def test_a_lost_instance_goes_back_to_what_was_copied(submit: Callable[..., Start], undisturbed) -> None:
    """Without a notice; and S3 holds files of checkpoints as they were half written, or not all of them."""
    start = submit("launcher.spot=true", "launcher.processes=2")
    for step in (35, 75):
        instances = start()
        for now in range(step - 30, step + 1, 3):
            instances.at_step(now)
            instances.sync()
        instances.kill()
        assert instances.kept is not None
        newest = max((instances.kept / "checkpoints").glob("step_0*"))
        next(newest.glob("*.safetensors")).unlink()
    last = start()
    assert last.codes() == {0}, last.printed()
    assert tensors(last.run_folder()) == undisturbed()


@pytest.mark.parametrize(
    ("words", "hosts", "told"),
    [((), 2, "algo-2"), ((*PSERVER, "launcher.allow_insecure=true"), 4, "algo-1")],
    ids=["ddp", "pserver"],
)
def test_several_instances_save_when_one_is_interrupted(
    submit: Callable[..., Start], undisturbed, words: tuple[str, ...], hosts: int, told: str
) -> None:
    start = submit(*SHARED, *words)
    first = start()
    assert len(first.processes) == hosts
    first.at_step(52)
    first.processes[told].terminate()
    assert first.codes() == {Exit.PREEMPTED}, first.printed()
    second = start()
    assert second.codes() == {0}, second.printed()
    assert tensors(second.run_folder()) == undisturbed(*words[:2])


def test_the_reason_of_a_failure_is_where_sagemaker_looks(submit: Callable[..., Start]) -> None:
    instances = submit("launcher.processes=1", "lr.peak=1e30", "train.skip_nonfinite=0")()
    assert instances.codes() == {Exit.DIVERGED}, instances.printed()
    assert "E_DIVERGED" in instances.failure("algo-1")
