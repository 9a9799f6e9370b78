"""Faults of defaults lists and package lines, which Hydra follows without a word, and what files may start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtf.core.errors import ConfigError
from tests.unit.test_config_files import BASE, GLOBAL, SHAPES, with_files


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        # a choice that Hydra does not make, or makes twice
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override /experiment: b]\n",
            ": experiment: b has no effect here, as an experiment comes after all other options; choose it on the "
            "command line or in a root of yours, or start from it: defaults: [b, _self_]",
        ),
        ("experiment/a", f"{GLOBAL}defaults: [experiment: b]\n", ": experiment: b has no effect here"),
        ("experiment/a", f"{GLOBAL}defaults: [/experiment: b]\n", ": experiment: b has no effect here"),
        ("recipe/a", f"{SHAPES}, override /experiment: b]\n", ": experiment: b has no effect here"),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [/strategy: zero1, _self_]\n",
            ": /strategy: zero1 in its defaults list is a second choice of strategy; write override /strategy: zero1 "
            "at the end of the list",
        ),
        ("experiment/a", f"{GLOBAL}defaults: [/strategy: ddp]\n", ": /strategy: ddp in its defaults list is a second"),
        (
            "recipe/a",
            f"{SHAPES}, ../precision/fp64@precision]\n",
            ": ../precision/fp64@precision in its defaults list is a second choice of precision; write override "
            "/precision: fp64 at the end of the list",
        ),
        (
            "strategy/a",
            "defaults: [schema/ddp@_here_, /precision/fp64@_global_.precision, _self_]\n",
            ": /precision/fp64@_global_.precision in its defaults list is a second choice of precision; leave it out, "
            "and choose precision=fp64 in an experiment or on the command line",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [/precision/schema@precision: fp64]\n",
            ": /precision/schema@precision: fp64 in its defaults list is a second choice of precision",
        ),
        ("recipe/a", f"{SHAPES}, /experiment/b]\n", ": experiment: b has no effect here"),
        (
            "strategy/a",
            "defaults: [../strategy/ddp, _self_]\n",
            ": ../strategy/ddp in its defaults list: a path has no . and no ..; write /strategy/ddp",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override /lr: step, override /lr: cosine]\n",
            ": override /lr stands twice in its defaults list, and only the first counts; leave one",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [optional strategy: fsdp, _self_]\n",
            ": optional strategy: fsdp in its defaults list: optional passes over an option that is not there without "
            "a word; leave it out: strategy: fsdp",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, optional override /precison: bf16]\n",
            ": optional override /precison: bf16 in its defaults list: optional passes over",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [/config, _self_]\n",
            ": /config in its defaults list leads back to the file itself, as config is the root that chooses it; ",
        ),
        ("experiment/a", f"{GLOBAL}defaults: [b, b, _self_]\n", ": b stands twice in its defaults list; leave one"),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override /strategy@foo: zero1]\n",
            ": override /strategy in its defaults list: a group has one place; leave @foo out",
        ),
        (
            "experiment/a",
            "# @package: _global_\nseed: 3\n",
            ", line 1: # @package: _global_ is not read so; write # @package _global_",
        ),
        # keys that would not count
        (
            "strategy/a",
            "defaults: [_self_, schema/ddp@_here_]\nbucket_mb: 3\n",
            ": schema/ddp@_here_ comes after _self_ in its defaults list, so that none of the file's own keys would "
            "count; _self_ goes after it: defaults: [schema/ddp@_here_, _self_]",
        ),
        ("strategy/a", "defaults: [_self_, ddp]\nbucket_mb: 3\n", ": ddp comes after _self_ in its defaults list"),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [strategy: zero1, _self_]\n",
            "experiment=strategy/zero1 is no option; write override /strategy: zero1 (experiment was set in ",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override strategy: zero1]\n",
            ": override strategy in its defaults list is a group below experiment; write override /strategy",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override /strategi: zero1]\n",
            ": override /strategi in its defaults list names no group; did you mean strategy?",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [_self_, override /strategy: my/own]\n",
            "strategy=my/own is no option; choices: ",
        ),
        (
            "strategy/a",
            f"{GLOBAL}defaults: [schema/ddp@strategy, _self_, override /recipe: resnet_cifar10]\n",
            ": override /recipe in its defaults list comes too late, recipe is chosen before this file is read; choose "
            "it in an experiment or on the command line",
        ),
        (
            "strategy/a",
            "defaults: [schema/ddp@_here_, _self_, override /lr: step]\n",
            ": override /lr in its defaults list reaches beyond the file's own group; begin the file with the line # "
            "@package _global_",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [override /strategy: dp, b: c]\n",
            ": Override 'strategy : dp' is defined before",
        ),
        (
            "experiment/a",
            f"{GLOBAL}observer: [console]\n",
            ": observer=[console] is no group of keys; to choose an option, write override /observer: [console] at the "
            "end of its defaults list",
        ),
        (
            "recipe/a",
            f"{SHAPES}]\nlr: step\n",
            ": lr=step is no group of keys; to choose an option, write override /lr:",
        ),
        ("experiment/a", f"{GLOBAL}experiment: b\n", ": experiment: b has no effect here"),
        # lists that are none
        (
            "strategy/a",
            "defaults: null\n",
            ": defaults=null must be a list, such as defaults: [schema/NAME@_here_, _self_]",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults:\nseed: 3\n",
            ": defaults=null must be a list, such as defaults: [_self_, over",
        ),
        (
            "strategy/a",
            "defaults: [optional schema/nope@_here_, _self_]\n",
            ": optional schema/nope@_here_ in its defaults list: optional passes over an option that is not there "
            "without a word; leave it out: schema/nope@_here_",
        ),
        (
            "experiment/a",
            f"{GLOBAL}defaults: [override /lr step]\n",
            ": override /lr step in its defaults list: override goes before GROUP: OPTION; write override /GROUP: NAME",
        ),
        # package lines
        (
            "experiment/a",
            "seed: 3\n",
            " puts its keys into a node experiment of its own; begin it with the line # @package _global_",
        ),
        (
            "recipe/a",
            "defaults: [schema/resnet_shapes@recipe, _self_]\n",
            " puts its keys into a node recipe of its own; begin it with the line # @package _global_",
        ),
        (
            "experiment/a",
            f"# mine\n{GLOBAL}seed: 3\n",
            ", line 2: # @package _global_ is read only above all other lines; move it up",
        ),
        (
            "strategy/a",
            f"# @package optimizer\n{BASE}",
            ": # @package optimizer puts the keys of strategy=a elsewhere; leave the line out, or write # @package ",
        ),
        (
            "observer/a",
            "# @package observer\ndefaults: [schema/console@_here_]\n",
            " puts its keys beside the names of observers; begin it with",
        ),
    ],
)
def test_what_hydra_takes_otherwise_is_refused_by_its_file(tmp_path: Path, file: str, text: str, message: str) -> None:
    files = {f"{file}.yaml": text, "experiment/b.yaml": f"{GLOBAL}seed: 4\n"}
    group, name = file.split("/")
    with pytest.raises(ConfigError) as caught:
        with_files(tmp_path, files).compose([f"{group}=[{name}]" if group == "observer" else f"{group}={name}"])
    said = str(caught.value)
    assert said.startswith(message if message[0].isalpha() else f"{tmp_path}/{file}.yaml{message}")
    assert f"{tmp_path}/{file}.yaml" in said


def test_an_experiment_starts_from_another(tmp_path: Path) -> None:
    files = {
        "experiment/a.yaml": f"{GLOBAL}defaults: [b, _self_]\nseed: 3\n",
        "experiment/b.yaml": f"{GLOBAL}defaults: [_self_, override /strategy: dp]\nseed: 4\ntrain: {{steps: 5}}\n",
        "root.yaml": "defaults: [config, _self_, override /experiment: a]\n",
    }
    config = with_files(tmp_path, files, "root").compose([]).config
    assert (config["seed"], config["train"]["steps"], config["strategy"]["name"]) == (3, 5, "dp")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("strategy: ${nope}", "strategy"),
        ("strategy: ${strategy}", "strategy"),
        ("lr: ${optimizer.nope}", "lr"),
        ("job: ${nope}", "job"),
        ("observer: ${nope}", "observer"),
        ('observer: {console: "${nope}"}', "observer.console"),
    ],
)
def test_an_interpolation_for_a_whole_part_that_leads_nowhere_is_named(tmp_path: Path, line: str, key: str) -> None:
    composer = with_files(tmp_path, {"experiment/a.yaml": f"{GLOBAL}{line}\n"})
    with pytest.raises(ConfigError, match=rf"^{key}: .* \(\S+ was set in {tmp_path}/experiment/a.yaml\)$"):
        composer.compose(["experiment=a"])


def test_a_key_that_a_file_makes_mandatory_is_asked_for(tmp_path: Path) -> None:
    files = {"experiment/a.yaml": f"{GLOBAL}seed: ???\n", "strategy/a.yaml": f"{BASE}bucket_mb: ???\n"}
    composer = with_files(tmp_path, files)
    for word, key in (("experiment=a", "seed"), ("strategy=a", "strategy.bucket_mb")):
        with pytest.raises(
            ConfigError, match=rf"^{key}=\?\?\? is mandatory; give {key}=VALUE \({key} was set in {tmp_path}"
        ):
            composer.compose([word])
    assert composer.compose(["experiment=a", "seed=3"]).config["seed"] == 3


def test_a_part_is_mixed_in_after_the_base(tmp_path: Path) -> None:
    files = {
        "strategy/a.yaml": "defaults: [schema/ddp@_here_, _self_, small]\nbucket_mb: 3\nstatic_graph: true\n",
        "strategy/small.yaml": "bucket_mb: 2\n",
        "strategy/b.yaml": "defaults: [schema@_here_: ddp, /strategy/small@_here_, _self_]\n",
        "experiment/a.yaml": f"{GLOBAL}defaults: [_self_, b]\nseed: 3\ntrain: {{steps: 5}}\n",
        "experiment/b.yaml": f"{GLOBAL}seed: 4\n",
        "root.yaml": "defaults: [config, _self_]\n",
    }
    composer = with_files(tmp_path, files, "root")
    for chosen in ("a", "b"):
        config = composer.compose([f"strategy={chosen}", "experiment=a"]).config
        assert (config["strategy"]["bucket_mb"], config["seed"], config["train"]["steps"]) == (2, 4, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "defaults: [schema/root, job: train]\n",
            "its defaults list has no `config`, dtf's own root, from which a root of yours starts; begin it with",
        ),
        ("seed: 3\n", "its defaults list has no `config`"),
        ("defaults: [config, config, _self_]\n", "config stands twice in its defaults list; leave one"),
        ("defaults: [config]\nseed: 3\n", "its defaults list has no _self_, the place of the file's own keys"),
        ("defaults: [root, config, _self_]\n", "its defaults list leads back to the file itself (root)"),
        ("defaults: config\n", "defaults=config must be a list, such as defaults: [config, _self_]"),
        (
            "defaults: [config, experiment: relay, _self_]\n",
            "experiment: relay in its defaults list is a second choice of",
        ),
        (
            "defaults: [config, checkpoint/off, _self_]\n",
            "checkpoint/off in its defaults list is a second choice of checkpoint; write override /checkpoint: off at",
        ),
        (
            "defaults: [config, experiment/relay, _self_]\n",
            "experiment/relay in its defaults list is a second choice of experiment; write override /experiment: relay",
        ),
        ("defaults: [_self_, config]\nseed: 3\n", "config comes after _self_ in its defaults list, so that none of"),
    ],
)
def test_a_root_of_ones_own_starts_from_that_of_dtf(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        with_files(tmp_path, {"root.yaml": text}, "root").compose([])
    assert str(caught.value).startswith(f"{tmp_path}/root.yaml: {message}")


def test_the_keys_of_a_root_of_ones_own_win_over_the_experiment(tmp_path: Path) -> None:
    files = {
        "experiment/a.yaml": f"{GLOBAL}seed: 3\n",
        "experiment/b.yaml": f"{GLOBAL}seed: 4\n",
        "root.yaml": "defaults: [config, _self_, override /experiment: a]\ntrain: {epochs: 7}\n",
        "hard.yaml": "defaults: [root, _self_]\nseed: 5\n",
    }
    assert with_files(tmp_path, files, "root").compose(["experiment=b"]).config["seed"] == 4
    assert with_files(tmp_path, files, "hard").compose(["experiment=b"]).config["seed"] == 5
