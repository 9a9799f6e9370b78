"""The command line: answers, exit codes, sweeps, completion.

Without torch, with little work, and without leaving files behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dtf.api.registry import registered
from dtf.cli.main import INTERRUPTED, PIPE_CLOSED, main, will_launch
from dtf.config.settings import GROUPS
from dtf.core.errors import Exit

ROOT = Path(__file__).parents[2]
SHOW = ("plugins=[tests.support.own_parts]", "job=front_show")
BARE = (
    "import hydra\n@hydra.main(version_base='1.3', config_path=None, config_name=None)\ndef main(cfg): pass\nmain()\n"
)
MOST_WORK = 2.0  # times the calls of a bare Hydra application
MOST_MODULES = 40

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("elsewhere")


def test_help_names_every_group_option_and_root_key(capsys: Capture) -> None:
    assert main(["--help"]) == Exit.OK
    out = capsys.readouterr().out
    for group in GROUPS:
        assert f"\n  {group} " in out
        for name in registered(group):
            assert name in out
    for key in ("seed=0", "step.batch_size=128", "train.epochs=null", "job=describe", "--config-dir", "install=bash"):
        assert key in out
    assert "*ddp" in out
    assert max(map(len, out.splitlines())) <= 120


def test_a_directory_that_is_gone_is_said_so(capsys: Capture, elsewhere: Path) -> None:
    elsewhere.rmdir()
    assert main([]) == Exit.CONFIG
    assert (
        capsys.readouterr().err
        == "dtf: error[E_CONFIG]: the current directory does not exist any more; change to one that does\n"
    )


def test_version(capsys: Capture) -> None:
    from dtf.core.version import __version__

    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"dtf {__version__}\n"


def test_cfg_prints_what_was_composed(capsys: Capture, elsewhere: Path) -> None:
    assert main(["--cfg", "job", "lr.peak=0.5", "run.name=n${seed}"]) == Exit.OK
    plain = capsys.readouterr().out
    assert "peak: 0.5" in plain
    assert "name: n${seed}" in plain
    assert main(["--cfg", "job", "--resolve", "--package", "run", "run.name=n${seed}"]) == Exit.OK
    assert capsys.readouterr().out.startswith("# @package run\nname: n0\n")
    assert main(["--cfg", "hydra", "-p", "hydra.output_subdir"]) == Exit.OK
    assert capsys.readouterr().out == "null\n"
    assert main(["--cfg", "hydra", "-p", "hydra.nothing"]) == Exit.CONFIG
    assert main(["--cfg", "all", "-p", "hydra.run"]) == Exit.OK
    assert "dir: ." in capsys.readouterr().out
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("what", ["defaults", "searchpath", "config"])
def test_info(capsys: Capture, what: str) -> None:
    assert main(["strategy=dp", "--info", what]) == Exit.OK
    assert {"defaults": "strategy/dp", "searchpath": "dtf://", "config": "name: dp"}[what] in capsys.readouterr().out


def test_a_job_gets_the_config(capsys: Capture, elsewhere: Path) -> None:
    assert main([*SHOW, "seed=3"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["seed"] == 3
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["stratgy=dp"], Exit.CONFIG, "dtf: error[E_CONFIG]: stratgy=dp is no known key; did you mean strategy?"),
        (["--epochs=3"], Exit.CONFIG, "dtf: error[E_CONFIG]: unrecognized arguments: --epochs=3;"),
        ([*SHOW, "job.fail=data"], Exit.DATA, "dtf: error[E_DATA]: the data is gone; look for it"),
        ([*SHOW, "job.fail=stop"], Exit.PREEMPTED, "dtf: error[E_PREEMPTED]: asked to stop; state saved"),
        ([*SHOW, "job.fail=interrupt"], INTERRUPTED, "dtf: interrupted"),
    ],
)
def test_every_failure_is_one_line_and_a_code(capsys: Capture, arguments: list[str], code: int, line: str) -> None:
    assert main(arguments) == code
    err = capsys.readouterr().err
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_mistake_in_dtf_shows_its_traceback(capsys: Capture) -> None:
    assert main([*SHOW, "job.fail=bug"]) == Exit.BUG
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("dtf: error[E_BUG]: ZeroDivisionError: a mistake")


def test_a_closed_pipe_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dtf", "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (PIPE_CLOSED, b"")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], True),
        (["strategy=dp", "train.steps=3"], True),
        (["observer=[console,jsonl]"], True),
        (["lr=cosine,step", "-m"], True),
        (["precision=bf16"], True),
        (["recipe=mine", "--config-dir=x"], True),
        (["strategy=mine", "plugins=[my]"], True),
        (["launcher.env.A=1"], True),
        (["recipe.data.pixels=8"], True),
        (["--help"], False),
        (["-c", "job"], False),
        (["--cfg=job"], False),
        (["-sc", "query=bash"], False),
        (["strategy=ddpp"], False),
        (["stratgy=dp"], False),
        (["train.stepz=3"], False),
        (["optimizer.lrr=3"], False),
        (["recipe.data.pixls=8"], False),
        (["observer=[consol]"], False),
        (["train"], False),
    ],
)
def test_ranks_are_warmed_only_for_what_may_need_them(words: list[str], expected: bool) -> None:
    assert will_launch(words) is expected


# ---------------------------------------------------------------- sweeps


def test_sweep_runs_every_combination_from_a_fresh_config(capsys: Capture, elsewhere: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert (
        main(["-m", *SHOW, f"job.file={log}", "optimizer=sgd,adamw", "lr.peak=0.1,0.2", "run.name=t${hydra:job.num}"])
        == Exit.OK
    )
    seen = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(one["optimizer"]["name"], one["lr"]["peak"], one["run"]["name"]) for one in seen] == [
        ("sgd", 0.1, "t0"),
        ("sgd", 0.2, "t1"),
        ("adamw", 0.1, "t2"),
        ("adamw", 0.2, "t3"),
    ]
    assert "dtf: trial 4 of 4: " in capsys.readouterr().out
    assert not list(elsewhere.iterdir())


def test_sweep_goes_on_after_a_failure_and_reports_it(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert main(["-m", *SHOW, f"job.file={log}", "seed=1", "job.fail='',data,bug,0"]) == Exit.DATA
    out = capsys.readouterr().out
    assert len(log.read_text().splitlines()) == 4
    told = [line.split(": ")[2].split("  ")[0] for line in out.splitlines()[-4:]]
    assert told == ["finished", "failed, E_DATA", "failed, E_BUG", "finished"]


def test_sweep_stops_when_a_trial_was_told_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert main(["-m", *SHOW, f"job.file={log}", "job.fail=stop,0"]) == Exit.PREEMPTED
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("bad", ["lr.peak=0.1,abc", "+optimizer.lrr=1,2", "strategy=ddp,ddpp", "seed=1,,"])
def test_no_trial_starts_when_one_of_them_is_wrong(capsys: Capture, tmp_path: Path, bad: str) -> None:
    log = tmp_path / "log"
    assert main(["-m", *SHOW, f"job.file={log}", bad]) == Exit.CONFIG
    assert capsys.readouterr().err.count("\n") == 1
    assert not log.exists()


def test_sweep_over_experiments_with_plugins_of_their_own(tmp_path: Path, elsewhere: Path) -> None:
    (elsewhere / "front_swept.py").write_text(
        "from dtf.api.registry import register\nfrom dtf.api.lr import Constant\n@register('lr', "
        "'front_swept')\nclass Swept(Constant): ...\n"
    )
    folder = tmp_path / "conf" / "experiment"
    folder.mkdir(parents=True)
    (folder / "one.yaml").write_text("# @package _global_\nseed: 1\n")
    (folder / "two.yaml").write_text(
        "# @package _global_\ndefaults:\n  - _self_\n  - override /lr: front_swept\nplugins: [front_swept]\n"
    )
    log = tmp_path / "log"
    assert main(["-m", *SHOW, "--config-dir", str(folder.parent), f"job.file={log}", "experiment=one,two"]) == Exit.OK
    assert [json.loads(line)["lr"]["name"] for line in log.read_text().splitlines()][1] == "front_swept"


# ---------------------------------------------------------------- completion


def complete(line: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dtf"])
    assert main(["-sc", "query=bash"]) == Exit.OK
    return capsys.readouterr().out.split()


def test_completion(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "conf" / "recipe").mkdir(parents=True)
    (tmp_path / "conf" / "recipe" / "mine.yaml").write_text("defaults: [schema/resnet_shapes@_here_]\n")
    assert {"strategy=ddp", "strategy=dp"} <= set(complete("dtf strategy=", capsys, monkeypatch))
    assert complete("dtf seed=1 optimizer=ada", capsys, monkeypatch) == [
        "optimizer=adadelta",
        "optimizer=adagrad",
        "optimizer=adam",
        "optimizer=adamax",
        "optimizer=adamw",
    ]
    assert "optimizer.momentum=" in complete("dtf optimizer.m", capsys, monkeypatch)
    assert not [word for word in complete("dtf s", capsys, monkeypatch) if "schema" in word]
    assert "recipe=mine" in complete(f"dtf --config-dir {tmp_path / 'conf'} recipe=", capsys, monkeypatch)
    assert "strategy=front_mine" in complete("dtf plugins=[tests.support.own_parts] strategy=", capsys, monkeypatch)
    assert complete("dtf 'unfinished", capsys, monkeypatch) == []


def test_completion_script(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/dtf"])
    assert main(["-sc", "install=bash"]) == Exit.OK
    assert capsys.readouterr().out.rstrip().endswith("-F hydra_bash_completion dtf")
    assert main(["-sc"]) == Exit.CONFIG
    monkeypatch.setattr(sys, "argv", ["/x/dtf/cli/main.py"])
    assert main(["-sc", "install=bash"]) == Exit.CONFIG


# ---------------------------------------------------------------- torch-free, and little work

HEAVY = """\
import sys
from dtf.cli.main import main
for words in {}:
    main(words)
