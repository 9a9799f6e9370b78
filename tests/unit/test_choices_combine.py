"""Every recipe goes with every option of every other group, or a rule of RULES says why it cannot."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtf.api.registry import registered
from dtf.api.schema import keys, unset
from dtf.config.compose import Composed, Composer, compose
from dtf.config.hydra_sources import CONF
from dtf.config.option_files import is_class_file
from dtf.config.settings import EXPERIMENT, GROUPS
from dtf.core.errors import ConfigError

RULES = {
    "no sparse tables": (
        r"sparse says how rows of sparse tables learn, and \w+ has none",
        "a choice of sparse= would have no effect",
    ),
    "no classes": (r"sampler=weighted balances classes, and the rows of", "clicks have no classes to balance"),
    "one view": (r"sampler=repeated shows rows several times", "generated and logged clicks are not augmented"),
    "no CUDA": (r"precision.tf32=true needs CUDA", "tf32 is arithmetic of a GPU"),
    "no rank": (r"launcher=env finds no rank in the environment", "it is started by another program"),
}
"""Name of a rule -> what its refusal says, and why no choice can be made to fit."""

GIVEN = {
    "launcher.node_rank": 0,
    "launcher.address": "127.0.0.1:29500",
    "launcher.rendezvous": "127.0.0.1:29500",
}
"""Values of mandatory keys; 1 for all others."""


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


def own(group: str, name: str) -> bool:
    """Whether it comes with dtf: tests register options too."""
    known = registered(group).get(name)
    return known is None or known.__module__.startswith("dtf.")


def choices(composer: Composer) -> Iterator[list[str]]:
    """Words that choose an option of a group, with each mode of a strategy that has modes."""
    for group in [*GROUPS, EXPERIMENT]:
        for name in composer.options(group):
            if group == "recipe" or not own(group, name):
                continue
            word = f"{group}=[{name}]" if group == "observer" else f"{group}={name}"
            yield [word]
            for key in keys(registered(group)[name]) if group == "strategy" and name in registered(group) else ():
                if key.name == "mode":
                    yield from ([word, f"strategy.mode={mode.value}"] for mode in key.hint)


def recipes(composer: Composer) -> list[list[str]]:
    """Words that choose a recipe; with a length for a class that no file advises on."""
    names = [name for name in composer.options("recipe") if own("recipe", name)]
    return [[f"recipe={name}", *(["train.epochs=1"] if is_bare(composer, name) else [])] for name in names]


def is_bare(composer: Composer, name: str) -> bool:
    """Whether a recipe's file has the keys of its class and nothing else."""
    read = composer.read("recipe", name)
    return read is None or is_class_file("recipe", name, read.file, CONF)


def refusal(composer: Composer, words: list[str]) -> str:
    """The name of the rule that refuses them; empty where they go together. ConfigError for any other refusal."""
    try:
        composed = composer.compose(words)
        missing = unset(composed.config)
        if missing:
            composed = composer.compose([*words, *(f"{key}={GIVEN.get(key, 1)}" for key in missing)])
        if composed.settings.job.trains:
            composed.check(data=False)
    except ConfigError as error:
        named = [name for name, (text, _) in RULES.items() if re.match(text, str(error))]
        if not named:
            raise AssertionError(f"{' '.join(words)}: {error}") from error
        return named[0]
    return ""


def test_a_recipe_goes_with_options_of_other_groups(composer: Composer) -> None:
    """Each option with one recipe, each recipe with several options."""
    some, options = recipes(composer), list(choices(composer))
    for number in range(max(len(some), len(options))):
        refusal(composer, [*some[number % len(some)], *options[number % len(options)]])


@pytest.mark.slow
def test_every_recipe_goes_with_every_option_of_other_groups(composer: Composer) -> None:
    """All pairs: python -m pytest -n 0 -s -m slow tests/unit/test_choices_combine.py"""
    refused = [refusal(composer, [*recipe, *words]) for recipe in recipes(composer) for words in choices(composer)]
    counts = {name: refused.count(name) for name in RULES}
    print(f"\n{len(refused)} pairs, {refused.count('')} go together; refused: {counts}")
    unused = {name for name, count in counts.items() if not count} - {"no CUDA"}
    assert not unused, "a rule that refuses nothing is to be taken out"


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("recipe=ctr_clicks_sparse sparse=ftrl", ["sparse.lr_factor=10 of recipe=ctr_clicks_sparse is left out: "]),
        ("recipe=deepfm_criteo sparse=ftrl", ["sparse.lr_factor=20 of recipe=deepfm_criteo is left out: sparse=ftrl"]),
        ("recipe=resnet50_imagenet lr=onecycle", ["lr.warmup=25000 of recipe=resnet50_imagenet is left out: lr=one"]),
        ("recipe=resnet50_imagenet lr=step", []),
        ("recipe=ctr_clicks_sparse strategy=pserver strategy.mode=geo", []),
    ],
)
def test_advice_for_another_option_is_left_out_and_said(composer: Composer, line: str, notes: list[str]) -> None:
    assert not refusal(composer, line.split())
    composed = composer.compose(line.split())
    assert len(composed.notes) == len(notes)
    assert all(text.startswith(start) for text, start in zip(composed.notes, notes, strict=True))
    assert "lr_factor" not in composed.tree.sparse or "ftrl" not in line


