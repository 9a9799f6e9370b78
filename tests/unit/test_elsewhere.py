"""What people type who come from other frameworks is refused with what they meant, and that exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtf.api.registry import registered
from dtf.config.command_line import is_known
from dtf.config.compose import Composer, compose
from dtf.config.elsewhere import KEYS, OPTIONS, SPACES, WORDS
from dtf.config.messages import parse
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError

SEARCH = "a search for the best value needs -m and hydra/sweeper=optuna"

MEANT = {
    "optimizer=AdamW": "did you mean adamw?",
    "precision=16": "did you mean fp16?",
    "precision=32": "did you mean fp32?",
    "precision=bf16-mixed": "did you mean bf16?",
    "precision=16-mixed": "did you mean fp16?",
    "job=test": "did you mean evaluate?",
    "job=fit": "did you mean train?",
    "fit": "write job=train",
    "train": "write job=train",
    "trian": "did you mean job=train?",
    "config.yaml": "--config-dir=. --config-name=config",
    "my/long.yaml": "--config-dir=my --config-name=long",
    "train.py": "plugins=[train]",
    "recipe.model.pretrained=true": "did you mean recipe.model.weights=FILE?",
    "lr.peak=0.001..1": f"did you mean lr.peak=interval(0.001,1)? {SEARCH}",
    "lr.peak=loguniform(1e-4,1e-1)": f"did you mean 'lr.peak=tag(log,interval(1e-4,1e-1))'? {SEARCH}",
    "lr.peak=uniform(0, 1)": f"did you mean 'lr.peak=interval(0,1)'? {SEARCH}",
    "seed=randint(0,9)": f"did you mean 'seed=int(interval(0,9))'? {SEARCH}",
    "lr.peak=interval(0.1,1)": "is a sweep and needs -m and hydra/sweeper=optuna",
    "checkpoint.path=x": "did you mean checkpoint.resume=PATH, or run.dir=FOLDER",
    "trainer.max_epochs=3": "trainer.max_epochs=3 is no known key; did you mean train.epochs?",
    "trainer.devices=3": "trainer.devices=3 is no known key; did you mean launcher.processes?",
    "train.max_steps=5": "did you mean train.steps?",
    "model=resnet50": "did you mean recipe=NAME, or recipe.model?",
    "data=cifar10": "did you mean recipe=NAME, or recipe.data?",
    "batch_size=64": "did you mean step.batch_size?",
    "lr=0.1": "did you mean lr.peak=0.1?",
    "epochs=3": "did you mean train.epochs?",
    "strategy=deepspeed": "did you mean fsdp?",
    "strategy=horovod": "did you mean ddp?",
    "accelerator=gpu": "did you mean launcher.devices=cuda?",
    "devices=2": "did you mean launcher.processes?",
    "resume_from_checkpoint=x": "did you mean checkpoint.resume=PATH?",
    "scheduler=cosine": "did you mean lr=cosine?",
    "++scheduler=[1]": "did you mean lr=NAME?",
    "lr.scheduler=none": "did you mean lr=NAME?",
}


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(("line", "meant"), MEANT.items())
def test_what_was_meant_is_said(composer: Composer, line: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.compose([line])
    assert meant in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("there", sorted({*KEYS.values(), *WORDS.values()}))
def test_what_is_offered_exists(there: str) -> None:
    """Each dotted key, and each group=option."""
    for word in re.findall(r"[a-z_]+(?:\.[a-z_]+)*=[\w\[\]]+|[a-z_]+\.[a-z_]+[a-z_.]*", there):
        key, _, value = word.partition("=")
        if key not in ("key", "sweeper"):
            named = value.isupper() or not value or value.startswith("[")
            assert (key in GROUPS and named) or is_known(word if value else f"{key}=1")


@pytest.mark.parametrize("group", OPTIONS)
def test_options_that_are_offered_exist_and_names_elsewhere_are_no_options(composer: Composer, group: str) -> None:
    options = composer.options(group)
    assert set(OPTIONS[group].values()) <= set(options)
    assert not {name for name in options if name.lower() in OPTIONS[group]}
    assert all(name == name.lower() for name in OPTIONS[group])


def test_no_name_elsewhere_is_a_key_of_the_root() -> None:
    assert not [key for key in KEYS if is_known(f"{key}=1") and "." in key]
    assert not set(WORDS) & set(registered("job"))


@pytest.mark.parametrize("name", SPACES)
def test_search_spaces_that_are_offered_are_hydras(composer: Composer, name: str) -> None:
    (override,) = parse([f"lr.peak={SPACES[name].format('0.1', '1')}"], composer.loader)
    assert override.is_sweep_override()


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("step.batch_size=${oc.env:DTF_TEST,64}", "step.batch_size", 64),
        ("step.batch_size=${oc.env:DTF_TEST}", "step.batch_size", 32),
        ("lr.peak=${oc.env:DTF_TEST}", "lr.peak", 32.0),
        ("train.steps=${oc.env:DTF_TEST}", "train.steps", 32),
        ("train.steps=${oc.env:DTF_TEST}", "train.steps", None),
        ("run.name=${oc.env:DTF_TEST}", "run.name", "32"),
        ("strategy.static_graph=${oc.env:DTF_TEST}", "strategy.static_graph", True),
        ("step.remat=${oc.env:DTF_TEST}", "step.remat", "blocks"),
    ],
)
def test_text_of_the_environment_becomes_the_type_of_its_key(
    composer: Composer, monkeypatch: pytest.MonkeyPatch, line: str, key: str, value: object
) -> None:
    if "64" not in line:
        text = {None: "null", True: "true"}.get(value, "32") if not isinstance(value, str) else value  # type: ignore[call-overload]
        monkeypatch.setenv("DTF_TEST", text)
    got = composer.compose([line]).config
    for part in key.split("."):
        got = got[part]
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize("text", ["many", "1.5", "", "true"])
def test_text_of_the_environment_that_is_no_number_is_refused(
    composer: Composer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("DTF_TEST", text)
    with pytest.raises(ConfigError, match=f"step.batch_size={re.escape(text)} is not of type int; set on the command"):
        composer.compose(["step.batch_size=${oc.env:DTF_TEST}"])


def test_numbers_of_the_environment_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTF_TEST", "48")
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nstep: {batch_size: '${oc.env:DTF_TEST,64}'}\n")
    composed = compose(["--config-dir", str(tmp_path), "--config-name", "mine"])
    assert composed.config["step"]["batch_size"] == 48


@pytest.mark.parametrize("typed", ["run.dir=~/x y", "run.dir='~/x y'", 'run.dir="~/x y"'])
def test_the_home_directory_is_read_as_shells_do(monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    """Which leave `~` alone behind `key=`."""
    monkeypatch.setenv("HOME", "/home/me")
    composed = compose([typed])
    assert composed.config["run"]["dir"] == "/home/me/x y"
    assert compose(composed.command).config == composed.config


def test_the_home_directory_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nrun: {dir: ~/x, name: ~}\nlauncher: {log_dir: ~a}\n"
    )
    with pytest.raises(ConfigError, match=r"run\.name=null is not of type text"):
        compose(["--config-dir", str(tmp_path), "--config-name", "mine"])
    composed = compose(["--config-dir", str(tmp_path), "--config-name", "mine", "run.name=x", "launcher.env.A='a/~/b'"])
    assert composed.config["run"] == {"dir": "/home/me/x", "name": "x", "objective": ""}
    assert composed.config["launcher"]["env"] == {"A": "a/~/b"}


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://b", "hdfs://host/x", "https://h/x", "file:///x"])
def test_run_folders_are_folders(composer: Composer, address: str) -> None:
    with pytest.raises(ConfigError, match=r"is an address, and runs are kept in folders; .*set on the command line"):
        composer.compose([f"run.dir={address}"])
