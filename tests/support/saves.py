"""Saves of a run of the harness: by a thread, as late as can be, or the last thing that a run does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from dtf.checkpoint.checkpointer import Checkpointer
from dtf.checkpoint.saves import Saves
from dtf.distributed.world import World


class Halt(Exception):
    """The run ends here, as if killed."""


class Halting(Saves):
    """The run ends with the first save."""

    def save(self, *arguments: Any) -> None:
        super().save(*arguments)
        self.finish()
        raise Halt


class Late(Saves):
    """Each save is written twice: by `at_once` while training waits, and by a thread that begins when the next save is
    due, and training has changed all that it could.
    """

    def __init__(self, checkpointer: Checkpointer, at_once: Checkpointer, barrier: Callable[[], None]) -> None:
        super().__init__(checkpointer, print, barrier)
        self._at_once, self._due, write = at_once, threading.Event(), checkpointer.save

        def save(*arguments: Any) -> str:
            self._due.wait()
            return write(*arguments)

        checkpointer.save = save  # type: ignore[method-assign]

    def ready(self) -> None:
        self._due.set()
        super().ready()
        self._due.clear()

    def save(self, step: int, state: Any, scalars: Any, value: Any, told: Any, check: Any) -> None:
        self._at_once.save(step, state, scalars, value)
        super().save(step, state, scalars, value, told, check)

    def layer(self, whole: bool) -> int | None:
        self._at_once.layer(whole)
        return super().layer(whole)

    def finish(self) -> None:
        self._due.set()
        super().finish()


def saves(
    saver: Callable[[str], Checkpointer], world: World, folder: str, at_once: str = "", halt: bool = False
) -> Saves | None:
    """To `folder`, if any, and where `at_once` is a folder, to that one too. `halt`: after the first the run ends."""
    peers = world.channel() if folder else None
    if peers is None:
        return None
    writer = saver(folder).over(peers)
    if at_once:
        return Late(writer, saver(at_once), world.barrier)
    return (Halting if halt else Saves)(writer, print, world.barrier)
