"""Source files that no package manager has installed: those of plugins and recipes, and dtf's own in a working copy.

Versions say nothing of them, so hosts compare digests. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterator

from dtf.core.author_line import DTF
from dtf.core.main_module import MAIN

CODE = "code"
"""The key of `own_code` among what hosts and ranks must have in common. A file that one of them has not loaded, as it
had no use for it yet, is no difference.
"""
_OF_DTF = (".py", ".yaml", ".sh", ".c")
_INSTALLED = re.compile("site-packages|dist-packages")
_PYTHON = tuple(f"{sysconfig.get_path(key)}{os.sep}" for key in ("stdlib", "platstdlib", "scripts"))


def is_own(path: str) -> bool:
    """Whether a file belongs to neither Python nor dtf nor an installed package."""
    return not path.startswith((*_PYTHON, DTF)) and not _INSTALLED.search(path)


def own_code() -> dict[str, str]:
    """Digests of the own source files that this process has loaded, by their paths as imports give them: `my/model.py`.
    For a working copy of dtf one for each of its folders.
    """
    code = {
        _path_of(name, path): digest
        for name, module in list(sys.modules.items())
        if isinstance(path := getattr(module, "__file__", None), str)
        and path.endswith(".py")
        and is_own(path)
        and (digest := _digest([path]))
    }
    if not _INSTALLED.search(DTF):
        code |= dict(_working_copy())
    return code


def dtf_digest(package: str = DTF) -> str:
    """Of all files of dtf that it runs or reads: the same of a working copy and of the installed package of one state,
    in 20 ms.
    """
    content = hashlib.sha256()
    for folder, folders, files in os.walk(package, followlinks=True):  # recipes and conf are links in a working copy
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        for name in sorted(files):
            if name.endswith(_OF_DTF) and not name.startswith("."):  # editors and notebooks keep theirs so
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    content.update(f"{os.path.relpath(path, package)}\0".encode() + file.read() + b"\0")
    return content.hexdigest()[:16]


def _path_of(name: str, path: str) -> str:
    """As another host may have it, which keeps it elsewhere."""
    file = os.path.basename(path)
    if name == MAIN:
        return file
    folders = name.split(".") if file == "__init__.py" else name.split(".")[:-1]
    return "/".join([*folders, file])


def _working_copy() -> Iterator[tuple[str, str]]:
    for folder, folders, files in os.walk(DTF):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        sources = [os.path.join(folder, name) for name in sorted(files) if name.endswith(".py")]
        if sources:
            yield f"dtf/{os.path.relpath(folder, DTF)}".removesuffix("/."), _digest(sources)


def _digest(paths: list[str]) -> str:
    """Of files with their names. Empty where one cannot be read."""
    content = hashlib.sha256()
    try:
        for path in paths:
            with open(path, "rb") as file:
                content.update(f"{os.path.basename(path)}\0".encode() + file.read() + b"\0")
    except OSError:
        return ""
    return content.hexdigest()[:16]