def test_advice_whose_key_the_other_option_has_stays(composer: Composer) -> None:
    config = composer.compose(["recipe=resnet50_imagenet", "lr=onecycle"]).config
    assert config["lr"]["peak"] == 0.1 and config["step"]["batch_size"] == 256


@pytest.mark.parametrize("line", ["lr=onecycle lr.warmup=5", "lr=onecycle ++lr.warmup=5", "lr=onecycle lr={warmup:5}"])
def test_the_command_line_is_never_left_out(composer: Composer, line: str) -> None:
    with pytest.raises(ConfigError, match=r"lr\.warmup=5 is no known key; .*; set on the command line"):
        composer.compose(["recipe=resnet50_imagenet", *line.split()])


def test_a_mapping_on_the_command_line_gives_its_own_keys_alone(composer: Composer) -> None:
    """The other keys are the file's, and what does not fit the choice is left out."""
    model = composer.compose(["recipe=ctr_clicks", "recipe.model={kind: lr}"]).config["recipe"]["model"]
    assert model["kind"] == "lr"
    lr = composer.compose(["recipe=resnet50_imagenet", "lr=onecycle", "lr={peak: 0.3}"]).config["lr"]
    assert (lr["name"], lr["peak"]) == ("onecycle", 0.3)


RECIPE = """\
# @package _global_
defaults: [schema/resnet_shapes@recipe, _self_, {{override /lr: {lr}}}]
lr: {{peak: 0.3, {key}: 7}}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[..., Composed]:
    """`mine("override in a file", words)`: composes recipe/mine.yaml, and experiment/mine.yaml where one is given."""

    def put(lr: str, key: str, *words: str, experiment: str = "") -> Composed:
        for folder, text in (("recipe", RECIPE.format(lr=lr, key=key)), ("experiment", experiment)):
            (tmp_path / folder).mkdir(exist_ok=True)
            if text:
                (tmp_path / folder / "mine.yaml").write_text(f"# @package _global_\n{text}")
        return compose(["--config-dir", str(tmp_path), *words])

    return put


def test_a_mistake_in_a_recipe_is_no_advice(mine: Callable[..., Composed]) -> None:
    assert mine("cosine", "warmup", "recipe=mine", "lr=onecycle").notes
    for lr, key in (("cosine", "warmupp"), ("onecycle", "warmup")):
        with pytest.raises(ConfigError, match=rf"lr.{key}=7 is no known key; .*set in .*mine.yaml"):
            mine(lr, key, "recipe=mine", "lr=onecycle")


def test_advice_of_a_recipe_under_an_experiment_that_chooses_another_option(mine: Callable[..., Composed]) -> None:
    other = "defaults: [_self_, {override /recipe: mine}, {override /lr: onecycle}]\nlr: {rise: 0.2}\n"
    composed = mine("cosine", "warmup", "experiment=mine", experiment=other)
    assert [note.split(" is ")[0] for note in composed.notes] == ["lr.warmup=7 of recipe=mine"]
    assert composed.config["lr"]["rise"] == 0.2
    composed = mine("cosine", "warmup", "experiment=mine", "lr=cosine", experiment=other)
    assert [note.split(" is ")[0] for note in composed.notes] == ["lr.rise=0.2 of experiment=mine"]


def test_advice_for_an_observer_that_was_not_chosen(mine: Callable[..., Composed]) -> None:
    watched = "observer: {jsonl: {path: x.jsonl}}\n"
    assert mine("cosine", "floor", "experiment=mine", experiment=watched).notes == ()
    composed = mine("cosine", "floor", "experiment=mine", "observer=[console]", experiment=watched)
    assert list(composed.config["observer"]) == ["console"] and "observer.jsonl={...}" in composed.notes[0]
