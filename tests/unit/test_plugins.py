"""A plugin that cannot be imported, and a recipe whose check fails, are named with the author's line."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtf.config.compose import Composer
from dtf.core.errors import ConfigError, DataError, DtfError
from dtf.core.text import suggest
from dtf.recipes.resnet.recipe import ResnetShapes


@pytest.fixture(scope="module")
def composer() -> Composer:
    return Composer()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nowhere_at_all", "No module named 'nowhere_at_all', at {name}.py:1 in <module>"),
        (
            "from .there import Recipe",
            "{name} is in no package: import by the full name, or give plugins=[package.{name}]",
        ),
        ("1 / 0", "ZeroDivisionError: division by zero, at {name}.py:1 in <module>"),
        (
            "from dtf import Recipe, register\n@register('recipe', 'own_init')\nclass Own(Recipe):\n"
            "    def __init__(self):\n        pass\n",
            "{name}.Own has an __init__ of its own",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported(
    text: str, message: str, composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"plugin_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        composer.compose([f"plugins=[{name}]"])
    assert message.format(name=name) in str(refused.value)


def test_a_plugin_is_named_without_the_suffix_of_its_file(composer: Composer) -> None:
    with pytest.raises(ConfigError, match=r"give the module, without .py: plugins=\[my_recipe\]"):
        composer.compose(["plugins=[my_recipe.py]"])


@pytest.mark.parametrize(
    ("error", "kind"), [(FileNotFoundError("rows.csv"), DataError), (KeyError("columns"), ConfigError)]
)
def test_a_check_that_raises_names_the_recipe_and_the_line(
    error: Exception, kind: type[DtfError], composer: Composer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(self: object) -> None:
        raise error

    monkeypatch.setattr(ResnetShapes, "check", check)
    with pytest.raises(
        kind, match=rf"ResnetShapes.check\(\) raised {type(error).__name__}: .*, at .*\.py:\d+ in check"
    ):
        composer.compose(["recipe=resnet_shapes"]).check()


def test_the_nearest_name_is_found_whatever_its_case() -> None:
    assert suggest("adamW", ["adam", "adamw", "sgd"]).startswith("did you mean adamw?")
    assert suggest("ResNet18", ["resnet18", "resnet34"]).startswith("did you mean resnet18?")
