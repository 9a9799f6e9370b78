"""Options of all groups go together, or a rule of RULES names the pair that does not and says why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle, product
from pathlib import Path
from typing import NamedTuple

import pytest

from dtf.api.registry import registered
from dtf.api.schema import keys, unset
from dtf.config.compose import Composed, Composer, compose
from dtf.config.hydra_sources import CONF
from dtf.config.option_files import is_class_file
from dtf.config.settings import EXPERIMENT, GROUPS
from dtf.core.errors import ConfigError
from tests.support.tracked_runs import STAND_INS


class Rule(NamedTuple):
    """Why some choices do not go together, with nothing to be done about it."""

    says: str
    """How the refusal begins, a pattern."""

    choices: Mapping[str, str]
    """Group -> the options that it refuses, a pattern; where there are several groups, only together."""


WITHOUT_TABLES = "(?!ctr_clicks_sparse|deepfm_criteo).*"
CLICKS = "(?!resnet).*"
ASYNCHRONOUS = "async|half_async|geo"
RULES = {
    "it has no sparse tables": Rule(
        r"sparse says how rows of sparse tables learn, and \w+ has none",
        {"recipe": WITHOUT_TABLES, "sparse": "(?!adagrad).+"},
    ),
    "clicks have no classes to balance": Rule(
        r"sampler=weighted balances classes, and the rows of", {"recipe": CLICKS, "sampler": "weighted"}
    ),
    "clicks are not augmented": Rule(
        r"sampler=repeated shows rows several times", {"recipe": CLICKS, "sampler": "repeated"}
    ),
    "tf32 is arithmetic of a GPU": Rule(r"precision.tf32=true needs CUDA", {"precision": "tf32"}),
    "no loss scale is shared by all": Rule(
        r"a loss scale is found step by step, and strategy.mode=\w+ has none",
        {"precision": "fp16", "strategy.mode": ASYNCHRONOUS},
    ),
    "another program starts its ranks": Rule(r"launcher=env finds no rank in the environment", {"launcher": "env"}),
    "it starts ranks of one role": Rule(
        r"launcher=\w+ starts ranks of one role", {"launcher": "inline|torchrun", "strategy": "pserver"}
    ),
    "it starts one process of several roles": Rule(
        r"launcher=manual starts one process of a run whose processes have several roles",
        {"launcher": "manual", "strategy": "(?!pserver).*"},
    ),
    "it is one process": Rule(
        r"launcher=torchrun starts \d+ ranks, and strategy=dp has 1", {"launcher": "torchrun", "strategy": "dp"}
    ),
}
"""Name of a rule -> what it refuses. Any other choices go together."""

DEFAULTS = {
    "recipe": "resnet_shapes",
    "strategy": "ddp",
    "precision": "fp32",
    "sampler": "shuffle",
    "launcher": "local",
}
"""What counts for RULES where nothing is chosen."""

GIVEN = {
    "launcher.node_rank": 0,
    "launcher.address": "127.0.0.1:29500",
    "launcher.rendezvous": "127.0.0.1:29500",
    "launcher.store": "s3://bucket/runs",
    "launcher.role": "arn:aws:iam::123456789012:role/dtf",
}
"""Values of mandatory keys; 1 for all others."""

Choice = dict[str, str]
"""Group -> option; also `strategy.mode`."""


@pytest.fixture(scope="module")
def composer() -> Iterator[Composer]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DTF_TOKEN", "a secret of all processes")
        environment.syspath_prepend(STAND_INS)  # for observers of libraries that may not be installed
        yield Composer()


def own(group: str, name: str) -> bool:
    """Whether it comes with dtf: tests register options too."""
    known = registered(group).get(name)
    return known is None or known.__module__.startswith("dtf.")


def options(composer: Composer, group: str) -> list[Choice]:
    """The options of a group, with each mode of a strategy that has modes."""
    found = list[Choice]()
    for name in (name for name in composer.options(group) if own(group, name)):
        found.append({group: name})
        for key in keys(registered(group)[name]) if group == "strategy" and name in registered(group) else ():
            if key.name == "mode":
                found += [{group: name, "strategy.mode": mode.value} for mode in key.hint]
    return found


def is_bare(composer: Composer, name: str) -> bool:
    """Whether a recipe's file has the keys of its class and nothing else."""
    read = composer.read("recipe", name)
    return read is None or is_class_file("recipe", name, read.file, CONF)


def words(composer: Composer, choice: Choice) -> list[str]:
    """The command line; with a length for a recipe that no file advises on, and no GPU, whatever this machine has."""
    said = [f"{group}=[{name}]" if group == "observer" else f"{group}={name}" for group, name in choice.items()]
    bare = "recipe" in choice and is_bare(composer, choice["recipe"])
    manual = choice.get("launcher") == "manual"
    said += ["launcher.endpoints=[127.0.0.1:4000]", "launcher.role=server"] if manual else []
    return [*said, "launcher.devices=cpu", *(["train.epochs=1"] if bare else [])]


