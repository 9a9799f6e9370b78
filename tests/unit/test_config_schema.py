"""Values and types: what fits a key, what is refused, and the way there and back."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.api.registry import option
from dtf.api.schema import UNSET, KeyProblem, build, coerce, keys, node, to_plain, unset
from dtf.config.compose import compose
from dtf.config.messages import parse, with_suggestions
from dtf.config.settings import coerce_config
from dtf.core.errors import ConfigError


class Color(Enum):
    red = "r"
    blue = "b"


@dataclass(kw_only=True)
class Leaf:
    size: int = 1


@dataclass(kw_only=True)
class Tree:
    leaf: Leaf = field(default_factory=Leaf)
    maybe: Leaf | None = None
    leaves: list[Leaf] = field(default_factory=list)
    by_name: dict[str, Leaf] = field(default_factory=dict)
    pair: tuple[int, ...] = (1, 2)
    color: Color = Color.red
    must: int


@pytest.mark.parametrize(
    ("hint", "value", "fitted", "typed"),
    [
        (int, 3, 3, 3),
        (float, 3, 3.0, 3.0),
        (float, 0.5, 0.5, 0.5),
        (str, "\udce9", "\udce9", "\udce9"),
        (str, "a", "a", "a"),
        (str, 7, "7", "7"),
        (bool, True, True, True),
        (int | None, None, None, None),
        (int | str, "auto", "auto", "auto"),
        (int | str, 3, 3, 3),
        (float | None, 3, 3.0, 3.0),
        (Color, "red", "r", Color.red),
        (Color, "r", "r", Color.red),
        (Color | None, "blue", "b", Color.blue),
        (Literal["a", 1], 1, 1, 1),
        (list[float], [1, 2.5], [1.0, 2.5], [1.0, 2.5]),
        (tuple[int, ...], [1, 2], [1, 2], (1, 2)),
        (dict[str, int], {"a": 1, 2: 3}, {"a": 1, "2": 3}, {"a": 1, "2": 3}),
        (Any, [1, "x"], [1, "x"], [1, "x"]),
        (Leaf | None, {"size": 3}, {"size": 3}, Leaf(size=3)),
        (list[Leaf], [{}], [{"size": 1}], [Leaf()]),
        (int, UNSET, UNSET, None),
    ],
)
def test_fits(hint: Any, value: object, fitted: object, typed: object) -> None:
    plain = coerce(hint, value, "key")
    assert (plain, type(plain)) == (fitted, type(fitted))
    assert json.loads(json.dumps(plain)) == plain
    if plain != UNSET:
        assert build(hint, plain) == typed


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (int, 1.0, "key=1.0 is not of type int"),
        (int, True, "key=true is not of type int"),
        (int, "3", "key=3 is not of type int"),
        (int, None, "key=null is not"),
        (float, "x", "key=x is not of type float"),
        (float, float("nan"), "key=nan must be a finite number"),
        (float | None, float("inf"), "key=inf must be a finite number"),
        (list[float], [1.0, float("-inf")], "key[1]=-inf must be a finite number"),
        (Any, float("inf"), "key=inf must be a finite number"),
        (int, float("inf"), "key=inf is not of type int"),
        (str, "a\0b", "key=a\\x00b must be text without NUL and surrogate characters"),
        (str, "\ud800", "key=\\ud800 must be text without"),
        (dict[str, int], {"\0": 1}, "key=\\x00 must be text without"),
        (float, True, "not of type float"),
        (float, 10**400, "not of type"),
        (bool, 1, "key=1 is not of type bool"),
        (str, None, "key=null is not of type text"),
        (str, 1.5, "key=1.5 is not of type text"),
        (str, [1], "key=[1] is not of type text"),
        (Color, "rod", "key=rod is no choice; did you mean red? choices: b, blue, r, red"),
        (int | None, "x", "key=x is not of type int | null"),
        (Literal["a", 1], True, "type a | 1"),
        (list[int], [1, "x"], "key[1]=x is not of type int"),
        (list[int], 3, "key=3 is not of type list of int"),
        (dict[str, int], {"a": "x"}, "key.a=x is not of type int"),
        (dict[str, int], {None: 1}, "the key null is no text"),
        (Leaf, 3, "key=3 is no group of keys; choices: size"),
        (Leaf, {"sise": 3}, "key.sise=3 is no known key; did you mean size"),
        (Leaf | None, {"size": "x"}, "key.size=x is not of type int"),
        (int, "\x1b[31m\n" + "y" * 200, "key=\\x1b[31m\\nyyy"),
    ],
)
def test_refused(hint: Any, value: object, said: str) -> None:
    with pytest.raises(KeyProblem) as caught:
        coerce(hint, value, "key")
    assert said in str(caught.value)
    assert caught.value.key.startswith("key")
    assert str(caught.value).isprintable()


@dataclass(kw_only=True)
class Bounded:
    count: int = option(default=1, least=0, most=8, doc="")
    share: float | None = option(default=0.5, above=0, below=1, doc="")
    sizes: list[int] = option(factory=list, least=1, doc="")
    named: dict[str, int] = option(factory=dict, least=1, doc="")
    either: int | str = option(default="auto", most=3, doc="")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"count": -1}, "count=-1 must be 0 to 8"),
        ({"count": 10**30}, "must be 0 to 8"),
        ({"share": 0}, "share=0.0 must be more than 0 and less than 1"),
        ({"share": 1.0}, "share=1.0 must be more than 0 and less than 1"),
        ({"sizes": [3, 0]}, "sizes[1]=0 must be 1 or more"),
        ({"named": {"a": 1, "b": 0}}, "named.b=0 must be 1 or more"),
        ({"either": 4}, "either=4 must be at most 3"),
        ({"count": 0, "share": None, "sizes": [1], "either": "much"}, ""),
        ({"count": 8, "share": 0.999, "sizes": [], "either": -5}, ""),
    ],
)
def test_numbers_stay_in_their_range(given: dict[str, Any], said: str) -> None:
    try:
        coerce(Bounded, given, "")
        refused = ""
    except KeyProblem as problem:
        refused = str(problem)
    assert refused.endswith(said) and bool(refused) == bool(said)


def test_a_class_there_and_back() -> None:
    default = node(Tree)
    assert unset(default) == ["must"]
    tree = build(
        Tree,
        coerce(Tree, {**default, "must": 3, "maybe": {"size": 2}, "leaves": [{"size": 5}], "by_name": {"x": {}}}, ""),
    )
    assert tree == Tree(must=3, maybe=Leaf(size=2), leaves=[Leaf(size=5)], by_name={"x": Leaf()})
    assert coerce(Tree, to_plain(tree), "") == to_plain(tree)


def test_default_nodes_are_not_shared() -> None:
    node(Tree)["leaves"].append(1)
    assert node(Tree)["leaves"] == []


PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.text(max_size=5), st.sampled_from([key.name for key in keys(Tree)])), inner, max_size=3
        ),
    ),
)


@given(PLAIN)
def test_anything_fits_or_is_a_key_problem(value: object) -> None:
    try:
        fitted = coerce(Tree, value, "")
    except KeyProblem:
        return
    if not unset(fitted):
        assert to_plain(build(Tree, fitted)) == fitted


def test_types_no_config_can_hold_are_refused() -> None:
    @dataclass
    class Odd:
        what: complex = 1j

    with pytest.raises(ConfigError, match="Odd.what: no config can hold a <class 'complex'>"):
        keys(Odd)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The default config."""
    return compose([]).config


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("seed=1.5", "is not of type int"),
        ("seed=true", "is not of type int"),
        ("train.steps=[3]", "is not of type int | null"),
        ("run.name=true", "is not of type text"),
        ("optimizer.momentum=nan", "must be a finite number"),
        ("seed=-1", "must be 0 to 18446744073709551615"),
        ("step.batch_size=0", "must be 1 to 1000000"),
        ("step.batch_size=1000000000000", "must be 1 to 1000000"),
        ("step.clip_norm=inf", "must be a finite number"),
        ("train.steps=0", "must be 1 to 1000000000000"),
        ("train.epochs=0.0", "must be more than 0 and at most 1000000"),
        ("train.epochs=inf", "must be a finite number"),
        ("train.log_every=-1", "must be 0 or more"),
        ("launcher.threads=1000000", "must be 0 to 1024"),
        ("launcher.processes=100000", "must be 1 to 1024"),
        ("launcher.hang_timeout_s=inf", "must be a finite number"),
        ("launcher.start_timeout_s=nan", "must be a finite number"),
        ("launcher.grace_s=3000000.0", "must be 0 to 1000000"),
        ("strategy.bucket_mb=0.0", "must be more than 0 and at most 1000000"),
        ("strategy.bucket_mb=inf", "must be a finite number"),
        ("strategy.bucket_mb=nan", "must be a finite number"),
        ("strategy.bucket_mb=1000000000000.0", "must be more than 0 and at most 1000000"),
        ("recipe.model.width=1000000000", "must be 0 to 1024"),
        ("recipe.model.width=-1", "must be 0 to 1024"),
        ("recipe.model.classes=1", "must be 2 or more"),
        ("recipe.data.pixels=4", "must be 8 to 4096"),
        ("recipe.data.pixels=1000000", "must be 8 to 4096"),
        ("recipe.data.train_rows=0", "must be 1 or more"),
        ("recipe.data.eval_rows=-3", "must be 1 or more"),
        ("recipe.data.crop_pad=-1", "must be 0 or more"),
        ("recipe.label_smoothing=1.0", "must be 0 or more and less than 1"),
        ("optimizer.momentum=1.0", "must be 0 or more and less than 1"),
    ],
)
def test_a_value_that_no_key_takes(plain: dict[str, Any], line: str, rule: str) -> None:
    """Said of a composed config, wherever the value was set."""
    (override,) = parse([line])
    config = part = copy.deepcopy(plain)
    *path, last = override.key_or_group.split(".")
    for name in path:
        part = part[name]
    part[last] = override.value()
    with pytest.raises(KeyProblem) as caught:
        coerce_config(config)
    assert str(caught.value) == f"{line} {rule}"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": {"bucket_mb": "3"}}, "strategy.bucket_mb=3 is not of type float; quotes make it text, write it "),
        ({"strategy": {"static_graph": "true"}}, "strategy.static_graph=true is not of type bool; quotes make it text"),
        ({"strategy": {"static_graph": "yes"}}, "strategy.static_graph=yes is not of type bool; write true"),
        ({"train": {"steps": "null"}}, "train.steps=null is not of type int | null; quotes make it text"),
        ({"train": {"steps": "3.5"}}, "train.steps=3.5 is not of type int | null"),
        ({"train": {"steps": ""}}, "train.steps= is not of type int | null"),
        ({"train": {"steps": "00"}}, "train.steps=00 is not of type int | null; numbers are decimal: write 0"),
        ({"train": {"steps": "0o17"}}, "train.steps=0o17 is not of type int | null; numbers are decimal: write 15"),
        (
            {"train": {"steps": "017"}},
            "train.steps=017 is not of type int | null; numbers are decimal: write 17, or 15 ",
        ),
        (
            {"run": {"name": 1.5}},
            "run.name=1.5 is not of type text; in quotes it is text: '1.5', on the command line 'run.name=",
        ),
        ({"run": {"name": False}}, "run.name=false is not of type text; in quotes it is text"),
        ({"run": {"name": None}}, "run.name=null is not of type text"),
        (
            {"strategy.bucket_mb": 3},
            "strategy.bucket_mb=3 is no known key; a dot in a name leads nowhere, write strategy: ",
        ),
        (
            {"recipe": {"model.arch": "x"}},
            "recipe.model.arch=x is no known key; a dot in a name leads nowhere, write m",
        ),
        ({"lr": {"lr.peak": 0.1}}, "lr.lr.peak=0.1 is no known key; a dot in a name leads nowhere, write peak: 0.1"),
    ],
)
def test_what_was_meant_by_a_value_in_another_form(plain: dict[str, Any], given: dict[str, Any], said: str) -> None:
    config = {**plain, **{name: {**plain[name], **inner} if name in plain else inner for name, inner in given.items()}}
    with pytest.raises(KeyProblem) as caught:
        coerce_config(config)
    text = str(with_suggestions(caught.value, config))
    assert text == said if said.endswith("null") else text.startswith(said)


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (list[str], "kill_rank", "k=kill_rank is not of type list of text; write [kill_rank]"),
        (list[int], 2, "k=2 is not of type list of int; write [2]"),
        (list[int], "two", "k=two is not of type list of int"),
        (list[int] | None, 2, "k=2 is not of type list of int | null; write [2]"),
        (list[Color], "r", "k=r is not of type list of r | b; write [r]"),
        (list[Leaf], {}, "k={...} is not of type list of group of keys"),
    ],
)
def test_one_entry_where_a_list_is_wanted(hint: Any, value: Any, said: str) -> None:
    with pytest.raises(KeyProblem) as caught:
        coerce(hint, value, "k")
    assert str(caught.value) == said
