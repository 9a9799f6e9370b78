"""What the fork server has imported when it forks a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtf.config.settings import load_parts
from dtf.launch import forkserver_cache
from dtf.launch.forkserver import ForkServer
from dtf.launch.supervised import _package_of
from tests.support.launching import launch


def test_a_run_names_the_package_of_its_recipe_and_its_modules_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, lines in {
        "whole/__init__": "",
        "whole/needs_an_extra": "import not_installed_here",
        "whole/part": "import os\nfrom pathlib import Path\nPath(os.environ['DTF_TEST_FILE']).write_text('imported')",
        "broken/__init__": "1 / 0",
    }.items():
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(lines)
    monkeypatch.syspath_prepend(tmp_path)
    server = ForkServer(["json"], {"DTF_TEST_FILE": str(tmp_path / "seen")})
    try:
        server.import_package("whole")
        server.import_package("broken")
        message = server.receive()
        assert message is not None and message["error"] == "ZeroDivisionError: division by zero"
        assert (tmp_path / "seen").read_text() == "imported", "what cannot be imported does not keep the rest away"
    finally:
        server.close()


def test_a_signal_to_all_processes_does_not_end_a_server_that_has_just_been_made() -> None:
    """It comes before the first line of Python there. Twenty of them, as a later one meets what ignores it."""
    server = ForkServer(["json"], {})
    try:
        for _ in range(20):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(server.pid, number)
        server.import_package("no_such_package")
        message = server.receive()
        assert message is not None and "no_such_package" in message["error"]
    finally:
        server.close()


def test_the_package_of_a_recipe_is_named_where_it_is_one_of_dtf() -> None:
    load_parts([])
    assert _package_of("resnet_shapes") == "dtf.recipes.resnet"
    assert _package_of("ctr_log") == "dtf.recipes.ctr"
    assert _package_of("") == _package_of("somebody_elses") == ""


@pytest.mark.slow  # by default tests/laws/test_architecture.py looks into a rank, for all but numba
def test_what_every_rank_has_brings_neither_hydra_nor_libraries_of_recipes() -> None:
    """They take a fifth of the time until the first step."""
    names = "{'hydra', 'omegaconf', 'numba', 'pyarrow', 'torchvision', 'dtf.recipes.ctr.log'}"
    code = f"import dtf.cli.preload, sys; sys.exit(', '.join({names} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_openmp_binds_no_rank_to_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It binds the thread that imports torch, in the fork server; the loader of a rank would share that core."""
    monkeypatch.setattr(forkserver_cache, "_server", None)
    monkeypatch.setattr(forkserver_cache, "PRELOAD", ["torch"])
    try:
        done = launch("tests.support.entries:add", tmp_path, processes=1, env={"OMP_PROC_BIND": "close"})
    finally:
        forkserver_cache.shut_down()
    assert json.loads((done.folder / "0.json").read_text())["cores"] == sorted(os.sched_getaffinity(0))


@pytest.mark.slow
def test_ranks_of_click_recipes_do_not_each_have_numba_learn_its_types() -> None:
    code = (
        "import sys; from dtf.launch.forkserver import _modules_of; list(_modules_of('dtf.recipes.ctr')); "
        "before = set(sys.modules); from numba.core.registry import cpu_target as numba; "
        "numba.typing_context.refresh(); numba.target_context.refresh(); sys.exit(len(sys.modules.keys() - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
