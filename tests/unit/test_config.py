"""Composing: who wins over whom, options from classes and files, plugins, and composing again."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtf.api.registry import lookup, registered
from dtf.api.schema import unset
from dtf.api.sparse_table import Placement
from dtf.config.compose import Composed, Composer, compose
from dtf.config.messages import parse
from dtf.config.settings import GROUPS, parse_settings
from dtf.core.consistency import digest
from dtf.core.errors import ConfigError, DataError
from dtf.core.text import quoted
from dtf.runs.run_folder import identity

PLUGIN = "plugins=[tests.support.own_parts]"
Write = Callable[[str, str], Path]


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write("recipe/mine.yaml", text)` into a config folder; the folder."""

    def put(name: str, text: str) -> Path:
        file = tmp_path / "conf" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path / "conf"

    return put


def with_dir(folder: Path, *overrides: str) -> Composed:
    return compose(["--config-dir", str(folder), *overrides])


def test_defaults_are_the_documented_ones(composer: Composer) -> None:
    composed = composer.compose([])
    assert composed.choices == {
        "job": "train",
        "recipe": "resnet_shapes",
        "strategy": "ddp",
        "precision": "fp32",
        "optimizer": "sgd",
        "sparse": "adagrad",
        "lr": composed.choices["lr"],
        "sampler": "shuffle",
        "checkpoint": "every",
        "launcher": "local",
        "experiment": None,
    }
    assert list(composed.config["observer"]) == ["console", "jsonl", "tensorboard"]
    assert composer.defaults()["lr"] == ["cosine"]


def own(group: str, name: str) -> bool:
    """Whether it comes with dtf: tests register options too."""
    known = registered(group).get(name)
    return known is None or known.__module__.startswith("dtf.")


def check_options(composer: Composer, chosen: dict[str, str]) -> None:
    """They compose, and each becomes an object of its class."""
    words = [f"{group}=[{name}]" if group == "observer" else f"{group}={name}" for group, name in chosen.items()]
    composed = composer.compose(words)
    missing = unset(composed.config)
    composed = composed.recompose([f"{key}=1" for key in missing]) if missing else composed
    for group, name in chosen.items():
        part, node = getattr(composed.settings, group), composed.config[group]
        if group == "observer":
            (part,), (node,) = part.values(), node.values()
        assert node["name"] == name or name not in registered(group)
        assert type(part) is lookup(group, node["name"])


def test_every_option_composes_and_is_typed(composer: Composer) -> None:
    """With the default recipe, whose root settings must fit the options of every other group; those of several groups
    side by side.
    """
    options = {group: [name for name in composer.options(group) if own(group, name)] for group in GROUPS}
    assert all(set(registered(group)) <= set(composer.options(group)) for group in GROUPS)
    del options["recipe"]
    for row in range(max(map(len, options.values()))):
        check_options(composer, {group: names[row % len(names)] for group, names in options.items()})


@pytest.mark.slow
def test_every_recipe_composes_and_is_typed(composer: Composer) -> None:
    """With options that its file does not name; `test_describe` composes it as it is."""
    others = {group: composer.options(group)[-1] for group in ("optimizer", "lr")}
    for recipe in composer.options("recipe"):
        if own("recipe", recipe):
            check_options(composer, {"recipe": recipe, **others})


def test_config_is_plain_and_rebuilds_in_a_rank(composer: Composer) -> None:
    composed = composer.compose(["train.steps=3", PLUGIN, "strategy=front_mine", "strategy.extra=4"])
    config = json.loads(json.dumps(composed.config))
    settings = parse_settings(config)
    assert settings == composed.settings
    assert config["plugins"] == ["tests.support.own_parts"]
    assert settings.strategy == lookup("strategy", "front_mine")(extra=4)


RECIPE = """\
# @package _global_
defaults:
  - schema/resnet_shapes@recipe
  - _self_
  - override /lr: constant
step: {batch_size: 17}
train: {epochs: 3}
optimizer: {momentum: 0.5}
lr: {peak: 0.3}
"""


def test_recipe_wins_over_root_experiment_over_recipe_command_line_over_all(write: Write) -> None:
    folder = write("recipe/mine.yaml", RECIPE)
    write(
        "experiment/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /recipe: mine\n  - _self_\nstep: {batch_size: 18}\nlr: {peak: "
        "0.4}\nseed: 5\n",
    )
    recipe = with_dir(folder, "recipe=mine").config
    assert (recipe["step"]["batch_size"], recipe["train"]["epochs"], recipe["optimizer"]["momentum"]) == (17, 3.0, 0.5)
    assert recipe["lr"] == {"name": "constant", "peak": 0.3, "warmup": 0}
    experiment = with_dir(folder, "experiment=mine").config
    assert (
        experiment["step"]["batch_size"],
        experiment["train"]["epochs"],
        experiment["lr"]["peak"],
        experiment["seed"],
    ) == (18, 3.0, 0.4, 5)
    typed_in = with_dir(folder, "experiment=mine", "step.batch_size=19", "lr=cosine", "lr.peak=0.5").config
    assert (typed_in["step"]["batch_size"], typed_in["lr"]["name"], typed_in["lr"]["peak"]) == (19, "cosine", 0.5)


