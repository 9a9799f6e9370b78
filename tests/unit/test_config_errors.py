"""Every mistake in a command line or a config file: one line with key=value, the rule, the choices, and where it was
set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.api.registry import registered
from dtf.api.schema import coerce_option, option_node
from dtf.config.compose import Composer, compose
from dtf.config.settings import GROUPS, load_parts
from dtf.core.errors import ConfigError

HERE = " (... was set on the command line)"
"""`...`: a key that the message has."""
load_parts([])


def without_key(said: str) -> str:
    """The message with HERE for where the key was set."""
    placed = re.fullmatch(r"(.*) \(([^()]+) was set on the command line\)", said)
    assert placed is None or placed[2] in placed[1]
    return f"{placed[1]}{HERE}" if placed else said


def test_where_a_key_was_set_cannot_be_read_as_a_remedy(composer: Composer) -> None:
    """It named no key, and stood behind what to use instead as if it were a part of that."""
    with pytest.raises(ConfigError) as caught:
        composer.compose(["strategy=zero1", "train.guard_every=5"]).check()
    assert str(caught.value).endswith("use train.guard_every=0 (train.guard_every was set on the command line)")


@pytest.fixture(scope="module")
def composer() -> Composer:
    composer = Composer()
    composer.compose(["plugins=[tests.support.own_parts]"])
    return composer


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "+optimizer.lrr=1",
            "optimizer.lrr=1 is no known key; choices: decay_norm_and_bias, lr_factors, momentum, nesterov, "
            "weight_decay, weight_decays" + HERE,
        ),
        (
            "optimizer.momentun=1",
            "optimizer.momentun=1 is no known key; did you mean momentum? choices: decay_norm_and_bias, lr_factors, "
            "momentum, nesterov, weight_decay, "
            "weight_decays" + HERE,
        ),
        ("strategy=ddpp", "strategy=ddpp is no option; did you mean ddp? choices: "),
        ("observer=[consol]", "observer=consol is no option; did you mean console? choices: "),
        ("stratgy=dp", "stratgy=dp is no known key; did you mean strategy? choices: "),
        ("train.stepz=3", "train.stepz=3 is no known key; did you mean steps? choices: "),
        ("train.step=3", "train.step=3 is no known key; did you mean train.steps or step? choices: "),
        ("recipe.data.pixls=3", "recipe.data.pixls=3 is no known key; did you mean pixels? choices: "),
        ("step.batch_size=0", "step.batch_size=0 must be 1 to 1000000" + HERE),
        (f"seed={2**64}", "seed=18446744073709551616 must be 0 to 18446744073709551615" + HERE),
        ("optimizer.momentum=abc", "optimizer.momentum=abc is not of type float" + HERE),
        ("step={batch_size: 3, x: 4}", "step.x=4 is no known key; choices: batch_size"),
        ("train=3", "train=3 is no group of keys; choices: dry_run"),
        ("strategy.bucket_mb.x=1", "strategy.bucket_mb={...} is not of type float" + HERE),
        (
            "precision.compute.capacity=3",
            "precision.compute.capacity is no known key; choices: none, as precision.compute is one of bf16, fp16, "
            "fp32, fp64" + HERE,
        ),
        (
            "precision.compute=bf61",
            "precision.compute=bf61 is no choice; did you mean bf16? choices: bf16, fp16, fp32, fp64" + HERE,
        ),
        ("launcher.env={A: [1]}", "launcher.env.A=[1] is not of type text" + HERE),
        ("lr=null", "lr=null is no option; choices: constant, cosine"),
        ("~lr", "~lr leaves no lr; choose with lr=NAME" + HERE),
        ("lr=0.1", "lr=0.1 is no option; did you mean lr.peak=0.1? choices: constant, cosine"),
        ("optimizer=[1,2]", "optimizer=[1,2] is no option; choices: adadelta"),
        ("precision=float16", "precision=float16 is no option; did you mean fp16? choices: bf16"),
        ("optimizer.lr=0.1", "optimizer.lr=0.1 is no known key; did you mean lr.peak? choices: decay_norm_and_bias"),
        ("learning_rate=0.1", "learning_rate=0.1 is no known key; did you mean lr.peak? choices: budget"),
        ("resume=auto", "resume=auto is no known key; did you mean checkpoint.resume? choices: budget"),
        ("log_every=1", "log_every=1 is no known key; did you mean train.log_every? choices: budget"),
        ("pixels=8", "pixels=8 is no known key; did you mean recipe.data.pixels? choices: budget"),
        (
            "job.log_every=1",
            "job.log_every=1 is no known key; did you mean train.log_every? there are no choices" + HERE,
        ),
        (
            "path=x",
            "path=x is no known key; did you mean observer.jsonl.path or observer.tensorboard.path? choices: budget",
        ),
        (
            "~observer",
            "~observer takes no observer away; write observer=[NAME,...], observer=[] for none, or ~observer.NAME; "
            "choices: console",
        ),
        ("~observer=console", "~observer=console takes no observer away; write observer=[NAME,...]"),
        (
            "~train.steps",
            "~train.steps has nothing to take away: no such key or option is set; see dtf --cfg job" + HERE,
        ),
        ("~experiment=foo", "~experiment=foo has nothing to take away: no such key or option is set"),
        ("~seed=4", "~seed=4 has nothing to take away: seed=0; write ~seed" + HERE),
        ("experiment=null", "experiment=null is no option; "),
        (
            "strategy.name=dp",
            "strategy.name says which class the other keys belong to; choose with strategy=NAME" + HERE,
        ),
        ("observer.jsonl.name=tensorboard", "observer.jsonl.name says which class the other keys belong to; choose"),
        ("observer={jsonl: {name: console}}", "observer.jsonl.name says which class the other keys belong to; choose"),
        (
            "optimizer={foo:1}",
            "optimizer.foo=1 is no known key; choices: decay_norm_and_bias, lr_factors, momentum, nesterov, "
            "weight_decay, weight_decays" + HERE,
        ),
        ("+strategy=dp", "+strategy=dp: strategy takes one option; write strategy=dp without +" + HERE),
        (
            "optimizer=adamw,sgd",
            "optimizer=adamw,sgd gives several values; a list is optimizer=[adamw,sgd], a sweep over them needs -m"
            + HERE,
        ),
        ("seed=range(1,3)", "seed=range(1,3) is a sweep and needs -m" + HERE),
        ("train", "train is no override; write job=train"),
        ("foo", "foo is no override; write key=value"),
        ("=3", "=3 is no override; write key=value"),
        (f"seed={'9' * 5000}", f"seed={'9' * 72}... has more digits than a number can have" + HERE),
        ("x={", "x={ cannot be read; quote a value with special characters: 'key=\"a, b\"'"),
        ("x=[a=b]", "x=[a=b] cannot be read; quote a value with special characters: 'key=[\"a, b\"]'"),
        ("seed=${nope}", "seed: Interpolation key 'nope' not found" + HERE),
        ("+recipe._target_=os.system", "recipe._target_ is refused, a config names no code"),
        ("launcher.env={_target_: x}", "launcher.env._target_ is refused, a config names no code"),
        ("hydra=1", "hydra=1 is no override; write hydra.KEY=value" + HERE),
        ("+hydra={run: 1}", "+hydra={run: 1} is no override; write hydra.KEY=value" + HERE),
        ("hydra.foo=1", "hydra.foo is no known key"),
        ("hydra/job_logging=none", "hydra/job_logging is not used here; leave it out" + HERE),
        ("hydra.run.dir=/x", "hydra.run.dir is not used here; use run.dir instead"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x is not used here; use run.dir instead" + HERE),
        ("hydra.mode=MULTIRUN", "hydra.mode is not used here; use -m instead"),
        ("hydra.verbose=true", "hydra.verbose is not used here; use observers instead"),
        ("hydra.output_subdir=x", "hydra.output_subdir is not used here; use run.dir instead"),
        ("hydra.sweeper.params={seed: 1}", "hydra.sweeper.params={seed: 1} is not used here; write the sweep as"),
        ("~hydra/sweeper", "~hydra/sweeper takes away settings of Hydra that dtf needs; leave it out" + HERE),
        ("~hydra.sweeper", "~hydra.sweeper takes away settings of Hydra that dtf needs; leave it out" + HERE),
        ("hydra.searchpath=[file:///no/such]", "hydra.searchpath=/no/such is no folder or package that can be found"),
        ("plugins=[no.such]", "plugins=[no.such] cannot be imported: ModuleNotFoundError"),
        ("plugins=os", "plugins=os is not of type list of text; write [os]" + HERE),
        ("plugins=[own.py]", "plugins=[own.py] cannot be imported: ModuleNotFoundError"),
        ("plugins=[os]", "plugins=[os] names a module that registers nothing; name one whose classes carry @register"),
        ("hydra.searchpath=null", "hydra.searchpath must be a list of folders and packages"),
        ("hydra.searchpath=3", "hydra.searchpath must be a list of folders and packages"),
        ("hydra.run=3", "hydra.run=3 does not fit its key; see dtf --cfg hydra" + HERE),
        ("plugins=['a b']", "plugins=[a b] is no module name"),
        ("foo/bar=x", "foo/bar=x is no known key; "),
        ("strategy=[zero1,ddp]", "strategy=[zero1,ddp]: strategy takes one option; write strategy=ddp" + HERE),
        ("experiment=[a,b]", "experiment=[a,b]: experiment takes one option; write experiment=b" + HERE),
        ("optimizer=[]", "optimizer=[]: optimizer takes one option; write optimizer=NAME" + HERE),
    ],
)
def test_command_line(composer: Composer, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composer.compose([line])
    assert without_key(str(caught.value)).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_name_of_ones_own_needs_its_module(composer: Composer) -> None:
    with pytest.raises(ConfigError, match=r"lr=own is no option; .*; one of your own needs plugins=\[ITS_MODULE\]"):
        composer.compose(["lr=own"])


def test_threads_of_one_process_are_counted_together(composer: Composer) -> None:
    assert composer.compose(["launcher=inline", "launcher.threads=1024"]).settings
    with pytest.raises(ConfigError, match=r"strategy.threads=512 must be at most 256 for 4 replicas"):
        composer.compose(["launcher=inline", "strategy=dp", "strategy.replicas=4", "strategy.threads=512"]).check()


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS for name in registered(group)])
def test_every_default_is_in_its_range(group: str, name: str) -> None:
    node = option_node(group, name)
    assert coerce_option(group, node, group) == node


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "3"], "unrecognized arguments: --epochs; config values are given as key=value; see dtf --help"),
        (["--cfg", "all", "--multirun"], "only one of --run, --multirun"),
        (["--resolve"], "--resolve and --package go with --cfg"),
        (["--config-dir", "/no/such"], "--config-dir=/no/such is no folder"),
        (["--config-name", "nope"], "--config-name=nope is not found"),
    ],
)
def test_flags(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(flags)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "experiment/a.yaml",
            "# @package _global_\noptimizer: {lrr: 3}\n",
            "optimizer.lrr=3 is no known key; choices: ",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\ntrain: {steps: abc}\n",
            "train.steps=abc is not of type int | null",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\ntrian: {steps: 3}\n",
            "trian={...} is no known key; did you mean train?",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /strategy: ddpp\n",
            "strategy=ddpp is no option; did you mean ddp?",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\ndefaults:\n  - override /observer: [jsonl, consol]\n",
            "observer=consol is no option; did you mean console?",
        ),
        (
            "experiment/a.yaml",
            "# @package _global_\nrun: {name: '${sed}'}\n",
            "run.name: Interpolation key 'sed' not found",
        ),
        ("experiment/a.yaml", "[1, 2]\n", "ends"),
        ("experiment/a.yaml", "a: [1\nb: 2\n", "ends"),
        (
            "strategy/a.yaml",
            "defaults: [schema/ddp@_here_, _self_]\nbucket: 3\n",
            "strategy.bucket=3 is no known key; did you mean bucket_mb?",
        ),
        (
            "strategy/a.yaml",
            "defaults: [schema/ddpp@_here_, _self_]\n",
            "strategy: schema/ddpp is no registered class; did you mean ddp?",
        ),
        (
            "strategy/a.yaml",
            "bucket_mb: 3\n",
            "strategy.name=null names no registered class; a strategy file starts from one: ",
        ),
        (
            "recipe/a.yaml",
            "# @package _global_\ndefaults: [schema/resnet_shapes@recipe, _self_]\nlr: {peek: 3}\n",
            "lr.peek=3 is no known key; did you mean peak?",
        ),
    ],
)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose(["--config-dir", "my", f"{Path(file).parent}=a", "seed=1"])
    said = str(caught.value)
    if message == "ends":
        assert said.startswith(str(path))
    else:
        assert said.startswith(message)
        named = os.path.join("my", file)
        assert said.endswith((f" was set in {named})", " was set on the command line)")) and (
            named in said or file.startswith(("experiment/a", "strategy/a"))
        )
    assert "\n" not in said


def test_the_last_file_that_sets_a_key_is_blamed(tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "experiment").mkdir()
    (tmp_path / "recipe" / "r.yaml").write_text(
        "# @package _global_\ndefaults: [schema/resnet_shapes@recipe, _self_]\nseed: a\n"
    )
    (tmp_path / "experiment" / "e.yaml").write_text("# @package _global_\nseed: b\n")
    for overrides, blamed in (
        (["recipe=r"], r"seed=a.*recipe/r.yaml\)$"),
        (["recipe=r", "experiment=e"], r"seed=b.*experiment/e.yaml\)$"),
        (["recipe=r", "seed=c"], r"seed=c.*command line\)$"),
    ):
        with pytest.raises(ConfigError, match=blamed):
            compose(["--config-dir", str(tmp_path), *overrides])


KEYS = [
    "seed",
    "step",
    "optimizer",
    "optimizer.momentum",
    "lr",
    "observer",
    "recipe.data.pixels",
    "launcher.env.A",
    "train.steps",
    "plugins",
    "experiment",
    "hydra",
    "job",
    "x",
]
VALUES = [
    "1",
    "-1",
    "null",
    "true",
    "[]",
    "{}",
    "[1,2]",
    "{a: 1}",
    "ddp",
    "${seed}",
    "${x}",
    "???",
    "",
    "a,b",
    "range(1,3)",
    "nan",
    "9" * 5000,
    "[[[[]]]]",
    "é",
    "'",
    "{_target_: a.b}",
]
OVERRIDE = st.builds(
    lambda prefix, key, value: f"{prefix}{key}={value}",
    st.sampled_from(["", "+", "++", "~", "@", "/"]),
    st.one_of(st.sampled_from(KEYS), st.text(max_size=6)),
    st.one_of(st.sampled_from(VALUES), st.text(max_size=8)),
)


EXAMPLES = pytest.mark.parametrize("examples", [15, pytest.param(500, marks=pytest.mark.slow)])


@EXAMPLES
def test_any_command_line_composes_or_is_a_config_error(composer: Composer, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.lists(st.one_of(OVERRIDE, st.text(max_size=12)), max_size=2))
    def check(overrides: list[str]) -> None:
        _composes_or_refuses(lambda: composer.compose(overrides))

    check()


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(VALUES), st.text(max_size=8))
NAMES = st.one_of(
    st.sampled_from([key.split(".")[-1] for key in KEYS] + ["defaults", "name", "_target_"]),
    st.integers(),
    st.none(),
    st.text(max_size=4),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=4)),
    max_leaves=8,
)


@EXAMPLES
def test_any_file_composes_or_is_a_config_error(tmp_path: Path, examples: int) -> None:
    import yaml

    (tmp_path / "experiment").mkdir()
    composer = Composer(str(tmp_path))

    @settings(max_examples=examples, deadline=None, database=None)
    @given(st.one_of(TREES, st.text(max_size=40), st.binary(max_size=30)))
    def check(body: object) -> None:
        data = body if isinstance(body, bytes) else yaml.safe_dump(body).encode("utf-8", "surrogatepass")
        (tmp_path / "experiment" / "fuzz.yaml").write_bytes(b"# @package _global_\n" + data)
        _composes_or_refuses(lambda: composer.compose(["experiment=fuzz"]))

    check()


def _composes_or_refuses(action: Callable[[], object]) -> None:
    try:
        action()
    except ConfigError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
