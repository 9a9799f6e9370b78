"""The contents of a report: which charts and tables of runs, in which order. Draws nothing itself."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from dtf.core.text import bytes_text, count_text, number_text, option_text, scaled_text, time_text
from dtf.observers.trace_shares import WORK
from dtf.runs import html as page
from dtf.runs.charts import Axes, Bar, Chart, Line, svg
from dtf.runs.results import Point, Result, best_trials, differences

_OF_TRAINING = ("lr", "grad_norm", "rows_per_s", "model_flops_per_s", "mfu")
_SPEED = ("throughput", "mfu", "epoch_time")
"""Begin the names of charts."""
_HEAD = ("split", "step", "epoch", "seconds")


def charts_of(results: Sequence[Result], published: Mapping[str, float]) -> list[Chart]:
    """The charts for which these runs have data."""
    charts = [_comparison(results, published)] if len(results) > 1 or published else []
    charts += [_metric(results, metric) for metric in _metrics(results)]
    charts += [
        _lines(results, "learning_rate", "learning rate", lambda result: result.curve("train", "lr")),
        _lines(results, "gradient_norm", "gradient norm", lambda result: result.curve("train", "grad_norm")),
        _lines(
            results, "throughput", "rows per second", lambda result: result.curve("train", "rows_per_s"), floor=True
        ),
        _lines(results, "mfu", "model FLOPs utilisation (mfu), %", _mfu, floor=True),
        _lines(results, "epoch_time", "seconds per epoch", lambda result: result.epochs, floor=True),
    ]
    for device in dict.fromkeys(device for result in results for device in result.devices):
        charts += [
            _sampled(results, device, "utilisation", "utilisation, %", 1.0, 105.0),
            _sampled(results, device, "memory", "memory, GB", 1e9, None),
        ]
    return [chart for chart in charts if any(axes.lines or axes.bars for axes in chart.axes)]


def html(results: Sequence[Result], charts: Sequence[Chart], now: str) -> str:
    """The whole page."""
    figures = {chart.file: page.figure(svg(chart), chart.caption, chart.wide) for chart in charts}
    wide, others = [chart.file for chart in charts if chart.wide], [chart.file for chart in charts if not chart.wide]
    curves = [name for name in others if not name.startswith((*_SPEED, "utilisation", "memory"))]
    speed = [name for name in others if name.startswith(_SPEED)]
    resources = [name for name in others if name.startswith(("utilisation", "memory"))]
    best = "".join(f"<p>{escape(line)}</p>" for line in best_trials(results))
    sections = [("Best", best)] if best else []
    sections += [("Runs", _runs(results))]
    sections += [("Side by side", "\n".join(figures[name] for name in wide))] if wide else []
    sections += (
        [("Curves", _key(results, "pale: training, strong: evaluation") + page.grid(figures[name] for name in curves))]
        if curves
        else []
    )
    sections += [("Speed", _key(results) + page.grid(figures[name] for name in speed))] if speed else []
    sections += [("Devices", _key(results) + page.grid(figures[name] for name in resources))] if resources else []
    if any(result.profiles for result in results):
        sections.append(("Where the time of a step goes", _profiles(results)))
    if any(result.confusion for result in results):
        sections.append(("What was taken for what", _confusions(results)))
    if len(results) > 1:
        sections.append(("How the configs differ", _differences(results)))
    recipes = ", ".join(dict.fromkeys(str(result.config["recipe.name"]) for result in results))
    return page.page(f"{recipes}: {count_text(len(results), 'run')}", f"dtf report of {now}", sections)


# ---------------------------------------------------------------- charts


def _comparison(results: Sequence[Result], published: Mapping[str, float]) -> Chart:
    """Bars of time per epoch, utilisation and memory of each run, and of published times on an axis of their own."""

    def bars(title: str, unit: str, value: Callable[[Result], float | None], text: Callable[[float], str]) -> Axes:
        known = [(number, result, value(result)) for number, result in enumerate(results)]
        shown = [
            Bar(result.name, v or 0.0, f"run{number % 8}", "not known" if v is None else text(v))
            for number, result, v in known
        ]
        return Axes(title, unit, bars=shown if any(v is not None for _, _, v in known) else [])

    axes = [
        bars("time per epoch", "seconds", lambda result: result.epoch_s, _seconds),
        bars("utilisation, mean", "per cent", lambda result: result.utilisation, "{:.0f} %".format),
        bars(
            "memory of all processes, most",
            "GB",
            lambda result: None if result.memory is None else result.memory / 1e9,
            "{:.2f} GB".format,
        ),
    ]
    axes = [panel for panel in axes if panel.bars]
    for panel in axes[1:]:
        panel.labelled = False
    caption = "Solid, these runs: time to train an epoch (median), without evaluating and saving."
    if any(panel.title.startswith("utilisation") for panel in axes):
        caption += (
            " Utilisation and memory as sampled meanwhile: on a CPU of all processes of the run, with pages that they "
            "share counted for each, on a GPU what is taken on it. The run itself tells of one process."
        )
    if published:
        axes.append(
            Axes(
                "published, time per epoch",
                "seconds",
                bars=[Bar(label, value, "pale", _seconds(value)) for label, value in published.items()],
            )
        )
        caption += " Hatched, against an axis of their own, what others measured and published."
    return Chart("comparison", caption, axes, [1.15 if panel.labelled else 0.85 for panel in axes])


def _metric(results: Sequence[Result], metric: str) -> Chart:
    """Curves of a metric: training pale and evaluation strong. Where there is only one of them, it is strong."""
    lines: list[Line] = []
    for number, result in enumerate(results):
        train, evaluation = result.curve("train", metric), result.curve("eval", metric)
        lines += [Line(number, train, pale=bool(evaluation))] if train else []
        lines += [Line(number, evaluation)] if evaluation else []
    x = "epochs (pale: training)" if any(line.pale for line in lines) else "epochs"
    return Chart(_file("metric", metric), "", [Axes(metric, x, lines)])


def _lines(
    results: Sequence[Result], file: str, title: str, points: Callable[[Result], list[Point]], floor: bool = False
) -> Chart:
    lines = [Line(number, curve) for number, result in enumerate(results) if (curve := points(result))]
    return Chart(file, "", [Axes(title, "epochs", lines, floor=floor)])


def _mfu(result: Result) -> list[Point]:
    return [(epoch, 100 * share) for epoch, share in result.curve("train", "mfu")]


def _sampled(results: Sequence[Result], device: str, key: str, what: str, unit: float, top: float | None) -> Chart:
    known = ((number, result.samples_of(device, key)) for number, result in enumerate(results))
    lines = [Line(number, [(minutes, value / unit) for minutes, value in points]) for number, points in known if points]
    where = "CPU" if device == "cpu" else device
    return Chart(_file(key, device), "", [Axes(f"{where} {what}", "minutes", lines, floor=True, top=top)])


def _file(kind: str, name: str) -> str:
    """The name of a chart's file, which its ids in the page begin with. Other names make other files."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
    if plain not in (name, name.replace(":", "_")):
        plain += "_" + hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{kind}_{plain}"


