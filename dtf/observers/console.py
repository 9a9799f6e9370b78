"""Prints a run on standard output: live progress on a terminal, lines for grep elsewhere, both in a notebook.

The launcher prints failures.
"""

from __future__ import annotations

import codecs
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.text import (
    FLOPS,
    StepRate,
    flops_text,
    guard_text,
    memory_text,
    number_text,
    option_text,
    plain_text,
    time_text,
)
from dtf.core.types import Ended, Event, Measured, Note, Saved, Started

if TYPE_CHECKING:
    from dtf.observers.terminal import TerminalView


@register("observer", "console")
class Console(Observer):
    """Print the course of the run; colours and movement only where standard output is a terminal.

    NO_COLOR is respected.
    """

    shows_notes = True

    live: bool = option(default=True, doc="draw progress on a terminal, or in a notebook; false: plain lines there too")

    def open(self, folder: Path, config: dict) -> None:
        self._view: TerminalView | Lines | None = None
        if self.live and _is_cell(sys.stdout):
            self._view = CellLines(sys.stdout)
        elif self.live and _draws(sys.stdout):
            from dtf.observers.terminal import TerminalView

            self._view = TerminalView(folder, config)
        else:
            self._view = Lines(sys.stdout)

    def see(self, event: Event) -> None:
        if self._view is not None:
            try:
                self._view.see(event)
            except BrokenPipeError as error:
                _hang_up()
                raise BrokenPipeError("nobody reads standard output any more") from error
            except OSError as error:  # standard output is a file, and its disk is full
                _hang_up()
                error.filename = "standard output"
                raise

    def close(self) -> None:
        if self._view is not None:
            view, self._view = self._view, None
            view.close()


class Lines:
    """One line per event, `key=value` parted by blanks, for files, pipes and grep."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total, self._pace, self._opened = 0, StepRate(), time.monotonic()

    def see(self, event: Event) -> None:
        match event:
            case Started(step, total, _, table, attempt):
                self._total = total
                self._pace.restart(step)
                place = {"step": f"{step}/{total}", "attempt": attempt}
                self._print(
                    "restarted" if attempt else "started",
                    place if attempt else place | {k: v for k, v in table.items() if "\n" not in str(v)},
                )
                for name, value in table.items():
                    if not attempt and "\n" in str(value):
                        for line in (f"{name}:", *str(value).splitlines()):
                            self._write(plain_text(line))
            case Measured("train", step, epoch, seconds, values):
                self._pace.mark(step, seconds)
                rest = {"eta": time_text(self._pace.seconds_for(self._total - step))}
                self._print("", self._place(step, epoch) | _train_values(values) | rest)
            case Measured(split, step, epoch, _, values):
                self._print(
                    split,
                    self._place(step, epoch) | {name: number_text(value) for name, value in values.items()},
                    "best" if event.best else "",
                )
            case Saved(step, path, best, seconds, held):
                times = {"seconds": f"{seconds:.2f}"} | ({"held": f"{held:.3f}"} if held < seconds else {})
                self._print("saved", {"step": step, "path": path} | times, "best" if best else "")
            case Note(level, text):
                self._write(f"{level}: {plain_text(text)}")
            case Ended(step, reason, values):
                place = {"step": f"{step}/{self._total}", "reason": reason}
                wall = {"wall": time_text(time.monotonic() - self._opened)}
                memory = {"memory": memory_text(event.memory)} if event.memory else {}
                guard = {"guard": guard_text(event.guarded)} if event.guarded else {}
                final = {name: _final_text(name, value) for name, value in values.items()}
                self._print("ended", place | final | memory | guard | wall)

    def close(self) -> None:
        """Nothing is held back."""

    def _place(self, step: int, epoch: float) -> dict[str, object]:
        return {"step": f"{step}/{self._total}", "epoch": f"{epoch:.2f}"}

    def _print(self, head: str, pairs: Mapping[str, object], tail: str = "") -> None:
        words = [f"{name.replace(' ', '_')}={_quoted(value)}" for name, value in pairs.items()]
        self._write(" ".join([*filter(None, [head]), *words, *filter(None, [tail])]))

    def _write(self, line: str) -> None:
        self._put(line + "\n")

    def _put(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self._stream.flush()


class CellLines(Lines):
    """Lines for the output of a notebook's cell: the start-up table has a line for each of its rows, and what is
    measured in training takes the place of what was measured before.
    """

    _passes = False  # whether the next line may be replaced
    _passing = 0  # characters of the line that the next one replaces

    def see(self, event: Event) -> None:
        if isinstance(event, Started) and not event.attempt:
            width = max(map(len, event.table), default=0)
            for name, value in event.table.items():
                first, *rest = str(value).splitlines() or [""]
                self._write(plain_text(f"{name:<{width}}  {first}"))
                for line in rest:
                    self._write(plain_text(f"{'':<{width}}  {line}"))
            event = replace(event, table={})
        self._passes = isinstance(event, Measured) and event.split == "train"
        super().see(event)

    def close(self) -> None:
        """Keep the line that would have been replaced."""
        if self._passing:
            self._passing = 0
            self._put("\n")

    def _write(self, line: str) -> None:
        if self._passes:
            self._put(f"\r{line:<{self._passing}}")
            self._passing = len(line)
        else:
            self._put((f"\r{line:<{self._passing}}" if self._passing else line) + "\n")
            self._passing = 0


def _train_values(values: dict[str, float]) -> dict[str, str]:
    """Metrics first, then what belongs to the optimizer, then speed."""
    last = {
        "lr": ("lr", option_text),
        "grad_norm": ("grad_norm", number_text),
        "rows_per_s": ("rows/s", "{:.0f}".format),
    }
    texts = {name: number_text(value) for name, value in values.items() if name not in {*last, *FLOPS}}
    texts |= {short: text(values[name]) for name, (short, text) in last.items() if name in values}
    return texts | flops_text(values)


def _final_text(name: str, value: float) -> str:
    """The text of a final value: a step as a whole number, a metric with its decimals."""
    return f"{value:.0f}" if name == "best_step" else number_text(value)


def _quoted(value: object) -> str:
    text = plain_text(str(value))
    return '"' + text.replace('"', "'") + '"' if not text or any(c in text for c in ' "=') else text


def _draws(stream: TextIO) -> bool:
    """Whether this is a terminal that can move its cursor and show block characters."""
    if not stream.isatty() or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        return False
    return codecs.lookup(stream.encoding or "ascii").name == "utf-8"


def _is_cell(stream: TextIO) -> bool:
    """Whether this is the output of a notebook's cell."""
    return type(stream).__module__.partition(".")[0] == "ipykernel"


def _hang_up() -> None:
    """Point standard output at /dev/null, so that neither later prints nor the last flush of the interpreter fail."""
    try:
        number = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, number)
    os.close(null)
