"""Which modules other processes must import to have the registered classes that a config chooses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from dtf.api.registry import name_of, registered
from dtf.config.plugin_modules import entry_point_modules
from dtf.config.settings import GROUPS, Settings
from dtf.core.errors import ConfigError
from dtf.core.main_module import MAIN, main_module_name


class Chosen(NamedTuple):
    """A class that a config chooses."""

    group: str
    name: str
    cls: type


def chosen_classes(config: dict[str, Any]) -> Iterator[Chosen]:
    """The registered classes that a composed config chooses."""
    nodes = [(group, node) for group, node in config.items() if isinstance(node, dict)]
    nodes += [("observer", node) for node in config.get("observer", {}).values()]
    for group, node in nodes:
        if (name := str(node.get("name"))) in registered(group):
            yield Chosen(group, name, registered(group)[name])


def plugins_of(config: dict[str, Any]) -> list[str]:
    """Modules, beside those in `plugins`, that define classes which a composed config chooses. Those of dtf and those
    that no other process can import are left out.
    """
    homes = {chosen.cls.__module__ for chosen in chosen_classes(config)}
    homes = {main_module_name() if home == MAIN else home for home in homes}
    known = {"", *map(str, config.get("plugins", [])), *entry_point_modules()}
    return sorted(home for home in homes - known if not f"{home}.".startswith("dtf."))


def check_importable(settings: Settings) -> None:
    """Raise ConfigError for a class of a notebook, or of another `__main__` that has no name, where ranks are other
    processes than this one.
    """
    if settings.launcher.in_this_process or main_module_name():
        return
    found = [(group, getattr(settings, group)) for group in GROUPS if group != "observer"]
    found += [("observer", part) for part in settings.observer.values()]
    for group, part in found:
        if type(part).__module__ == MAIN:
            name, launcher = name_of(group, part), name_of("launcher", settings.launcher)
            raise ConfigError(
                f"{group}={name} is the class {type(part).__qualname__} of this notebook or script (__main__), and "
                f"launcher={launcher} starts other processes, which cannot import it; use launcher=inline, or write "
                "the class into a file, such as my_parts.py, and import it here"
            )
