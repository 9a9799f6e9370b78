"""Observers look at the events of a run and touch nothing. They live in the launching process, which has no torch."""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

from dtf.values import Event


class Observer(ABC):
    """Fields are the config node `observer.<name>`."""

    def check(self) -> None:
        """Raise ConfigError for values that cannot work. Called before any launch."""

    def open(self, folder: Path, config: dict) -> None:
        """Before the first event. `folder`: the run folder; `config`: the resolved config (secrets redacted)."""

    @abstractmethod
    def see(self, event: Event) -> None:
        """One event; quick, since ranks may wait for the launching process to read.

        After a restart a second Started comes, with `attempt` > 0: what was measured after its `step` will be measured again.
        """

    def close(self) -> None:
        """After the last event, also when the run failed, and after an exception of this observer."""


class Observers:
    """Several observers as one, by name. An exception ends the observer that raised it, with one warning, never the run."""

    def __init__(self, observers: Mapping[str, Observer], warn: Callable[[str], None] | None = None) -> None:
        self._observers = dict(observers)
        self._warn = warn or _print_warning

    def open(self, folder: Path, config: dict) -> None:
        self._each(lambda observer: observer.open(folder, config))

    def see(self, event: Event) -> None:
        self._each(lambda observer: observer.see(event))

    def close(self) -> None:
        """May be called twice; the second time does nothing."""
        self._each(lambda observer: observer.close())
        self._observers.clear()

    def _each(self, call: Callable[[Observer], None]) -> None:
        for name, observer in list(self._observers.items()):
            try:
                call(observer)
            except Exception as error:  # noqa: BLE001 - whatever a watcher does, the run goes on
                del self._observers[name]
                with contextlib.suppress(Exception):
                    observer.close()
                self._warn(f"observer.{name} stops watching, the run goes on: {type(error).__name__}: {error}")


def _print_warning(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed too
        print(f"dtf: warning: {text}", file=sys.stderr, flush=True)
