"""What a file advises for an option that another choice has replaced.

A recipe's file sets values in nodes of other groups, such as `lr: {peak: 0.1, warmup: 25000}`, for the options that it
chooses itself. Where the run has another option, values whose key that option has stay; the others are left out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra.types import RunMode
from omegaconf import DictConfig, flag_override

from dtf.api.registry import registered
from dtf.api.schema import KeyProblem, is_node, keys, show
from dtf.config.dotted_keys import leaves
from dtf.config.messages import is_set_by
from dtf.config.provenance import Source, sources
from dtf.config.settings import GROUPS
from dtf.core.text import suggest

if TYPE_CHECKING:
    from dtf.config.defaults_lists import YamlFile
    from dtf.config.hydra_sources import Loader

Path = tuple[str, ...]

_TRAINING = ("train", "verify")
_FAR = 20.0  # times the usual learning rate


class CommandLine(NamedTuple):
    """What a config was composed from."""

    config_name: str
    overrides: Sequence[str]
    loader: Loader
    reads: dict[str, YamlFile]

    def file_of(self, key: str) -> str:
        """The file that set a key, by its path as an option (`recipe/mine`); empty where the command line did."""
        if is_set_by(key, self.overrides, self.loader):
            return ""
        found = self.places(key)
        return found[-1].option if found and found[-1].file else ""

    def places(self, key: str) -> list[Source]:
        """See `sources`."""
        return sources(key, self.config_name, self.overrides, self.loader, self.reads)

    def with_file_alone(self, file: str) -> DictConfig:
        """What it would come to if it chose this file and nothing else."""
        group, _, option = file.partition("/")
        kept = [text for text in self.overrides if text.startswith("hydra.searchpath=")]
        chosen = [*kept, f"{group}={option}"] if option else kept
        return self.loader.load_configuration(self.config_name, chosen, RunMode.RUN)


def drop_advice(config: dict[Any, Any], tree: DictConfig, given: CommandLine) -> list[str]:
    """Take advice for options that were not chosen out of `config` and `tree`, the same config as Hydra composed it, in
    place. Returns a line for each value.

    What the command line sets stays, to be refused. So does a key of a file that the option which this file chooses
    does not know either: that is a mistake. KeyProblem for such keys of observers that were not chosen.
    """
    lines, alone = [], functools.cache(given.with_file_alone)
    for path in [path for group in GROUPS for path in _unknown(config.get(group), group)]:
        key, group = ".".join(path), path[0]
        file = given.file_of(key)
        if not file or file.partition("/")[0] == group:
            continue
        meant = alone(file).get(group)
        if not isinstance(meant, DictConfig) or path in _unknown(meant, group):
            continue
        value = _take(config, path)
        with flag_override(tree, ["readonly", "struct"], False):
            _take(tree, path)
        lines.append(f"{key}={show(value)} of {file.replace('/', '=')} is left out: {_why(config, path)}")
    _refuse_unchosen(config.get("observer"), given)
    return lines


def rate_notes(config: dict[Any, Any], given: CommandLine) -> list[str]:
    """A line where nobody chose the learning rate for the optimizer, and that is far above what is usual for it."""
    rate, name = config["lr"].get("peak"), config["optimizer"]["name"]
    usual = getattr(registered("optimizer").get(name), "usual_lr", None)
    if config["job"]["name"] not in _TRAINING or not usual or not rate or rate < _FAR * usual:
        return []
    typed = [is_set_by(key, given.overrides, given.loader) for key in ("lr.peak", "optimizer")]
    if typed[0] or not (typed[1] or all(source.is_default for source in given.places("lr.peak"))):
        return []
    return [
        f"warning: lr.peak={show(rate)} was not chosen for optimizer={name}, which usually takes {usual:g}; job=tune "
        "suggests a rate for this run"
    ]


def print_notes(notes: Sequence[str]) -> None:
    """Print what `drop_advice` and `rate_notes` returned, on standard error."""
    for note in notes:
        print(f"dtf: {note}", file=sys.stderr, flush=True)


def _refuse_unchosen(observers: Any, given: CommandLine) -> None:
    """Raise KeyProblem for a key of an observer that was not chosen."""
    nodes = observers.items() if isinstance(observers, dict) else ()
    for name, node in nodes:
        if not isinstance(node, dict) or "name" in node or f"observer/{name}" in given.reads:
            continue
        key, value = next(leaves(node, f"observer.{name}"))
        options = given.loader.get_group_options("observer")
        if name not in options:
            raise KeyProblem(
                f"observer.{name}", f"{key}={show(value)}: {name} is no observer; {suggest(str(name), options)}"
            )
        chosen = [str(other) for other, part in nodes if isinstance(part, dict) and "name" in part]
        raise KeyProblem(
            f"observer.{name}",
            f"{key}={show(value)} is a key of observer={name}, which is not chosen; choose "
            f"observer=[{','.join([*chosen, str(name)])}]",
        )


def _unknown(node: Any, group: str) -> Iterator[Path]:
    """Keys of a group's node that the class of its option does not have; observers that were not chosen."""
    if group == "observer":
        for name, part in node.items() if _is_mapping(node) else ():
            if _is_mapping(part):
                yield from _unknown_of("observer", part, (group, str(name))) if "name" in part else [(group, str(name))]
    elif _is_mapping(node):
        yield from _unknown_of(group, node, (group,))


def _unknown_of(group: str, node: Any, path: Path) -> Iterator[Path]:
    cls = registered(group).get(str(node.get("name")))
    return _below(cls, {name: node[name] for name in node if name != "name"}, path) if cls else iter(())


def _below(cls: type, node: Any, path: Path) -> Iterator[Path]:
    known = {key.name: key.hint for key in keys(cls)}
    for name, value in node.items():
        inner = (*path, str(name))
        if name not in known:
            yield inner
        elif is_node(known[name]) and _is_mapping(value):
            yield from _below(known[name], value, inner)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict | DictConfig)


def _take(node: Any, path: Path) -> Any:
    for part in path[:-1]:
        node = node[part]
    return node.pop(path[-1])


def _why(config: dict[Any, Any], path: Path) -> str:
    group = path[0]
    if group == "observer":
        return f"observer={show(list(config[group]))} was chosen" if len(path) == 2 else f"{path[1]} has no such key"
    return f"{group}={config[group]['name']} has no such key"
