"""A command line that is handed to a scheduler: what is fixed at submission, what runs inside, what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.cluster import inside, record, submit
from dtf.cluster.allocation import Allocation
from dtf.cluster.bundle import unpacked
from dtf.cluster.platform import job_name
from dtf.cluster.plugin_code import code_of
from dtf.cluster.submit import refuse_live
from dtf.config.compose import Composed, compose
from dtf.core.errors import BusyError, ConfigError, Exit, PeerError
from dtf.core.files import flat
from dtf.core.own_code import dtf_digest
from dtf.core.text import quoted
from dtf.core.version import __version__
from tests.support.submission import HERE, SMALL, bundle, composed_inside

ROLES = ["strategy=pserver", "strategy.servers=1", "launcher.nodes=2"]
pytestmark = pytest.mark.usefixtures("elsewhere", "platform")


def difference(one: Composed, other: Composed) -> set[str]:
    ours, theirs = dict(flat(one.config, "")), dict(flat(other.config, ""))
    return {key.partition(".")[0] for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}


@pytest.mark.parametrize(
    ("allocation", "expected"),
    [
        (Allocation(), {"name": "local", "processes": 2}),
        (
            Allocation(nodes=3, node=1, address="10.0.0.1:29500"),
            {"name": "static", "nodes": 3, "node_rank": 1, "address": "10.0.0.1:29500", "processes": 2},
        ),
        (
            Allocation(role="server", number=1, endpoints=("a:1", "b:2")),
            {"name": "manual", "role": "server", "id": 1, "endpoints": ["a:1", "b:2"], "processes": 6},
        ),
    ],
)
def test_the_launcher_inside_follows_from_the_allocation_and_all_else_is_as_submitted(
    tmp_path: Path, allocation: Allocation, expected: dict
) -> None:
    submitted = compose(
        [*HERE, "launcher.nodes=3", "launcher.threads=2", "launcher.env.NCCL_DEBUG=INFO", "lr.peak=0.25"]
    )
    path, _ = bundle(tmp_path, submitted)
    found = composed_inside(path, allocation)
    passed_on = {"threads": 2, "env": {"NCCL_DEBUG": "INFO"}, "devices": "cpu", "grace_s": 300.0}
    assert found.config["launcher"].items() >= (expected | passed_on).items()
    assert found.config["run"]["dir"] == str(tmp_path / "run0")
    assert difference(found, submitted) == {"launcher", "run"}


def test_values_from_the_environment_are_those_of_the_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEAK", "0.5")
    path, _ = bundle(tmp_path, compose([*HERE, "lr.peak=${oc.env:PEAK}"]))
    monkeypatch.setenv("PEAK", "0.7")
    assert composed_inside(path, Allocation()).config["lr"]["peak"] == 0.5
    monkeypatch.delenv("PEAK")
    with pytest.raises(ConfigError, match="PEAK"):
        composed_inside(path, Allocation())


def test_config_files_are_those_of_the_submission(tmp_path: Path) -> None:
    folder = tmp_path / "my" / "experiment"
    folder.mkdir(parents=True)
    file = folder / "mine.yaml"
    file.write_text("# @package _global_\nlr: {peak: 0.3}\n")
    submitted = compose([*HERE, f"--config-dir={tmp_path / 'my'}", "experiment=mine"])
    path, _ = bundle(tmp_path, submitted)
    file.write_text("# @package _global_\nlr: {peak: 0.9}\n")
    assert composed_inside(path, Allocation()).config["lr"]["peak"] == 0.3
    file.unlink()
    assert difference(composed_inside(path, Allocation()), submitted) == {"launcher", "run"}


def test_whoever_runs_a_bundle_by_hand_may_change_it(tmp_path: Path) -> None:
    """A relative run folder is below the folder where that command is typed, not below that of the submission."""
    path, _ = bundle(tmp_path, compose([*HERE, "lr.peak=0.3"]))
    found = composed_inside(path, Allocation(), "lr.peak=0.4", "run.dir=mine")
    assert (found.config["lr"]["peak"], found.config["run"]["dir"]) == (0.4, str(tmp_path / "mine"))


def test_the_code_of_plugins_is_what_they_import_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what they import late, and whole packages with the files in them. Nothing that is installed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "one.py").write_text("import json, torch, dtf\ndef late():\n    from two_package import part\n")
    (tmp_path / "two_package" / "__pycache__").mkdir(parents=True)
    (tmp_path / "two_package" / "__init__.py").write_text("from . import part\n")
    (tmp_path / "two_package" / "part.py").write_text("import three\n")
    (tmp_path / "two_package" / "names.txt").write_text("a")
    (tmp_path / "two_package" / ".hidden").write_text("a")
    (tmp_path / "two_package" / "__pycache__" / "part.pyc").write_text("a")
    (tmp_path / "three.py").write_text("def broken(:\n")
    (tmp_path / "four.py").write_text("")
    expected = {"one.py", "three.py", "two_package/__init__.py", "two_package/part.py", "two_package/names.txt"}
    assert set(code_of(["one"])) == expected
    (tmp_path / "two_package" / "weights.bin").touch()
    os.truncate(tmp_path / "two_package" / "weights.bin", 65 << 20)
    with pytest.raises(ConfigError, match="two_package"):
        code_of(["one"])


def test_a_bundle_that_was_changed_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, digest = bundle(tmp_path, compose(HERE))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("code/other.py", "")
    assert main([f"--bundle={path}", f"--digest={digest}"]) == Exit.CONFIG
    assert "is not what was submitted" in capsys.readouterr().err
    path.write_bytes(b"PK no more")
    assert main([f"--bundle={path}"]) == Exit.DATA
    assert main([f"--bundle={tmp_path / 'none.zip'}"]) == Exit.DATA


def test_a_node_with_another_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = bundle(tmp_path, compose(HERE))
    monkeypatch.setattr(inside, "__version__", "99.0")
    with unpacked(path, "") as content, pytest.raises(ConfigError, match="has dtf 99.0"):
        inside._prepare(content, Allocation())


def test_a_node_with_other_code_of_the_same_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two working copies of dtf have one version."""
    path, _ = bundle(tmp_path, compose(HERE))
    monkeypatch.setattr(inside, "dtf_digest", lambda: "0123")
    monkeypatch.setattr(inside, "DTF", "/other/dtf/")
    with unpacked(path, "") as content:
        digest, home = content.bundle.dtf
        with pytest.raises(ConfigError) as raised:
            inside._prepare(content, Allocation())
    assert f"dtf {__version__} of {home} with the code {digest}," in str(raised.value)
    assert "/other/dtf/ with 0123" in str(raised.value) and digest == dtf_digest()


