"""Charts of runs with matplotlib: as SVG with the colours of the page around it, which may be light or dark, and as PNG
on white.
"""
# pyright: reportMissingImports=false
# (matplotlib is the extra `report`)

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from dtf.runs.results import Point

PALETTE = ("#2f6fdb", "#d9480f", "#2b8a3e", "#9c36b5", "#c2255c", "#0b7285", "#8f6200", "#5f3dc4")
"""Colours of runs, in their order, on white; `html` has those for a dark page. Further runs repeat them with dashes."""
PARTS = {
    "data": "#0b7285",
    "forward": "#2f6fdb",
    "backward": "#5f3dc4",
    "communication": "#d9480f",
    "optimizer": "#2b8a3e",
    "other": "#98a2ad",
}
_LIGHT = {"ink": "#1f2328", "muted": "#57606a", "line": "#d0d7de", "pale": "#b6bec7"} | {
    f"run{i}": colour for i, colour in enumerate(PALETTE)
}
_MARKED = {name: f"#fe{number:02x}ef" for number, name in enumerate(_LIGHT)}
"""Colours that nothing else has: in an SVG they are replaced by the page's variables of these names."""
_STRUCK = "#d1242f"
_LONGEST_LABEL = 80
_LEGEND_ROW = 66  # letters beside each other
_HANDLE = 7  # letters that a line and the space after it take
_BAR_LABEL = 40
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))


@dataclass
class Line:
    run: int
    points: list[Point]
    pale: bool = False  # a second line of the same run, less important


@dataclass
class Bar:
    label: str
    value: float
    colour: str  # `run<i>`, or `pale` for what was not measured here
    text: str


@dataclass
class Axes:
    """One pair of axes: lines or horizontal bars."""

    title: str
    x: str = ""
    lines: list[Line] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    labelled: bool = True  # bars only: whether labels stand at its left; else those of the axes to the left count
    floor: bool = False  # lines only: whether y begins at 0
    log: bool = False  # lines only: whether x is on a logarithmic scale
    top: float | None = None  # of the values, where it is known
    shown: tuple[float, float] | None = None  # lines only: the part of y that is drawn


@dataclass
class Chart:
    """One picture: axes side by side. `file`: its name without ending."""

    file: str
    caption: str
    axes: list[Axes]
    widths: list[float] = field(default_factory=list)

    @property
    def wide(self) -> bool:
        return len(self.axes) > 1


