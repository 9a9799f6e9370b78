"""Translates errors of Hydra and OmegaConf: key=value, the rule, the choices, and where the value was set."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dtf.api.registry import registered
from dtf.api.schema import KeyProblem, show
from dtf.config import elsewhere
from dtf.config.limits import one_line
from dtf.config.meant_keys import known_keys, meant_elsewhere, options_with
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.override_parser.types import Override

    from dtf.config.defaults_lists import YamlFile
    from dtf.config.hydra_sources import Loader

_THEIRS = (HydraException, OmegaConfBaseException, ValueError, AssertionError, OSError, UserWarning, RecursionError)
COMMAND_LINE = "on the command line"
_FEW = 3  # keys that an error may offer; more are no help

_SPACE = re.compile(r"([^=]+)=(\w+)\(([^,()]+),([^,()]+)[,)].*", re.DOTALL)
_DOTS = re.compile(r"([\d.eE+-]*\d)\.\.\.?(-?\d[\d.eE+-]*)")
_NOT_DECIMAL = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-9]+|[0-9]+(?::[0-5]?[0-9])+)")
"""What YAML 1.1 reads as a whole number to another base."""
_SEARCH = " a search for the best value needs -m and hydra/sweeper=optuna"


def parse(overrides: Sequence[str], loader: Loader | None = None) -> list[Override]:
    """Overrides as Hydra parses them. ConfigError for one that cannot be parsed."""
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            raise ConfigError(_no_override(text)) from error
        except ValueError as error:
            raise ConfigError(f"{show(text)} has more digits than a number can have; set {COMMAND_LINE}") from error
    return parsed


def translated(error: Exception, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> Exception:
    """The ConfigError that says what the user has to change; an error that is not the user's is returned as it is."""
    if isinstance(error, ConfigError) or not isinstance(error, _THEIRS):
        return error
    text = str(error)
    if unordered := re.match(r"In '(.*?)': Defaults list is missing `_self_`", text):
        return ConfigError(
            f"{_place(unordered[1], reads) or unordered[1]}: its defaults list has no _self_, the place of the file's "
            "own keys among those of the others; write - _self_ at its end"
        )
    if isinstance(error, OverrideParseException):
        return ConfigError(_no_override(error.override))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error.missing_cfg_file, overrides, loader, reads)
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)'\n", text, re.DOTALL):
        key, _, value = ambiguous[1].partition("=")
        return ConfigError(
            f"{show(ambiguous[1])} gives several values; a list is {key}=[{value}], a sweep over them needs -m; set "
            f"{COMMAND_LINE}"
        )
    if sweep := re.match(r"Sweep parameters '(.*?)' requires --multirun", text, re.DOTALL):
        search = " and hydra/sweeper=optuna" if "interval(" in sweep[1] else ""
        return ConfigError(f"{show(sweep[1])} is a sweep and needs -m{search}; set {COMMAND_LINE}")
    if several := re.match(r"Multiple values for (\S+?)\.", text):
        return ConfigError(f"{several[1]} takes one option; write {several[1]}=NAME without +")
    if unknown := re.match(r"Could not override '(.*?)'\.\nTo append", text):
        return ConfigError(f"{show(unknown[1])} is no known key; see dtf job=describe; set {COMMAND_LINE}")
    if unused := re.match(r"(?:In '(.*?)': )?Could not override '(hydra/.*?)'", text):
        where = _place(unused[1], reads)
        return ConfigError(
            f"{show(unused[2])} is not used here; leave it out; set {f'in {where}' if where else COMMAND_LINE}"
        )
    if gone := re.match(r"Could not delete (?:from config\. )?'(.*?)'", text):
        return ConfigError(
            f"~{show(gone[1])} has nothing to take away: no such key or option is set; see dtf --cfg job; set "
            f"{COMMAND_LINE}"
        )
    if other := re.match(
        r"Could not delete from config\. The value of '(.*?)' is (.*) and not (.*)\.", text, re.DOTALL
    ):
        return ConfigError(
            f"~{other[1]}={show(other[3])} has nothing to take away: {other[1]}={show(other[2])}; write ~{other[1]}; "
            f"set {COMMAND_LINE}"
        )
    if re.match(r"BasicSweeper does not support sweep type", text):
        return ConfigError(
            "an interval has no list of values to run; list them, or let Optuna choose: hydra/sweeper=optuna; set "
            f"{COMMAND_LINE}"
        )
    if re.match(r"(Error merging override )?hydra.searchpath", text):
        return ConfigError(
            "hydra.searchpath must be a list of folders and packages: hydra.searchpath=[file:///folder,pkg://package]"
        )
    if unfit := re.match(r"Error merging override (.*)", text, re.DOTALL):
        return ConfigError(f"{show(unfit[1])} does not fit its key; see dtf --cfg hydra; set {COMMAND_LINE}")
    if path := re.match(r"provider=.*?, path=(.*) is not available", text):
        return ConfigError(f"hydra.searchpath={path[1]} is no folder or package that can be found")
    if isinstance(error.__cause__, OmegaConfBaseException) and text in ("", "None"):
        text = str(error.__cause__)
    return ConfigError(one_line(ValueError(text or type(error).__name__)))


