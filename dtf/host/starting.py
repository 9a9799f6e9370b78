"""Answers a signal to stop from the first lines of a command on, until something listens for it, and again after that.

Whatever handles signals later replaces the handler here: `signals.Stop`, the ranks' own, torch's elastic agent. While
the handler here stands, or within `at_once`, there is nothing to save, so the process ends at once. A thread ends it:
C code may keep the main thread (`import torch`, a wait for other ranks).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NUMBERS = (signal.SIGTERM, signal.SIGHUP)  # SIGINT is KeyboardInterrupt
_heard: list[int] = []
_at_once: list[bool] = []  # not empty: whatever handler stands
_ends: list[int] = []  # of the pipe into which the interpreter writes the number of each signal
_masks: dict[int, set[Any]] = {}  # of threads that fork at this moment


def listen() -> None:
    """Answer SIGTERM and SIGHUP from now on with exit code 75 and its line, unless they are ignored (nohup).

    Only in the main thread of a command. A second call does nothing.
    """
    if _ends:
        return
    _ends.extend(os.pipe())
    os.set_blocking(_ends[1], False)
    signal.set_wakeup_fd(_ends[1], warn_on_full_buffer=False)
    threading.Thread(target=_answer, args=(_ends[0],), name="dtf-starting", daemon=True).start()
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)
    for number in _NUMBERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _hear)


@contextmanager
def at_once() -> Iterator[None]:
    """A context in which C code may wait for ever for a process that heard the same signal and left. A command is ended
    by a signal in it, whatever handles signals there. One that came before is a matter of the caller.
    """
    _at_once.append(True)
    try:
        yield
    finally:
        _at_once.pop()


def ignore() -> None:
    """Ignore both signals from now on: the command has its exit code. While it ends, the interpreter would take its
    handlers away, and a signal change that.
    """
    for number in _NUMBERS:
        signal.signal(number, signal.SIG_IGN)


def answers(handler: object) -> bool:
    """Whether a handler of signals is the one here."""
    return handler is _hear


def _hear(number: int, frame: object) -> None:
    _heard.append(number)


def _answer(reader: int) -> None:
    """The thread. A handler that is installed just after a signal has not heard of it: then `_heard` has."""
    while data := os.read(reader, 64):
        for number in data:
            if number in _NUMBERS and (_heard or _at_once or signal.getsignal(number) is _hear):
                _leave(number)


def _leave(number: int) -> None:
    from dtf.core.errors import Exit, error_line

    name = signal.Signals(number).name
    text = f"{name} before any work began that would have to be saved; start the same command again"
    try:
        os.write(2, f"{error_line(Exit.PREEMPTED, text)}\n".encode())
    finally:
        os._exit(Exit.PREEMPTED)


def _hold() -> None:
    """Before a fork. A signal to the new process must wait until `_forget`, or this one would take it for its own."""
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, _NUMBERS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


def _forget() -> None:
    """In a forked process, which has no thread that answers: signals do what they do by default."""
    signal.set_wakeup_fd(-1)
    for number in _NUMBERS:
        if signal.getsignal(number) is _hear:
            signal.signal(number, signal.SIG_DFL)
    _release()
