"""conf/ shows every key of every option, and what stands there is what is composed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from dtf.api.lr import Cosine
from dtf.api.registry import base_of, lookup, registered
from dtf.api.schema import option_node
from dtf.cli.main import main
from dtf.cli.trials import _lasting
from dtf.config import hydra_sources
from dtf.config.compose import Composer
from dtf.config.hydra_sources import CONF
from dtf.config.inherit import saved_config
from dtf.config.option_files import files, option_text, root_text
from dtf.config.settings import GROUPS, Root, load_parts
from dtf.config.yaml_text import parse_yaml
from dtf.core.errors import ConfigError

load_parts([])
SHIPPED = [
    (group, name) for group in GROUPS for name, cls in registered(group).items() if cls.__module__.startswith("dtf.")
]


def test_each_option_of_dtf_has_its_file() -> None:
    made = files(CONF)
    assert len(made) == len(SHIPPED) + 1
    other = [str(path) for path, text in made.items() if not path.is_file() or path.read_text("utf-8") != text]
    assert not other, "python docs/option_files.py --write makes them anew"


@pytest.mark.parametrize(("group", "name"), SHIPPED)
def test_a_file_has_every_key_with_its_default_and_help(group: str, name: str) -> None:
    text = option_text(group, name)
    assert parse_yaml(text) == option_node(group, name)
    lines = [line.strip() for line in text.splitlines()]
    keys = [number for number, line in enumerate(lines) if not line.startswith("#") and not line.startswith("name:")]
    assert all(lines[number - 1].startswith("#") for number in keys), "help stands above each key"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that dtf takes for its own."""
    folder = tmp_path / "conf"
    shutil.copytree(CONF, folder)
    monkeypatch.setattr(hydra_sources, "CONF", folder)
    return folder


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert text.count(old) == 1
    file.write_text(text.replace(old, new), "utf-8")


def test_an_edit_in_a_checkout_takes_effect(checkout: Path, tmp_path: Path) -> None:
    edit(checkout / "strategy" / "ddp.yaml", "bucket_mb: 25.0", "bucket_mb: 7")
    edit(checkout / "schema" / "root.yaml", "log_every: 20", "log_every: 3")
    edit(checkout / "recipe" / "schema" / "resnet_shapes.yaml", "label_smoothing: 0.0", "label_smoothing: 0.25")
    edit(checkout / "observer" / "jsonl.yaml", "path: metrics.jsonl", "path: m.jsonl")
    edit(
        checkout / "sparse" / "adagrad.yaml", "lr_factor: 1.0", "lr_factor: 2.0"
    )  # no choice, where there are no tables
    composed = Composer().compose([])
    composed.check()
    config = composed.config
    assert (config["strategy"]["bucket_mb"], config["train"]["log_every"]) == (7.0, 3)
    assert config["recipe"]["label_smoothing"] == 0.25
    assert config["observer"]["jsonl"]["path"] == "m.jsonl"
    (tmp_path / "strategy").mkdir()
    (tmp_path / "strategy" / "mine.yaml").write_text("defaults: [schema/ddp@_here_, _self_]\nbackend: gloo\n")
    mine = Composer(str(tmp_path)).compose(["strategy=mine"]).config["strategy"]
    assert (mine["bucket_mb"], mine["backend"]) == (7.0, "gloo")


def test_a_file_of_ones_own_stands_in_the_place_of_dtfs(tmp_path: Path) -> None:
    (tmp_path / "strategy").mkdir()
    file = tmp_path / "strategy" / "ddp.yaml"
    file.write_text("defaults: [schema/ddp@_here_, _self_]\nbucket_mb: 9\n")
    assert Composer(str(tmp_path)).compose([]).config["strategy"]["bucket_mb"] == 9.0
    file.write_text("name: ddp\nbucket_mb: 8\n")  # keys that it leaves out are as in the class
    assert Composer(str(tmp_path)).compose([]).config["strategy"] == option_node("strategy", "ddp") | {"bucket_mb": 8.0}
    file.write_text("name: ddp\nbucket: 8\n")
    with pytest.raises(ConfigError, match=r"strategy.bucket=8 is no known key; did you mean .*set in .*ddp.yaml"):
        Composer(str(tmp_path)).compose([])


def test_an_edited_value_that_does_not_fit_names_the_file(checkout: Path) -> None:
    edit(checkout / "strategy" / "ddp.yaml", "bucket_mb: 25.0", "bucket_mb: -1")
    with pytest.raises(
        ConfigError, match=r"strategy.bucket_mb=-1.* \(strategy.bucket_mb was set in .*conf/strategy/ddp.yaml\)"
    ):
        Composer().compose([])


def test_the_root_has_every_key() -> None:
    assert set(yaml.safe_load(root_text())) == set(Root.__dataclass_fields__)


def test_a_class_of_a_plugin_has_a_file_too() -> None:
    composer = Composer()
    composer.compose(["plugins=[tests.support.own_parts]"])
    assert "extra: 3" in option_text("strategy", "front_mine")
    assert lookup("strategy", "front_mine").__module__ == "tests.support.own_parts"


def test_a_name_that_only_looks_like_that_of_a_base(tmp_path: Path) -> None:
    (tmp_path / "observer").mkdir()
    (tmp_path / "observer" / "schematic.yaml").write_text(
        "# @package observer.schematic\ndefaults: [schema/jsonl@_here_, _self_]\npath: s.jsonl\n"
    )
    observers = Composer(str(tmp_path)).compose(["observer=[schematic]"]).config["observer"]
    assert observers["schematic"]["path"] == "s.jsonl"


