"""Translates errors of Hydra and OmegaConf: the file or the key=value, the rule, and what to write."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from dtf.api.registry import registered
from dtf.api.schema import show
from dtf.config.defaults_lists import ROOT, YamlFile, choices_in, named_by
from dtf.config.limits import one_line
from dtf.config.messages import COMMAND_LINE, located, meant_option, no_override, parse, typed
from dtf.config.option_files import SCHEMA
from dtf.config.plugin_names import plugins_in, plugins_in_overrides
from dtf.config.settings import GROUPS
from dtf.core.errors import ConfigError
from dtf.core.text import display_path, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtf.config.hydra_sources import Loader

_OF_PLUGINS = ("recipe", "optimizer", "sparse", "strategy", "lr", "observer", "sampler")
"""Groups of which users write options."""
_THEIRS = (HydraException, OmegaConfBaseException, ValueError, AssertionError, OSError, UserWarning, RecursionError)


def translated(error: Exception, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> Exception:
    """The ConfigError that says what the user has to change; an error that is not the user's is returned as it is."""
    if isinstance(error, ConfigError) or not isinstance(error, _THEIRS):
        return error
    text = str(error)
    if isinstance(error, OverrideParseException):
        return ConfigError(no_override(error.override))
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_option(error.missing_cfg_file, overrides, loader, reads)
    said = _of_command_line(text) or _of_second_choice(text, reads) or _of_file(text, reads)
    if said:
        return ConfigError(said)
    if re.match(r"(Error merging override )?hydra.searchpath", text):
        return ConfigError(
            "hydra.searchpath must be a list of folders and packages: hydra.searchpath=[file:///folder,pkg://package]"
        )
    if unfit := re.match(r"Error merging override (.*)", text, re.DOTALL):
        return ConfigError(typed(f"{show(unfit[1])} does not fit its key; see dtf --cfg hydra", unfit[1]))
    if path := re.match(r"provider=.*?, path=(.*) is not available", text):
        return ConfigError(f"hydra.searchpath={path[1]} is no folder or package that can be found")
    if isinstance(error.__cause__, OmegaConfBaseException) and text in ("", "None"):
        text = str(error.__cause__)
    return ConfigError(one_line(ValueError(text or type(error).__name__)))


def _of_command_line(text: str) -> str:
    """What an error about an override comes to; empty for another error."""
    said = ""
    if ambiguous := re.match(r"Ambiguous value for argument '(.*?)'\n", text, re.DOTALL):
        key, _, value = ambiguous[1].partition("=")
        said = f"{show(ambiguous[1])} gives several values; a list is {key}=[{value}], a sweep over them needs -m"
    elif sweep := re.match(r"Sweep parameters '(.*?)' requires --multirun", text, re.DOTALL):
        search = " and hydra/sweeper=optuna" if "interval(" in sweep[1] else ""
        said = f"{show(sweep[1])} is a sweep and needs -m{search}"
    elif unknown := re.match(r"Could not override '(.*?)'\.\nTo append", text):
        said = f"{show(unknown[1])} is no known key; see dtf job=describe"
    elif unused := re.match(r"Could not override '(hydra/.*?)'", text):
        said = f"{show(unused[1])} is not used here; leave it out"
    elif gone := re.match(r"Could not delete (?:from config\. )?'(.*?)'", text):
        said = f"~{show(gone[1])} has nothing to take away: no such key or option is set; see dtf --cfg job"
    elif other := re.match(
        r"Could not delete from config\. The value of '(.*?)' is (.*) and not (.*)\.", text, re.DOTALL
    ):
        said = f"~{other[1]}={show(other[3])} has nothing to take away: {other[1]}={show(other[2])}; write ~{other[1]}"
    elif re.match(r"BasicSweeper does not support sweep type", text):
        return "an interval has no list of values to run; list them, or let Optuna choose: hydra/sweeper=optuna"
    return said and typed(said, said.split()[0])