def test_a_sweeps_bundle_needs_the_number_of_a_trial(tmp_path: Path) -> None:
    path, _ = bundle(tmp_path, compose(HERE), compose([*HERE, "lr.peak=0.3"]))
    with unpacked(path, "") as content:
        assert inside._choose(content.bundle, 1).config["lr"]["peak"] == 0.3
        for trial in (None, 2, -1):
            with pytest.raises(ConfigError, match="--trial=0 to 1"):
                inside._choose(content.bundle, trial)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["train.dry_run=true"], "train.dry_run"),
        (["launcher.devices=auto", "launcher.gpus=1", "launcher.processes=2"], "launcher.gpus=1"),
        (ROLES, "launcher.allow_insecure=true"),
        ([*ROLES, "launcher.pin=true"], "launcher.pin=false"),
        (["job=verify", "train.steps=2"], "job=verify starts many"),
        (["run.dir=foreign"], "holds no run"),
        (["strategy=ddp", "launcher.nodes=2", "launcher.tls.mode=mtls"], "launcher.tls is for roles"),
        ([*ROLES, "launcher.allow_insecure=true", "launcher.tls.ca=ca.pem"], "leave one of them out"),
        (["strategy=ddp", "launcher.nodes=2", "launcher.allow_insecure=true"], "launcher.allow_insecure is for roles"),
        (["launcher.devices=cuda"], "launcher.gpus=0 asks for none"),
        (["launcher.devices='\"0,1\"'"], "launcher.gpus=0 asks for none"),
        (["launcher.gpus=2"], "launcher.devices=cpu uses none"),
    ],
)
def test_what_no_job_could_run_is_refused_before_it_is_submitted(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("foreign").mkdir()
    Path("foreign", "note").touch()
    assert main([*HERE, "train.steps=2", *words]) != Exit.OK
    assert reason in capsys.readouterr().err
    assert not Path("outputs").exists() and os.listdir("foreign") == ["note"]


def test_a_dry_run_prints_what_would_be_submitted_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "launcher.dry_run=true", 'launcher.extra=["--comment=mine"]', "run.dir=mine"]) == Exit.OK
    printed = capsys.readouterr().out
    assert "--bundle=" in printed and "--comment=mine" in printed
    assert os.listdir() == []


