"""The arguments of classes and functions, read from their source or from themselves, and the types of their keys."""

from __future__ import annotations

import re
import subprocess
import sys
from inspect import Parameter
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.core.arguments import UNKNOWN, arguments_of, config_type, load, named, typed_default
from dtf.core.errors import ConfigError
from tests.support import foreign_optimizers

HERE = "tests.support.signatures"
TORCHS = sorted(
    name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
)
KINDS: dict[str, tuple[Any, Any]] = {
    "needed": (int, Parameter.empty),
    "path": (str, "./"),
    "wide": (int | float, 3),
    "many": (tuple[int, ...], (4, 4)),
    "mixed": (tuple[float, ...], (1e-6, 50.0)),
    "sizes": (list[int] | None, None),
    "rate": (float, 0.25),
    "whole": (float, 2.0),
    "either": (int | str | None, 5),
    "maybe": (str | None, None),
    "kind": (str, "a"),
    "marked": (int, 1),
    "free": (float, 0.5),
    "count": (None, UNKNOWN),
    "act": (None, None),
    "made": (None, UNKNOWN),
    "parts": (None, {}),
    "nothing": (None, None),
    "flag": (bool, False),
    "empty": (tuple[int, ...], ()),
}


def found(target: Any) -> dict[str, tuple[Any, Any]]:
    arguments = named(arguments_of(target))
    return {
        key: (config_type(argument), typed_default(config_type(argument), argument.default))
        for key, argument in arguments.items()
    }


def test_arguments_are_typed_keys() -> None:
    assert found(f"{HERE}:Kinds") == KINDS
    kinds = {argument.name: argument.kind for argument in arguments_of(f"{HERE}:Kinds")}
    assert kinds["first"] is Parameter.POSITIONAL_ONLY
    assert (kinds["rest"], kinds["more"]) == (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Inherits", list(KINDS)),
        ("BothBases", list(KINDS)),  # what is not here is passed over
        ("FromLibrary", []),
        ("ByModule", ["params", "lr", "betas", "weight_decay"]),
        ("ByPackage", ["params", "lr", "period", "scale"]),
        ("conditional", ["count", "seed"]),
        ("Overloaded", ["width", "name"]),
        ("overloaded", ["width", "name"]),
    ],
)
def test_a_constructor_is_found_where_it_is_inherited_from(name: str, expected: list[str]) -> None:
    assert list(found(f"{HERE}:{name}")) == expected


@pytest.mark.parametrize("name", TORCHS)
def test_a_source_says_what_the_class_says(name: str) -> None:
    source, cls = found(f"torch.optim:{name}"), found(getattr(torch.optim, name))
    assert list(source) == list(cls)
    assert list(source.values())[1:] == list(cls.values())[1:]  # the first are parameters


@pytest.mark.parametrize(("name", "theirs"), [("Lion", "Lion"), ("Renamed", "Counting"), ("InItself", "InItself")])
def test_a_class_is_found_where_a_package_brings_it_from(name: str, theirs: str) -> None:
    assert found(f"tests.support.foreign_star:{name}") == found(getattr(foreign_optimizers, theirs))


def test_a_folder_without_an_init_file_is_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loose_folder").mkdir()
    (tmp_path / "loose_folder" / "net.py").write_text("def make(width: int = 3): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert found("loose_folder.net:make") == {"width": (int, 3)}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("Lion", 'write "package.module:Class"'),
        (f"{HERE}:Kind", "has no class or function Kind in its source"),
        ("no_such_package:Lion", "no module no_such_package is here.*pip install no-such-package"),
        ("torch.nothing:Lion", "the source of torch.nothing is not in"),
        ("_struct:Struct", "name the class itself"),
        (type("Odd", (), {"__signature__": 3}), "has no signature to read"),
    ],
)
def test_what_cannot_be_read_is_said(target: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        arguments_of(target)


def test_the_name_of_a_script_is_refused_with_what_to_write(tmp_path: Path) -> None:
    """`__main__` is another module in ranks."""
    for read in (arguments_of, load):
        with pytest.raises(
            ConfigError, match=re.escape('"__main__:Net"') + ".*ranks.*give the class or function itself"
        ):
            read("__main__:Net")
    script = tmp_path / "script.py"
    script.write_text(
        "from dtf.core.arguments import arguments_of, load\n"
        "print('run')\n"
        "class Net:\n    def __init__(self, width: int = 3): ...\n"
        "assert load('script:Net') is Net and len(arguments_of('script:Net')) == 1\n"
        "arguments_of(f'{__name__}:Net')\n"
    )
    root = Path(__file__).parents[2]
    environment = {"PYTHONPATH": f"{root}", "PATH": ""}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "run\n"
    assert done.stderr.rstrip().endswith('give the class or function itself, Net, or "script:Net"')


def test_a_default_that_no_config_holds_makes_no_key() -> None:
    class Net:
        def __init__(self, width: int = 8, act: type = torch.nn.ReLU, note: str | None = None, sizes=(1, None)): ...

    assert {key: hint for key, (hint, _) in found(Net).items()} == {
        "width": int,
        "act": None,
        "note": str | None,
        "sizes": None,
    }
