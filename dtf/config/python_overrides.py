"""Overrides as Python writes them: texts as on the command line, and mappings of keys to values."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import PurePath
from types import ModuleType
from typing import Any

from dtf.config.messages import without_place
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError
from dtf.core.text import quoted

Overrides = str | Mapping[str, Any] | Sequence["str | Mapping[str, Any]"]
"""`"lr.peak=0.1"`, `{"lr.peak": 0.1}`, or a sequence of these."""

_NAME = re.compile(r"[A-Za-z0-9_.*?/-]+")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


def as_texts(overrides: Overrides) -> list[str]:
    """The same overrides as a command line has them. ConfigError for what is no override."""
    if isinstance(overrides, str | Mapping):
        overrides = [overrides]
    texts: list[str] = []
    for item in overrides:
        if isinstance(item, Mapping):
            texts += [text for key, value in item.items() for text in _assigned(str(key), value)]
        elif not isinstance(item, str):
            raise ConfigError(f"{item!r} is no override; give 'key=value' or {{'key': value}}")
        elif item.startswith("-"):
            raise ConfigError(f"{item} is a flag of the command line; in Python give config_dir= or config_name=")
        else:
            texts.append(item)
    return texts


def plugin_override(plugins: Sequence[str | ModuleType]) -> list[str]:
    """The override that names these plugins, each a module or its name; none where there are none."""
    if isinstance(plugins, str | ModuleType):
        plugins = [plugins]
    names = [plugin.__name__ if isinstance(plugin, ModuleType) else str(plugin) for plugin in plugins]
    return [f"plugins=[{','.join(map(_written, dict.fromkeys(names)))}]"] if names else []


@contextmanager
def in_words_of_python() -> Iterator[None]:
    """A block whose ConfigErrors say nothing of a command line, and nothing of how they were found."""
    try:
        yield
    except ConfigError as error:
        error.args = (without_place(str(error)), *error.args[1:])
        if type(error.__cause__).__module__.partition(".")[0] in ("dtf", "hydra", "omegaconf"):
            error.__cause__ = None  # the same in other words
        raise


def summary(choices: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """What was chosen of each group, and the keys that were given, a line for each."""
    names = {group: ", ".join(map(str, name)) if isinstance(name, list) else name for group, name in choices.items()}
    shown = [group for group in (*GROUPS, *(choices.keys() - GROUPS)) if names.get(group) is not None]
    lines = [f"{group:<12}{names[group]}" for group in shown]
    return "\n".join([*lines, *(text for text in overrides if text.partition("=")[0] not in choices)])


def _assigned(key: str, value: Any) -> Iterator[str]:
    """A mapping with entries sets each of them alone, as it does in a file."""
    if isinstance(value, Mapping) and value and all(_NAME.fullmatch(str(name)) for name in value):
        for name, inner in value.items():
            yield from _assigned(f"{key}.{name}", inner)
    else:
        yield f"{key}={_written(value, key)}"


def _written(value: Any, key: str = "") -> str:
    """A value in the grammar of overrides, where quotes make text of it."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str | PurePath):
        # options of groups are words; as text a number would be no number
        return str(value) if _is_word(str(value)) else quoted(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):  # also numpy's, which is one
        return repr(int(value) if isinstance(value, int) else float(value))
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return _written(value.item(), key)
    if isinstance(value, Mapping) and all(_NAME.fullmatch(str(name)) for name in value):
        return "{" + ",".join(f"{name}:{_written(item, key)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_written(item, key) for item in value) + "]"
    shown = repr(value)[:100]
    raise ConfigError(
        f"{key}={shown} is a {type(value).__name__}, and configs hold numbers, texts, true, false, null, lists and "
        "mappings; objects are made by classes that are registered and chosen by name"
    )


def _is_word(text: str) -> bool:
    """Whether a text means the same without quotes."""
    return _WORD.fullmatch(text) is not None and text.lower() not in ("true", "false", "null", "none", "nan", "inf")
