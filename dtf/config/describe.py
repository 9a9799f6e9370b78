"""Lists every option of every group with its keys, as data and as text for a terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_args

from dtf.api.registry import registered
from dtf.api.schema import is_node, keys, option_node, show, to_plain, type_text
from dtf.config.as_written import fit_option, leave_interpolations, raw, restore
from dtf.config.dotted_keys import leaves
from dtf.config.hydra_sources import CONF, record_files
from dtf.config.option_files import is_class_file, option_text
from dtf.config.settings import EXPERIMENT, GROUPS, Root
from dtf.core.errors import ConfigError
from dtf.core.text import suggest

if TYPE_CHECKING:
    from dtf.config.compose import Composer
    from dtf.config.defaults_lists import YamlFile
    from dtf.config.hydra_sources import Loader

WHAT = {**GROUPS, EXPERIMENT: "complete named runs"}


def catalogue(
    composer: Composer, group: str = "", option: str = "", chosen: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> dict[str, Any]:
    """`{"root": [key...], "groups": {group: {"help", "options": {option: {"help", "keys", "sets"}}}}}`, narrowed when
    asked.

    `chosen`: only these options, by group.

    A key has `key`, `type`, `range` (of its numbers, in words; may be empty), `default`, `unit` and `help`.
    `sets` holds what a YAML option sets outside its own node.
    """
    if group and group not in WHAT:
        raise ConfigError(f"job.group={show(group)} is no group; {suggest(group, WHAT)}")
    if option and not group:
        raise ConfigError(f"job.option={show(option)} needs its group; give job.group=NAME")
    groups = {}
    for name in chosen or ([group] if group else WHAT):
        known = composer.options(name)
        if option and option not in known:
            raise ConfigError(f"job.option={show(option)} is no option of {name}; {suggest(option, known)}")
        groups[name] = {
            "help": WHAT[name],
            "options": {
                option_name: _option(composer, name, option_name)
                for option_name in chosen.get(name) or ([option] if option else known)
            },
        }
    return {
        **({} if group or chosen else {"root": _keys(Root, _root_values(composer), "")}),
        "groups": groups,
    }


def as_text(described: dict[str, Any], width: int) -> str:
    """A catalogue for people."""
    lines: list[str] = []
    if "root" in described:
        lines += ["root keys", "", *_key_lines(described["root"], width)]
    for group, entry in described["groups"].items():
        if len(described["groups"]) > 1:
            lines += ["", f"{group}: {entry['help']}", ""]
        for name, option in entry["options"].items():
            choice = f"{group}=[{name}]" if group == "observer" else f"{group}={name}"
            lines += [choice, *_wrapped(option["help"], width, "  ")]
            lines += _key_lines(option["keys"], width)
            if option["sets"]:
                lines += _wrapped(
                    "also sets " + " ".join(f"{key}={show(value)}" for key, value in option["sets"].items()),
                    width,
                    "  ",
                )
            lines.append("")
    return "\n".join(lines).rstrip()


def as_json(described: dict[str, Any]) -> str:
    """A catalogue for programs."""
    return json.dumps(described, indent=2)


def as_yaml(composer: Composer, group: str, option: str, chosen: Mapping[str, Sequence[str]]) -> str:
    """The file of one option as it is, or what it would be for a class of a plugin, which has none.

    ConfigError where several options are asked for.
    """
    asked = {group: [option]} if group and option else dict(chosen)
    names = [(each, name) for each, options in asked.items() for name in options]
    if len(names) != 1:
        raise ConfigError(
            "job.format=yaml shows the file of one option; give job.group=GROUP job.option=NAME, or choose one beside "
            "it: job=describe strategy=fsdp job.format=yaml"
        )
    each, name = names[0]
    catalogue(composer, each, name)  # refuses what there is not
    read = composer.read(each, name)
    return option_text(each, name) if read is None else read.file.read_text("utf-8")


def help_text(composer: Composer, width: int) -> str:
    """`dtf --help`: groups with their options, root keys, flags, examples."""
    chosen = composer.defaults()
    lines = [_HEAD, "Groups (group=option; * is chosen unless a recipe or experiment says otherwise):", ""]
    for group, what in WHAT.items():
        chosen_here = chosen.get(group) or []
        names = [f"*{name}" if name in chosen_here else name for name in composer.options(group)]
        lines += textwrap.wrap(
            " ".join(names) or "(none yet)",
            width - 14,
            initial_indent=f"  {group:<12}",
            subsequent_indent=" " * 14,
            break_on_hyphens=False,
        )
        lines += [f"{'':14}{what}"]
    lines += ["", "Keys outside groups (key=value):", ""]
    for key in _keys(Root, _root_values(composer), ""):
        unit = f" [{key['unit']}]" if key["unit"] else ""
        text = f"{key['key']}={show(key['default'])}".ljust(30) + f" {key['help'].split(';')[0]}{unit}"
        lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=" " * 33)
    return "\n".join([*lines, "", _TAIL])


def _root_values(composer: Composer) -> dict[str, Any]:
    """The keys outside groups as the files of a root have them, before a recipe or an experiment sets some. What a file
    writes stays as it is written.
    """
    values: dict[str, Any] = to_plain(Root())
    with record_files() as reads:
        for content in _root_contents(composer.loader, composer.config_name, reads):
            _merge(values, {name: content[name] for name in values if name in content})
    return values


def _root_contents(loader: Loader, path: str, reads: dict[str, YamlFile]) -> Iterator[dict[Any, Any]]:
    """The content of a file, and of those of its defaults list that are no options, in their order."""
    if path in reads:
        return
    loader.repository.load_config(path)
    if (read := reads.get(path)) is None:
        return
    named = [entry for entry in read.defaults if isinstance(entry, str)]
    for entry in named if "_self_" in named else [*named, "_self_"]:
        if entry == "_self_":
            yield read.content
        else:
            yield from _root_contents(loader, entry.strip("/"), reads)


def _merge(values: dict[Any, Any], more: dict[Any, Any]) -> None:
    """Set what `more` has, at any depth, in `values`."""
    for name, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _option(composer: Composer, group: str, name: str) -> dict[str, Any]:
    classes = registered(group)
    if group != EXPERIMENT and (own := _class_node(composer, group, name)) is not None:
        cls = classes[name]
        return {"help": _summary(cls), "keys": _keys(cls, own, _prefix(group, name)), "sets": {}}
    words = [f"{group}=[{name}]" if group == "observer" else f"{group}={name}"]
    composed = composer.compose(words, leave_interpolations)
    read = composed.reads[f"{group}/{name}"]
    text = " ".join(line.lstrip("# ").strip() for line in _header(read.file.read_text(encoding="utf-8")))
    if group == EXPERIMENT:
        return {"help": text, "keys": [], "sets": _chosen(read.defaults) | _sets(read.content)}
    node = restore(composed.config[group], raw(composed.tree[group]))
    node = next(iter(node.values())) if group == "observer" else node
    cls = classes[node["name"]]
    outside = read.content if "package" in read.header and read.header["package"] == "_global_" else {}
    sets = _chosen(read.defaults) | {key: value for key, value in _sets(outside).items() if key.split(".")[0] != group}
    return {"help": text or _summary(cls), "keys": _keys(cls, node, _prefix(group, name)), "sets": sets}


def _class_node(composer: Composer, group: str, option: str) -> dict[str, Any] | None:
    """The keys of an option that is a registered class and no more, with the values of its file. None for a file with
    content of its own.
    """
    if option not in registered(group):
        return None
    read = composer.read(group, option)
    if read is None:
        return option_node(group, option)
    return fit_option(group, read.content) if is_class_file(group, option, read.file, CONF) else None


def _keys(cls: type, values: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    described = []
    for key in keys(cls):
        name, value = f"{prefix}{key.name}", values[key.name]
        if is_node(key.hint) and isinstance(value, dict):
            described += _keys(key.hint, value, f"{name}.")
        else:
            nested = [arm for arm in get_args(key.hint) if is_node(arm)]
            facts = {
                "type": type_text(key.hint),
                "range": str(key.range),
                "default": value,
                "unit": key.unit,
                "help": " ".join(key.doc.split()),
            }
            described.append({"key": name, **facts})
            if len(nested) == 1 and not isinstance(value, dict):  # an optional group of keys
                described += _keys(nested[0], {inner.name: inner.default for inner in keys(nested[0])}, f"{name}.")
    return described


def _prefix(group: str, name: str) -> str:
    return f"observer.{name}." if group == "observer" else f"{group}."


def _summary(cls: type) -> str:
    return " ".join((cls.__doc__ or "").split("\n\n")[0].split())


def _header(text: str) -> list[str]:
    """The comment lines that a file starts with, but for the package line."""
    comments = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not line.lstrip("# ").startswith("@package"):
            comments.append(line)
    return comments


def _chosen(defaults: list[Any]) -> dict[str, Any]:
    """Options of other groups that a defaults list overrides."""
    pairs = [pair for entry in defaults if isinstance(entry, dict) for pair in entry.items()]
    return {str(key).split()[-1].strip("/"): value for key, value in pairs if str(key).startswith("override ")}


def _sets(content: dict[Any, Any]) -> dict[str, Any]:
    return dict(leaves(content)) if content else {}


def _key_lines(described: list[dict[str, Any]], width: int) -> list[str]:
    lines = []
    for key in described:
        unit = f" {key['unit']}" if key["unit"] else ""
        accepted = ", ".join(filter(None, (key["type"], key["range"])))
        lines += _wrapped(f"{key['key']}={show(key['default'])}{unit}   ({accepted})", width, "  ", "      ")
        lines += _wrapped(key["help"], width, "      ")
    return lines


def _wrapped(text: str, width: int, indent: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if rest is None else rest,
        break_on_hyphens=False,
        break_long_words=False,
    )


_HEAD = """\
dtf: declarative distributed training on PyTorch

  dtf [group=option] [key=value] ... [flags]         (or python -m dtf ...)

  dtf                                                train the default recipe
  dtf recipe=resnet_cifar10 recipe.data.root=PATH    another recipe
  dtf strategy=ddp launcher.processes=4 precision=bf16
  dtf train.epochs=3 step.batch_size=256             any key by its dotted name
  dtf -m optimizer=sgd,adamw lr.peak=0.05,0.1        a sweep: one run per combination
  dtf --config-dir DIR experiment=NAME               files of your own
  dtf job=describe job.group=strategy job.option=ddp every key of an option
"""

_TAIL = """\
Flags:

  --cfg job             print the composed config and stop; --resolve replaces ${interpolations}, --package NAME narrows
  --info [WHAT]         how the config came to be: defaults, defaults-tree, config, searchpath, plugins, all
  -m, --multirun        run every combination of key=a,b,c; again: those that are missing
  --bundle FILE         run what was submitted to a scheduler, see docs/clusters.md
  --config-dir DIR      look for <group>/<option>.yaml in DIR too
  --config-name NAME    start from DIR/NAME.yaml in place of dtf's own root config
  -sc install=bash      tab completion: eval "$(dtf -sc install=bash)"
  --version, --help

job=describe lists every key of every option with type, default and unit.
plugins=[my.module] adds options of your own."""
