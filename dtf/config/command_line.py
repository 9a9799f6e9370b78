"""The flags of the command line, and a guess whether its overrides can be right. Imports neither torch nor Hydra."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from dtf.api.registry import registered
from dtf.api.schema import is_node, keys
from dtf.config.settings import EXPERIMENT, GROUPS, Root
from dtf.core.errors import ConfigError
from dtf.core.text import quoted

_FLAGS_ELSEWHERE = {
    "--config-path": "--config-dir=FOLDER adds the options in a folder to those of dtf, and --config-name=NAME starts "
    "from a root of your own in it",
    "--hydra-help": "dtf --help lists the flags, and dtf --cfg hydra the settings of Hydra",
    "--experimental-rerun": "a run goes on under its own command with the same run.dir",
}
"""Flags of Hydra that are not used here: what to write instead."""

_PATH = re.compile(r"^([^=]+=)(~(?:/[^,]*)?|(?=[^=]+=)[\w./+=@%:-]+)$")
"""A path below the home directory, where the shell did not expand it; or one with `=` in it, such as a trial's folder,
which Hydra reads in quotes alone.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; config values are given as key=value; see dtf --help")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Flags and overrides, in any order. ConfigError for an unknown flag."""
    parser = _Parser(prog="dtf", add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in (
        ["--help", "-h"],
        ["--version"],
        ["--run", "-r"],
        ["--multirun", "-m"],
        ["--resolve"],
        ["--shell-completion", "-sc"],
    ):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-name", "-cn")
    parser.add_argument("--config-path", "-cp")
    parser.add_argument("--hydra-help", action="store_true")
    parser.add_argument("--experimental-rerun")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--bundle")
    parser.add_argument("--digest")
    parser.add_argument("--trial", type=int)
    parser.add_argument(
        "--info",
        "-i",
        nargs="?",
        const="all",
        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"],
    )
    flags = parser.parse_intermixed_args(list(argv))
    for flag, instead in _FLAGS_ELSEWHERE.items():
        if getattr(flags, flag.lstrip("-").replace("-", "_")):
            raise ConfigError(f"{flag} is not used here; {instead}")
    flags.overrides = [_PATH.sub(lambda found: f"{found[1]}{quoted(found[2])}", text) for text in flags.overrides]
    if (flags.digest is not None or flags.trial is not None) and not flags.bundle:
        parser.error("--digest and --trial go with --bundle")
    if flags.bundle and (flags.config_dir or flags.config_name):
        parser.error("--bundle brings its own config files; leave --config-dir and --config-name out")
    if (flags.resolve or flags.package) and not flags.cfg:
        parser.error("--resolve and --package go with --cfg")
    answers = [flags.run, flags.multirun, flags.shell_completion, flags.cfg is not None, flags.info is not None]
    if sum([*answers, bool(flags.bundle)]) > 1:
        parser.error("only one of --run, --multirun, --bundle, --cfg, --info and --shell-completion at a time")
    return flags


def is_known(override: str) -> bool:
    """Whether a `key=value` names a key, or an option, that dtf's own parts have.

    Says nothing about other people's, nor about values.
    """
    name, equals, value = override.partition("=")
    head, *rest = name.lstrip("+~").split(".")
    if not equals or (head not in GROUPS and head != EXPERIMENT and head not in {field.name for field in fields(Root)}):
        return False
    if head not in GROUPS:
        return not rest or head == EXPERIMENT or _has(get_type_hints(Root)[head], rest)
    if not rest:
        options = [option for option in value.strip("[]").split(",") if option]
        return all(
            option in registered(head) or Path(__file__).parents[1].joinpath("conf", head, f"{option}.yaml").is_file()
            for option in options
        )
    return head == "observer" or any(_has(cls, rest) for cls in registered(head).values())


def _has(hint: Any, path: list[str]) -> bool:
    """Whether a type has a key by this path; anything may stand below a key that is no dataclass."""
    if not path or not is_node(hint):
        return True
    return any(key.name == path[0] and _has(key.hint, path[1:]) for key in keys(hint))
