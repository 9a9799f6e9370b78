"""The module that Python was started with, `__main__`, and the name by which other processes import it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

MAIN = "__main__"


def main_module_name() -> str:
    """The name by which another process with the same `sys.path` imports the code of `__main__`: `train` for
    `python train.py`, `pkg.train` for `python -m pkg.train`.

    Empty where there is none: a notebook, an interactive Python, a script whose name is no module name or is that of
    another module.
    """
    main = sys.modules.get(MAIN)
    if is_interactive():  # what was typed is in no file
        return ""
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return str(spec.name)
    file = getattr(main, "__file__", None)
    name = Path(file).stem if file else ""
    if not file or not name.isidentifier() or name == MAIN:
        return ""
    try:
        found = importlib.util.find_spec(name)
        same = found is not None and found.origin is not None and os.path.samefile(found.origin, file)
    except (ImportError, ValueError, OSError):  # a module of this name that has no spec, or a file that is gone
        return ""
    return name if same else ""


def is_main(name: str) -> bool:
    """Whether a module that others import by this name is the code of `__main__`. It must not be imported here too."""
    return name == MAIN or (name not in sys.modules and name == main_module_name())


def is_loaded(name: str) -> bool:
    """Whether this process has a module already, as `__main__` too."""
    return name in sys.modules or is_main(name)


def loaded_module(name: str) -> ModuleType:
    """A module that was imported, or `__main__` where `name` is its name for other processes."""
    return sys.modules[name] if name in sys.modules else sys.modules[MAIN]


def is_interactive() -> bool:
    """Whether somebody types what runs here: a notebook, or an interactive Python."""
    return hasattr(sys, "ps1")