def svg(chart: Chart) -> str:
    """An <svg> element for a page that defines --ink, --muted, --line, --pale and --run0 to --run7. Text stays text."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.file, "svg.id": chart.file}):
        figure = _figure(chart, _MARKED, [])
        figure.savefig(
            out := io.StringIO(),
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = re.sub(r"<metadata>.*?</metadata>", "", out.getvalue(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    for name, colour in _MARKED.items():
        text = text.replace(colour, f"var(--{name})")
    text = (
        re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", text)
        .replace(' id="', f' id="{chart.file}-')
        .replace('href="#', f'href="#{chart.file}-')
        .replace("url(#", f"url(#{chart.file}-")
    )
    text = re.sub(r"font: bold ([\d.]+px)[^;\"]*", r"font-size: \1; font-weight: 600", text)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', text)
    assert size is not None
    return text.replace(size[0], f'role="img" aria-label="{escape(chart.caption)}"', 1)


def png(chart: Chart, names: Sequence[str], path: Path) -> None:
    """The same on white, with a legend where lines need one."""
    _figure(chart, _LIGHT, names if any(axes.lines for axes in chart.axes) else []).savefig(
        path, dpi=160, facecolor="white"
    )


def _figure(chart: Chart, colours: Mapping[str, str], legend: Sequence[str]) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    bars = max((len(axes.bars) for axes in chart.axes), default=0)
    rows = max((_label(bar.label).count("\n") for axes in chart.axes for bar in axes.bars), default=0)
    height = 0.75 + (0.36 + 0.15 * rows) * bars if bars else 2.7
    names = [shown(name, _LEGEND_ROW) for name in legend]
    columns = max(1, min(3, len(names), _LEGEND_ROW // (max(map(len, names), default=0) + _HANDLE)))
    with rc_context(_style(colours)):
        below = 0.24 * -(-len(names) // columns)
        figure = Figure(
            figsize=(11.5 if chart.wide else 5.6, height + below),
            layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08),
        )
        places = figure.subplots(1, len(chart.axes), squeeze=False, width_ratios=chart.widths or None)[0]
        for place, axes in zip(places, chart.axes, strict=True):
            place.set_title(shown(axes.title))
            _bars(place, axes, colours) if axes.bars else _lines(place, axes, colours)
        if legend:
            from matplotlib.lines import Line2D

            handles = [
                Line2D([], [], color=colours[f"run{i % 8}"], linestyle=_dash(i), label=name)
                for i, name in enumerate(names)
            ]
            figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        figure.canvas.draw()  # lay out with this style
    return figure


def shown(text: str, most: int = _LONGEST_LABEL) -> str:
    """A name that may come from elsewhere, as it stands in a chart: no control characters, and at most so many letters.
    Its middle is left out: runs often differ at their end.
    """
    cut = text if len(text) <= most else f"{text[: most - most // 3 - 3]}...{text[-(most // 3) :]}"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in cut)


def _label(name: str) -> str:
    """Beside a bar: the values of a long name one below the other."""
    parts = name.split(" \N{MIDDLE DOT} ")[:3] if len(name) > _BAR_LABEL else [name]
    return "\n".join(shown(part, _BAR_LABEL) for part in parts)


def _style(colours: Mapping[str, str]) -> dict[Any, Any]:
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titlesize": 10,
        "text.parse_math": False,
    }
    style |= {
        "axes.edgecolor": colours["line"],
        "axes.labelcolor": colours["muted"],
        "xtick.color": colours["muted"],
        "ytick.color": colours["muted"],
    }
    style |= {
        "text.color": colours["ink"],
        "axes.titlecolor": colours["ink"],
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
    }
    return style


def _lines(place: Any, axes: Axes, colours: Mapping[str, str]) -> None:
    for line in axes.lines:
        style: dict[str, Any] = {"alpha": 0.4, "linewidth": 1.1} if line.pale else {"linewidth": 1.8}
        if len(line.points) == 1:
            style["marker"] = "o"
        place.plot(
            *zip(*line.points, strict=True), color=colours[f"run{line.run % 8}"], linestyle=_dash(line.run), **style
        )
    place.grid(axis="y", color=colours["line"], linewidth=0.6)
    place.set_xlabel(axes.x)
    if axes.log:
        place.set_xscale("log")
    else:
        place.set_xlim(0, None)
    if axes.floor:
        place.set_ylim(0, axes.top or 1.08 * max(y for line in axes.lines for _, y in line.points) or 1)
    if axes.shown:
        place.set_ylim(*axes.shown)
    place.tick_params(length=0)


def _bars(place: Any, axes: Axes, colours: Mapping[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for number, bar in enumerate(axes.bars):
        measured = bar.colour != "pale"
        face: dict[str, Any] = (
            {"color": colours[bar.colour]}
            if measured
            else {"facecolor": "none", "edgecolor": colours["pale"], "hatch": "////"}
        )
        place.barh(number, bar.value, height=0.62, **face)
        place.annotate(
            bar.text, (bar.value, number), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5
        )
    place.set_xlim(0, 1.35 * max((bar.value for bar in axes.bars), default=1) or 1)
    place.set_ylim(len(axes.bars) - 0.45, -0.55)
    place.set_yticks(range(len(axes.bars)), [_label(bar.label) if axes.labelled else "" for bar in axes.bars])
    for label in place.get_yticklabels():
        label.set_color(colours["ink"])
    place.set_xlabel(axes.x)
    place.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    place.tick_params(length=0)


def _dash(run: int) -> Any:
    return _DASHES[run // len(PALETTE) % len(_DASHES)]


def relay(report: Mapping[str, Any], path: Path) -> None:
    """Draw what relay.json holds: the loss of the relay and of its reference over the segments of the run, and below it
    their relative difference. A PNG on white.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with rc_context(_style(_LIGHT)):
        figure = Figure(figsize=(10, 5.2), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1.6])
        _draw_segments(above, below, report["legs"])
        _draw_losses(above, report)
        _draw_differences(below, report)
        for place in (above, below):
            place.tick_params(length=0)
        figure.suptitle(report["title"], x=0.01, ha="left", weight="bold", fontsize=10.5)
        figure.savefig(path, dpi=180, facecolor="white")


