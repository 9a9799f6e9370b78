"""Overrides that are Python objects mean what they are."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtf.config.messages import parse
from dtf.config.python_compose import compose
from dtf.config.python_overrides import as_texts, plugin_override
from dtf.core.errors import ConfigError
from dtf.core.main_module import main_module_name

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=12).filter(lambda text: "${" not in text)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, width=32) | TEXT,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(PLAIN)
def test_a_value_is_read_as_it_was_given(value: Any) -> None:
    (override,) = parse(as_texts({"some.key": value}))
    assert override.key_or_group == "some.key" and override.value() == value
    assert type(override.value()) is type(value)


def test_objects_that_stand_for_plain_values() -> None:
    class Choice(Enum):
        one = "auto"

    values = {"a": Path("/x y"), "b": Choice.one, "c": np.float32(0.5), "d": np.int64(3), "e": (1, 2), "f": np.bool_(1)}
    assert as_texts(values) == ["a='/x y'", "b=auto", "c=0.5", "d=3", "e=[1,2]", "f=true"]
    assert as_texts({"a": np.float64(0.1), "b": [np.float64(1e-5)]}) == ["a=0.1", "b=[1e-05]"]
    assert as_texts({"a": {"b": {"c": 1, "d": []}}, "e": {}}) == ["a.b.c=1", "a.b.d=[]", "e={}"]
    assert as_texts("lr.peak=0.1") == ["lr.peak=0.1"] == as_texts([{"lr.peak": 0.1}])
    assert plugin_override([sys.modules[__name__], "os.path"]) == [f"plugins=[{__name__},os.path]"]
    assert plugin_override([ModuleType("mine")]) == ["plugins=[mine]"] and not plugin_override([])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lr.peak": object()}, "is a object, and configs hold"),
        ({"launcher.env": {"x y": 1}}, "is a dict, and configs hold"),
        ([3], "3 is no override"),
        (["--cfg=job"], "is a flag of the command line; in Python give config_dir="),
        ("lr.peak=0.1,0.2", "lr.peak=0.1,0.2 gives several values"),
        ({"train.steps": "3"}, "quotes make it text"),
    ],
)
def test_what_is_no_override_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        compose(given)
    assert refused.value.__cause__ is None


def test_a_config_can_be_shown_and_changed() -> None:
    config = compose(["strategy=fsdp", {"lr.peak": 0.1, "run.name": "a b"}])
    assert config.config["lr"]["peak"] == 0.1 and config.config["run"]["name"] == "a b"
    chosen = {"recipe      resnet_shapes", "strategy    fsdp", "lr.peak=0.1", "run.name='a b'"}
    assert chosen <= {*str(config).splitlines()} and str(config) in repr(config)
    other = config.with_({"strategy": "ddp", "lr.peak": 0.2})
    assert (other.config["strategy"]["name"], other.config["lr"]["peak"]) == ("ddp", 0.2)
    assert config.config["strategy"]["name"] == "fsdp" and "peak: 0.2" in other.to_yaml()
    assert not config.is_outdated


def test_the_name_of_the_main_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script has one where importing it finds the same file; what is typed has none."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert main_module_name() == ""
    script = tmp_path / "some_script.py"
    script.write_text("")
    main.__file__ = str(script)
    assert main_module_name() == "", "its folder is not where modules are found"
    monkeypatch.syspath_prepend(tmp_path)
    assert main_module_name() == "some_script"
    for name in ("json.py", "my-script.py", "__main__.py"):
        (tmp_path / name).write_text("")
        main.__file__ = str(tmp_path / name)
        assert main_module_name() == "", name
    main.__file__ = str(script)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert main_module_name() == ""
