"""Translates errors of Hydra and OmegaConf: key=value, the rule, the choices, and where the value was set."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException

from dtf.api.registry import registered
from dtf.api.schema import KeyProblem, is_node, keys, show
from dtf.config.limits import one_line
from dtf.config.settings import GROUPS, Root
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hydra.core.override_parser.types import Override

    from dtf.config.hydra_sources import Loader, YamlFile

_THEIRS = (HydraException, OmegaConfBaseException, ValueError, AssertionError, OSError, UserWarning, RecursionError)
COMMAND_LINE = "on the command line"
_FEW = 3  # keys that an error may offer; more are no help

# What people type who come from elsewhere, by the last part of the key.
_KEYS_ELSEWHERE = {"lr": "lr.peak", "learning_rate": "lr.peak"}
_OPTIONS_ELSEWHERE = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float32": "fp32",
    "float": "fp32",
    "float64": "fp64",
    "double": "fp64",
}


def parse(overrides: Sequence[str], loader: Loader | None = None) -> list[Override]:
    """Overrides as Hydra parses them. ConfigError for one that cannot be parsed."""
    parser = OverridesParser.create(config_loader=loader)
    parsed: list[Override] = []
    for text in overrides:
        try:
            parsed += parser.parse_overrides([text])
        except OverrideParseException as error:
            raise ConfigError(_no_override(error.override)) from error
        except ValueError as error:
            raise ConfigError(f"{show(text)} has more digits than a number can have; set {COMMAND_LINE}") from error
    return parsed


def translated(error: Exception, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> Exception:
    """The ConfigError that says what the user has to change; an error that is not the user's is returned as it is."""
    if isinstance(error, ConfigError) or not isinstance(error, _THEIRS):
        return error
    text = str(error)
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
        return ConfigError(f"{show(sweep[1])} is a sweep and needs -m; set {COMMAND_LINE}")
    if several := re.match(r"Multiple values for (\S+?)\.", text):
        return ConfigError(f"{several[1]} takes one option; write {several[1]}=NAME without +")
    if unknown := re.match(r"Could not override '(.*?)'\.\nTo append", text):
        return ConfigError(f"{show(unknown[1])} is no known key; see dtf job=describe; set {COMMAND_LINE}")
    if unused := re.match(r"(?:In '(.*?)': )?Could not override '(hydra/.*?)'", text):
        where = display_path(reads[unused[1]].file) if unused[1] in reads else ""
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
    """The problem. Where a few known keys have the same last part as an unknown one, it suggests these, after the
    nearest key beside it.
    """
    head, unknown, choices = str(problem).partition(" is no known key; ")
    if not unknown:
        return problem
    parent, dot, last = problem.key.rpartition(".")
    known = list(_known_keys(config))
    meant = [key for key in known if key.rpartition(".")[2] == last] or [
        key for key in known if key == _KEYS_ELSEWHERE.get(last)
    ]
    near = re.match(r"did you mean (\w+)\? ", choices)
    if not meant or len(meant) + bool(near) > _FEW:
        return problem
    if near:
        meant.insert(0, f"{parent}{dot}{near[1]}")
    return KeyProblem(problem.key, f"{head}{unknown}did you mean {' or '.join(meant)}? {choices.rpartition('? ')[2]}")


def key_for_number(group: str, value: object) -> str:
    """`did you mean lr.peak=0.1? ` for `lr=0.1`; empty where a group is not known elsewhere as a number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"did you mean {_KEYS_ELSEWHERE[group]}={value}? " if number and group in _KEYS_ELSEWHERE else ""


def is_set_by(key: str, overrides: Sequence[str], loader: Loader) -> bool:
    """Whether the command line gave a key its value, or a part of it."""

    def gives(override: Override) -> bool:
        given = override.key_or_group.replace("/", ".")
        chooses = loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)
        within = key.startswith((f"{given}.", f"{given}[")) and not chooses
        return key == given or within or given.startswith(f"{key}.")

    return any(gives(override) for override in parse(overrides, loader))


def origin(key: str, config_name: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> str:
    """Where a key got its value: `on the command line`, `in FILE`, or "" when it is a default."""
    if is_set_by(key, overrides, loader):
        return COMMAND_LINE
    option = file_of(key, config_name, overrides, loader, reads)
    return f"in {display_path(reads[option].file)}" if option else ""


def file_of(key: str, config_name: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> str:
    """The last file that set a key, by its path as an option (`recipe/mine`); empty where none did."""
    wanted = re.findall(r"[^.\[\]]+", key)
    for default in reversed(loader.compute_defaults_list(config_name, list(overrides), RunMode.RUN).defaults):
        read = reads.get(default.config_path or "")
        if read is None:
            continue
        package = default.package.split(".") if default.package else []
        if wanted[: len(package)] == package and _holds(read.content, wanted[len(package) :]):
            return default.config_path or ""
    return ""


def display_path(path: Path) -> str:
    """A path as text: relative to the current directory where it lies below that, else absolute."""
    absolute, current = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, current) if absolute.startswith(f"{current}{os.sep}") else absolute


def _known_keys(config: dict[Any, Any]) -> Iterator[str]:
    """Dotted keys of the root and of the options that `config` chose; an option that does not exist has none."""
    yield from _keys_below(Root, "")
    for group in GROUPS:
        chosen = config.get(group)
        parts = chosen if group == "observer" and isinstance(chosen, dict) else {"": chosen}
        for name, part in parts.items():
            cls = registered(group).get(str(part.get("name"))) if isinstance(part, dict) else None
            if cls is not None:
                yield from _keys_below(cls, f"{group}.{name}." if name else f"{group}.")


def _keys_below(cls: type, prefix: str) -> Iterator[str]:
    for key in keys(cls):
        yield f"{prefix}{key.name}"
        if is_node(key.hint):
            yield from _keys_below(key.hint, f"{prefix}{key.name}.")


def _holds(content: Any, parts: list[str]) -> bool:
    for part in parts:
        if isinstance(content, dict):
            names = {str(name): entry for name, entry in content.items()}
            if part not in names:
                return False
            content = names[part]
        elif isinstance(content, list) and part.isdecimal() and int(part) < len(content):
            content = content[int(part)]
        else:
            return False
    return True


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
        jobs = registered("job")
        meant = (
            f"job={text}"
            if text in jobs
            else f"key=value, or -{'-' * (len(text) > 1)}{text}"
            if text in ("help", "h")
            else "key=value"
        )
        return f"{show(text)} is no override; write {meant}"
    example = '["a, b"]' if text.partition("=")[2].startswith("[") else '"a, b"'
    return f"{show(text)} cannot be read; quote a value with special characters: 'key={example}'; set {COMMAND_LINE}"


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
    alias = _OPTIONS_ELSEWHERE.get(name)
    near = f"did you mean {alias}? {suggest('', choices)}" if alias in choices else suggest(name, choices)
    return ConfigError("; ".join(filter(None, (what, near, where))))
