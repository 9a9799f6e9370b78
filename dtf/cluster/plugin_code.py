"""The source files of plugins, and of what they import of their own: what a job has to take along.

Found by reading imports, since a plugin imports much of its code only in ranks. Installed packages are left out: the
job's own installation has them.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from dtf.core.errors import ConfigError
from dtf.core.text import bytes_text

MOST_BYTES = 64 << 20
"""Of code that a job takes along."""

_LEFT_OUT = {"__pycache__", "node_modules"}


def code_of(modules: Iterable[str]) -> dict[str, Path]:
    """Path below a folder of sys.path -> file, for these modules and all of their own that they import.

    ConfigError when there is too much of it.
    """
    found: dict[str, Path] = {}
    pending, seen = [name.partition(".")[0] for name in modules], set[str]()
    while pending:
        top = pending.pop()
        if top in seen or top == "dtf" or top in sys.stdlib_module_names:
            continue
        seen.add(top)
        for name, path in _files(top):
            found[name] = path
            if path.suffix == ".py":
                pending += _imported(path)
        size = sum(path.stat().st_size for path in found.values())
        if size > MOST_BYTES:
            raise ConfigError(
                f"the code of the plugin module {top}, with all in its folder, is {bytes_text(size)}; a job takes "
                f"{bytes_text(MOST_BYTES)} along: keep data out of the package, or install it where the job runs"
            )
    return dict(sorted(found.items()))


def _files(top: str) -> Iterator[tuple[str, Path]]:
    """Name in the bundle and path of each file of a top-level module; nothing of one that is installed or missing."""
    spec = _spec(top)
    if spec is None:
        return
    if spec.submodule_search_locations is None:
        if spec.origin and _is_own(Path(spec.origin).parent):
            yield Path(spec.origin).name, Path(spec.origin)
        return
    for location in map(Path, spec.submodule_search_locations):
        if _is_own(location.parent):
            for path in sorted(location.rglob("*" if spec.origin else "*.py")):  # a namespace may be any folder
                inside = path.relative_to(location.parent)
                hidden = any(part.startswith(".") or part in _LEFT_OUT for part in inside.parts)
                if path.is_file() and not hidden:
                    yield str(inside), path


def _spec(top: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):  # a module that a program made has no spec
        return None


def _is_own(folder: Path) -> bool:
    """Whether a folder of sys.path holds no installed packages."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]).resolve() for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    folder = folder.resolve()
    return not (installed & {folder, *folder.parents}) and not {"site-packages", "dist-packages"} & set(folder.parts)


def _imported(path: Path) -> Iterator[str]:
    """The top-level names that a file imports, wherever the import stands."""
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
