"""Imports modules that are not dtf's and whose registered classes become options."""

from __future__ import annotations

import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from dtf.api.registry import brings, groups, registered
from dtf.api.schema import show
from dtf.core.author_line import author_line
from dtf.core.errors import ConfigError
from dtf.core.main_module import is_loaded, loaded_module

_ENTRY_POINTS = "dtf.plugins"
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def load_plugin(name: str) -> None:
    """Import a module that is not dtf's, from the current directory too. ConfigError when it cannot be imported."""
    if is_loaded(name):
        return
    if not _MODULE.fullmatch(name):
        raise ConfigError(f"plugins=[{show(name)}] is no module name; give plugins=[package.module]")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # `python -m dtf` has it already, the console script does not
    try:
        importlib.import_module(name)
    except ConfigError:
        raise
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        raise ConfigError(
            f"plugins=[{name}] cannot be imported: {type(error).__name__}: {error}"
            + _import_hint(name, error, bool(missing))
        ) from error


def brings_parts(plugin: str) -> bool:
    """Whether a loaded module defines registered classes, or imports some."""
    module = loaded_module(plugin)
    members = vars(module).values()
    sources = {plugin, module.__name__, *(value.__name__ for value in members if isinstance(value, ModuleType))}
    classes = [cls for group in groups() for cls in registered(group).values()]
    known = any(
        cls in members or cls.__module__ in sources or cls.__module__.startswith(f"{plugin}.") for cls in classes
    )
    return known or any(brings(home) for home in sources)


def _import_hint(name: str, error: Exception, missing: bool) -> str:
    if missing and name.endswith(".py"):
        return f"; give the module, without .py: plugins=[{name.removesuffix('.py')}]"
    if missing:
        return "; install it, or run where it can be found"
    line = author_line(list(traceback.walk_tb(error.__traceback__)))
    place = f", at {line}" if line else ""
    if "attempted relative import" in str(error):
        return f"{place}; {name} is in no package: import by the full name, or give plugins=[package.{name}]"
    return place


def entry_point_modules() -> list[str]:
    """Plugin modules of installed packages.

    importlib.metadata takes 25 ms to import, so it is imported only when a package has an entry point of dtf.
    """
    marker = f"[{_ENTRY_POINTS}]".encode()
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            if entry.endswith((".dist-info", ".egg-info")):
                listing = Path(folder, entry, "entry_points.txt")
                if listing.is_file() and marker in listing.read_bytes():
                    from importlib.metadata import entry_points

                    return sorted({point.module for point in entry_points(group=_ENTRY_POINTS)})
    return []
