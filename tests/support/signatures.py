"""Constructors and functions in many forms. This module cannot be imported: it is read."""

# ruff: noqa: UP007, UP045 (older forms are read too)
# pyright: basic, reportMissingImports=false, reportGeneralTypeIssues=false, reportInconsistentOverload=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, overload

import not_installed_at_all as absent

try:
    import tests.support.foreign_optimizers as foreign
    from tests.support import foreign_star
except ImportError:
    import elsewhere as foreign

RATE = 0.25
COUNT = 1
COUNT += 1


class Kinds:
    def __init__(
        self,
        first,
        /,
        needed: int,
        path: Path = "./",  # pyright: ignore
        wide=3,
        many=(4, 4),
        mixed: tuple[float, int] = (1e-6, 50),
        sizes: list[int] | None = None,
        rate: float = RATE,
        whole: float = 2,
        either: Union[int, str, None] = 5,
        maybe: Optional[str] = None,
        kind: Literal["a", "b"] = "a",
        marked: Annotated[int, "positive"] = 1,
        free: Any = 0.5,
        count=COUNT,
        act: Callable[[int], float] | None = None,
        made=absent.thing,
        parts: dict[str, int] = {},  # noqa: B006
        nothing=None,
        *rest,
        flag: bool = False,
        empty: tuple[int, ...] = (),
        **more,
    ):
        raise NotImplementedError


class Inherits(Kinds):
    pass


class FromLibrary(absent.Module):
    pass


class BothBases(absent.Module, Kinds):
    pass


class ByModule(foreign.Lion):
    pass


class ByPackage(foreign_star.Renamed):
    pass


if RATE:

    def conditional(count: int, seed=0):
        raise NotImplementedError


class Overloaded:
    @overload
    def __init__(self, width: int): ...
    @overload
    def __init__(self, name: str): ...
    def __init__(self, width=8, name=""):
        raise NotImplementedError


@overload
def overloaded(width: int): ...
@overload
def overloaded(name: str): ...
def overloaded(width=8, name=""):
    raise NotImplementedError