def _draw_segments(above: Any, below: Any, segments: Sequence[Mapping[str, Any]]) -> None:
    """Coloured grounds of the segments on both axes, with the strategy and its processes in words."""
    for number, segment in enumerate(segments):
        colour = PALETTE[number % len(PALETTE)]
        for place in (above, below):
            place.axvspan(segment["first"], segment["last"], color=colour, alpha=0.07, linewidth=0)
        _write(above, segment, 1.0, -6, segment["strategy"], colour, weight="bold", fontsize=10.5)
        _write(above, segment, 1.0, -21, segment["world"].replace(", ", "\n"), _LIGHT["muted"], fontsize=8)


def _draw_losses(place: Any, report: Mapping[str, Any]) -> None:
    """The loss of the reference and of the relay, and where a process was killed."""
    segments, steps, reference = report["legs"], report["steps"], report["reference"]
    done = [row["step"] for row in steps]
    undisturbed, relayed = ([row["loss"][side] for row in steps] for side in (0, 1))
    top = 1.35 * max(undisturbed)
    label = f"undisturbed: {reference['strategy']}, {reference['world']}"
    place.plot(done, undisturbed, color=_LIGHT["pale"], linewidth=5, solid_capstyle="round", label=label)
    place.plot(done, relayed, color=_LIGHT["ink"], linewidth=1.2, label="relay")
    losses = dict(zip(done, relayed, strict=True))
    for segment in segments:
        if killed := segment.get("killed"):
            at, again = killed["at"], killed["again"]
            height = losses.get(at, 0.0)
            place.axvspan(again, at, 0.3, 0.78, color=_STRUCK, alpha=0.2, linewidth=0)
            place.plot([at, at], [0.3 * top, height], color=_STRUCK, linewidth=0.8)
            place.plot([at], [height], "x", color=_STRUCK, markersize=9, markeredgewidth=2.2, zorder=5)
            text = f"kill -9 at step {at}:\n{killed['who']}" + (f",\nagain from {again}" if again < at else "")
            _write(place, segment, 0.29, 0, text, _STRUCK, fontsize=8)
    place.set(ylabel="loss", xlim=(0, segments[-1]["last"]), ylim=(0, top))
    place.legend(loc="lower left", frameon=False)


def _draw_differences(place: Any, report: Mapping[str, Any]) -> None:
    """Relative difference of loss and of gradient norm at each step, on a logarithmic axis, and the bound."""
    steps, bound = report["steps"], report["bound"]
    done, least = [row["step"] for row in steps], bound / 1e7
    for key, label, colour in (("loss", "loss", _LIGHT["ink"]), ("grad_norm", "gradient norm", PALETTE[0])):
        differences = [max(least, abs(a - b) / (abs(a) or 1)) for a, b in (row[key] for row in steps)]
        place.plot(done, differences, ".", color=colour, markersize=3.5, label=label, clip_on=False)
    place.axhline(bound, color=_STRUCK, linewidth=1.2, linestyle=_DASHES[1])
    place.set(yscale="log", ylim=(least / 3, bound * 1e2), xlabel="step", ylabel="relative difference")
    end = (report["legs"][-1]["last"], bound)
    place.annotate("bound", end, xytext=(-4, 3), textcoords="offset points", ha="right", color=_STRUCK)
    ticks = [bound / 10**power for power in (6, 4, 2, 0)]
    place.set_yticks([least, *ticks], ["0", *(f"{tick:.0e}" for tick in ticks)])
    place.minorticks_off()
    place.legend(loc="upper left", frameon=False, ncols=2, markerscale=2, handletextpad=0.1)


