"""In a job: modules of one's own come from what was submitted, in every process and at any time, or are refused.

What a node finds in its working directory or by PYTHONPATH may be another copy. Torch-free.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

from dtf.core.errors import ConfigError
from dtf.core.own_code import is_own

_VARIABLE = "DTF_SUBMITTED_CODE"
"""For ranks: the folder of the submitted code, and modules that are installed though they lie elsewhere."""


class _Finder:
    """The first finder: it asks all others."""

    def __init__(self, code: str, installed: Iterable[str]) -> None:
        self._code, self._installed = os.path.join(os.path.realpath(code), ""), set(installed)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or not spec.has_location or spec.origin is None:
            return spec
        file = os.path.realpath(spec.origin)
        outside = is_own(spec.origin) and is_own(file) and not file.startswith(self._code)
        if outside and name.partition(".")[0] not in self._installed:
            raise ConfigError(
                f"{name} is imported from {spec.origin}, which is not part of what was submitted, as no import "
                "statement names it; name its module in plugins, or write an import of it"
            )
        return spec


@contextmanager
def from_submission_alone(code: str, installed: Sequence[str]) -> Iterator[None]:
    """A context in which this process, and ranks that it starts, refuse modules of one's own beyond the folder `code`.
    `installed`: names of top-level modules that are none, wherever they lie.
    """
    finder = _Finder(code, installed)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    os.environ[_VARIABLE] = os.pathsep.join([code, *installed])
    try:
        yield
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        os.environ.pop(_VARIABLE, None)


def as_submitted() -> None:
    """The same in a rank, for as long as it lives; nothing where no job was submitted."""
    if text := os.environ.get(_VARIABLE):
        code, *installed = text.split(os.pathsep)
        sys.meta_path.insert(0, _Finder(code, installed))  # type: ignore[arg-type]
