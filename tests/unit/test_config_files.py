"""Faults of config files themselves: their defaults lists, where their keys stand, and how numbers are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtf.config import hydra_sources
from dtf.config.compose import Composer
from dtf.config.describe import help_text
from dtf.config.messages import parse
from dtf.config.settings import load_parts
from dtf.config.yaml_text import parse_yaml
from dtf.core.errors import ConfigError

BASE = "defaults: [schema/ddp@_here_, _self_]\n"
GLOBAL = "# @package _global_\n"
SHAPES = f"{GLOBAL}defaults: [schema/resnet_shapes@recipe, _self_"
load_parts([])


def with_files(folder: Path, files: dict[str, str], config_name: str | None = None) -> Composer:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return Composer(str(folder), config_name)


@pytest.mark.parametrize(
    ("files", "chosen", "message"),
    [
        (
            {"strategy/a.yaml": "defaults: [a, _self_]\n"},
            "strategy=a",
            "{}/strategy/a.yaml: its defaults list leads back to the file itself (strategy/a); take that entry out",
        ),
        (
            {"strategy/a.yaml": "defaults: [b@_here_]\n", "strategy/b.yaml": "defaults: [/strategy/a@_here_]\n"},
            "strategy=a",
            "{}/strategy/b.yaml: its defaults list leads back to the file itself (strategy/b), by way of strategy/a; ",
        ),
        (
            {"strategy/a.yaml": "defaults: schema/ddp\n"},
            "strategy=a",
            "{}/strategy/a.yaml: defaults=schema/ddp must be a list, such as defaults: [schema/NAME@_here_, _self_]",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\ndefaults: [override /checkpoint: off]\n"},
            "experiment=a",
            "{}/experiment/a.yaml: false in its defaults list is no name of an option; quote a name that YAML reads as "
            "something else, such as 'off'",
        ),
        (
            {"strategy/a.yaml": "defaults: [schema/ddp, _self_]\n"},
            "strategy=a",
            "{}/strategy/a.yaml: schema/ddp in its defaults list puts the keys into strategy.schema; write "
            "schema/ddp@_here_",
        ),
        (
            {"strategy/a.yaml": f"{BASE}name: zero1\n"},
            "strategy=a",
            "strategy.name=zero1 is another class than ddp, from which the node starts; leave the name out, or write "
            "schema/zero1@_here_ into the defaults list "
            "(strategy.name was set in {}/strategy/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nstrategy: {name: zero1}\n"},
            "experiment=a",
            "strategy.name=zero1 is another class than ddp, from which the node starts; leave the name out, or write "
            "override /strategy: zero1 into the defaults list "
            "(strategy.name was set in {}/experiment/a.yaml)",
        ),
        (
            {"strategy/a.yaml": "name: off\n"},
            "strategy=a",
            "strategy.name=false names no registered class; YAML reads off, no, on and yes without quotes as false and "
            "true; quote it: name: 'off' "
            "(strategy.name was set in {}/strategy/a.yaml)",
        ),
        (
            {"strategy/a.yaml": "bucket_mb: 3\n"},
            "strategy=a",
            "strategy.name=null names no registered class; a strategy file starts from one: defaults: "
            "[schema/NAME@_here_, _self_] "
            "(strategy was set in {}/strategy/a.yaml)",
        ),
        (
            {"observer/a.yaml": "defaults: [schema/console@_here_, _self_]\nlive: false\n"},
            "observer=[a,jsonl]",
            "{}/observer/a.yaml puts its keys beside the names of observers; begin it with the line # @package "
            "observer.a",
        ),
        (
            {"strategy/a.yaml": f"{BASE}powersgd_rank: 010\n"},
            "strategy=a",
            "strategy.powersgd_rank=010 is not of type int; numbers are decimal: write 10, or 8 where it is octal "
            "(strategy.powersgd_rank was set in {}/strategy/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nrun: {name: '${'}\n"},
            "experiment=a",
            "{}/experiment/a.yaml: run.name has an interpolation that cannot be read; write ${{KEY}}",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nstep: {batch_size: 1e3}\n"},
            "experiment=a",
            "step.batch_size=1000.0 is not of type int; write it without a point or exponent: 1000 "
            "(step.batch_size was set in {}/experiment/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\ntrain: {steps: 1:30}\n"},
            "experiment=a",
            "train.steps=1:30 is not of type int | null; numbers are decimal: write 90 "
            "(train.steps was set in {}/experiment/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nlr: {peak: 0x10}\n"},
            "experiment=a",
            "lr.peak=0x10 is not of type float; numbers are decimal: write 16 "
            "(lr.peak was set in {}/experiment/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nrun: {name: 1_000}\n"},
            "experiment=a",
            "run.name=1_000 is the number 1000; in quotes it is text: '1_000', on the command line "
            "'run.name=\"1_000\"' "
            "(run.name was set in {}/experiment/a.yaml)",
        ),
        (
            {"experiment/a.yaml": "# @package _global_\nrecipe: {model.arch: resnet20}\n"},
            "experiment=a",
            "recipe.model.arch=resnet20 is no known key; a dot in a name leads nowhere, write model: "
            "{{arch: resnet20}} "
            "(recipe.model.arch was set in {}/experiment/a.yaml)",
        ),
    ],
)
def test_a_fault_names_its_file_and_the_remedy(
    tmp_path: Path, files: dict[str, str], chosen: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        with_files(tmp_path, files).compose([chosen])
    assert str(caught.value).startswith(message.format(tmp_path))


def test_a_number_is_text_where_it_reads_as_it_was_written(tmp_path: Path) -> None:
    composer = with_files(
        tmp_path, {"experiment/a.yaml": f"{GLOBAL}run: {{name: 7}}\nlauncher: {{env: {{OMP_PLACES: -5}}}}\n"}
    )
    config = composer.compose(["experiment=a", "launcher.env={B: 12}", "run.dir=${seed}"]).config
    assert (config["run"]["name"], config["run"]["dir"], config["launcher"]["env"]) == (
        "7",
        "0",
        {"OMP_PLACES": "-5", "B": "12"},
    )
    for word, said in (("run.name=+7", "'+7'"), ("launcher.env={B: 1_2}", "'1_2'"), ("run.name=-0", "'-0'")):
        with pytest.raises(ConfigError, match=f"in quotes it is text: {re.escape(said)}, on the command line"):
            composer.compose([word])


NUMBERS = "0 00 010 -010 +3 0x10 0b11 0o17 1:30 1:30.5 1_000 1__0 1_ 0_1 -0 1e3 1E-3 1e+03 1.5 1. .5 -.5e3 01.5 1_0.5_0"


@pytest.mark.parametrize("text", NUMBERS.split())
def test_a_file_has_the_numbers_of_the_command_line(text: str) -> None:
    from_file, typed = parse_yaml(text), parse([f"x={text}"])[0].value()
    assert (type(from_file), from_file) == (type(typed), typed)


def test_the_files_of_a_package_are_read_as_those_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "__init__.py": "",
        "strategy/quiet.yaml": f"{BASE}bucket_mb: 7\n",
        "strategy/typo.yaml": f"{BASE}bucket: 7\n",
        "strategy/octal.yaml": f"{BASE}powersgd_rank: 010\n",
        "experiment/nope.yaml": f"{GLOBAL}defaults: [override /strategy: ddpp]\n",
        "strategy/ddp.yaml": f"{BASE}bucket_mb: 8\n",
    }
    with_files(tmp_path / "front_options", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    composer, path = Composer(), "hydra.searchpath=[pkg://front_options]"
    assert composer.compose([path, "strategy=quiet"]).config["strategy"]["bucket_mb"] == 7.0
    for word, file in (
        ("strategy=typo", "strategy/typo"),
        ("strategy=octal", "strategy/octal"),
        ("experiment=nope", "experiment/nope"),
        ("strategy=ddp", "strategy/ddp"),
    ):
        with pytest.raises(ConfigError, match=f"{tmp_path}/front_options/{file}.yaml"):
            composer.compose([path, word])
    with pytest.raises(ConfigError, match="hydra.searchpath=front_missing is no folder or package that can be found"):
        composer.compose(["hydra.searchpath=[pkg://front_missing]"])


def test_an_interpolation_waits_for_the_run_that_uses_it(tmp_path: Path) -> None:
    name = "sparse/adagrad.yaml"
    files = {name: "defaults: [schema/adagrad@_here_, _self_]\neps: ${oc.env:DTF_NOT_SET,1e-3}\n"}
    composer = with_files(tmp_path, files)
    composer.compose([]).check()  # a recipe without tables
    with pytest.raises(ConfigError, match="sparse says how rows of sparse tables learn"):
        composer.compose(["sparse.initial_accumulator=0.5"]).check()
    assert composer.compose(["recipe=ctr_clicks_sparse"]).config["sparse"]["eps"] == 1e-3


def test_help_shows_what_the_files_of_the_root_say(tmp_path: Path) -> None:
    files = {
        "inner.yaml": "defaults: [config, _self_]\nseed: 6\nstep: {clip_norm: 2.5}\n",
        "root.yaml": "defaults: [inner, _self_]\nseed: 7\n",
    }
    said = help_text(with_files(tmp_path, files, "root"), 100)
    assert "  seed=7 " in said and "  step.clip_norm=2.5 " in said and "  step.batch_size=128 " in said


def test_own_files_are_read_once_and_those_of_the_user_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composer = with_files(tmp_path, {"experiment/a.yaml": f"{GLOBAL}seed: 1\n"})
    first = composer.compose(["experiment=a"])
    read: list[str] = []
    monkeypatch.setattr(hydra_sources, "parse_yaml", lambda text: read.append(text) or parse_yaml(text))
    first.tree.lr.peak = 7.0  # what one run makes of its config is not the next one's
    (tmp_path / "experiment" / "a.yaml").write_text(f"{GLOBAL}seed: 2\n")
    again = composer.compose(["experiment=a"])
    assert again.config == {**first.config, "seed": 2} and again.tree.lr.peak == first.config["lr"]["peak"]
    assert read == [f"{GLOBAL}seed: 2\n"] and again.reads.keys() == first.reads.keys()
    assert Composer().compose(["recipe=resnet_shapes", "lr.peak=0.5"]).config["lr"]["peak"] == 0.5
    assert composer.compose(["experiment=a"]).config == again.config


def test_an_entry_of_a_defaults_list_can_name_the_choice_of_another_group(tmp_path: Path) -> None:
    files = {
        "lr/fp16.yaml": "defaults: [schema/constant@_here_, _self_]\n",
        "experiment/a.yaml": f"{GLOBAL}defaults: [{{override /precision: '${{lr}}'}}, _self_]\n",
    }
    composed = with_files(tmp_path, files).compose(["experiment=a", "lr=fp16"])
    assert composed.config["precision"]["name"] == "fp16"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "hydra: {job: {chdir: [1]}}\n",
            "ValidationError raised while composing config: Value '[1]' is not a valid bool",
        ),
        ("hydra: {jobb: 3}\n", "ConfigKeyError raised while composing config: Key 'jobb' not in 'HydraConf'"),
        ("1: 3\n", "1=3 is no known key; "),
    ],
)
def test_what_cannot_be_merged_names_its_file(tmp_path: Path, body: str, message: str) -> None:
    composer = with_files(tmp_path, {"experiment/a.yaml": f"{GLOBAL}seed: 1\n{body}"})
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        composer.compose(["experiment=a"])
    assert str(tmp_path / "experiment" / "a.yaml") in str(caught.value)
