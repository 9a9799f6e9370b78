"""What a job does around its run: it unpacks, examines, and ends."""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import sys
import time
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from dtf.cli.main import main
from dtf.cluster import inside
from dtf.cluster.allocation import Allocation
from dtf.cluster.bundle import unpacked
from dtf.cluster.platform import Platform
from dtf.cluster.submit import request_of
from dtf.config.compose import compose
from dtf.core import submitted_code
from dtf.core.errors import ConfigError, DtfError, Exit, Preempted
from dtf.core.run_record import LONGEST_SAVE
from tests.support.submission import HERE, bundle, composed_inside

pytestmark = pytest.mark.usefixtures("elsewhere", "platform")


def test_a_config_dir_with_run_folders_gives_its_config_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("experiment/mine.yaml", "outputs/toy/1/config.yaml", "outputs/toy/1/job/x.yaml", ".venv/a.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# @package _global_\nlr: {peak: 0.3}\n")
    (tmp_path / "outputs/toy/1/run.json").touch()
    submitted = compose([*HERE, f"--config-dir={tmp_path}", "experiment=mine"])
    path, _ = bundle(tmp_path, submitted)
    with zipfile.ZipFile(path) as archive:
        assert [name for name in archive.namelist() if name.endswith(".yaml")] == ["conf/experiment/mine.yaml"]
    monkeypatch.setattr("dtf.cluster.bundle.MOST_BYTES", 10)
    with pytest.raises(ConfigError, match="in 1 YAML files"):
        bundle(tmp_path, submitted)


def test_ranks_and_the_scheduler_get_the_time_that_a_save_takes(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "run.json").write_text(json.dumps({LONGEST_SAVE: 100.0}))
    composed = compose([*HERE, "launcher.grace_s=30"])
    platform = composed.settings.launcher
    assert isinstance(platform, Platform)
    for folder, trials in ((tmp_path / "two", []), (tmp_path, ["one", "two"])):
        request = request_of(platform, [composed] * max(1, len(trials)), folder, str(folder), "mine", trials)
        path = tmp_path / "bundle.zip"
        path.write_bytes(request.content)
        inside_s = composed_inside(path, Allocation()).config["launcher"]["grace_s"]
        assert (request.grace_s, inside_s) == (300.0, 300.0)


@pytest.mark.parametrize("raises", [False, True])
def test_a_run_without_checkpoints_that_its_time_limit_ends_is_not_started_again(raises: bool) -> None:
    outcome = Mock(side_effect=Preempted("asked to stop")) if raises else Mock(return_value=Exit.PREEMPTED)

    def run(left_s: float | None, *words: str) -> int:
        config = compose([*HERE[:1], "launcher=local", "launcher.grace_s=25", *words]).config
        deadline = None if left_s is None else time.time() + left_s
        try:
            return inside._run(Mock(config=config, job=Mock(run=outcome)), Allocation(deadline=deadline))
        except DtfError as error:
            return error.exit

    assert run(50, "checkpoint=off") == Exit.NO_PROGRESS
    assert [run(3600, "checkpoint=off"), run(None, "checkpoint=off"), run(50)] == [Exit.PREEMPTED] * 3


def test_a_bundle_that_cannot_be_unpacked_now_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = bundle(tmp_path, compose(HERE))
    for owner, method, number in (
        (zipfile.ZipFile, "extractall", errno.ENOSPC),
        (Path, "read_bytes", errno.ESTALE),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, Mock(side_effect=OSError(number, os.strerror(number))))
            assert main([f"--bundle={path}"]) == Exit.IO


def test_a_bundle_of_an_earlier_version_says_which(tmp_path: Path) -> None:
    path, _ = bundle(tmp_path, compose(HERE))
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("bundle.json"))
    del manifest["dtf"]
    manifest["versions"]["dtf"] = "0.0.9"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bundle.json", json.dumps(manifest))
    with (
        pytest.raises(ConfigError, match="submitted by an earlier dtf 0.0.9, .* and this is dtf 0"),
        unpacked(path, ""),
    ):
        pass


def test_node_0_decides_whether_the_nodes_of_a_submission_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the submission, whatever another node sees of the folder, and however often the job was started."""
    examined, said = tmp_path / "examined", []
    monkeypatch.setattr(inside, "job_of_node_0", lambda *asked: said.append(asked) or "train")

    def decides(node: int, digest: str) -> bool:
        allocation = Allocation(nodes=2, node=node, address="10.0.0.1:29500", restarts=node)
        return inside._is_to_examine(examined, digest, allocation, "t")

    assert decides(0, "a") and not decides(1, "a")
    examined.write_text("a")
    assert not decides(0, "a") and decides(0, "b") and not decides(1, "b")
    assert said == [(("10.0.0.1", 29500), 1, "t", 600)] * 2


def test_ranks_of_a_node_are_as_many_as_were_submitted(tmp_path: Path) -> None:
    for words, ranks in ((["launcher.gpus=3", "launcher.devices=auto"], 3), ([], 2), (["launcher.processes=5"], 5)):
        submitted = compose([*HERE, *words])
        platform = submitted.settings.launcher
        assert isinstance(platform, Platform)
        path, _ = bundle(tmp_path, submitted)
        assert composed_inside(path, Allocation()).config["launcher"]["processes"] == platform.per_node() == ranks


def test_code_that_was_not_submitted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any time, in the launching process and in its ranks, wherever Python finds it. What was submitted may be
    unpacked below such a folder.
    """
    for name in ("live", "bundled/mine", "installed"):
        (tmp_path / f"{name}.py").parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "bundled")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = list(sys.meta_path)

    def imports() -> None:
        for name in ("mine", "installed"):
            sys.modules.pop(name, None)
            importlib.import_module(name)
        assert importlib.util.find_spec("torch") and importlib.util.find_spec("nowhere") is None
        with pytest.raises(ConfigError, match="live is imported from .*live.py, which is not part of what was submit"):
            importlib.import_module("live")

    with submitted_code.from_submission_alone(str(tmp_path / "bundled"), ["installed"]):
        imports()
        environment = dict(os.environ)
    assert sys.meta_path == before
    monkeypatch.setattr(os, "environ", environment)
    submitted_code.as_submitted()
    imports()
    for name in ("mine", "installed"):
        del sys.modules[name]
