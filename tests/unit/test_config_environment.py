"""A config file from elsewhere sets no environment variable that makes ranks run other code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtf.config.compose import Composer
from dtf.config.environment import FROM_FILES
from dtf.config.inherit import overrides_from_run
from dtf.core.errors import ConfigError, Exit
from dtf.jobs.evaluate import EvaluateJob
from dtf.jobs.export import ExportJob

HARMFUL = ["PYTHONPATH", "LD_PRELOAD", "PATH", "NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_CONF_FILE", "TORCH_LOGS"]
HARMFUL += ["OMP_TOOL_LIBRARIES", "TORCHINDUCTOR_CACHE_DIR", "omp_num_threads", "OMP_NUM_THREADS ", "A.B", ""]
GLOBAL = "# @package _global_\n"


def with_file(folder: Path, name: str, text: str, typed: list[str] | None = None) -> Composer:
    file = folder / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return Composer(str(folder), typed=typed)


def refused(composer: Composer, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        composer.compose(overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", HARMFUL)
def test_a_variable_of_a_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    composer = with_file(tmp_path, "experiment/theirs", f"{GLOBAL}launcher: {{env: {{'{name}': /tmp/x}}}}\n")
    said = refused(composer, "experiment=theirs")
    assert f"launcher.env has {name}" in said and f"give launcher.env.{name}=VALUE on the command line" in said
    if name.isidentifier():
        assert said.endswith(f" was set in {tmp_path}/experiment/theirs.yaml)")


def test_whichever_file_sets_it(tmp_path: Path) -> None:
    option = "defaults: [schema/local@_here_, _self_]\nenv: {LD_PRELOAD: x.so}\n"
    assert "LD_PRELOAD" in refused(with_file(tmp_path, "launcher/theirs", option), "launcher=theirs")
    root = "defaults: [config, _self_]\nlauncher: {env: {LD_PRELOAD: x.so}}\n"
    with_file(tmp_path, "root", root)
    assert "LD_PRELOAD" in refused(Composer(str(tmp_path), "root"))


@pytest.mark.parametrize(
    "override",
    [
        "launcher.env.LD_PRELOAD=mine.so",
        "++launcher.env.LD_PRELOAD=mine.so",
        "launcher.env={LD_PRELOAD: mine.so}",
        "launcher={env: {LD_PRELOAD: mine.so}}",
    ],
)
def test_the_command_line_sets_any_variable_and_wins(tmp_path: Path, override: str) -> None:
    composer = with_file(tmp_path, "experiment/theirs", f"{GLOBAL}launcher: {{env: {{LD_PRELOAD: x.so}}}}\n")
    composed = composer.compose(["experiment=theirs", override])
    assert composed.config["launcher"]["env"] == {"LD_PRELOAD": "mine.so"}
    assert composed.recompose(["train.steps=3"]).config["launcher"]["env"] == {"LD_PRELOAD": "mine.so"}


def test_a_file_sets_switches(tmp_path: Path) -> None:
    names = [f"{first}_{rest}" for first, rests in FROM_FILES.items() for rest in rests.split()]
    assert {"OMP_WAIT_POLICY", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"} <= {*names}
    entries = ", ".join(f"{name}: '1'" for name in names)
    composer = with_file(tmp_path, "experiment/mine", f"{GLOBAL}launcher: {{env: {{{entries}}}}}\n")
    env = composer.compose(["experiment=mine", "launcher.env.OWN=2"]).config["launcher"]["env"]
    assert env == dict.fromkeys(names, "1") | {"OWN": "2"}


def test_a_typed_variable_allows_no_other(tmp_path: Path) -> None:
    composer = with_file(tmp_path, "experiment/theirs", f"{GLOBAL}launcher: {{env: {{LD_PRELOAD: x.so}}}}\n")
    assert "LD_PRELOAD" in refused(composer, "experiment=theirs", "launcher.env.PATH=/mine")


def test_parameters_of_a_sweep_in_a_file_are_not_typed(run_dtf: Callable[..., Any], tmp_path: Path) -> None:
    where = tmp_path / "conf"
    text = f"{GLOBAL}hydra: {{sweeper: {{params: {{launcher.env.LD_PRELOAD: x.so}}}}}}\n"
    with_file(where, "experiment/theirs", text)
    done = run_dtf("-m", f"--config-dir={where}", "experiment=theirs", "train.steps=1", "observer=[]")
    assert done.code == Exit.CONFIG and "launcher.env has LD_PRELOAD" in done.err


def test_the_config_of_a_run_whose_model_is_used_gives_no_variables(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    rows = {"name": "adagrad", "score_decay": 1.0, "values": "bf16", "disk": "rows", "memory_gb": 1.0}
    saved = {"seed": 3, "sparse": rows, "plugins": [], "launcher": {"name": "local", "env": {"LD_PRELOAD": "x.so"}}}
    (tmp_path / "config.yaml").write_text(json.dumps(saved))
    assert overrides_from_run(str(checkpoint), ExportJob.keys_of_run, {}, []) == [
        "seed=3",
        "sparse=adagrad",
        "sparse.score_decay=1.0",
        "sparse.values='bf16'",
    ]
    evaluated = EvaluateJob.keys_of_run
    assert overrides_from_run(str(checkpoint), evaluated, {}, []) == ["seed=3", "sparse.values='bf16'"]
    assert overrides_from_run(str(checkpoint), evaluated, {"sparse.values": "param"}, []) == ["seed=3"]
    (tmp_path / "config.yaml").write_text(json.dumps({"sparse": "adagrad", "plugins": []}))
    assert overrides_from_run(str(checkpoint), evaluated, {}, []) == []