def test_submitting_imports_no_torch() -> None:
    code = (
        "import sys; from dtf.cli.main import main; code = main(sys.argv[1:]); sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *SMALL, "launcher.dry_run=true"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_record_of_another_version_is_read(tmp_path: Path) -> None:
    """Which had other options, and lacked some of today's."""
    (tmp_path / "job").mkdir()
    node = {"name": "here", "nodes": 2, "gone": 1}
    record.keep(tmp_path, record.JobRecord(node, {"pids": ""}, "", "", ""))
    composed = compose(HERE)
    assert composed.settings is not None
    known = record.find(tmp_path)
    assert known is not None and known.platform.nodes == 2
    record.keep(tmp_path, record.JobRecord({"name": "local"}, {}, "", "", ""))
    other = record.find(tmp_path)
    assert other is not None
    with pytest.raises(BusyError, match="which submits no jobs"):
        _ = other.platform


@pytest.mark.parametrize("folder", ["mine", "sweep/lr.peak=0.1", "sweep/lr.peak=0.1,seed=2", "it's $(touch PWN), a=b"])
def test_the_commands_that_follow_a_job_can_be_pasted(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = record.JobRecord({"name": "here"}, {"job": "1"}, "", "", "")
    monkeypatch.setattr(submit, "hand_in", lambda platform, request: submitted)
    assert main([*SMALL, f"run.dir={quoted(folder)}"]) == Exit.OK
    line = capsys.readouterr().out.splitlines()[1]
    *_, job, named = shlex.split(line)
    assert compose([job, named]).config["job"]["run_folder"] == folder


def test_names_that_every_scheduler_takes() -> None:
    assert job_name("ResNet50_imagenet v2!") == "resnet50-imagenet-v2"
    assert job_name("50 shapes") == "dtf-50-shapes"
    assert len(job_name("x" * 80)) == 50 and job_name("___") == "dtf"
    assert job_name("x" * 80, "A_1") == f"{'x' * 46}-a-1"
    assert len(job_name("x" * 80, "y" * 80)) == 50 and job_name("", "7") == "dtf-7"


@pytest.fixture
def submit_and_wait(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Submit a run to this host, wait until its job has ended, and return what it printed."""

    def run(folder: str, *words: str) -> str:
        assert main([*SMALL, f"run.dir={folder}", *words]) == Exit.OK
        known = record.find(Path(folder))
        assert known is not None
        for pid in known.handle["pids"].split():
            os.waitpid(int(pid), 0)
        capsys.readouterr()
        assert main(["plugins=[here_platform]", "job=logs", f"job.run_folder={folder}"]) == Exit.OK
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_a_job_of_two_nodes_runs_what_was_submitted(submit_and_wait, capsys: pytest.CaptureFixture[str]) -> None:
    printed = submit_and_wait("mine", "launcher.nodes=2")
    assert "nothing is wrong" in printed and "ended step=2/2" in printed
    capsys.readouterr()
    assert main(["plugins=[here_platform]", "job=status", "job.run_folder=mine", "job.format=json"]) == Exit.OK
    status = json.loads(capsys.readouterr().out)
    assert status["run"]["exit"] == 0 and status["run"]["saved"] == 2 and status["job"]["state"] == "finished"
    assert not Path("mine/job/reason").exists()


@pytest.mark.slow
def test_ranks_refuse_code_that_was_not_submitted(
    submit_and_wait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where Python finds it, in the working directory or by PYTHONPATH, and ranks alone would load it."""
    (tmp_path / "late.py").write_text(
        "import importlib\nfrom dtf import register\nfrom dtf.recipes.resnet.recipe import ResnetShapes\n"
        "@register('recipe', 'late')\nclass Late(ResnetShapes):\n"
        "    def build_model(self):\n        importlib.import_module('unnamed')\n        return super().build_model()\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}")
    monkeypatch.syspath_prepend(tmp_path)
    for place in (Path(), tmp_path):
        (place / "unnamed.py").touch()
        folder = f"run-{place.name}"
        submit_and_wait(folder, "plugins=[here_platform,late]", "recipe=late")
        said = Path(folder, "job/reason").read_text()
        assert "unnamed is imported from" in said and "not part of what was submitted" in said, said
        (place / "unnamed.py").unlink()


@pytest.mark.slow
def test_roles_on_several_nodes_are_processes_of_their_own(submit_and_wait) -> None:
    words = ["strategy=pserver", "strategy.servers=2", "launcher.nodes=2", "launcher.allow_insecure=true"]
    assert "ended step=2/2" in submit_and_wait("mine", *words)


@pytest.mark.slow
def test_the_reason_of_a_failure_is_where_the_scheduler_shows_it(submit_and_wait) -> None:
    submit_and_wait("mine", "lr.peak=1e30", "train.steps=20", "train.skip_nonfinite=0")
    assert "E_DIVERGED" in Path("mine/job/reason").read_text()


@pytest.mark.slow
def test_a_live_job_keeps_its_folder_until_it_is_cancelled(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "run.dir=mine", "train.steps=1000000", "checkpoint.every_steps=1000"]
    assert main(words) == Exit.OK
    known = record.find(Path("mine"))
    assert known is not None
    before = Path("mine/job/bundle.zip").read_bytes()
    assert main(words) == Exit.BUSY
    assert "belongs to here job" in capsys.readouterr().err
    assert Path("mine/job/bundle.zip").read_bytes() == before
    assert main(["plugins=[here_platform]", "job=cancel", "job.run_folder=mine"]) == Exit.OK
    _, status = os.waitpid(int(known.handle["pids"]), 0)
    assert os.waitstatus_to_exitcode(status) == Exit.PREEMPTED


def test_a_scheduler_that_does_not_answer_locks_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its run is shown; a new submission names the stale job, and the way out."""
    words = [*SMALL, "run.dir=mine"]
    known = record.JobRecord(compose(words).config["launcher"], {"job": "7"}, "2026-11-26T20:00:00", "abc", "mine")
    (tmp_path / "mine" / "job").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    record.keep(Path("mine"), known)
    Path("mine/run.json").write_text(
        json.dumps(
            {
                "id": "20261126-1",
                "exit": 75,
                "ended": "2026-11-26T20:30:00",
                "started": "2026-11-26T20:01:00",
                "cause": "asked",
            }
        )
    )

    def gone(self: object, handle: dict[str, str]) -> None:
        raise PeerError("10.0.0.1:6379: nobody answers")

    monkeypatch.setattr(type(known.platform), "state", gone)
    assert main([HERE[0], "job=status", "job.run_folder=mine"]) == Exit.OK
    assert "here job 7: unknown (the scheduler cannot be asked: 10.0.0.1:6379: nobody" in (
        told := capsys.readouterr().out
    )
    assert "run 20261126-1" in told
    with pytest.raises(
        BusyError, match="here job 7 of 2026-11-26T20:00:00, .* job=cancel job.forget=true job.run_folder=mine"
    ):
        refuse_live(Path("mine"))
    assert main([HERE[0], "job=cancel", "job.run_folder=mine"]) == Exit.PEER
    assert "job.forget=true" in capsys.readouterr().err
    assert main([HERE[0], "job=cancel", "job.run_folder=mine", "job.forget=true"]) == Exit.OK
    assert "here job 7 is forgotten, not ended" in capsys.readouterr().out
    refuse_live(Path("mine"))
    assert Path("mine/job/forgotten-job.json").exists()
    assert main([HERE[0], "job=cancel", "job.run_folder=mine", "job.forget=true"]) == Exit.CONFIG
