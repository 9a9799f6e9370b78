"""The name of a node is that of the class whose keys and values it holds."""

from __future__ import annotations

import re
import shlex
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
    ("line", "message"),
    [
        ("strategy=zero1 strategy.shard_optimizer=false", "makes strategy=ddp of strategy=zero1; choose strategy=ddp"),
        ("strategy.shard_optimizer=true", "makes strategy=zero1 of strategy=ddp; choose strategy=zero1"),
        ("precision=bf16 precision.compute=fp32 precision.cast=module", "makes precision=fp32 of precision=bf16"),
        (
            "precision=bf16 precision.cast=module",
            "precision.cast=module makes precision=bf16_master of precision=bf16; choose precision=bf16_master",
        ),
        ("precision.compute=bf16", "makes precision=bf16_master of precision=fp32"),
        (
            "precision.compute=fp16 precision.cast=autocast precision.loss_scale=8",
            "makes precision=fp16 of precision=fp32; choose precision=fp16 and precision.loss_scale=8",
        ),
        ("checkpoint.every_steps=0", "makes checkpoint=off of checkpoint=every; choose checkpoint=off"),
        (
            "checkpoint=off checkpoint.every_steps=5",
            "checkpoint.every_steps=5 makes checkpoint=every of checkpoint=off; choose checkpoint=every and "
            "checkpoint.every_steps=5",
        ),
        ("'strategy={name: zero1}'", "strategy.name says which class the other keys belong to"),
    ],
)
def test_the_name_of_a_variant_is_that_of_its_values(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(message)}.*; set on the command line"):
        Composer().compose(shlex.split(line))


@pytest.mark.parametrize(
    "line",
    [
        "precision=fp16 precision.loss_scale=8",
        "precision=fp16 precision.cast=module",
        "precision=bf16_params precision.compute=fp32",  # sense is checked later, with better words
        "checkpoint=off checkpoint.keep_last=9",
        "checkpoint=every checkpoint.every_steps=5",
        "strategy=zero1 strategy.bucket_mb=3",
    ],
)
def test_what_is_nearest_to_a_variant_has_its_name(line: str) -> None:
    (group, name) = line.split()[0].split("=")
    assert Composer().compose(line.split()).config[group]["name"] == name
