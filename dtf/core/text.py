"""Numbers, times and progress as short text for people."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path


class StepRate:
    """Seconds per step over the last measurements. Evaluations and saves in between count, as there will be more of
    them.
    """

    def __init__(self, memory: int = 16) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=memory)

    def restart(self, step: int) -> None:
        """The ranks start at `step`. Forget what was measured before."""
        self._marks.clear()
        self._marks.append((step, 0.0))

    def mark(self, step: int, seconds: float) -> None:
        """`step` was reached `seconds` after the start."""
        if not self._marks or step > self._marks[-1][0]:
            self._marks.append((step, seconds))

    def seconds_for(self, steps: int) -> float | None:
        """How long that many steps will take. None before the first mark."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return max(0.0, steps * (ended - began) / (last - first))


class MetricHistory:
    """The values of a metric over a whole run in bounded memory. When memory is full, neighbouring values are
    averaged.
    """

    def __init__(self, memory: int = 256) -> None:
        self._memory, self._stride = memory, 1
        self._points: list[tuple[int, float]] = []  # (step, mean of `stride` values)
        self._open: list[float] = []

    def add(self, step: int, value: float) -> None:
        """Add the value at `step`. Values that are not finite are left out."""
        if not math.isfinite(value):
            return
        self._open.append(value)
        if len(self._open) < self._stride:
            return
        self._points.append((step, math.fsum(self._open) / self._stride))
        self._open.clear()
        if len(self._points) >= self._memory:
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(later[0], (earlier[1] + later[1]) / 2) for earlier, later in pairs]
            self._stride *= 2

    def forget_after(self, step: int) -> None:
        """Remove the values after `step`, for a run that goes on from there."""
        self._points = [point for point in self._points if point[0] <= step]
        self._open.clear()

    def sparkline(self, width: int) -> str:
        """At most `width` blocks, the lowest value drawn lowest; empty with fewer than two values."""
        values = [value for _, value in self._points]
        if len(values) < 2 or width < 2:
            return ""
        if len(values) > width:
            cuts = [len(values) * i // width for i in range(width + 1)]
            values = [math.fsum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
        low, high = min(values), max(values)
        scale = 7 / (high - low) if high > low else 0.0
        return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in values)


def number_text(value: object) -> str:
    """Four decimals between 0.01 and 1000, so that a column keeps its width; else few digits: `0.4123`, `1.2e-05`,
    `5120`.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain_text(str(value))
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    return f"{value:.0f}" if size >= 1000 else f"{value:.4f}" if size >= 0.01 else f"{value:.3g}"


def option_text(value: object) -> str:
    """For a chosen number, such as a learning rate: three digits, no trailing zeros."""
    return f"{value:.3g}" if isinstance(value, float) else number_text(value)


def count_text(number: int, noun: str) -> str:
    """`1 step`, `5,120 steps`, `2 processes`."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith(('s', 'ch')) else 's'}"


def scaled_text(value: float) -> str:
    """`12.4 G`, `989 T`: three digits and the prefix of a unit; powers of ten."""
    scales = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    scale, prefix = next((pair for pair in scales if abs(value) >= pair[0]), (1.0, ""))
    return f"{value / scale:.3g} {prefix}"


FLOPS = ("mfu", "model_flops_per_s")
"""Values of a measurement that `flops_text` shows."""


def flops_text(values: Mapping[str, float]) -> dict[str, str]:
    """Of a measurement of training: the share of the devices' arithmetic that the model used. Where that is not known,
    the rate; nothing where neither is.
    """
    if "mfu" in values:
        return {"mfu": f"{values['mfu']:.1%}"}
    rate = values.get("model_flops_per_s")
    return {} if rate is None else {"FLOP/s": scaled_text(rate).replace(" ", "")}


def bytes_text(size: int) -> str:
    """`213 MB`, `1.2 GB`; powers of ten."""
    scale, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / scale:.{0 if size >= 10 * scale else 1}f} {unit}"


def memory_text(memory: Mapping[str, int]) -> str:
    """For `Ended.memory`."""
    words = {"planned": "planned", "allocated": "allocated", "resident": "resident growth"}
    sizes = [f"{bytes_text(memory[key])} {word}" for key, word in words.items() if key in memory]
    return f"{', '.join(sizes)} at the peak of rank {memory['rank']}"


def guard_text(steps: int) -> str:
    """For `Ended.guarded`."""
    return f"{count_text(steps, 'guarded step')}, nothing differed"


def time_text(seconds: float | None) -> str:
    """`00:12`, `1:02:03`, `2d 03:04`; `--:--` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "--:--"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def about_text(seconds: float) -> str:
    """A time to come, roughly: `40 s`, `12 min`, `1 h 10 min`, `2 d 3 h`."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    parts = {"d": minutes // 1440, "h": minutes % 1440 // 60, "min": minutes % 60 if minutes < 1440 else 0}
    return " ".join(f"{count} {unit}" for unit, count in parts.items() if count)


def plain_text(text: str, limit: int = 512) -> str:
    """One line without control characters, cut at `limit`: text from a rank cannot move the cursor."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: limit + 1])
    return clean if len(clean) <= limit else clean[: limit - 1] + "…"


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """A text from elsewhere for a terminal: without colours, and with other control characters written out, so that it
    moves no cursor, sets no title and hides nothing. Tabs and ends of lines stay.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), _COLOUR.sub("", text))


def quoted(value: object) -> str:
    """A text as the value of an override, in quotes, whatever is in it."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def suggest(word: str, choices: Iterable[str]) -> str:
    """`did you mean X? choices: A, B, C`, or only the choices when nothing is near."""
    known = sorted(choices)
    small = {choice.lower(): choice for choice in reversed(known)}
    near = [small[choice] for choice in difflib.get_close_matches(word.lower(), small, n=1, cutoff=0.6)]
    listed = f"choices: {', '.join(known)}" if known else "there are no choices"
    return f"did you mean {near[0]}? {listed}" if near else listed


def display_path(path: Path) -> str:
    """A path as text: relative to the current directory where it lies below that, else absolute."""
    absolute, current = os.path.abspath(path), os.getcwd()
    return os.path.relpath(absolute, current) if absolute.startswith(f"{current}{os.sep}") else absolute
