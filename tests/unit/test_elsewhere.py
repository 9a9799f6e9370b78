"""What people type who come from other frameworks is refused with what they meant, and that exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from dtf.api.registry import registered
from dtf.config.command_line import is_known
from dtf.config.compose import Composer, compose
from dtf.config.elsewhere import KEYS, OPTIONS, SPACES, WORDS
from dtf.config.meant_keys import known_keys, meant_elsewhere, options_with
from dtf.config.messages import parse
from dtf.config.settings import GROUPS, load_parts
from dtf.core.errors import ConfigError

load_parts([])
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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "recipe=ctr_clicks num_workers=4",
            "recipe.data.threads is a key of recipe=ctr_log and recipe=resnet_photos; ",
        ),
        ("recipe=frappe recipe.data.num_workers=4", "did you mean recipe.data.threads? "),
        (
            "recipe=ctr_clicks data_dir=x",
            "recipe.data.root is a key of recipe=ctr_log, ",
        ),
        ("recipe=frappe data_dir=x", "did you mean recipe.data.root? "),
        ("recipe=ctr_clicks arch=x", "did you mean recipe.model.kind? "),
        ("lr=cosine lr.warmup_steps=9", "did you mean lr.warmup? "),
        ("lr=onecycle lr.warmup_steps=9", "did you mean lr.rise=SHARE of the run? "),
        ("lr=onecycle lr.warmup=9", "it is a key of lr=constant, lr=cosine, "),
        ("job.model=x", "it is a key of job=evaluate, job=export and job=predict; there are no choices"),
        ("num_nodes=2", "launcher.nodes is a key of launcher="),
        (
            "trainer.accumulate_grad_batches=4",
            "did you mean step.micro_batch_rows=ROWS, those of a pass: step.batch_size=128 / 4 passes / ",
        ),
    ],
)
def test_what_is_offered_fits_the_rest_of_the_config(composer: Composer, line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.compose(line.split())
    assert f" is no known key; {said}" in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "recipe=ctr_clicks lr=onecycle launcher=env strategy=pserver",
        "recipe=resnet50_imagenet lr=step launcher=static optimizer=lars observer=[]",
    ],
)
def test_each_key_that_is_offered_is_one_of_this_config(composer: Composer, line: str) -> None:
    config = composer.compose(line.split()).config
    known, offered = {*known_keys(config), *GROUPS}, 0
    for name in KEYS:
        said = meant_elsewhere(name, 1, config)
        if said.startswith("did you mean "):
            offered += 1
            texts = said.removeprefix("did you mean ").removesuffix("? ").split(", or ")
            assert {re.split("[=, ]", text)[0] for text in texts} <= known
        elif said:
            key, options = said.removesuffix("; ").split(" is a key of ")
            assert key not in known and options == options_with(key) != ""
    assert offered > 40


@pytest.mark.parametrize(
    ("name", "value", "batch", "said"),
    [
        ("limit_val_batches", 10, 32, "train.eval_rows=320, 10 x step.batch_size=32"),
        ("limit_val_batches", 0.5, 32, "train.eval_rows=ROWS, rows in place of batches"),
        ("per_device_train_batch_size", 8, 1, "step.batch_size=ROWS, those of all ranks together"),
        (
            "accumulate_grad_batches",
            "x",
            "x",
            "step.micro_batch_rows=ROWS, those of a pass: step.batch_size / passes ",
        ),
    ],
)
def test_counts_of_something_else_become_rows(name: str, value: Any, batch: Any, said: str) -> None:
    assert meant_elsewhere(name, value, {"step": {"batch_size": batch}}).startswith(f"did you mean {said}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "observer=[console] observer.tensorboard.path=x",
            "observer.tensorboard.path=x is a key of observer=tensorboard, which is not chosen; choose "
            "observer=[console,tensorboard] (observer.tensorboard was set on the command line)",
        ),
        (
            "observer=[] observer.jsonl.path=x",
            "which is not chosen; choose observer=[jsonl] (observer.jsonl was set on the command line)",
        ),
        (
            "observer.rare.path=x",
            "choose observer=[console,jsonl,tensorboard,rare] (observer.rare was set on the command line)",
        ),
        (
            "observer.tensorbord.path=x",
            "observer.tensorbord.path=x: tensorbord is no observer; did you mean tensorboard? choices: console, ",
        ),
        ("experiment=more", "choose observer=[console,jsonl,tensorboard,profile] (observer.profile was set in "),
        ("observer=[nameless]", "one: defaults: [schema/NAME@_here_, _self_] (observer.nameless was set in "),
        (
            "optimizer=nameless",
            "an optimizer file starts from one: defaults: [schema/NAME@_here_, _self_] (optimizer was ",
        ),
        ("recipe=nameless", "a recipe file starts from one: defaults: [schema/NAME@recipe, _self_]"),
    ],
)
def test_keys_of_an_observer_that_was_not_chosen(tmp_path: Path, line: str, said: str) -> None:
    for name, text in {
        "observer/rare": "# @package observer.rare\ndefaults: [schema/jsonl@_here_, _self_]\n",
        "observer/nameless": "# @package observer.nameless\npath: x\n",
        "optimizer/nameless": "momentum: 0.5\n",
        "recipe/nameless": "# @package _global_\nrecipe: {label_smoothing: 0.1}\n",
        "experiment/more": "# @package _global_\nobserver: {profile: {steps: 3}}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        Composer(str(tmp_path)).compose(line.split())
    assert said in str(caught.value)


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
    with pytest.raises(
        ConfigError, match=f"step.batch_size={re.escape(text)} is not of type int \\(step.batch_size was set on"
    ):
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
    with pytest.raises(
        ConfigError, match=r"is an address, and runs are kept in folders; .* \(run.dir was set on the command line\)"
    ):
        composer.compose([f"run.dir={address}"])
