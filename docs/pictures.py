"""The pictures of the documentation, made from runs: what a terminal shows, and how a run learned.

    python docs/pictures.py terminal docs/images/terminal.svg               # trains the default recipe first
    python docs/pictures.py terminal docs/images/terminal.svg RUN_FOLDER    # shows a run that recorded its events
    python docs/pictures.py curve docs/images/curve.png RUN_FOLDER...       # learning curves of one run or several
    python docs/pictures.py relay docs/images/relay.png RUN_FOLDER          # shows a run of job=relay

`curve` and `relay` need matplotlib: pip install -e '.[docs]'. These commands make the run folders:

    python -m dtf observer=[console,jsonl,tensorboard,events]    # for `terminal`
    python -m dtf experiment=relay run.dir=RUN_FOLDER                                    # for `relay`

`terminal` feeds the recorded events to the code that drew the terminal of the run.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import yaml
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.live import Live
from rich.text import Text

sys.path.append(str(Path(__file__).parents[1].resolve()))  # dtf of this checkout, where none is installed

from dtf.core.errors import DataError, DtfError, Exit
from dtf.core.types import Event, Measured, Saved, event_from_json
from dtf.observers import terminal as screen
from dtf.observers.tensorboard import flatten

ROOT = Path(__file__).parents[1].resolve()
_RECORD = "observer=[console,jsonl,tensorboard,events]"
_FONTS = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_COLUMNS, _PIXELS = 100, 1800  # width of the pictures
_BEGIN, _END = 3, 2  # evaluations shown of a long run
_COLOURS = ("#0969da", "#cf222e", "#1a7f37", "#8250df", "#bc4c00", "#57606a")


def terminal(out: Path, run: Path | None, title: str) -> None:
    """Write what a terminal shows at the end of a run, as SVG. Without `run` the default recipe is trained."""
    if run is not None:
        out.write_text(_drawn(run, title), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as place:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
        subprocess.run(
            [sys.executable, "-m", "dtf", _RECORD], cwd=place, env=os.environ | {"PYTHONPATH": path}, check=True
        )
        (recorded,) = Path(place).glob("outputs/*/*/events.jsonl")
        out.write_text(_drawn(recorded.parent, title), encoding="utf-8")


class _Still(Live):
    """Where nothing moves, what would have moved is drawn when it stops: on lines of its own, as on a terminal."""

    def stop(self) -> None:
        if self.is_started:
            super().stop()
            self.console.line()


def _drawn(run: Path, title: str) -> str:
    """The recorded events of a run as a picture; its folder is shown as it is seen from where `outputs` lies."""
    lines = _rows(run / "events.jsonl", f"record them: python -m dtf {_RECORD}")
    folder = next(line["table"]["run folder"] for line in lines if line["event"] == "Started")
    parts = Path(folder).parts
    shown = "/".join(parts[parts.index("outputs") :] if "outputs" in parts else parts[-2:])
    lines = json.loads(json.dumps(lines, ensure_ascii=False).replace(folder, shown))
    # Without the environment, so that NO_COLOR and COLUMNS of whoever draws do not matter.
    console = Console(
        record=True,
        file=io.StringIO(),
        width=_COLUMNS,
        color_system="truecolor",
        highlight=False,
        emoji=False,
        _environ={},
    )
    moment = 0.0
    with mock.patch.multiple(screen, time=SimpleNamespace(monotonic=lambda: moment), Live=_Still):
        view = screen.TerminalView(
            Path(shown), yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")), console
        )
        opened = lines[0]["monotonic"]
        fields = [{key: value for key, value in line.items() if key not in ("at", "monotonic")} for line in lines]
        events = [
            (line["monotonic"] - opened, event_from_json(event)) for line, event in zip(lines, fields, strict=True)
        ]
        hidden = _hidden([event for _, event in events])
        for number, (at, event) in enumerate(events):
            moment = at
            if number not in hidden:
                view.see(event)
            elif number == hidden[0]:
                console.print(Text("    ⋮", style="dim"))
        view.close()
    # The font of rich's template comes from a server, which no picture in a page may ask; every system has one of
    # these.
    template = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
        "Fira Code, monospace", _FONTS
    )
    return console.export_svg(title=title, code_format=template, unique_id="dtf")


def _hidden(events: Sequence[Event]) -> list[int]:
    """Positions of the evaluations and saves in the middle of a long run, which look like those before and after
    them.
    """
    evaluations = [
        number for number, event in enumerate(events) if isinstance(event, Measured) and event.split == "eval"
    ]
    middle = range(evaluations[_BEGIN], evaluations[-_END]) if len(evaluations) > _BEGIN + _END + 1 else ()
    return [number for number in middle if number in evaluations or isinstance(events[number], Saved)]


def curve(out: Path, runs: Sequence[Path]) -> None:
    """Write top-1 and loss of each run against epochs as PNG, the learning rate of the first behind them."""
    from matplotlib import rc_context  # pyright: ignore[reportMissingImports]  (extra: docs)
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    from PIL import Image

    style: dict[Any, Any] = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8c959f",
        "axes.axisbelow": True,
    }
    style |= {
        "axes.labelcolor": "#1f2328",
        "xtick.color": "#57606a",
        "ytick.color": "#57606a",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
    }
    with rc_context(style):
        axes = (figure := Figure(figsize=(9, 3.6), layout="constrained")).subplots(1, 2)
        for axis, metric, scale, unit in (
            (axes[0], "top1", 100.0, "top-1 accuracy, %"),
            (axes[1], "loss", 1.0, "cross-entropy loss"),
        ):
            for run, name, colour in zip(runs, _names(runs), itertools.cycle(_COLOURS)):
                _draw(axis, _rows(run / "metrics.jsonl"), metric, scale, colour, name)
            axis.set(xlabel="epochs", title=unit, xlim=(0, None))
            axis.grid(axis="y", color="#d0d7de", linewidth=0.6)
            surface = _draw_lr(axis, _rows(runs[0] / "metrics.jsonl"))
        figure.legend(
            handles=[*axes[0].lines, surface],
            loc="outside lower center",
            ncols=max(3, len(runs) + 1),
            frameon=False,
            handlelength=2.4,
        )
        figure.savefig(picture := io.BytesIO(), dpi=_PIXELS / 9, facecolor="white")
    Image.open(picture).convert("RGB").quantize(96, dither=Image.Dither.NONE).save(out, optimize=True)


def relay(out: Path, run: Path) -> None:
    """Write the picture that `job=relay` drew once more, with fewer colours."""
    from PIL import Image

    from dtf.runs import charts

    charts.relay(json.loads((run / "relay.json").read_text(encoding="utf-8")), out)
    Image.open(out).convert("RGB").quantize(240, dither=Image.Dither.NONE).save(out, optimize=True)


def _draw(axis: Any, rows: list[dict], metric: str, scale: float, colour: str, name: str) -> None:
    """Training as a pale line, evaluation as a strong one whose last value is written beside it."""
    for split, look in (
        ("train", {"linewidth": 1.1, "alpha": 0.45}),
        ("eval", {"linewidth": 1.8, "marker": "o", "markersize": 2.6}),
    ):
        points = [
            (row["epoch"], row[metric] * scale) for row in rows if row["split"] == split and row.get(metric) is not None
        ]
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            label=f"{name}{'training' if split == 'train' else 'evaluation'}",
            **look,
        )
        if split == "eval" and points:
            last = f"{points[-1][1]:.1f}" if scale == 100 else f"{points[-1][1]:.3f}"
            axis.annotate(
                last,
                points[-1],
                xytext=(5, 0),
                textcoords="offset points",
                color=colour,
                weight="bold",
                va="center",
                annotation_clip=False,
            )


def _draw_lr(axis: Any, rows: list[dict]) -> Any:
    """A grey surface behind the curves, a quarter of the height at most: its form counts, its peak is named in the
    legend.
    """
    points = [(row["epoch"], row["lr"]) for row in rows if row["split"] == "train" and row.get("lr") is not None]
    peak = max(rate for _, rate in points)
    behind = axis.twinx()
    surface = behind.fill_between(
        *zip(*points, strict=True), color="#57606a", alpha=0.13, linewidth=0, label=f"learning rate (peak {peak:.2g})"
    )
    behind.set(ylim=(0, 4 * peak), yticks=[])
    behind.set_zorder(axis.get_zorder() - 1)
    axis.patch.set_visible(False)
    return surface


def _names(runs: Sequence[Path]) -> list[str]:
    """What to write before `training` and `evaluation`: the config keys in which the runs differ, nothing for a single
    one.
    """
    configs = [flatten(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))) for run in runs]
    keys = dict.fromkeys(itertools.chain(*configs))
    differ = [
        key for key in keys if not key.startswith("run.") and len({str(config.get(key)) for config in configs}) > 1
    ]
    named = [key for key in differ if key.endswith(".name")] or differ[:2]  # options before their fields
    return [
        "" if len(runs) == 1 else " ".join(f"{key.removesuffix('.name')}={config.get(key)}" for key in named) + " "
        for config in configs
    ]


def _rows(path: Path, advice: str = "is this a run folder?") -> list[dict]:
    if not path.exists():
        raise DataError(f"{path} does not exist; {advice}")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = parser.add_subparsers(dest="picture", required=True)
    one = pictures.add_parser("terminal", help="what a terminal shows at the end of a run, as SVG")
    one.add_argument("out", type=Path)
    one.add_argument(
        "run", type=Path, nargs="?", help="run folder with events.jsonl; default: train the default recipe"
    )
    one.add_argument("--title", default="python -m dtf", help="the command that was given")
    two = pictures.add_parser("curve", help="top-1 and loss against epochs, as PNG")
    two.add_argument("out", type=Path)
    two.add_argument("runs", type=Path, nargs="+", help="run folders: the learning rate is that of the first")
    three = pictures.add_parser("relay", help="one run under one strategy after the other, as PNG")
    three.add_argument("out", type=Path)
    three.add_argument("run", type=Path, help="run folder of job=relay")
    given = parser.parse_args(argv)
    try:
        match given.picture:
            case "terminal":
                terminal(given.out, given.run, given.title)
            case "curve":
                curve(given.out, given.runs)
            case _:
                relay(given.out, given.run)
    except (DtfError, subprocess.CalledProcessError) as error:
        print(f"pictures: {error}", file=sys.stderr)
        return error.exit if isinstance(error, DtfError) else error.returncode
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main())
