"""The name of a node is that of the class whose keys and values it holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtf.config.compose import Composer
from dtf.core.errors import ConfigError
from tests.unit.test_config_files import BASE, with_files


def test_a_name_that_says_the_truth_stays(tmp_path: Path) -> None:
    files = {
        "strategy/same.yaml": f"{BASE}name: ddp\n",
        "strategy/whole.yaml": "name: zero1\nbucket_mb: 3\n",
        "strategy/later.yaml": "defaults: [schema/ddp@_here_, schema/zero1@_here_, _self_]\n",
        "experiment/e.yaml": "# @package _global_\ndefaults: [override /strategy: zero1]\nstrategy: {name: zero1}\n",
        "mine.yaml": "defaults: [config, _self_]\nseed: 4\n",
        "theirs.yaml": "defaults: [mine, _self_]\n",
    }
    composer = with_files(tmp_path, files, "theirs")
    for chosen, name in (("same", "ddp"), ("whole", "zero1"), ("later", "zero1")):
        strategy = composer.compose([f"strategy={chosen}"]).config["strategy"]
        assert (strategy["name"], strategy["shard_optimizer"]) == (name, name == "zero1")
    composed = composer.compose(["experiment=e"]).config
    assert (composed["strategy"]["name"], composed["seed"]) == ("zero1", 4)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("strategy=zero1 strategy.shard_optimizer=false", "ddp"),
        ("strategy.shard_optimizer=true", "zero1"),
        ("strategy.shard_optimizer=true strategy.bucket_mb=3", "zero1"),
        ("precision=bf16 precision.compute=fp32 precision.cast=module", "fp32"),
        ("precision=bf16 precision.cast=module", "bf16_master"),
        ("precision.compute=fp16 precision.loss_scale=65536", "fp32"),  # with casts of its own it is none of the others
        ("precision=fp16 precision.loss_scale=8", "fp16"),
        ("precision=fp16 precision.cast=module", "fp16"),
        ("precision=bf16_params precision.compute=fp32", "bf16_params"),  # sense is checked later, with better words
        ("checkpoint.every_steps=0", "off"),
        ("checkpoint=off checkpoint.every_steps=5", "every"),
        ("checkpoint=off checkpoint.keep_last=9", "off"),
    ],
)
def test_the_name_of_a_variant_is_that_of_its_values(line: str, name: str) -> None:
    composed, group = Composer().compose(line.split()), re.split("[.=]", line)[0]
    assert composed.config[group]["name"] == composed.tree[group]["name"] == name
    again = Composer().compose([f"{group}={name}", *line.split()[(1 if f"{group}=" in line else 0) :]])
    assert again.config[group] == composed.config[group]


def test_a_name_on_the_command_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy.name says which class the other keys belong to"):
        Composer().compose(["strategy={name: zero1}"])
