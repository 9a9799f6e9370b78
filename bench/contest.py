"""Contestants in processes of their own, which take turns: one computes, the others wait for a line.

A contestant is one process, or the ranks of one, which meet as under torchrun. See `bench.turns` for its side.
"""

from __future__ import annotations

import json
import os
import platform
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.peers import Absent, python_of
from bench.rows import Row

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = 240.0
"""The longest that a start or a turn may take."""
REST_S = 0.2
"""Between turns: threads of the one before may still spin."""
_GLIBC = tuple(int(part) for part in platform.libc_ver()[1].split(".") if part.isdigit())
KEPT = {
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_MMAP_THRESHOLD_": str(1 << (28 if _GLIBC >= (2, 35) else 25)),
}
"""Environment in which glibc keeps freed memory as `dtf.host.allocator` has it do so in ranks."""


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


class Turn(NamedTuple):
    """`cpu`: of all ranks; the others are those of rank 0. `shortest`: seconds of the shortest step."""

    seconds: float
    cpu: float
    loss: float | None
    shortest: float


class Running:
    """The processes of a contestant. RuntimeError where one of them fails."""

    def __init__(self, contestant: Contestant) -> None:
        python = python_of(contestant.peer) if contestant.peer else sys.executable
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]  # free a moment ago; the ranks' store takes it
        common = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(contestant.threads), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "WORLD_SIZE": str(contestant.ranks), "LOCAL_WORLD_SIZE": str(contestant.ranks),
            "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "bench", **contestant.variables,
        }  # fmt: skip
        self.processes = [
            subprocess.Popen(
                [python, "-m", contestant.module, *contestant.arguments],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
            )
            for rank in range(contestant.ranks)
        ]
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        self.facts = self._answers()[0]

    def turn(self, steps: int) -> Turn:
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            except BrokenPipeError as error:
                raise RuntimeError("a process has ended") from error
        told = self._answers()
        first = told[0]
        return Turn(first["seconds"], sum(one["cpu"] for one in told), first["loss"], first["shortest"])

    def end(self) -> None:
        for process in self.processes:
            assert process.stdin is not None and process.stdout is not None
            process.kill()
            process.stdin.close()
            process.stdout.close()
            process.wait()

    def _answers(self) -> list[dict[str, Any]]:
        answers, deadline = [], time.monotonic() + PATIENCE_S
        for process in self.processes:
            assert process.stdout is not None
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise RuntimeError(f"no answer in {PATIENCE_S:.0f} s")
            answer = json.loads(process.stdout.readline() or '{"error": "a process ended without a word"}')
            if "error" in answer:
                raise RuntimeError(answer["error"])
            answers.append(answer)
        return answers


def contest(
    work: str, contestants: Sequence[Contestant], rounds: int, steps: int, warm: int
) -> tuple[dict[str, list[Turn]], list[Row]]:
    """The turns of those that run, and a row for each that does not. All are there before the first turn, of `warm`
    steps, which does not count; in each round they run in the other direction.
    """
    running: dict[str, Running] = {}
    absent: list[Row] = []
    try:
        for one in contestants:
            with suppress(Absent):
                if one.ranks == 1:  # those of more choose a port for their store, one after the other
                    running[one.who] = Running(one)
        for one in contestants:
            try:
                running[one.who] = running.get(one.who) or Running(one)
                running[one.who].wait_until_ready()
                running[one.who].turn(warm)
            except (Absent, RuntimeError) as error:
                absent.append(Row(work, one.who, settings=one.settings, not_run=" ".join(str(error).split())[:200]))
                if one.who in running:
                    running.pop(one.who).end()
        turns: dict[str, list[Turn]] = {one.who: [] for one in contestants if one.who in running}
        for number in range(rounds):
            for who in list(turns) if number % 2 else list(reversed(turns)):
                time.sleep(REST_S)
                try:
                    turns[who].append(running[who].turn(steps))
                except RuntimeError as error:
                    settings = next(one.settings for one in contestants if one.who == who)
                    absent.append(Row(work, who, settings=settings, not_run=f"in round {number + 1}: {error}"[:200]))
                    del turns[who]
        return turns, absent
    finally:
        for one in running.values():
            one.end()


def step_rows(
    work: str, contestants: Sequence[Contestant], turns: dict[str, list[Turn]], steps: int, unit: str, scale: float
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
    work: str, contestants: Sequence[Contestant], turns: dict[str, list[Turn]], unit: str, scale: float
) -> list[Row]:
    """The shortest step of each turn."""
    return [
        Row(work, one.who, unit, [turn.shortest * scale for turn in turns[one.who]], settings=one.settings)
        for one in contestants
        if one.who in turns and all(turn.shortest for turn in turns[one.who])
    ]


def apart(turns: dict[str, list[Turn]], who: Sequence[str], most: float) -> None:
    """SystemExit where the last losses of these differ by more than `most`, relative to the largest."""
    losses = {name: turns[name][-1].loss for name in who if name in turns}
    known = [loss for loss in losses.values() if loss is not None]
    if known and max(known) - min(known) > most * max(abs(loss) for loss in known):
        raise SystemExit(f"all must train to the same loss: {losses}")


def said(turns: dict[str, list[Turn]]) -> str:
    """One line, for a trial."""
    return ", ".join(f"{who} {median(turn.seconds for turn in some):.4f} s" for who, some in turns.items())
