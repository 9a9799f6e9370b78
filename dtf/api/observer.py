"""The contract of observers: they see the events of a run and change nothing.

Observers live in the launching process, which has no torch. A probe is the part of an observer inside a rank.
"""

from __future__ import annotations

import contextlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from dtf.core.types import Event, Note

if TYPE_CHECKING:
    from dtf.core.types import Place


class Probe(ABC):
    """The part of an observer that lives in a rank."""

    @abstractmethod
    def enter(self, phase: str, step: int) -> None:
        """The rank enters one of `heartbeat.PHASES` after `step` finished optimizer steps. The phase before has ended.

        Called several times in each step, so it must be fast.
        """

    def close(self) -> None:
        """Called after the last phase, also when the run failed or this probe raised an exception."""


class Observer(ABC):
    """Reports on a run. Fields are the config node `observer.<name>`."""

    shows_notes = False
    """Whether people who watch see a Note here at once. Where no observer of a run does, warnings go to standard error.
    """

    def check(self) -> None:
        """Raise ConfigError for values that cannot work. Called before processes are started."""

    def open(self, folder: Path, config: dict) -> None:
        """Called before the first event. `folder`: the run folder; `config`: the resolved config without secrets."""

    @abstractmethod
    def see(self, event: Event) -> None:
        """Take one event. Must be fast, since ranks may wait until the launching process reads from them.

        After a restart there is a second Started, with `attempt` > 0. What was measured after its `step` is measured
        again.
        """

    def close(self) -> None:
        """Called after the last event, also when the run failed or this observer raised an exception."""

    def probe(self, place: Place, folder: Path, say: Callable[[str], None]) -> Probe | None:
        """What this observer has inside a rank. Called in every rank before its first step. `say` shows a line to the
        people who watch.

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
        self._warn = warn or print_warning

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
        shown = any(observer.shows_notes for observer in self._watchers.values())
        if isinstance(event, Note) and event.level == "warning" and not shown:
            self._warn(event.text)


class Probes(_Watchers[Probe]):
    """In a rank."""

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def enter(self, phase: str, step: int) -> None:
        self._each(lambda probe: probe.enter(phase, step))


def print_warning(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # standard error may be closed too
        print(f"dtf: warning: {text}", file=sys.stderr, flush=True)
