"""job=describe: everything that exists, for people and for programs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dtf.api.registry import registered
from dtf.api.schema import keys
from dtf.cli.main import main
from dtf.config.compose import Composer
from dtf.config.describe import as_text, catalogue
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError, Exit

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def composer() -> Composer:
    composer = Composer()
    composer.compose(["plugins=[tests.support.own_parts]"])
    return composer


@pytest.fixture(scope="module")
def everything(composer: Composer) -> dict[str, Any]:
    return catalogue(composer)


def test_every_option_key_and_help_is_there(composer: Composer, everything: dict[str, Any]) -> None:
    found = everything
    assert [key["key"] for key in found["root"]][:2] == ["seed", "plugins"]
    for group in GROUPS:
        options = found["groups"][group]["options"]
        assert set(options) == set(composer.options(group))
        for name, cls in registered(group).items():
            prefix = f"observer.{name}." if group == "observer" else f"{group}."
            for key in keys(cls):
                assert any(
                    entry["key"] == prefix + key.name or entry["key"].startswith(f"{prefix}{key.name}.")
                    for entry in options[name]["keys"]
                )
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_explains_itself(everything: dict[str, Any], group: str) -> None:
    for name, option in everything["groups"][group]["options"].items():
        assert option["help"], f"{group}={name} has no docstring and no comment"
        for key in option["keys"]:
            assert key["help"], f"{key['key']} has no doc"
            assert not key["type"].startswith("<"), key


@pytest.mark.parametrize("width", [79, 119])
def test_text_fits_a_terminal(everything: dict[str, Any], width: int) -> None:
    lines = as_text(everything, width).splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []
    assert "  strategy.bucket_mb=25.0 MiB   (float, more than 0 and at most 1000000)" in lines


def test_narrowed(composer: Composer) -> None:
    found = catalogue(composer, "strategy", "front_mine")
    assert list(found) == ["groups"]
    option = found["groups"]["strategy"]["options"]["front_mine"]
    assert option["help"] == "A strategy of the user's own."
    assert {
        "key": "strategy.extra",
        "type": "int",
        "range": "",
        "default": 3,
        "unit": "",
        "help": "a key that dp has not",
    } in option["keys"]


def test_nested_keys_types_and_mandatory_ones(composer: Composer) -> None:
    rows = {
        key["key"]: key
        for key in catalogue(composer, "recipe", "front_toy")["groups"]["recipe"]["options"]["front_toy"]["keys"]
    }
    types = {name.removeprefix("recipe."): (row["type"], row["default"]) for name, row in rows.items()}
    assert types == {
        "data.root": ("text", "???"),
        "data.size": ("int", 4),
        "mood": ("calm | angry", "calm"),
        "kind": ("a | b", "a"),
        "limit": ("float | null", None),
        "either": ("int | text", "auto"),
        "names": ("mapping of int", {}),
        "steps": ("list of float", [0.5, 1.0]),
    }
    assert rows["recipe.data.size"]["unit"] == "rows"


def test_files_show_their_values_and_what_else_they_set(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "mine.yaml").write_text(
        "# @package _global_\n# A recipe of mine,\n# in two lines.\ndefaults:\n  - schema/resnet_shapes@recipe\n  - "
        "_self_\n  - override /lr: step\n"
        "recipe: {data: {pixels: 99}}\nstep: {batch_size: 7}\n"
    )
    option = catalogue(Composer(str(tmp_path)), "recipe", "mine")["groups"]["recipe"]["options"]["mine"]
    assert option["help"] == "A recipe of mine, in two lines."
    assert next(key["default"] for key in option["keys"] if key["key"] == "recipe.data.pixels") == 99
    assert option["sets"] == {"lr": "step", "step.batch_size": 7}


def test_interpolations_are_shown_as_they_are_written(tmp_path: Path) -> None:
    files = {
        "experiment/e": "# @package _global_\nplugins: ${oc.env:DTF_NOT_SET}\nseed: ${oc.env:DTF_NOT_SET}\n",
        "optimizer/mine": "defaults: [schema/adam@_here_, _self_]\neps: ${oc.env:DTF_NOT_SET}\n",
        "sparse/adagrad": "defaults: [schema/adagrad@_here_, _self_]\neps: ${oc.env:DTF_NOT_SET}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text(text)
    found = catalogue(
        Composer(str(tmp_path)), chosen={"experiment": ["e"], "optimizer": ["mine"], "sparse": ["adagrad"]}
    )
    options = {name: next(iter(entry["options"].values())) for name, entry in found["groups"].items()}
    assert options["experiment"]["sets"] == dict.fromkeys(("plugins", "seed"), "${oc.env:DTF_NOT_SET}")
    for key in ("optimizer.eps", "sparse.eps"):
        shown = {entry["key"]: entry["default"] for entry in options[key.split(".")[0]]["keys"]}
        assert shown.pop(key) == "${oc.env:DTF_NOT_SET}"
        assert all("$" not in str(value) for value in shown.values())


def test_unknown_names_are_refused(composer: Composer) -> None:
    with pytest.raises(ConfigError, match="job.group=strategi is no group; did you mean strategy"):
        catalogue(composer, "strategi")
    with pytest.raises(ConfigError, match="job.option=ddpp is no option of strategy; did you mean ddp"):
        catalogue(composer, "strategy", "ddpp")
    with pytest.raises(ConfigError, match="needs its group"):
        catalogue(composer, "", "ddp")


def test_job(capsys: Capture) -> None:
    assert main(["job=describe", "job.group=lr", "job.format=json"]) == Exit.OK
    assert set(json.loads(capsys.readouterr().out)["groups"]["lr"]["options"]) >= {"constant", "cosine"}
    assert main(["job=describe", "job.group=lr", "job.option=cosine"]) == Exit.OK
    assert capsys.readouterr().out.startswith("lr=cosine\n")


@pytest.mark.parametrize(
    ("given", "described"),
    [
        (["recipe=resnet_cifar10"], ["recipe=resnet_cifar10"]),
        (
            ["recipe=resnet_cifar10", "observer=[console,jsonl]"],
            ["recipe=resnet_cifar10", "observer=[console]", "observer=[jsonl]"],
        ),
        (["experiment=frappe_fm"], ["experiment=frappe_fm"]),
        (["recipe=resnet_cifar10", "job.group=recipe"], ["recipe=resnet_cifar10"]),
        (["recipe=resnet_cifar10", "job.group=recipe", "job.option=resnet_photos"], ["recipe=resnet_photos"]),
        (["recipe=resnet_cifar10", "job.group=lr", "job.option=step"], ["lr=step"]),
        (["recipe=resnet_cifar10", "lr.peak=0.2", "job.group=lr", "lr=cosine"], ["lr=cosine"]),
    ],
)
def test_what_the_command_line_chooses_is_described_alone(
    given: list[str], described: list[str], capsys: Capture
) -> None:
    assert main(["job=describe", *given]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if re.match(r"\w+=", line)] == described
    assert "root keys" not in lines