def _metrics(results: Sequence[Result]) -> list[str]:
    """Names of the metrics: those of evaluations, then those of training only."""
    names = dict.fromkeys(
        name for split in ("eval", "train") for result in results for row in result.rows(split) for name in row
    )
    return [name for name in names if name not in (*_HEAD, *_OF_TRAINING)]


# ---------------------------------------------------------------- tables


def _key(results: Sequence[Result], more: str = "") -> str:
    """The legend of the colours of runs."""
    return page.legend(
        [*((f"run{number % 8}", result.name) for number, result in enumerate(results)), *([("", more)] if more else [])]
    )


def _runs(results: Sequence[Result]) -> str:
    metrics = [metric for metric in _metrics(results) if any(result.curve("eval", metric) for result in results)]
    rates = {
        "FLOP/s": ("model_flops_per_s", lambda rate: scaled_text(rate).replace(" ", "")),
        "mfu": ("mfu", "{:.1%}".format),
    }
    known = [head for head, (name, _) in rates.items() if any(result.usual(name) is not None for result in results)]
    heads = [
        "run",
        "state",
        "spread",
        "steps",
        *(f"eval {metric}" for metric in metrics),
        "rows/s",
        *known,
        "epoch",
        "utilisation",
        "memory of all",
        "wall",
    ]
    rows = []
    for number, result in enumerate(results):
        last = [result.curve("eval", metric)[-1:] for metric in metrics]
        steps = max((row["step"] for row in result.metrics), default=0)
        rows.append(
            [
                f'{page.chip(number)}<span title="{escape(str(result.folder))}">{escape(result.name)}</span>',
                escape(result.state),
                escape(f"{result.config['strategy.name']} on {result.config['world']}"),
                f"{steps:,}",
                *(number_text(points[0][1]) if points else "" for points in last),
                _shown(result.rows_per_s, "{:,.0f}".format),
                *(_shown(result.usual(name), text) for name, text in map(rates.__getitem__, known)),
                _shown(result.epoch_s, _seconds),
                _shown(result.utilisation, "{:.0f} %".format),
                _shown(result.memory, lambda size: bytes_text(round(size))),
                _shown(result.wall_s, time_text),
            ]
        )
    return page.table(heads, rows, numbers=3)


