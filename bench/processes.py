"""Processes that take lines and answer each with a line of JSON: contestants of all kinds.

Every wait for one has a limit, one that ends says why, and neither it nor what it has started outlives the process that
started it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from bench import keeper
from bench.peers import Absent

ROOT = Path(__file__).resolve().parents[1]
_NUMBERS = count()
PATIENCE_S = 240.0
"""The longest that a start or a turn may take."""


class Process:
    """A command in a session of its own, so that Ctrl-C reaches the parent alone; `end` ends all that it has started.
    Absent where it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str | None] | None = None,
        folder: Path = ROOT,
        code: Path = ROOT,
    ) -> None:
        """`variables`: on top of this process's; None takes one away. `code`: the checkout whose modules it imports."""
        self._mark = f"{keeper.keep()}{next(_NUMBERS)}/"
        own = {"PYTHONPATH": str(code), keeper.VARIABLE: self._mark}
        given = {**os.environ, **(variables or {}), **own}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  `end` closes it
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command,
                env={name: value for name, value in given.items() if value is not None},
                cwd=folder,
                stdin=pipe,
                stdout=pipe,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            raise Absent(str(error)) from error
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid, self.stdout = self._process.pid, self._process.stdout.fileno()
        self._stdin, self._said = self._process.stdin, b""

    def send(self, line: object) -> None:
        """Absent where it has ended."""
        try:
            self._stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self.ended() from None

    def take(self) -> dict[str, Any] | None:
        """Its answer, once there is something to read; None while the line is not whole. Absent with what it says
        where it fails.
        """
        if not (data := os.read(self.stdout, 1 << 16)):
            raise self.ended()
        line, end, self._said = (self._said + data).partition(b"\n")
        if not end:
            self._said = line
            return None
        try:
            answer = dict(json.loads(line))
        except (ValueError, TypeError):
            raise Absent(f"this is no answer: {line[:100].decode(errors='replace')}") from None
        if "error" in answer:
            raise Absent(answer["error"])
        return answer

    def lives(self) -> bool:
        return self._process.poll() is None

    def ended(self) -> Absent:
        """Why it is gone: its exit code, and its last words."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._errors.seek(0)
        said = last_words(self._errors.read().decode(errors="replace"))
        return Absent(f"its process ended with {self._process.returncode}: {said}")

    def signal(self, number: int) -> None:
        """To it and to all of its session."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self, patience_s: float = 0.0) -> None:
        """It may tidy up for so long, as no more lines follow; then it is killed, with all that it has started."""
        self._stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        keeper.end(self._mark)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()


def answers(asked: Sequence[Process], beside: Sequence[Process] = ()) -> list[dict[str, Any]]:
    """One of each that was `asked`. Absent where one of them or of those `beside` fails, or one says nothing for
    PATIENCE_S.
    """
    found: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + PATIENCE_S
    while missing := [one for one in asked if one.pid not in found]:
        readable = select.select([one.stdout for one in missing], [], [], 0.5)[0]
        for one in missing:
            if one.stdout in readable and (answer := one.take()) is not None:
                found[one.pid] = answer
        for one in beside:
            if not one.lives():
                raise one.ended()
        if time.monotonic() > deadline:
            raise Absent(f"no answer in {PATIENCE_S:.0f} s")
    return [found[one.pid] for one in asked]


def last_words(text: str) -> str:
    """Of what a process wrote: the last line that names an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return ([line for line in lines if "Error" in line] or lines or ["it said nothing"])[-1][:200]
