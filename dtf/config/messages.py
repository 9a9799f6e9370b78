"""What an error about a key or a word says besides: what was meant, the choices, and where the value was set."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from dtf.api.registry import registered
from dtf.api.schema import Interpolated, KeyProblem, show, type_text
from dtf.config import elsewhere
from dtf.config.dotted_keys import UNSAID, at, leaves, nested, parts_of
from dtf.config.meant_keys import known_keys, meant_elsewhere, options_with
from dtf.config.yaml_text import parse_yaml
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hydra.core.override_parser.types import Override

    from dtf.config.hydra_sources import Loader

COMMAND_LINE = "on the command line"
_KEY_SHOWN = 100  # characters
_FEW = 3  # keys that an error may offer; more are no help

_SPACE = re.compile(r"([^=]+)=(\w+)\(([^,()]+),([^,()]+)[,)].*", re.DOTALL)
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}  # as YAML 1.1 reads them, and Hydra does not
_DOTS = re.compile(r"([\d.eE+-]*\d)\.\.\.?(-?\d[\d.eE+-]*)")
_NOT_DECIMAL = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0[0-9]+|[0-9]+(?::[0-5]?[0-9])+)")
"""What people, or YAML, write a whole number to another base as."""
_SEARCH = " a search for the best value needs -m and hydra/sweeper=optuna"


def located(text: str, key: str, where: str) -> str:
    """A message with where the key got its value; apart from the remedy, so that nobody takes it for a part of it.

    `where`: `on the command line`, `in FILE`; empty: it is a default, and nothing is said.
    """
    return f"{text} ({show(key)} was set {where})" if where else text


class Located:
    """A block in which a KeyProblem becomes a ConfigError that says where the key was set: `where(key)`."""

    def __init__(self, where: Callable[[str], str]) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KeyProblem):
            lacks_name = str(error).startswith(f"{error.key}=null names no registered class")
            key = error.key.removesuffix(".name") if lacks_name else error.key
            raise ConfigError(located(str(error), key, self._where(error.key))) from error


def typed(text: str, override: str) -> str:
    """`located`, for an override, or a key, of the command line."""
    return located(text, override.partition("=")[0], COMMAND_LINE)


def without_place(text: str) -> str:
    """What `typed` was given, where the command line is not that of the user."""
    return text.rpartition(" (")[0] if text.endswith(f" was set {COMMAND_LINE})") else text


def parse(overrides: Sequence[str], loader: Loader | None = None) -> list[Override]:
    """Overrides as Hydra parses them. ConfigError for one that cannot be parsed."""
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            raise ConfigError(no_override(text)) from error
        except RecursionError:
            key = text.partition("=")[0][:_KEY_SHOWN]
            raise ConfigError(typed(f"{key} has brackets within brackets, more than can be read", key)) from None
        except ValueError as error:
            raise ConfigError(typed(f"{show(text)} has more digits than a number can have", text)) from error
    return parsed


def with_suggestions(problem: KeyProblem, config: dict[Any, Any]) -> KeyProblem:
    """The problem, with what was meant where that can be told: a value in the form of its type, a key of an option that
    was not chosen, then what other frameworks call a key, then known keys that have the same last part, after the
    nearest key beside it.
    """
    said, value = str(problem), at(config, parts_of(problem.key))
    if form := _other_form(said, value):
        return KeyProblem(problem.key, f"{problem}; {form}")
    head, unknown, choices = said.partition(" is no known key; ")
    if not unknown:
        return problem
    if inner := nested(config, problem.key):
        return KeyProblem(problem.key, f"{head}{unknown}a dot in a name leads nowhere, write {inner}")
    if options := options_with(problem.key):
        return KeyProblem(problem.key, f"{head}{unknown}it is a key of {options}; {choices.rpartition('? ')[2]}")
    key, value = next(leaves(None if value is UNSAID else value, problem.key))
    if there := meant_elsewhere(key, value, config):
        head = f"{key}={show(value)}" if key != problem.key else head
        return KeyProblem(problem.key, f"{head}{unknown}{there}{choices.rpartition('? ')[2]}")
    parent, dot, last = problem.key.rpartition(".")
    meant = [key for key in known_keys(config) if key.rpartition(".")[2] == last]
    near = re.match(r"did you mean (\w+)\? ", choices)
    if not meant or len(meant) + bool(near) > _FEW:
        return problem
    if near:
        meant.insert(0, f"{parent}{dot}{near[1]}")
    return KeyProblem(problem.key, f"{head}{unknown}did you mean {' or '.join(meant)}? {choices.rpartition('? ')[2]}")


def _other_form(said: str, value: Any) -> str:
    """How to write a value that is of another type than its key, where the form alone is wrong; else empty."""
    given, other, types = said.partition(" is not of type ")
    wanted = types.split(" | ")
    if not other or isinstance(value, Interpolated):
        return ""
    if isinstance(value, int | float) and "text" in wanted:
        return in_quotes(given.partition("=")[0], show(value))
    if isinstance(value, float) and value.is_integer() and "int" in wanted:
        return f"write it without a point or exponent: {int(value)}"
    if not isinstance(value, str) or not value:
        return ""
    if dots := _DOTS.fullmatch(value):
        return f"did you mean {given.partition('=')[0]}=interval({dots[1]},{dots[2]})?{_SEARCH}"
    if _NOT_DECIMAL.fullmatch(value) and {"int", "float"} & {*wanted}:
        return f"numbers are decimal: write {_decimal(value)}"
    bare = type_text(type(_plain(value)))
    fits = bare in wanted or (bare == "int" and "float" in wanted)
    if "bool" in wanted and value.lower() in _SWITCHES:
        return f"write {_SWITCHES[value.lower()]}"
    return "quotes make it text, write it without them" if fits else ""


def in_quotes(key: str, text: object) -> str:
    """How to write a number as text."""
    return f"in quotes it is text: '{text}', on the command line '{key}=\"{text}\"'"


def _plain(text: str) -> Any:
    """What a file has where this stands in it without quotes."""
    try:
        return parse_yaml(text)
    except Exception:  # noqa: BLE001  whatever YAML raises: it is text
        return text


def _decimal(text: str) -> str:
    """A text of `_NOT_DECIMAL` as one writes it; with both readings of a leading zero."""
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("+-")
    if ":" in digits:
        return f"{sign}{functools.reduce(lambda whole, part: 60 * whole + int(part), digits.split(':'), 0)}"
    if digits[1].isdecimal():
        octal = int(digits) if set(digits) & {"8", "9"} else int(digits, 8)
        return f"{sign}{int(digits)}" + (f", or {sign}{octal} where it is octal" if octal != int(digits) else "")
    return f"{sign}{int(digits, 0)}"


def meant_option(group: str, value: object) -> str:
    """`did you mean lr.peak=0.1? ` for `lr=0.1`, `did you mean fp16? ` for `precision=16`; empty where it is not
    known.
    """
    known = elsewhere.OPTIONS.get(group, {}).get(show(value).lower())
    if known:
        return f"did you mean {known}? "
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"did you mean {elsewhere.KEYS[group]}={value}? " if number and group in elsewhere.KEYS else ""


def _overlap(key: str, other: str) -> bool:
    """Whether one of two keys is the other, or lies below it."""
    return key == other or key.startswith((f"{other}.", f"{other}[")) or other.startswith(f"{key}.")


def is_set_by(key: str, overrides: Sequence[str], loader: Loader) -> bool:
    """Whether the command line gave a key its value, or a part of it."""

    def gives(override: Override) -> bool:
        given, value = override.key_or_group.replace("/", "."), override.value()
        if key == given:
            return True
        if isinstance(value, dict) and value:
            return any(_overlap(key, inner) for inner, _ in leaves(value, given))
        if loader.repository.group_exists(override.key_or_group):
            return given.startswith(f"{key}.")
        return _overlap(key, given)

    return any(gives(override) for override in parse(overrides, loader))


def no_override(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"{show(text)} is no override; {_meant_word(text)}"
    space = _SPACE.fullmatch(text)
    if space and space[2].lower() in elsewhere.SPACES:
        there = elsewhere.SPACES[space[2].lower()].format(space[3].strip(), space[4].strip())
        return typed(f"{show(text)} cannot be read; did you mean '{space[1]}={there}'?{_SEARCH}", text)
    example = '["a, b"]' if text.partition("=")[2].startswith("[") else '"a, b"'
    return typed(f"{show(text)} cannot be read; quote a value with special characters: 'key={example}'", text)


def _meant_word(text: str) -> str:
    jobs = registered("job")
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return f"a file is named by its folder and its name: --config-dir={path.parent} --config-name={path.stem}"
    if path.suffix == ".py":
        return f"a module with parts of your own is named as plugins=[{path.stem}]"
    if text in jobs or text in elsewhere.WORDS:
        return f"write {elsewhere.WORDS.get(text) or f'job={text}'}"
    if (path / "run.json").is_file():
        return f"a run folder is named by a key: job.runs=[{text}] or job.model={text}, of the job that takes it"
    near = re.match(r"did you mean (\w+)\?", suggest(text, jobs))
    return f"write key=value{f', or did you mean job={near[1]}?' if near else ''}"
