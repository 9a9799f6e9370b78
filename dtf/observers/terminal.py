"""Shows a run on a terminal with rich: start-up table, live progress, lines that stay, a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dtf.core.errors import Exit
from dtf.core.text import (
    FLOPS,
    MetricHistory,
    StepRate,
    count_text,
    flops_text,
    guard_text,
    memory_text,
    number_text,
    option_text,
    plain_text,
    time_text,
)
from dtf.core.types import Ended, Event, Failed, Measured, Note, Saved, Started

_REDRAWS_PER_SECOND = 10  # at most, however fast measurements come
_TICKS_PER_SECOND = 2  # clocks move while nothing is measured
_COLOURS = {
    **dict.fromkeys(("finished", "early_stop"), "green"),
    **dict.fromkeys(("preempted", "time_limit", "budget"), "yellow"),
    "failed": "red",
}
_LAST: dict[str, tuple[str, Callable[[float], str]]] = {  # after the metrics, in this order
    "rows_per_s": ("rows/s", "{:,.0f}".format),
    "lr": ("lr", option_text),
    "grad_norm": ("grad_norm", option_text),
}


class TerminalView:
    """Prints events above live progress. `console`: where to draw; default: standard output."""

    def __init__(self, folder: Path, config: dict, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, emoji=False)
        self._folder, self._config = folder, config
        self._bar = Bar()
        self._drawn = 0.0
        self._live = Live(
            self._bar,
            console=self._console,
            refresh_per_second=_TICKS_PER_SECOND,
            redirect_stderr=sys.stderr is not None and sys.stderr.isatty(),  # `2> errors.log` must keep its text
        )
        self._live.start()

    def see(self, event: Event) -> None:
        bar = self._bar
        match event:
            case Started(step, total, steps_per_epoch, table, attempt):
                known = bar.total > 0
                bar.start(step, total, steps_per_epoch)
                if known:
                    self._say(
                        Text(f"restarted at step {step:,} of {total:,} (attempt {attempt})", style="yellow"), mark="↻"
                    )
                else:
                    self._console.print(self._table(table))
                    if step:
                        self._say(Text(f"resumed at step {step:,} of {total:,}"), mark="↻")
            case Measured("train"):
                bar.measure(event)
                if time.monotonic() - self._drawn >= 1 / _REDRAWS_PER_SECOND:
                    self._drawn = time.monotonic()
                    self._live.refresh()
            case Measured(split, step, epoch, _, values):
                line = _pairs(
                    {"step": f"{step:>{len(str(bar.total))}}", "epoch": f"{epoch:.2f}"}
                    | {k: number_text(v) for k, v in values.items()}
                )
                if event.best:
                    line.append("  ★ best" if self._console.width >= 72 else " ★", style="bold green")
                self._say(line, mark=split, style="bold cyan")
            case Saved(step, path, best, seconds):
                place = Path(path)
                name = place.relative_to(self._folder) if place.is_relative_to(self._folder) else place
                text = f"{plain_text(str(name))}  {seconds:.2f} s{'  ★' if best else ''}"
                self._say(Text(text, style="dim"), mark="save", style="dim")
            case Note(level, text):
                warning = level == "warning"
                self._say(
                    Text(plain_text(text), style="yellow" if warning else ""),
                    mark="!" if warning else "i",
                    style="bold yellow" if warning else "dim",
                )
            case Failed():
                bar.stop("preempted" if event.exit == Exit.PREEMPTED else "failed")
            case Ended(step, reason):
                bar.stop(reason, step)
                self._live.stop()
                self._console.print(self._summary(event))

    def close(self) -> None:
        """Release the terminal. Without an Ended event the bar stays where the run failed."""
        if self._bar.state in ("starting", "running"):
            self._bar.stop("stopped")
        self._live.stop()

    def _say(self, text: Text, mark: str, style: str = "yellow") -> None:
        """Print a line that stays, with its mark in a column of its own."""
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(width=5, justify="right")
        grid.add_column()
        grid.add_row(Text(mark, style=style), text)
        self._console.print(grid)

    def _folder_text(self) -> str:
        """The run folder as text, relative to the current directory where it is below that."""
        return str(self._folder.relative_to(Path.cwd()) if self._folder.is_relative_to(Path.cwd()) else self._folder)

    def _table(self, rows: dict[str, Any]) -> RenderableType:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in rows.items():
            lines = (
                str(value).splitlines()
                if "\n" in str(value)
                else [self._folder_text() if value == str(self._folder) else _shown(value)]
            )
            for head, line in zip([name, *[""] * (len(lines) - 1)], lines, strict=True):
                grid.add_row(plain_text(head), Text(plain_text(line)))
        nodes = [self._config.get(group, {}) for group in ("recipe", "strategy", "precision")]
        names = [node.get("compute", node.get("name", "")) for node in nodes]  # a precision is known by its arithmetic
        return Panel(
            grid,
            title=Text(" · ".join(["dtf", *filter(None, names)]), style="bold"),
            title_align="left",
            border_style="cyan",
            expand=False,
        )

    def _summary(self, event: Ended) -> RenderableType:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        best, best_step = (
            {k[5:]: v for k, v in event.values.items() if k.startswith("best_")},
            event.values.get("best_step"),
        )
        for name, value in event.values.items():
            if name.startswith("best_"):
                continue
            row = Text(number_text(value), style="bold")
            if name in best:
                at = f" at step {best_step:,.0f}" if best_step is not None else ""
                row.append(f"   best {number_text(best[name])}{at}", style="green")
            grid.add_row(f"eval {plain_text(name)}", row)
        if (speed := self._bar.mean_rows_per_s()) is not None:
            grid.add_row("throughput", f"{speed:,.0f} rows/s")
        if event.memory:
            grid.add_row("memory", memory_text(event.memory))
        if event.guarded:
            grid.add_row("guard", guard_text(event.guarded))
        grid.add_row("wall time", time_text(time.monotonic() - self._bar.opened))
        grid.add_row("run folder", Text(self._folder_text()))
        colour = _COLOURS.get(event.reason, "yellow")
        title = Text(f"{event.reason.replace('_', ' ')} after {count_text(event.step, 'step')}", style=f"bold {colour}")
        return Panel(grid, title=title, title_align="left", border_style=colour, expand=False)


class Bar:
    """The two lines of live progress. Another thread draws them, so each event replaces values and changes none."""

    def __init__(self) -> None:
        self.opened = time.monotonic()
        self.state = "starting"
        self.start_step = self.step = self.total = 0
        self._values: dict[str, float] = {}
        self._pace, self._loss = StepRate(), MetricHistory()
        self._steps_per_epoch, self._left, self._measured = 1, None, time.monotonic()
        self._speeds: tuple[float, float] = (0.0, 0.0)  # steps, and seconds of training they took for one row

    def start(self, step: int, total: int, steps_per_epoch: int) -> None:
        self.step, self.total, self._left, self.state = step, total, None, "running"
        self._steps_per_epoch = steps_per_epoch
        self._pace.restart(step)
        self._loss.forget_after(step)

    def measure(self, event: Measured) -> None:
        steps = event.step - self.step
        if (speed := event.values.get("rows_per_s", 0.0)) > 0 and steps > 0:
            self._speeds = (self._speeds[0] + steps, self._speeds[1] + steps / speed)
        self.step, self._values, self._measured = event.step, dict(event.values), time.monotonic()
        self._pace.mark(event.step, event.seconds)
        self._left = self._pace.seconds_for(self.total - event.step)
        self._loss.add(event.step, event.values.get("loss", float("nan")))

    def stop(self, state: str, step: int | None = None) -> None:
        self.state, self.step = state, self.step if step is None else step

    def mean_rows_per_s(self) -> float | None:
        """Rows per second over all training steps of this process, without the time of evaluations and saves."""
        steps, seconds = self._speeds
        return steps / seconds if seconds else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.state == "starting":
            yield Text(f"starting ranks  {time.monotonic() - self.opened:.0f} s", style="dim")
        elif self.total:
            yield self._progress()
            yield self._line(options.max_width)

    def _progress(self) -> RenderableType:
        colour = _COLOURS.get(self.state, "cyan" if self.state == "running" else "yellow")
        grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True)
        grid.add_row(
            Text(f"{self.step:>{len(str(self.total))}}/{self.total}", style="bold"),
            ProgressBar(self.total, self.step, style="bright_black", complete_style=colour, finished_style=colour),
            Text(
                f"{100 * self.step / self.total:3.0f} %  {self._clock()}",
                style=colour if self.state != "running" else "",
            ),
        )
        return grid

    def _clock(self) -> str:
        now = time.monotonic()
        if self.state != "running":
            return f"{self.state.replace('_', ' ')}  {time_text(now - self.opened)}"
        left = None if self._left is None else max(0.0, self._left - (now - self._measured))
        return f"{time_text(now - self.opened)}  eta {time_text(left)}"

    def _line(self, width: int) -> Text:
        """As many values as fit, the most important first, with a sparkline beside the loss."""
        wanted = {name: number_text(value) for name, value in self._values.items() if name not in {*_LAST, *FLOPS}}
        wanted["epoch"] = f"{self.step / self._steps_per_epoch:.2f}"
        wanted |= {_LAST[name][0]: _LAST[name][1](self._values[name]) for name in _LAST if name in self._values}
        wanted |= flops_text(self._values)
        line = Text()
        for name, value in wanted.items():
            word = _pairs({name: value})
            if name == "loss" and (curve := self._loss.sparkline(0 if width < 72 else 12 if width < 110 else 24)):
                word.append(f" {curve}", style="cyan")
            if len(line) + len(word) <= width:
                line.append_text(word).append("  ")
        line.rstrip()
        return line


def _pairs(pairs: dict[str, str]) -> Text:
    line = Text()
    for name, value in pairs.items():
        line.append(f"{'  ' if line else ''}{plain_text(name)} ", style="dim").append(value)
    return line


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else number_text(value)
