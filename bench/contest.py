"""Contestants in processes of their own, which take turns: one computes, the others wait for a line.

A contestant is one process, or the ranks of one, which meet as under torchrun. See `bench.turns` for its side.
"""

from __future__ import annotations

import math
import platform
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from bench.peers import Absent, python_of
from bench.processes import Process, answers
from bench.rounds import alternating, starts
from bench.rows import Row

FAILURES = (Absent, OSError)
"""Of a start."""
REST_S = 0.2
"""Between turns: threads of the one before may still spin."""
_GLIBC = tuple(int(part) for part in platform.libc_ver()[1].split(".") if part.isdigit())
KEPT = {
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_MMAP_THRESHOLD_": str(1 << (28 if _GLIBC >= (2, 35) else 25)),
}
"""Environment in which glibc keeps freed memory as `dtf.host.allocator` has it do so in ranks."""
KEPT_MEMORY = f"kept memory ({' '.join(f'{name}={value}' for name, value in KEPT.items())})"
"""For settings, so that it can be done again by hand."""


@dataclass(frozen=True)
class Contestant:
    """`module` with `arguments` in the environment `peer` of peers.toml; "" is the running interpreter."""

    who: str
    module: str
    arguments: Sequence[str] = ()
    peer: str = ""
    ranks: int = 1
    threads: int = 1
    settings: str = ""
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        return self.ranks > 1  # which choose a port for their store

    def start(self) -> Running:
        python = python_of(self.peer) if self.peer else sys.executable
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]  # free a moment ago; the ranks' store takes it
        common = {
            "OMP_NUM_THREADS": str(self.threads), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "WORLD_SIZE": str(self.ranks), "LOCAL_WORLD_SIZE": str(self.ranks), "GLOO_SOCKET_IFNAME": "lo",
            "TORCHELASTIC_RUN_ID": "bench", **self.variables,
        }  # fmt: skip
        command = [python, "-m", self.module, *self.arguments]
        return Running(
            [Process(command, common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(self.ranks)]
        )


class Starts(Protocol):
    """A contestant of any kind. Absent where it cannot be started."""

    @property
    def who(self) -> str: ...

    @property
    def settings(self) -> str: ...

    @property
    def alone(self) -> bool:
        """It starts once those before it are ready, and nobody beside it."""
        ...

    def start(self) -> Running: ...


class Turn(NamedTuple):
    """`cpu`: of all ranks; the others are those of rank 0. `shortest`: seconds of the shortest step."""

    seconds: float
    cpu: float
    loss: float | None
    shortest: float


class Running:
    """The processes of a contestant: those that are `asked` for each turn, and others `beside` them. Absent where one
    of them fails.
    """

    def __init__(self, asked: Sequence[Process], beside: Sequence[Process] = ()) -> None:
        self.asked, self.beside = asked, beside

    def wait_until_ready(self) -> None:
        answers(self.asked, self.beside)

    def turn(self, steps: int) -> Turn:
        told = self._told([steps] * len(self.asked))
        first = told[0]
        return Turn(first["seconds"], sum(one["cpu"] for one in told), first["loss"], first["shortest"])

    def end(self) -> None:
        for process in (*self.asked, *self.beside):
            process.end()

    def _told(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        for process, count in zip(self.asked, steps, strict=True):
            process.send(count)
        return answers(self.asked, self.beside)


def contest(
    work: str, contestants: Sequence[Starts], rounds: int, steps: int, warm: int
) -> tuple[dict[str, list[Turn]], list[Row]]:
    """The turns of those that run to the end, and a row for each that does not. All are there before the first turn,
    of `warm` steps, which does not count; in each round they run in the other direction.
    """
    running: dict[str, Running] = {}
    turns: dict[str, list[Turn]] = {}
    absent: list[Row] = []
    settings = {one.who: one.settings for one in contestants}

    def leave(who: str, why: str) -> None:
        absent.append(Row(work, who, settings=settings[who], not_run=why[:300]))
        turns.pop(who, None)
        if who in running:
            running.pop(who).end()

    try:
        for one in contestants:
            with suppress(*FAILURES):
                if not one.alone:
                    running[one.who] = one.start()
        for one in contestants:
            starts(one.who)
            try:
                running[one.who] = running.get(one.who) or one.start()
                running[one.who].wait_until_ready()
                running[one.who].turn(warm)
                turns[one.who] = []
            except FAILURES as error:
                leave(one.who, str(error))
        for number, who in alternating(rounds, turns):
            time.sleep(REST_S)
            try:
                turns[who].append(running[who].turn(steps))
            except Absent as error:
                leave(who, f"in round {number + 1}: {error}")
        return turns, absent
    finally:
        for one in running.values():
            one.end()


def step_rows(
    work: str, contestants: Sequence[Starts], turns: dict[str, list[Turn]], steps: int, unit: str, scale: float
) -> list[Row]:
    """Time of a step, the mean of each turn, in `unit`, of which `scale` are a second."""
    return [
        Row(
            work, one.who, f"{unit} a step",
            [turn.seconds / steps * scale for turn in turns[one.who]],
            cpu=[turn.cpu / steps * scale for turn in turns[one.who]], cpu_unit=unit,
            loss=turns[one.who][-1].loss, settings=one.settings,
        )
        for one in contestants if one.who in turns
    ]  # fmt: skip


def shortest_rows(
    work: str, contestants: Sequence[Starts], turns: dict[str, list[Turn]], unit: str, scale: float
) -> list[Row]:
    """The shortest step of each turn."""
    return [
        Row(work, one.who, unit, [turn.shortest * scale for turn in turns[one.who]], settings=one.settings)
        for one in contestants
        if one.who in turns and all(turn.shortest for turn in turns[one.who])
    ]


def apart(work: str, turns: dict[str, list[Turn]], those: Sequence[Starts], most: float) -> list[Row]:
    """Takes those out of `turns` whose last loss is not that of the first of them, within `most` of it, relative: a
    ratio of times would compare two things. A row for each says so, or one that the first has no loss to compare with.
    Who tells no loss stays.
    """
    losses = {one.who: turns[one.who][-1].loss for one in those if one.who in turns}
    base, others = those[0], [one for one in those[1:] if losses.get(one.who) is not None]
    own, rows = losses.get(base.who), list[Row]()

    def leave(one: Starts, why: str) -> None:
        del turns[one.who]
        rows.append(Row(work, one.who, settings=one.settings, not_run=f"no figures: its loss is {why}"))

    if own is None or math.isnan(own):
        if own is not None:
            leave(base, "nan")
        if others:
            names = ", ".join(one.who for one in others)
            rows.append(Row(work, f"loss of {names}", not_run=f"not compared: there is none of {base.who}"))
        return rows
    for one in others:
        loss = losses[one.who]
        assert loss is not None
        if not abs(loss - own) <= most * abs(own):  # NaN is another one
            leave(one, f"{loss:.6f}, that of {base.who} {own:.6f}")
    return rows