def chaos(report: Mapping[str, Any], path: Path) -> None:
    """Draw what chaos.json holds: the trials of each fault under each strategy, and how long runs took to recover. A
    PNG on white.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    cells = [row for row in report["rows"] if "all" not in (row["fault"], row["strategy"])]
    faults, strategies = (list(dict.fromkeys(row[key] for row in cells)) for key in ("fault", "strategy"))
    with rc_context(_style(_LIGHT)):
        timed = [row for row in cells if row["recovered_s"][0] is not None]
        size = (4.5 + 1.3 * len(strategies) + 4.0 * bool(timed), 1.6 + 0.32 * max(len(faults), 4))
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))
        widths = [1.3 * len(strategies) + 1, 4] if timed else [1]
        grid, *places = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
        _draw_trials(grid, cells, faults, strategies)
        if timed:
            _draw_recoveries(places[0], timed, faults, strategies)
        total = report["rows"][-1]
        title = f"{total['trials']:,} disturbed runs, {total['broken']} lost, hung or different"
        bound = f"95 % sure: fewer than {100 * total['bound']:.{1 if total['bound'] < 0.1 else 0}f} %"
        figure.suptitle(f"{title}; {bound}", x=0.01, ha="left", weight="bold", fontsize=10.5)
        figure.savefig(path, dpi=180, facecolor="white")


def _draw_trials(
    place: Any, cells: Sequence[Mapping[str, Any]], faults: Sequence[str], strategies: Sequence[str]
) -> None:
    for row in cells:
        x, y = strategies.index(row["strategy"]), faults.index(row["fault"])
        colour = _STRUCK if row["broken"] else "#2b8a3e"
        place.add_patch(_rectangle(x, y, colour, 0.9 if row["broken"] else 0.15))
        alone = " (samples)" if row["samples"] else ""
        text = f"{row['trials'] - row['broken']} of {row['trials']}{alone}"
        place.text(x, y, text, ha="center", va="center", color="white" if row["broken"] else _LIGHT["ink"], fontsize=8)
    place.set_xlim(-0.5, len(strategies) - 0.5)
    place.set_ylim(len(faults) - 0.5, -0.5)
    place.set_xticks(range(len(strategies)), [name.replace(" ", "\n", 1) for name in strategies], fontsize=7.5)
    place.set_yticks(range(len(faults)), faults)
    place.set_title("trials that kept every promise", fontsize=9, loc="left")
    place.grid(False)
    place.tick_params(length=0)


def _rectangle(x: int, y: int, colour: str, alpha: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.44), 0.94, 0.88, color=colour, alpha=alpha, linewidth=0)


def _draw_recoveries(
    place: Any, timed: Sequence[Mapping[str, Any]], faults: Sequence[str], strategies: Sequence[str]
) -> None:
    """Lines from the median to the 95th percentile."""
    for row in timed:
        number = strategies.index(row["strategy"])
        y = faults.index(row["fault"]) + (number + 0.5) / len(strategies) * 0.8 - 0.4
        median, most = row["recovered_s"]
        colour = PALETTE[number % len(PALETTE)]
        place.plot([median, most], [y, y], color=colour, linewidth=1.2)
        place.plot([median], [y], "o", color=colour, markersize=3.5)
    for number, name in enumerate(strategies):
        if any(row["strategy"] == name for row in timed):
            place.plot([], [], "-o", color=PALETTE[number % len(PALETTE)], markersize=3.5, linewidth=1.2, label=name)
    place.set_title("seconds to the next new step: median to 95th percentile", fontsize=9, loc="left")
    place.set_xlim(left=0.0)
    place.legend(fontsize=7, frameon=False)
    place.tick_params(length=0)


def _write(
    place: Any,
    segment: Mapping[str, Any],
    height: float,
    shift: float,
    text: str,
    colour: str,
    fontsize: float,
    weight: str = "normal",
) -> None:
    """Write text in the middle of a segment. Its top is at `height`, a share of the axes, plus `shift` points."""
    at, across = ((segment["first"] + segment["last"]) / 2, height), place.get_xaxis_transform()
    style: dict[str, Any] = {"ha": "center", "va": "top", "color": colour, "fontsize": fontsize, "weight": weight}
    place.annotate(text, at, xycoords=across, xytext=(0, shift), textcoords="offset points", **style)