def with_suggestions(problem: KeyProblem, config: dict[Any, Any]) -> KeyProblem:
    """The problem, with what was meant where that can be told: a key of an option that was not chosen, then what other
    frameworks call a key, then known keys that have the same last part, after the nearest key beside it.
    """
    dots = re.fullmatch(rf"{re.escape(problem.key)}=({_DOTS.pattern}) is not of type .*", str(problem))
    if dots:
        return KeyProblem(problem.key, f"{problem}; did you mean {problem.key}=interval({dots[2]},{dots[3]})?{_SEARCH}")
    other = re.fullmatch(
        rf"{re.escape(problem.key)}=({_NOT_DECIMAL.pattern}) is not of type .*(?:int|float).*", str(problem)
    )
    if other:
        return KeyProblem(problem.key, f"{problem}; numbers are decimal: write {_decimal(other[1])}")
    head, unknown, choices = str(problem).partition(" is no known key; ")
    if not unknown:
        return problem
    if options := options_with(problem.key):
        return KeyProblem(problem.key, f"{head}{unknown}it is a key of {options}; {choices.rpartition('? ')[2]}")
    key, value = first_leaf(problem.key, config)
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


def _decimal(text: str) -> str:
    """A text of `_NOT_DECIMAL` as one writes it; with both readings of a leading zero."""
    sign, digits = ("-" if text.startswith("-") else ""), text.lstrip("+-")
    if ":" in digits:
        return f"{sign}{functools.reduce(lambda whole, part: 60 * whole + int(part), digits.split(':'), 0)}"
    if digits[1].isdecimal():
        octal = "" if set(digits) & {"8", "9"} else f", or {sign}{int(digits, 8)} where it is octal"
        return f"{sign}{int(digits)}{octal}"
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


def first_leaf(key: str, config: dict[Any, Any]) -> tuple[str, Any]:
    """The first key at or below `key` that is no mapping, with its value."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    while isinstance(value, dict) and value:
        name = next(iter(value))
        key, value = f"{key}.{name}", value[name]
    return key, value


def paths(value: dict[Any, Any], at: str) -> Iterator[str]:
    """The keys that a mapping at `at` gives values to."""
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            yield from paths(inner, f"{at}.{name}")
        else:
            yield f"{at}.{name}"


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
            return any(_overlap(key, path) for path in paths(value, given))
        if loader.repository.group_exists(override.key_or_group):
            return given.startswith(f"{key}.")
        return _overlap(key, given)

    return any(gives(override) for override in parse(overrides, loader))


def display_path(path: Path) -> str:
    """A path as text: relative to the current directory where it lies below that, else absolute."""
    absolute, current = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, current) if absolute.startswith(f"{current}{os.sep}") else absolute


def _place(path: str | None, reads: dict[str, YamlFile]) -> str:
    """The file that was read as an option; empty for one that was not."""
    return display_path(reads[path].file) if path in reads else ""


def _chooses(entry: Any, group: str, name: str) -> bool:
    """Whether a line of a defaults list chooses this option; relative groups count when their last part fits."""
    pairs = (
        entry.items()
        if isinstance(entry, dict)
        else [tuple(entry.rpartition("/")[::2])]
        if isinstance(entry, str)
        else []
    )
    for key, value in pairs:
        path = str(key).split(" ")[-1].split("@")[0].strip("/")
        if f"/{group}".endswith(f"/{path}") and name in (
            value if isinstance(value, list) else [str(value).split("@")[0]]
        ):
            return True
    return False


def _no_override(text: str) -> str:
    if "=" not in text and not text.startswith("~"):
        return f"{show(text)} is no override; {_meant_word(text)}"
    space = _SPACE.fullmatch(text)
    if space and space[2].lower() in elsewhere.SPACES:
        there = elsewhere.SPACES[space[2].lower()].format(space[3].strip(), space[4].strip())
        return f"{show(text)} cannot be read; did you mean '{space[1]}={there}'?{_SEARCH}; set {COMMAND_LINE}"
    example = '["a, b"]' if text.partition("=")[2].startswith("[") else '"a, b"'
    return f"{show(text)} cannot be read; quote a value with special characters: 'key={example}'; set {COMMAND_LINE}"


def _meant_word(text: str) -> str:
    jobs = registered("job")
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return f"a file is named by its folder and its name: --config-dir={path.parent} --config-name={path.stem}"
    if path.suffix == ".py":
        return f"a module with parts of your own is named as plugins=[{path.stem}]"
    if text in jobs or text in elsewhere.WORDS:
        return f"write {elsewhere.WORDS.get(text) or f'job={text}'}"
    near = re.match(r"did you mean (\w+)\?", suggest(text, jobs))
    return f"write key=value{f', or did you mean job={near[1]}?' if near else ''}"


def _no_option(path: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> ConfigError:
    group, _, name = path.rpartition("/")
    if not group:
        return ConfigError(
            f"--config-name={name} is not found; give the name of a YAML file in --config-dir, without .yaml"
        )
    base, _, tail = group.rpartition("/")
    if tail == "schema" and base in GROUPS:
        choices, what = registered(base), f"{base}: schema/{show(name)} is no registered class"
    else:
        choices, what = loader.repository.get_group_options(group), f"{group}={show(name)} is no option"
    files = [read.file for read in reads.values() if any(_chooses(entry, group, name) for entry in read.defaults)]
    typed = any(override.key_or_group == group for override in parse(overrides, loader))
    where = f"set {COMMAND_LINE}" if typed else f"set in {display_path(files[-1])}" if files else ""
    meant = meant_option(group, name)
    near = f"{meant}{suggest('', choices)}" if meant else suggest(name, choices)
    return ConfigError("; ".join(filter(None, (what, near, where))))
