"""Observers look at the events of a run and touch nothing.

They live in the launching process, which has no torch; a probe is their eye in a rank.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dtf.core.types import Event

if TYPE_CHECKING:
    from dtf.core.types import Place


class Probe(ABC):
    """What an observer sees from inside a rank."""

    @abstractmethod
    def enter(self, phase: str, step: int) -> None:
        """The rank enters one of `heartbeat.PHASES` after `step` finished optimizer steps; the phase before has ended.

        Called very often.
        """

    def close(self) -> None:
        """After the last phase, also when the run failed, and after an exception of this probe."""


class Observer(ABC):
    """Fields are the config node `observer.<name>`."""

    def check(self) -> None:
        """Raise ConfigError for values that cannot work. Called before any launch."""

    def open(self, folder: Path, config: dict) -> None:
        """Before the first event. `folder`: the run folder; `config`: the resolved config (secrets redacted)."""

    @abstractmethod
    def see(self, event: Event) -> None:
        """One event; quick, since ranks may wait for the launching process to read.

        After a restart a second Started comes, with `attempt` > 0: what was measured after its `step` will be measured
        again.
        """

    def close(self) -> None:
        """After the last event, also when the run failed, and after an exception of this observer."""

    def probe(self, place: Place, folder: Path, say: Callable[[str], None]) -> Probe | None:
        """For what cannot be seen from outside: called in every rank before its first step. `say` shows a line to
        whoever watches.

        ConfigError for values that do not fit these ranks. Default: nothing.
        """
        return None


class _Closes(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closes)


class _Watchers(Generic[_T]):
    """Several watchers as one, by name. An exception ends the one that raised it, with one warning, never the run."""

    def __init__(self, watchers: Mapping[str, _T], warn: Callable[[str], None] | None = None) -> None:
        self._watchers = dict(watchers)
        self._warn = warn or _print_warning

    def close(self) -> None:
        """May be called twice; the second time does nothing."""
        self._each(lambda watcher: watcher.close())
        self._watchers.clear()

    def _each(self, call: Callable[[_T], None]) -> None:
        for name, watcher in list(self._watchers.items()):
            try:
                call(watcher)
            except Exception as error:  # noqa: BLE001 - whatever a watcher does, the run goes on
                del self._watchers[name]
                with contextlib.suppress(Exception):
                    watcher.close()
                self._warn(f"observer.{name} stops watching, the run goes on: {type(error).__name__}: {error}")


class Observers(_Watchers[Observer]):
    """In the launching process."""

    def open(self, folder: Path, config: dict) -> None:
        self._each(lambda observer: observer.open(folder, config))

    def see(self, event: Event) -> None:
        self._each(lambda observer: observer.see(event))


class Probes(_Watchers[Probe]):
    """In a rank."""

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def enter(self, phase: str, step: int) -> None:
        self._each(lambda probe: probe.enter(phase, step))


def _print_warning(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed too
        print(f"dtf: warning: {text}", file=sys.stderr, flush=True)
