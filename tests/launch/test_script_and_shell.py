"""Runs from a script and from an interactive Python, as processes of their own: what ranks import, and what is left."""

from __future__ import annotations

import os
import re
import runpy
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtf.api import registry
from dtf.config.settings import load_parts

ROOT = Path(__file__).parents[2]
QUICK = (
    '"observer=[]", "launcher.devices=cpu", "launcher.threads=1", "step.batch_size=16", "train.steps=2", '
    '"train.eval_every=0"'
)
RECIPE = """
import dtf
from tests.support.toy import Toy
@dtf.register("recipe", "mine")
class Mine(Toy):
    "A recipe of this file."

"""


def start(command: list[str], folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )


def test_a_script_is_what_its_ranks_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_parts(["tests.support.toy"])  # what it imports stays registered
    monkeypatch.setattr(registry, "_CLASSES", {group: dict(known) for group, known in registry._CLASSES.items()})
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_script.py").write_text(f'{RECIPE}\nconfig = dtf.compose(["recipe=mine"]).config\n')
    assert runpy.run_path(str(tmp_path / "my_script.py"), run_name="__main__")["config"]["plugins"] == ["my_script"]


@pytest.mark.slow
def test_a_script_trains_and_no_process_outlives_it(tmp_path: Path) -> None:
    """Its fork server dies with it, also when it is killed."""
    body = f"""
if __name__ == "__main__":
    import sys
    from dtf.launch import forkserver_cache
    config = dtf.compose(["recipe=mine", "launcher.processes=2", {QUICK}])
    result = dtf.train(config)
    print(config.config["plugins"], result.step, "torch" in sys.modules, forkserver_cache._server.pid, flush=True)
    input()
"""
    (tmp_path / "my_script.py").write_text(RECIPE + body)
    script = start(["my_script.py"], tmp_path)
    assert script.stdout is not None and script.stderr is not None
    line = script.stdout.readline()
    found = re.fullmatch(r"\['my_script'\] 2 False (\d+)\n", line)
    assert found, line + script.stderr.read()
    server = os.pidfd_open(int(found[1]))
    try:
        script.send_signal(signal.SIGKILL)
        script.communicate()
        assert select.select([server], [], [], 60)[0], "the fork server lives on"
    finally:
        os.close(server)


@pytest.mark.slow
def test_what_is_typed_trains_here_and_is_replaced_when_it_is_typed_again(tmp_path: Path) -> None:
    cells = f"""
{RECIPE}
config = dtf.compose(["recipe=mine", "launcher=inline", {QUICK}])
dtf.train(config).step

@dtf.register("recipe", "mine")
class Other(Toy):
    rows: int = dtf.option(default=32, doc="rows")

dtf.train(config).config.settings.recipe
dtf.train(config.with_("launcher=local"))
"""
    shell = start(["-q", "-i"], tmp_path)
    out, err = shell.communicate(cells, 120)
    assert out.splitlines()[0] == "2" and "Other(" in out and "rows=32" in out, out + err
    assert "recipe=mine is the class Other of this notebook or script (__main__)" in err
    assert err.count("Traceback") == 1, err


@pytest.mark.slow
def test_a_script_that_guards_nothing_is_told_to(tmp_path: Path) -> None:
    call = f'dtf.train(dtf.compose(["recipe=mine", "launcher.processes=2", {QUICK}]))'
    (tmp_path / "bare.py").write_text(f"{RECIPE}\n{call}\n")
    bare = start(["bare.py"], tmp_path)
    _, err = bare.communicate(timeout=120)
    assert bare.returncode == 1 and "put what starts runs under if __name__ == '__main__':" in err
