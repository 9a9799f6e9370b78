"""Functions that hear the events of a run, in a thread of the launching process: they see all and slow nothing."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from dtf.api.observer import print_warning
from dtf.core.errors import ConfigError
from dtf.core.types import Event

Callback = Callable[[Event], object]


class Callbacks:
    """Calls each function with each event in order, in one thread, while the run goes on. At the end of the block all
    that were queued are heard.

    An exception in one ends it with one warning and is kept in `errors`, by name; the others and the run go on.
    """

    def __init__(self, functions: Sequence[Callback]) -> None:
        functions = [functions] if callable(functions) else list(functions)
        for function in functions:
            if not callable(function):
                raise ConfigError(f"callbacks=[{function!r}] is no function; give functions of one event")
        self.errors: dict[str, BaseException] = {}
        self._functions = {f"{number} ({_name(function)})": function for number, function in enumerate(functions)}
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def see(self, event: Event) -> None:
        if self._functions:
            self._events.put(event)

    def __enter__(self) -> Self:
        if self._functions:
            run = contextvars.copy_context().run  # of a notebook's cell: what it prints is shown there
            self._thread = threading.Thread(target=run, args=(self._call,), name="dtf-callbacks", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._events.put(None)
            self._thread.join()

    def _call(self) -> None:
        while (event := self._events.get()) is not None:
            for name, function in list(self._functions.items()):
                try:
                    function(event)
                except BaseException as error:  # noqa: BLE001 - whatever a callback does, sys.exit() too, the run goes on
                    del self._functions[name]
                    self.errors[name] = error
                    print_warning(
                        f"callback {name} hears no more, the run goes on: {type(error).__name__}: {error}; the "
                        "exception is in callback_errors of the result"
                    )


def _name(function: Callback) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