def _of_second_choice(text: str, reads: dict[str, YamlFile]) -> str:
    """What an error about a group that is chosen twice comes to; empty for another error."""
    twice = re.match(r"Multiple values for (\S+?)\.|(\S+) appears more than once in the final defaults list", text)
    if not twice:
        return ""
    group = twice[1] or twice[2]
    for path, read in reversed(reads.items()):
        for is_override, chosen, value in choices_in(path, read.defaults) if path != ROOT else ():
            if chosen == group and not is_override:
                return (
                    f"{display_path(read.file)}: {group}: {show(value)} in its defaults list is a second choice of "
                    f"{group}; write override /{group}: {show(value)} at the end of the list"
                )
    return f"{group} takes one option; write {group}=NAME without +"


def _of_file(text: str, reads: dict[str, YamlFile]) -> str:
    """What an error about a file comes to; empty for one that names no file that was read."""
    named = re.match(r"In '?(.*?)'?: (.*)", text, re.DOTALL)
    if not named or named[1] not in reads:
        return ""
    place, rest = display_path(reads[named[1]].file), named[2]
    if rest.startswith("Defaults list is missing `_self_`"):
        return (
            f"{place}: its defaults list has no _self_, the place of the file's own keys among those of the others; "
            "write - _self_ at its end"
        )
    unused = re.match(r"Could not override '(.*?)'", rest)
    if not unused:
        return f"{place}: {one_line(rest)}"
    path, _, package = unused[1].partition("@")
    folder, _, group = path.rpartition("/")
    if "hydra" in folder.split("/"):
        return located(f"hydra/{group} is not used here; leave it out", f"hydra/{group}", f"in {place}")
    head = f"{place}: override /{group} in its defaults list"
    if group not in GROUPS:
        return f"{place}: override /{path} in its defaults list names no group; {suggest(path, GROUPS)}"
    if folder:
        return f"{place}: override {group} in its defaults list is a group below {folder}; write override /{group}"
    if package and reads[named[1]].header["package"] != "_global_":
        return f"{head} reaches beyond the file's own group; begin the file with the line # @package _global_"
    if package:
        return f"{head}: a group has one place; leave @{package} out"
    return (
        f"{head} comes too late, {group} is chosen before this file is read; choose it in an experiment or on the "
        "command line"
    )


def _no_option(path: str, overrides: Sequence[str], loader: Loader, reads: dict[str, YamlFile]) -> ConfigError:
    group, _, name = path.rpartition("/")
    if not group:
        return ConfigError(
            f"--config-name={name} is not found; give the name of a YAML file in --config-dir, without .yaml"
        )
    base, _, tail = group.rpartition("/")
    near = ""
    if tail == SCHEMA and base in GROUPS:
        choices, what = registered(base), f"{base}: schema/{show(name)} is no registered class"
    else:
        if base and not loader.repository.group_exists(group):  # an option of a folder, or a group without its slash
            near = f"write override /{tail}: {name}" if tail in GROUPS else ""
            group, _, name = path.partition("/")
        choices, what = loader.repository.get_group_options(group), f"{group}={show(name)} is no option"
    files = [read.file for place, read in reads.items() if path in named_by(place, reads, overrides=True)]
    values = [override.value() for override in parse(overrides, loader) if override.key_or_group == group]
    is_typed = any(name in value if isinstance(value, list) else name == value for value in values)
    where = COMMAND_LINE if is_typed else f"in {display_path(files[-1])}" if files else ""
    meant = meant_option(group, name)
    near = near or (f"{meant}{suggest('', choices)}" if meant else suggest(name, choices))
    known = [*plugins_in_overrides(overrides), *(name for read in reads.values() for name in plugins_in(read.content))]
    if group in _OF_PLUGINS and not known and not near.startswith("did you mean"):
        near += "; one of your own needs plugins=[ITS_MODULE]"
    return ConfigError(located("; ".join(filter(None, (what, near))), group, where))