def test_searchpath_and_config_name(write: Write) -> None:
    folder = write("experiment/mine.yaml", "# @package _global_\nseed: 5\n")
    write("root.yaml", "defaults:\n  - config\n  - _self_\nseed: 6\n")
    assert compose([f"hydra.searchpath=[file://{folder}]", "experiment=mine"]).config["seed"] == 5
    assert with_dir(folder, "--config-name", "root").config["seed"] == 6


def test_a_file_refines_a_class(write: Write) -> None:
    folder = write("strategy/quiet.yaml", "defaults: [schema/ddp@_here_, _self_]\nbucket_mb: 7\n")
    write("observer/rare.yaml", "# @package observer.rare\ndefaults: [schema/jsonl@_here_, _self_]\npath: rare.jsonl\n")
    composed = with_dir(folder, "strategy=quiet", "observer=[rare,jsonl]")
    assert composed.config["strategy"]["name"] == "ddp"
    assert composed.config["strategy"]["bucket_mb"] == 7.0
    assert composed.choices["strategy"] == "quiet"
    assert {name: node["path"] for name, node in composed.config["observer"].items()} == {
        "rare": "rare.jsonl",
        "jsonl": "metrics.jsonl",
    }


def test_plugins_named_in_files_bring_the_options_those_files_choose(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "front_late.py").write_text(
        "from dtf.api.registry import register, option\nfrom dtf.data.samplers import Shuffle\n"
        "@register('sampler', 'front_late')\nclass Late(Shuffle):\n    twist: int = option(default=1, doc='d')\n"
    )
    monkeypatch.chdir(tmp_path)
    folder = write(
        "experiment/late.yaml",
        "# @package _global_\ndefaults:\n  - override /sampler: front_late\n  - _self_\nplugins: "
        "[front_late]\nsampler: {twist: 2}\n",
    )
    composed = with_dir(folder, "experiment=late", PLUGIN)
    assert composed.config["sampler"] == {"name": "front_late", "tail": "partial", "twist": 2}
    assert sorted(composed.config["plugins"]) == ["front_late", "tests.support.own_parts"]  # ranks need both


def test_entry_points_bring_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "front_entry.py").write_text(
        "from dtf.api.registry import register\nfrom dtf.api.lr import Constant\n@register('lr', "
        "'front_entry')\nclass Entry(Constant): ...\n"
    )
    info = tmp_path / "front_entry-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: front-entry\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[dtf.plugins]\nfront = front_entry\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compose(["lr=front_entry"]).config["lr"]["name"] == "front_entry"