def _profiles(results: Sequence[Result]) -> str:
    rows = []
    for number, result in enumerate(results):
        for rank, shares in result.profiles:
            parts = [f"{100 * shares.parts[name]:.1f} %" for name in (*WORK, "other")]
            name = f"{page.chip(number)}{escape(result.name)}, rank {rank}"
            rows.append(
                [
                    name,
                    page.stack(shares.parts),
                    f"{1000 * shares.step_s:.1f} ms",
                    *parts,
                    f"{100 * shares.hidden:.1f} %",
                ]
            )
    explanation = (
        "<p>Communication counts where nothing is computed meanwhile; the rest of it is the last column. Steps "
        "under a profiler are slower.</p>"
    )
    heads = ["run", "share of a step", "step", *WORK, "other", "beside computation"]
    return (
        page.legend((f"part-{name}", name) for name in (*WORK, "other"))
        + page.table(heads, rows, numbers=2)
        + explanation
    )


def _confusions(results: Sequence[Result]) -> str:
    """A matrix of classes for each evaluation."""
    found = []
    for number, result in enumerate(results):
        if result.confusion:
            rows = [
                (name if name == str(label) else f"{label} {name}", counts)
                for label, (name, counts) in enumerate(result.confusion)
            ]
            heads = [str(label) for label in range(len(rows))]
            found.append(f"<p>{page.chip(number)}{escape(result.name)}</p>" + page.matrix(rows, heads))
    return "<p>Rows of each class, by what they were taken for.</p>" + "\n".join(found)


def _differences(results: Sequence[Result]) -> str:
    keys_that_differ = {"run folder": [result.folder.name for result in results]} | differences(results)
    heads = ["key", *(result.name for result in results)]
    return page.table(
        heads,
        (
            [f"<code>{escape(key)}</code>", *(_value(value) for value in values)]
            for key, values in keys_that_differ.items()
        ),
    )


def _value(value: Any) -> str:
    if value is None:
        return '<span style="color:var(--muted)">none</span>'
    if isinstance(value, float):
        text = option_text(value)
    else:
        text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"<code>{escape(text)}</code>"


def _shown(value: float | None, text: Callable[[float], str]) -> str:
    return "" if value is None else escape(text(value))


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
