"""What every rank does around its work: settings, stop signals, signs of life, and a message when it fails."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dtf.api.options import MemoryFormat
from dtf.config.settings import Settings, parse_settings
from dtf.core.errors import DtfError, Exit, PeerError, Preempted, io_failure
from dtf.core.types import Event, Failed, Place
from dtf.engine.time_limit import TimeLimit
from dtf.host import heartbeat
from dtf.host.allocator import keep_freed_memory
from dtf.host.scratch import held_folders
from dtf.host.signals import asked_to_stop
from dtf.model.author_errors import author_error, memory_error


@dataclass(frozen=True)
class Rank:
    """What one rank was started with."""

    settings: Settings
    config: dict[str, Any]
    """Resolved, as plain values."""

    folder: Path
    """Of the run."""

    run_id: str
    place: Place
    send: Callable[[Event], None]
    """To the launching process."""

    beat: Callable[[str, int], None]
    """`beat(phase, step)` marks that this rank is alive."""

    stop_requested: Callable[[], bool]
    """Whether this process was told to stop, or the time limit leaves no time for anything else."""

    left_s: Callable[[], float] = lambda: math.inf
    """Seconds that are left to this process once it was told to stop: what it does in vain after them is lost."""

    time_limit: TimeLimit = field(default_factory=TimeLimit)
    """When it is killed in any case."""

    @property
    def report(self) -> Callable[[Event], None]:
        """`send` on rank 0; other ranks report nothing."""
        return self.send if self.place.rank == 0 else ignore


GRACE_S = 25.0
"""Between SIGTERM and SIGKILL, where the launcher does not say: schedulers give 30 s."""
_GLOO_ADVICE = re.compile(r"^\[\S+\] | This is typically caused by a remote worker.*", re.DOTALL)
"""What gloo says beside what happened: a path of the machine that built it, and where to look."""

_ORDER_IN_MEMORY = re.compile(
    r"view size is not compatible|\b(contiguous|channels_last|memory.format)\b", re.IGNORECASE
)
"""Words of torch, and of authors, about where numbers lie."""


def run_rank(
    body: Callable[[Rank], None],
    config: dict[str, Any],
    folder: str,
    run_id: str,
    place: Place,
    send: Callable[[Event], None],
) -> int:
    """Run `body` as one rank. Returns the exit code and never raises: a failure is sent as a Failed event."""
    last, send = {"step": 0}, _one_at_a_time(send)
    starts, received = True, list[float]()
    limit = TimeLimit(place.deadline, place.grace_s)

    def beat(phase: str, step: int) -> None:
        nonlocal starts
        last["step"], starts = step, phase in ("start", "rendezvous")
        heartbeat.beat(phase, step)

    try:
        beat("start", 0)
        keep_freed_memory()
        with held_folders(), stop_signals() as received:
            body(
                Rank(
                    parse_settings(config),
                    config,
                    Path(folder),
                    run_id,
                    place,
                    send,
                    beat,
                    lambda: bool(received) or limit.is_over,
                    lambda: min(_left_s(received, config), limit.until_killed_s()),
                    limit,
                )
            )
        return Exit.OK
    except BaseException as error:  # noqa: BLE001 (it is reported)
        error = _explained(error, folder, bool(starts and received))
        if not received:
            error = limit.explained(error, starts)
        exit = error.exit if isinstance(error, DtfError) else Exit.BUG
        patient = isinstance(error, DtfError) and error.patient
        blamed = error.blames if isinstance(error, DtfError) and error.raised_by_all else place.rank
        # after the first steps an author's code may fail by chance, and may do well from the last save
        named = error if isinstance(error, DtfError) else author_error(error)
        message = str(named or f"{type(error).__name__}: {error}") + _format_advice(error, config)
        send(
            Failed(
                blamed,
                last["step"],
                int(exit),
                message,
                "" if patient or isinstance(error, Preempted) else traceback.format_exc(),
                patient,
                isinstance(error, DtfError) and error.by_author,
                type(error).__name__,
            )
        )
        return exit


def _format_advice(error: BaseException, config: dict[str, Any]) -> str:
    """What to add to an error that an order of numbers in memory may have caused, where one was asked for without a
    trial.
    """
    asked = config.get("step", {}).get("memory_format") == MemoryFormat.channels_last.value
    meant = _ORDER_IN_MEMORY.search(str(error)) and "step.memory_format" not in str(error)
    return "; or use step.memory_format=contiguous" if asked and meant else ""


def _explained(error: BaseException, folder: str, left: bool) -> BaseException:
    """The error in words of dtf, where it has some. `left`: ranks were told to stop while they started, when some leave
    at once.
    """
    if isinstance(error, KeyboardInterrupt):
        return Preempted(
            "interrupted; stopped at once, nothing was saved; start again to go on from the last checkpoint"
        )
    if peer_is_gone(error) and left:
        return Preempted(
            "asked to stop while ranks were starting, and others have left already; nothing is lost; start the same "
            "command again"
        )
    if peer_is_gone(error):
        return PeerError(f"lost another rank: {_GLOO_ADVICE.sub('', str(error))}")
    return memory_error(error) or io_failure(error, folder) or error


def _left_s(received: list[float], config: dict[str, Any]) -> float:
    """Of `launcher.grace_s` after the first of these signals; a fifth of it is for the end of the process."""
    grace_s = config["launcher"].get("grace_s", GRACE_S)
    return received[0] + 0.8 * grace_s - time.monotonic() if received else math.inf


def _one_at_a_time(send: Callable[[Event], None]) -> Callable[[Event], None]:
    """A thread tells of saves, and observers in this process hear of them at once."""
    lock = threading.RLock()

    def send_one(event: Event) -> None:
        with lock:
            send(event)

    return send_one


def peer_is_gone(error: BaseException) -> bool:
    """Whether a collective failed because of another rank. gloo has no exception class of its own."""
    phrases = ("closed by peer", "reset by peer", "Timed out", "Broken pipe")
    gloo = isinstance(error, RuntimeError) and "gloo" in str(error) and any(phrase in str(error) for phrase in phrases)
    return gloo or isinstance(error, torch.distributed.DistError)


@contextmanager
def stop_signals() -> Iterator[list[float]]:
    """When SIGTERM and SIGINT signals were received so far, by time.monotonic(): a list that grows.

    After the first the rank stops with the others within a few seconds, its state saved. A second SIGINT raises
    KeyboardInterrupt. A second SIGTERM does not: a scheduler that signals a whole process group reaches a rank twice,
    directly and through its launcher.
    """
    received: list[float] = []  # no threading.Event: a second signal inside its `set` would wait for the first for ever

    def receive(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(time.monotonic())

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    # A launcher that handles Ctrl-C for its ranks makes them ignore it, and sends SIGTERM.
    numbers = [number for number in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(number) is not signal.SIG_IGN]
    if asked_to_stop():  # as this process, which is a rank itself, got here
        received.append(time.monotonic())
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore(event: Event) -> None:
    """What ranks other than 0 do with an event."""
