"""The line of an author's file at which an error came: neither dtf's, nor a library's. Torch-free."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType

DTF = f"{Path(__file__).parents[1]}{os.sep}"
RECIPES = f"{DTF}recipes{os.sep}"
_STANDARD = f"{sysconfig.get_path('stdlib')}{os.sep}"
_PACKAGES = f"{os.sep}site-packages{os.sep}"


def author_line(frames: Sequence[tuple[FrameType, int]]) -> str:
    """The author's innermost line, `my_model.py:12 in forward`; one of an installed package where there is no other."""
    theirs = [(frame, line) for frame, line in frames if not _is_library(frame.f_code.co_filename)]
    theirs = [pair for pair in theirs if _PACKAGES not in pair[0].f_code.co_filename] or theirs
    if not theirs:
        return ""
    frame, line = theirs[-1]
    path = frame.f_code.co_filename
    shown = os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
    return f"{shown}:{line} in {frame.f_code.co_name}"


def _is_library(path: str) -> bool:
    if path.startswith((DTF, *_frameworks(), "<")):
        return not path.startswith(RECIPES)
    return path.startswith(_STANDARD) and _PACKAGES not in path


@cache
def _frameworks() -> tuple[str, ...]:
    """The folders of torch and numpy, which need not be imported."""
    found = [importlib.util.find_spec(name) for name in ("torch", "numpy")]
    return tuple(f"{place}{os.sep}" for spec in found if spec for place in spec.submodule_search_locations or ())