def refusal(composer: Composer, said: list[str]) -> str:
    """How a command line is refused; empty where it is not."""
    try:
        composed = composer.compose(said)
        missing = unset(composed.config)
        if missing:
            composed = composer.compose([*said, *(f"{key}={GIVEN.get(key, 1)}" for key in missing)])
        if composed.settings.job.trains:
            settings = composed.check(data=False)
            settings.launcher.check(settings.strategy)
    except ConfigError as error:
        return str(error)
    return ""


def rules(choice: Choice) -> list[str]:
    """Names of the rules that refuse a choice."""
    chosen = DEFAULTS | choice
    return [
        name
        for name, rule in RULES.items()
        if all(re.fullmatch(pattern, chosen.get(group, "")) for group, pattern in rule.choices.items())
    ]


def check(composer: Composer, choices: Iterable[Choice]) -> Counter[str]:
    """Compose them all; how often each rule refused, and none (""). Fails where RULES say something else."""
    found, wrong = Counter[str](), list[str]()
    for choice in choices:
        said, expected = words(composer, choice), rules(choice)
        refused = refusal(composer, said)
        by = next((name for name in expected if re.match(RULES[name].says, refused)), "")
        if bool(refused) != bool(by) or bool(expected) != bool(by):
            wrong.append(f"{' '.join(said)}: refused by {expected or 'no rule'}, and it says: {refused or 'nothing'}")
        found[by] += 1
    assert not wrong, "\n".join(wrong)
    return found


def mixtures(composer: Composer) -> Iterator[Choice]:
    """Choices in all groups at once that go together, until each option was in one that goes with anything."""
    left = {group: options(composer, group) for group in GROUPS if group not in ("job", "recipe")}
    for recipe in cycle(["ctr_clicks_sparse", "resnet_shapes"]):
        choice = {"recipe": recipe}
        for group, some in left.items():
            left[group] = some = [option for option in some if not refused_anyway(option)]
            fitting = next((option for option in some if not rules(choice | option)), None)
            if fitting is not None:
                choice |= fitting
                some.remove(fitting)
        if len(choice) == 1:
            assert not any(left.values()), left
            return
        yield choice


def refused_anyway(option: Choice) -> bool:
    """Whether an option goes with nothing."""
    return any(RULES[name].choices.keys() <= option.keys() for name in rules(option))


def test_choices_of_all_groups_go_together(composer: Composer) -> None:
    """Each option that goes with anything."""
    check(composer, mixtures(composer))


def test_a_rule_is_needed_for_what_is_refused_and_a_refusal_for_each_rule(
    composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, fine = {"sampler": "weighted", "recipe": "frappe"}, {"sampler": "weighted"}
    assert check(composer, [refused]) == {"clicks have no classes to balance": 1}
    for choice, rule in (
        (refused, Rule("sampler=weighted balances", {"recipe": "resnet.*"})),
        (fine, Rule("sampler=weighted balances", {"sampler": "weighted"})),
    ):
        monkeypatch.setitem(RULES, "clicks have no classes to balance", rule)
        with pytest.raises(AssertionError, match="refused by"):
            check(composer, [choice])


@pytest.mark.slow
def test_every_recipe_goes_with_every_option_of_other_groups(composer: Composer) -> None:
    """All pairs: python -m pytest -n 0 -s -m slow tests/unit/test_choices_combine.py"""
    groups = [group for group in [*GROUPS, EXPERIMENT] if group != "recipe"]
    others = [option for group in groups for option in options(composer, group)]
    found = check(composer, (recipe | other for recipe in options(composer, "recipe") for other in others))
    print(f"\n{found.total()} pairs, {found['']} go together; refused: {found}")
    assert ruling(1) <= set(found)


@pytest.mark.slow
def test_every_strategy_goes_with_every_launcher_precision_and_sampler(composer: Composer) -> None:
    """Those that go with anything; images have rows for each sampler."""
    groups = [
        [option for option in options(composer, group) if not refused_anyway(option)]
        for group in ("strategy", "launcher", "precision", "sampler")
    ]
    mixed = [strategy | launcher | precision | sampler for strategy, launcher, precision, sampler in product(*groups)]
    found = check(composer, mixed)
    print(f"\n{found.total()} mixtures, {found['']} go together; refused: {found}")
    assert ruling(2) <= set(found)


def ruling(groups: int) -> set[str]:
    """Rules about so many groups beside the recipe. One that refuses nothing is to be taken out."""
    return {name for name, rule in RULES.items() if len(rule.choices.keys() - {"recipe"}) == groups}


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
    with pytest.raises(
        ConfigError, match=r"lr\.warmup=5 is no known key; .* \(lr\.warmup was set on the command line\)"
    ):
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
