"""What values hold is put back, whatever holds it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from dtf.model.contents import Contents


class Key:
    pass


_KEY = Key()


def _local() -> threading.local:
    value = threading.local()
    value.count = 1
    return value


def _weak() -> weakref.WeakKeyDictionary[Key, list[int]]:
    return weakref.WeakKeyDictionary({_KEY: [1]})


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda value: value.append(2), list),
    "list that holds itself": (lambda: [1], lambda value: value.append(value), lambda value: len(value)),
    "thread's own": (_local, lambda value: setattr(value, "count", 2), lambda value: value.count),
    "weak dict": (_weak, lambda value: value[_KEY].append(2), lambda value: list(value[_KEY])),
    "new key": (_weak, lambda value: value.pop(_KEY), lambda value: dict(value)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contents_are_put_back(kind: str) -> None:
    make, change, read = KINDS[kind]
    contents, value = Contents(set()), make()
    contents.keep(value, 4)
    before = read(value)
    change(value)
    assert read(value) != before
    contents.restore()
    assert read(value) == before