print([name for name in ("torch", "numpy", "rich", "importlib.metadata") if name in sys.modules])"""

COUNTED = """\
import runpy, sys
before, calls = set(sys.modules), 0
def see(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(see)
try:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
except SystemExit:
    pass
sys.setprofile(None)
import json
print(json.dumps([calls, sorted(set(sys.modules) - before)]))"""


def test_answers_import_nothing_heavy() -> None:
    commands = [["--help"], ["--cfg", "job"], ["stratgy=dp"], ["job=describe", "job.group=lr"], ["--info", "defaults"]]
    done = subprocess.run(
        [sys.executable, "-c", HEAVY.format(commands)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_answers_are_little_more_work_than_those_of_hydra_alone(tmp_path: Path) -> None:
    """Calls of functions, and modules that are not dtf's own. `bench.startup` measures the seconds."""
    (tmp_path / "bare.py").write_text(BARE)

    def work(module: str, *words: str) -> tuple[int, set[str]]:
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, module, *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            check=True,
        )
        calls, modules = json.loads(done.stdout.splitlines()[-1])
        return calls, set(modules)

    bare, modules = work("bare", "--cfg", "job")
    assert bare > 100_000, "a whole answer was counted"
    for words in (["--help"], ["--cfg", "job"], ["strategy=ddpp"]):
        calls, imported = work("dtf", *words)
        assert calls <= MOST_WORK * bare, words
        assert len([name for name in imported - modules if name.split(".")[0] != "dtf"]) <= MOST_MODULES, words