def test_plugin_in_an_unknown_group_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dtf.api import registry

    monkeypatch.setattr(registry, "_CLASSES", {group: dict(classes) for group, classes in registry._CLASSES.items()})
    (tmp_path / "front_lost.py").write_text(
        "from dtf.api.registry import register\n@register('optimiser', 'x')\nclass X: ...\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="optimiser is no config group; did you mean optimizer"):
        compose(["plugins=[front_lost]"])
    sys.modules.pop("front_lost")


def test_shadowed_names_are_refused(write: Write) -> None:
    folder = write("strategy/ddp.yaml", "defaults: [schema/dp@_here_, _self_]\n")
    with pytest.raises(ConfigError, match=r"strategy=ddp is an option of dtf, and .* makes dp of it; rename the file"):
        with_dir(folder)
    other = write("config.yaml", "seed: 1\n")
    with pytest.raises(ConfigError, match="has the name of dtf's own root config"):
        with_dir(other, "strategy=dp")


def test_recompose_varies_one_thing(composer: Composer) -> None:
    base = composer.compose(
        ["strategy=ddp", "strategy.bucket_mb=5", "seed=3", "launcher.processes=3", "observer=[console]"]
    )
    assert base.recompose([]).config == base.config
    same = base.recompose(["strategy=ddp", "launcher.processes=2"])
    assert (same.config["strategy"]["bucket_mb"], same.config["launcher"]["processes"], same.config["seed"]) == (
        5.0,
        2,
        3,
    )
    other = base.recompose(["strategy=dp", "strategy.replicas=2"])  # bucket_mb was said of ddp
    assert (other.config["strategy"]["name"], other.config["strategy"]["replicas"], other.config["seed"]) == (
        "dp",
        2,
        3,
    )
    assert list(other.config["observer"]) == ["console"]


def test_a_mapping_sets_keys_and_chooses_nothing(composer: Composer) -> None:
    base = composer.compose(["strategy=fsdp", "seed=3"])
    more = base.recompose(["strategy={tables: rows}"])
    assert (more.config["strategy"]["name"], more.config["strategy"]["tables"]) == ("fsdp", "rows")
    assert more.chosen() == {"strategy": ["fsdp"]}
    mine = composer.compose(["observer=[]", "+observer.mine={name: jsonl, path: mine.jsonl}"]).config["observer"]
    assert {name: node["path"] for name, node in mine.items()} == {"mine": "mine.jsonl"}


def test_interpolations_are_resolved(composer: Composer) -> None:
    composed = composer.compose(
        ["seed=4", "run.name=run-${seed}", "launcher.env.COPY=${run.name}-x", r"launcher.env.LITERAL='\${seed}'"]
    )
    assert composed.config["launcher"]["env"] == {"COPY": "run-4-x", "LITERAL": "${seed}"}


def test_mandatory_keys_matter_only_to_who_needs_them(composer: Composer) -> None:
    composed = composer.compose([PLUGIN, "recipe=front_toy", "job=describe", "train.steps=1"])
    assert composed.config["recipe"]["data"]["root"] == "???"
    assert composed.job == lookup("job", "describe")()
    with pytest.raises(ConfigError, match=r"recipe.data.root=\?\?\? is mandatory; give recipe.data.root=VALUE"):
        _ = composed.settings
    with pytest.raises(ConfigError, match=r"plugins=\?\?\? is mandatory; give plugins=VALUE"):
        _ = composer.compose(["plugins=???"]).settings
    assert composed.recompose(["recipe.data.root=/x"]).check().recipe.data.root == "/x"  # type: ignore[attr-defined]
    with pytest.raises(DataError):
        composed.recompose(["recipe.data.root=missing"]).check()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["train.steps=null", "train.epochs=null"],
            "leave the run without a length; give train.steps=N or train.epochs=N",
        ),
        (
            ["step.batch_size=4", "step.micro_batch_rows=5"],
            "step.micro_batch_rows=5 must be 0 to step.batch_size=4 "
            "(step.micro_batch_rows was set on the command line)",
        ),
        (
            ["sampler.tail=drop", "recipe.data.train_rows=100"],
            "step.batch_size=128 must be at most the 100 training rows: sampler.tail=drop",
        ),
        (["train.early_stop=3", "train.eval_every=0"], "train.early_stop=3 needs evaluations"),
        (["run.name=../up"], "run.name=../up is no folder name"),
        (["run.objective=top2"], "run.objective=top2 is no metric of the recipe; did you mean top5"),
    ],
)
def test_root_rules(composer: Composer, overrides: list[str], message: str) -> None:
    composed = composer.compose(overrides)
    with pytest.raises(ConfigError) as caught:
        composed.check()
    assert message in str(caught.value)


def test_parts_are_asked_before_ranks_start(composer: Composer) -> None:
    for overrides, key in (
        (["strategy.bucket_mb=0"], "strategy.bucket_mb"),
        (["precision.loss_scale=8"], "precision.loss_scale"),
        (["optimizer.momentum=-1"], "optimizer.momentum"),
    ):
        with pytest.raises(ConfigError, match=key):
            composer.compose(overrides).check()


SPELLINGS = [("row_wise", "rows"), ("column_wise", "columns"), ("table_wise", "tables"), ("replicated", "replicated")]


@pytest.mark.parametrize(
    ("strategy", "name", "value"),
    [
        pytest.param(strategy, *SPELLINGS[number], marks=() if number == place else pytest.mark.slow)
        for place, strategy in enumerate(("ddp", "fsdp", "tensor", "pipeline"))
        for number in range(4)
    ],
)
def test_both_spellings_of_a_placement_are_one_run(composer: Composer, strategy: str, name: str, value: str) -> None:
    by_name, by_value = (
        composer.compose([f"strategy={strategy}", f"strategy.tables={word}"]) for word in (name, value)
    )
    assert by_name.config == by_value.config
    assert by_name.config["strategy"]["tables"] == value  # as in the config of a run of an earlier release
    assert identity(by_name.config) == identity(by_value.config)
    assert digest(by_name.config) == digest(by_value.config)
    assert vars(by_name.settings.strategy)["tables"] is Placement(value) is Placement[name]


def test_an_unknown_placement_is_answered_with_all_spellings(composer: Composer) -> None:
    with pytest.raises(ConfigError, match="strategy.tables=row_wize is no choice; did you mean row_wise") as caught:
        composer.compose(["strategy=fsdp", "strategy.tables=row_wize"])
    assert all(f" {word}" in str(caught.value) for word in ("rows", "row_wise", "replicated", "table_wise", "tables"))


def test_a_member_whose_name_only_escapes_a_keyword_has_one_spelling() -> None:
    """`async` is the value; `async_` is how Python has to call the member."""
    assert compose(["strategy=pserver", "strategy.mode=async"]).config["strategy"]["mode"] == "async"
    with pytest.raises(ConfigError, match="strategy.mode=async_ is no choice"):
        compose(["strategy=pserver", "strategy.mode=async_"])


@pytest.mark.parametrize(
    "text", ["/tmp/a b", "/tmp/it's", "/x\\", "a\\'b", "c\\d", "=,{}[]", "a'b'c", "", "null", "0,1"]
)
def test_a_quoted_text_is_read_as_it_was(text: str) -> None:
    (override,) = parse([f"run.dir={quoted(text)}"])
    assert override.value() == text