@pytest.mark.parametrize("place", ["schema/root.yaml", "recipe/schema/resnet_shapes.yaml"])
def test_no_folder_of_ones_own_holds_bases(tmp_path: Path, place: str) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"schema has the name of dtf's bases; rename the folder"):
        Composer(str(tmp_path))


def test_an_observer_of_another_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "observer").mkdir()
    file = tmp_path / "observer" / "jsonl.yaml"
    file.write_text("# @package observer.jsonl\nname: console\n")
    with pytest.raises(ConfigError, match=r"observer=jsonl is an option of dtf, and .*jsonl.yaml makes console of it"):
        Composer(str(tmp_path)).compose([])


def test_options_that_only_have_other_defaults_are_known_by_their_base() -> None:
    """What earlier versions recorded: a sweep and a checkpoint of theirs go on."""
    for group, name, base in (
        ("precision", "bf16", "fp32"),
        ("precision", "fp32", "fp32"),
        ("strategy", "zero1", "ddp"),
        ("strategy", "fsdp", "fsdp"),
        ("checkpoint", "off", "every"),
        ("optimizer", "adamw", "adamw"),
    ):
        assert base_of(group, name) == base
    old, new = (
        _lasting({"precision": option_node("precision", "bf16") | {"name": name}, "run": {"objective": ""}})
        for name in ("fp32", "bf16")
    )
    assert old == new


def test_a_variant_is_declared_and_never_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtf.api import registry

    monkeypatch.setattr(registry, "_CLASSES", {group: dict(classes) for group, classes in registry._CLASSES.items()})

    @registry.register("lr", "squared")
    class Squared(Cosine):
        """Another schedule with the keys of `cosine`."""

        warmup: int = registry.option(default=9, doc="linear warm-up", unit="steps")

        def __call__(self, step: int, total: int) -> float:
            return super().__call__(step, total) ** 2

    @registry.register("lr", "warmed", variant_of="cosine")
    class Warmed(Cosine):
        """`cosine` with a warm-up."""

        warmup: int = registry.with_default(Cosine, "warmup", 9)

    composer = Composer()
    assert base_of("lr", "squared") == "squared" and base_of("lr", "warmed") == "cosine"
    assert composer.compose(["lr=squared", "lr.warmup=0"]).config["lr"]["name"] == "squared"
    for line, name in (("lr=warmed lr.warmup=8", "cosine"), ("lr=cosine lr.warmup=9", "warmed")):
        assert composer.compose(line.split()).config["lr"]["name"] == name
    for base, body, said in (
        ("cosin", {}, "lr=other: .*Other has variant_of='cosin', which is not registered; did you mean cosine?"),
        ("step", {}, "lr=other: .*Other is no variant of dtf.api.lr.Step; make it a subclass"),
        ("cosine", {"__call__": Squared.__call__}, "is no variant of dtf.api.lr.Cosine, as it defines __call__"),
        ("cosine", {"more": 3}, "is no variant of dtf.api.lr.Cosine, as it defines more"),
    ):
        with pytest.raises(ConfigError, match=said):
            registry.register("lr", "other", variant_of=base)(type("Other", (Cosine,), body))
    with pytest.raises(ConfigError, match="lr=other: .*Other gives its key warmup a value without a type, which would"):
        registry.register("lr", "other")(type("Other", (Cosine,), {"warmup": 3}))
    assert "other" not in registered("lr")


def test_a_config_with_the_name_of_the_class_has_the_names_of_today(tmp_path: Path) -> None:
    """Earlier versions recorded the class of a variant."""
    node = option_node("precision", "bf16") | {"name": "fp32"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"precision": node, "run": {"name": "x"}, "seed": 1}))
    saved = saved_config(tmp_path / "config.yaml", "job.model=RUN", [])
    assert (saved["precision"]["name"], saved["run"], saved["seed"]) == ("bf16", {"name": "x"}, 1)


def test_describe_says_where_a_value_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
    def lines(*words: str) -> list[str]:
        assert main(["job=describe", *words]) == 0
        return capsys.readouterr().out.splitlines()

    batch = lines("job.key=step.batch_size", "recipe=resnet50_imagenet", "step.batch_size=${oc.env:DTF_NOT_SET,64}")
    assert batch[0] == "step.batch_size=64" and len(batch) == 4
    assert batch[1].split()[0] == "128" and "dtf's conf/schema/root.yaml, line " in batch[1]
    assert batch[2].split()[0] == "256" and "dtf's conf/recipe/resnet50_imagenet.yaml, line " in batch[2]
    assert batch[3].endswith("on the command line  (counts)")
    dim = lines("job.key=recipe.model.dim", "recipe=dlrm_criteo", "recipe.model.kind=lr")
    assert dim[0] == "recipe.model.dim=10" and dim[-1].endswith("what the command line chooses  (counts)")
    assert next(line for line in lines("job.key=lr") if not line.startswith(" ")) == "lr.name=onecycle"
    assert yaml.safe_load("\n".join(lines("job.format=yaml", "strategy=zero1")))["shard_optimizer"] is True
    for words, message in (
        (["job.key=step.bach"], "job.key=step.bach is no known key; did you mean step.batch_size? choices: "),
        (["job.key=batch_size"], "job.key=batch_size is no known key; did you mean step.batch_size? choices: "),
        (["job.key=stp.batch_size"], "job.key=stp.batch_size is no known key; did you mean step? choices: "),
        (["job.key=optimizer.lr"], "job.key=optimizer.lr is no known key; did you mean lr.peak? choices: "),
        (["job.key=lr", "job.format=json"], "leave job.group, job.option and job.format out"),
        (["job.format=yaml"], "job.format=yaml shows the file of one option"),
    ):
        assert main(["job=describe", *words]) == 2
        assert message in capsys.readouterr().err
