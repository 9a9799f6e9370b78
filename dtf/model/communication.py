"""Whether code of a model or a loss talks to other ranks: each computes other rows, and other numbers of passes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import FrameType
from typing import Any, Self

import torch
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from dtf.core.author_line import DTF
from dtf.core.errors import ConfigError

_TORCH = f"{torch.__path__[0]}{os.sep}"
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "GROUP_RANK")
"""What torchrun and launchers of clusters tell a process of the others."""


class AsksForOthers:
    """A context. `found`: the ways in which code that is neither torch's nor dtf's asked for the number of several
    processes, or which of them it is in. `who`: raise ConfigError at once, for code that would wait for the others.
    """

    def __init__(self, who: str = "") -> None:
        super().__init__()
        self.found: list[str] = _Refusing(who) if who else []

    def __enter__(self) -> Self:
        _Watch.add(self.found)
        return self

    def __exit__(self, *error: object) -> None:
        _Watch.remove(self.found)

    def refuse(self, who: str) -> None:
        """Raise ConfigError where `who` asked."""
        if self.found:
            raise others_error(who, self.found[0])


class _Refusing(list[str]):
    """Raises ConfigError with what it gets."""

    def __init__(self, who: str) -> None:
        super().__init__()
        self._who = who

    def append(self, found: str) -> None:
        super().append(found)
        raise others_error(self._who, found)


@contextmanager
def asks_for_no_others() -> Iterator[None]:
    """A context for a model's passes. ConfigError at its end where they asked."""
    with AsksForOthers() as asks:
        yield
    asks.refuse("the model")


class Communication(TorchDispatchMode):
    """A context. `found`: names of the collective operations and messages of `torch.distributed` in it, and what
    `AsksForOthers` finds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._asks = AsksForOthers()
        self.found = self._asks.found

    def __enter__(self) -> Self:
        self._asks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._asks.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _NAMESPACES:
            self.found.append(func._schema.name.partition("::")[2].strip("_"))
        return func(*args, **(kwargs or {}))

    def refuse(self, who: str) -> None:
        """Raise ConfigError where `who` talked to other ranks, or asked for them."""
        self._asks.refuse(who)


def others_error(who: str, found: str) -> ConfigError:
    """The error for code that talks to other ranks. `found`: in which way."""
    return ConfigError(
        f"{who} talks to other ranks itself ({found}), which compute other rows, and may have more micro-batches: its "
        "numbers would depend on the number of processes. Leave torch.distributed and its variables out; rows that a "
        "loss couples are those of a micro-batch, of step.micro_batch_rows"
    )


_SIZE, _VARIABLE = distributed_c10d._get_group_size, os._Environ.__getitem__


class _Watch:
    """The functions by which a process learns of others, replaced for as long as somebody watches them."""

    _lock, _lists = Lock(), list[list[str]]()

    @classmethod
    def add(cls, found: list[str]) -> None:
        """Report to this list from now on."""
        with cls._lock:
            cls._lists.append(found)
            distributed_c10d._get_group_size = _get_group_size
            os._Environ.__getitem__ = _getitem  # type: ignore[method-assign]

    @classmethod
    def remove(cls, found: list[str]) -> None:
        with cls._lock:
            cls._lists[:] = [each for each in cls._lists if each is not found]
            if not cls._lists:
                distributed_c10d._get_group_size = _SIZE
                os._Environ.__getitem__ = _VARIABLE  # type: ignore[method-assign]

    @classmethod
    def tell(cls, what: str, frame: FrameType | None) -> None:
        """Report what was asked for, unless torch or dtf asked. `frame`: of what answers."""
        while frame is not None and frame.f_code.co_filename in _ANSWERS:
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith((_TORCH, DTF)):
            for found in list(cls._lists):
                found.append(what)


_ANSWERS = {distributed_c10d.__file__, os.getenv.__code__.co_filename, os._Environ.get.__code__.co_filename}
"""Files of functions that lie between who asks and what answers."""


def _get_group_size(group: Any = None) -> int:
    size = _SIZE(group)
    if size > 1:
        _Watch.tell("get_world_size", sys._getframe(1))
    return size


def _getitem(environ: Any, key: str) -> str:
    value = _VARIABLE(environ, key)
    if key in _VARIABLES and environ._data.get(environ.encodekey("WORLD_SIZE"), b"1") != b"1":
        _Watch.tell(f"os.environ[{key!r}]", sys._getframe(1))
    return value
