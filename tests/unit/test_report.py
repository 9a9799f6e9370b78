"""job=report: one page that is complete in itself, from what run folders hold."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtf.core.errors import ConfigError, DataError
from dtf.runs import results
from dtf.runs.report import charts_of, html

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "link", "br", "img", "hr"}


def run_folder(
    folder: Path,
    strategy: str = "ddp",
    processes: int = 2,
    rate: float = 1000.0,
    resources: bool = True,
    **changes: Any,
) -> Path:
    """Two epochs of 10 steps of 100 rows, as observers leave them."""
    folder.mkdir(parents=True)
    config = {
        "seed": 0,
        "recipe": {"name": "shapes"},
        "strategy": {"name": strategy},
        "lr": {"name": "cosine", "peak": 0.1},
        "step": {"batch_size": 100},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"run": {"name": "", "dir": str(folder)}} | changes))
    record = {
        "started": "2025-01-01T12:00:00+00:00",
        "ended": "2025-01-01T12:01:05+00:00",
        "exit": 0,
        "cause": "finished",
        "seconds": 125.0,
    }
    (folder / "run.json").write_text(json.dumps(record | {"world": {"processes": processes, "devices": "cpu"}}))
    lines = []
    for step in range(5, 21, 5):
        train = {
            "loss": 10 / step,
            "top1": None if step == 5 else step / 20,
            "grad_norm": 1.0,
            "lr": 0.1,
            "rows_per_s": rate if step > 10 else rate / 2,
        }
        lines.append({"split": "train", "step": step, "epoch": step / 10, "seconds": float(step), **train})
        if not step % 10:
            evaluation = {"loss": 9 / step, "top1": step / 20}
            lines.append({"split": "eval", "step": step, "epoch": step / 10, "seconds": float(step), **evaluation})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"split": "tr')
    samples = [
        {"time": 100.0 + i + 500 * (i > 5), "step": i, "device": "cpu", "utilisation": 80.0 + i, "memory": 10**9 + i}
        for i in range(10)
    ]
    if resources:
        (folder / "resources.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    (folder / "profile").mkdir()
    parts = {"data": 0.1, "forward": 0.2, "backward": 0.3, "communication": 0.2, "optimizer": 0.1, "other": 0.1}
    (folder / "profile" / "rank_0.json").write_text(
        json.dumps({"rank": 0, "first_step": 20, "steps": 10, "step_s": 0.01, "parts": parts, "hidden": 0.05})
    )
    (folder / "profile" / "rank_0.pt.trace.json").write_text("{}")
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run_folder(tmp_path / "runs/a")
    run_folder(tmp_path / "runs/b", "dp", rate=500.0, resources=False)
    run_folder(tmp_path / "runs/c <i>", "dp", 1, lr={"name": "cosine", "peak": "<b>0.3</b>"})
    (tmp_path / "runs/no run").mkdir()
    return tmp_path / "runs"


class Page(HTMLParser):
    """Checks nesting while it reads; keeps tags, ids, headings and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1:] != ["style"]:
            self.texts.append(data.strip())


def test_what_a_run_says(runs):
    (run,) = results.read_runs([str(runs / "a")])
    assert run.name == "a" and run.rows_per_s == 750.0 and run.wall_s == 125  # over two launches
    assert run.epochs == [(1, pytest.approx(2.0)), (2, pytest.approx(1.0))]  # 1,000 rows at 500 and at 1,000 a second
    # a value that was not finite is no point
    assert run.curve("train", "top1") == [(1.0, 0.5), (1.5, 0.75), (2.0, 1.0)]
    assert run.utilisation == 84.5 and run.memory == 10**9 + 9
    minutes = [minute for minute, _ in run.samples_of("cpu", "memory")]
    assert minutes[-1] == pytest.approx((8 + 3) / 60)  # a pause between two launches is cut to three samples
    assert [(rank, shares.parts["forward"]) for rank, shares in run.profiles] == [(0, 0.2)]


def test_arithmetic_is_shown_where_it_is_known(tmp_path):
    folders = [run_folder(tmp_path / name) for name in "ab"]
    plain = html(results.read_runs([str(folders[0])]), [], "now")
    for row in ("FLOP/s", "mfu"):
        assert row not in Page(plain).texts
    lines = [json.loads(line) for line in (folders[1] / "metrics.jsonl").read_text().splitlines()[:-1]]
    rates = {"model_flops_per_s": 4.0e14, "mfu": 0.4}
    (folders[1] / "metrics.jsonl").write_text(
        "".join(json.dumps(line | (rates if line["split"] == "train" else {})) + "\n" for line in lines)
    )
    found = results.read_runs([str(tmp_path / "*")])
    charts = charts_of(found, {})
    (chart,) = [chart for chart in charts if chart.file == "mfu"]
    assert [share for _, share in chart.axes[0].lines[0].points] == [40.0] * 4 and chart.axes[0].lines[0].run == 1
    texts = Page(html(found, charts, "now")).texts
    assert texts.count("FLOP/s") == texts.count("mfu") == 1 and "400T" in texts and "40.0%" in texts
    assert not any("model_flops" in text for text in texts), "no metric"


def test_a_part_of_an_epoch_says_what_a_whole_one_takes(tmp_path):
    folder = run_folder(tmp_path / "a")
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert results.read_runs([str(folder)])[0].epochs == [(1.0, pytest.approx(2.0))]


def test_runs_are_named_by_what_differs(runs):
    names = [run.name for run in results.read_runs([str(runs / "*")])]
    assert names == ["ddp · 2 x cpu · lr.peak=0.1", "dp · 2 x cpu · lr.peak=0.1", "dp · 1 x cpu · lr.peak=<b>0.3</b>"]
    assert set(results.differences(results.read_runs([str(runs / "*")]))) == {"strategy.name", "world", "lr.peak"}
    run_folder(runs / "d")
    assert [run.name for run in results.read_runs([str(runs / "d"), str(runs / "a")])] == ["#1", "#2"]
    # each once
    assert [run.folder.name for run in results.read_runs([str(runs / "d"), str(runs / "*")])] == [
        "d",
        "a",
        "b",
        "c <i>",
    ]


def test_the_time_of_a_run_under_way(tmp_path):
    folder = run_folder(tmp_path / "a")
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(record | {"ended": None, "seconds": None}))
    assert results.read_runs([str(folder)])[0].wall_s is None
    (folder / "seconds").write_text("40.5\n")
    assert results.read_runs([str(folder)])[0].wall_s == 40.5


def test_a_folder_is_found_under_its_name_whatever_a_pattern_would_mean_by_it(tmp_path):
    run_folder(tmp_path / "a[1]")
    run_folder(tmp_path / "a1")
    assert [run.folder.name for run in results.read_runs([str(tmp_path / "a[1]")])] == ["a[1]"]
    assert [run.folder.name for run in results.read_runs([str(tmp_path / "a[0-9]")])] == ["a1"]


def test_what_is_no_run_is_refused(runs):
    with pytest.raises(ConfigError, match="matches nothing"):
        results.read_runs([str(runs / "x*")])
    with pytest.raises(ConfigError, match="holds no run.json"):
        results.read_runs([str(runs / "no run")])
    (runs / "a" / "config.yaml").unlink()
    with pytest.raises(DataError, match="no run folder, or a damaged one"):
        results.read_runs([str(runs / "a")])


def test_a_page_that_is_complete_in_itself(runs, run_dtf):
    pytest.importorskip("matplotlib")
    done = run_dtf("job=strategy_comparison", f"job.runs=['{runs}/*']")
    assert done.code == 0, done.err
    text = (done.folder / "report.html").read_text()
    page = Page(text)
    assert page.tags["svg"] == 9 and not page.tags["script"] and not page.tags["link"] and not page.tags["img"]
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith("#") for link in page.links) and not re.findall(r"@import|url\((?!#)", text)
    assert set(re.findall(r"url\(#([^)]*)\)", text)) | {link[1:] for link in page.links} <= set(page.ids)
    assert not re.findall(r"https?://(?!www\.w3\.org/)", text)  # names of formats, never fetched
    assert "<b>0.3" not in text and "<i>" not in text
    for heading in (
        "Runs",
        "Side by side",
        "Curves",
        "Speed",
        "Devices",
        "Where the time of a step goes",
        "How the configs differ",
    ):
        assert heading in page.texts
    for word in (
        "published, time per epoch",
        "1,786 s",
        "HFAiLab, dp, 8 A100",
        "84 %",
        "strategy.name",
        "time per epoch",
        "02:05",
        "CPU utilisation, %",
    ):
        assert word in page.texts, word
    for variable in re.findall(r"var\((--[\w-]+)\)", text):
        assert text.count(f"{variable}:") >= 2, variable  # for light and for dark
    pictures = {path.stem for path in done.folder.glob("*.png")}
    assert {
        "comparison",
        "metric_loss",
        "metric_top1",
        "throughput",
        "epoch_time",
        "utilisation_cpu",
        "memory_cpu",
    } <= pictures


HOSTILE = [
    '"><script>alert(1)</script>',
    "loss'/onload='x",
    "eval/loss",
    "../../escaped",
    "$\\frac{$ and #1 url(#x)",
    "a\nb\x00\u202e",
    "x" * 5000,
    "\ud800",
]


@pytest.mark.parametrize("names", [HOSTILE[::2], pytest.param(HOSTILE, marks=pytest.mark.slow)], ids=["some", "all"])
def test_names_from_elsewhere_stay_text(tmp_path, run_dtf, names):
    pytest.importorskip("matplotlib")
    folder = run_folder(tmp_path / "runs/a", lr={"name": "cosine", "peak": f"{HOSTILE[0]}\x1b[2J\x9b1A"})
    row = {"split": "eval", "step": 10, "epoch": 1.0} | dict.fromkeys(names, 0.5)
    sample = {"time": 1.0, "step": 1, "utilisation": 1.0, "memory": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    # a device has several charts: one has a bit of each name
    devices = ["".join(name[:50] for name in HOSTILE), HOSTILE[3], HOSTILE[6][:900]]
    (folder / "resources.jsonl").write_text("\n".join(json.dumps(sample | {"device": name}) for name in devices))
    run_folder(tmp_path / "runs/b")
    done = run_dtf("job=report", f"job.runs=['{tmp_path}/runs/*']")
    assert done.code == 0, done.err
    page = Page((done.folder / "report.html").read_text())
    assert not page.tags["script"] and len(page.ids) == len(set(page.ids))
    assert all(re.fullmatch(r"[\w.:-]+", name) for name in page.ids)
    assert "eval/loss" in page.texts
    assert {path.parent for path in tmp_path.rglob("*.png")} == {done.folder}
    assert len([*done.folder.glob("metric_*.png")]) == len(names) + 2
    assert "<script>" in done.out and not set(done.out) & set("\x1b\x9b")
    assert len([*done.folder.glob("memory_*.png")]) == len(devices) + 1


ODD_LINES = [
    b'{"split": "train", "step": "x", "epoch": 1}',
    b'{"split": [], "step": 1, "epoch": 1}',
    b'{"split": "train", "step": 1, "epoch": 1' + b"0" * 400 + b"}",
    b'{"split": "train", "step": 1, "epoch": 1e15, "rows_per_s": 1}',
    b'{"split": "train", "step": 3, "epoch": 0.3, "rows_per_s": "fast", "loss": [1], "top1": NaN}',
    b"[" * 100_000,
    b"\0" * 100,
    b"{}",
    b"7",
    b"\xff\xfe",
    b'{"split": "train", "step": 2, "epoch": 0.2, "loss": "' + b"x" * (1 << 21) + b'"}',
]


def test_lines_that_are_no_measurements_are_skipped(tmp_path, run_dtf):
    pytest.importorskip("matplotlib")
    folder = run_folder(tmp_path / "runs/a")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\n" + b"\n".join(ODD_LINES))
    (folder / "resources.jsonl").write_bytes(b"\n".join(ODD_LINES))
    (folder / "run.json").write_text(json.dumps(json.loads((folder / "run.json").read_text()) | {"seconds": "long"}))
    (folder / "seconds").write_bytes(bytes(16))
    done = run_dtf("job=report", f"job.runs=['{folder}']")
    assert done.code == 0, done.err
    (folder / "config.yaml").write_text("a: &a [x, x]\nb: &b [*a, *a]\n")
    with pytest.raises(DataError, match=r"the alias \*a is refused"):
        results.read_runs([str(folder)])


def test_a_single_run_is_not_compared(runs, run_dtf):
    pytest.importorskip("matplotlib")
    done = run_dtf("job=report", f"job.runs=['{runs}/b']")
    assert done.code == 0, done.err
    page = Page((done.folder / "report.html").read_text())
    assert (
        "Side by side" not in page.texts and "How the configs differ" not in page.texts and "Devices" not in page.texts
    )
    assert not (done.folder / "comparison.png").exists()


def test_refusals(runs, run_dtf, monkeypatch):
    done = run_dtf("job=report")
    assert done.code == 2 and "job.runs=[] names nothing to report on" in done.err
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else known(name, *rest)
    )
    done = run_dtf("job=report", f"job.runs=['{runs}/a']")
    assert done.code == 2 and "-m pip install 'matplotlib>=3.8'" in done.err and not done.folder.exists()


def test_a_report_that_cannot_be_made_leaves_nothing(runs, run_dtf, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("dtf.runs.report.html", lambda *parts: 1 / 0)
    done = run_dtf("job=report", f"job.runs=['{runs}/a']")
    assert done.code == 1 and not done.folder.exists()
    monkeypatch.undo()
    done.folder.write_text("a file")
    done = run_dtf("job=report", f"job.runs=['{runs}/a']", folder=done.folder)
    assert done.code == 2 and "cannot be written: File exists; choose another run.dir" in done.err


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_draws_it_light_and_dark(runs, run_dtf, tmp_path):
    pytest.importorskip("matplotlib")
    from PIL import Image

    done = run_dtf("job=strategy_comparison", f"job.runs=['{runs}/*']")
    grounds = {}
    for look, number in (("light", 1), ("dark", 0)):
        out = tmp_path / f"{look}.png"
        command = [
            str(BROWSER),
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'browser'}",
        ]
        command += [f"--blink-settings=preferredColorScheme={number}", "--window-size=1200,2400", f"--screenshot={out}"]
        subprocess.run([*command, (done.folder / "report.html").as_uri()], check=True, capture_output=True, timeout=120)
        picture = Image.open(out).convert("RGB")
        grounds[look] = picture.getpixel((2, 2))
        # bars and lines of the three runs are there
        colours = {colour for count, colour in picture.getcolors(1 << 20) or [] if count > 300}
        runs_seen = {
            "light": {(47, 111, 219), (217, 72, 15), (43, 138, 62)},
            "dark": {(116, 167, 255), (255, 157, 102), (99, 201, 122)},
        }[look]
        assert runs_seen <= colours
    assert grounds == {"light": (246, 248, 250), "dark": (13, 17, 23)}


@pytest.mark.parametrize("count", [1, 2, 5])
def test_long_names_of_runs_fit_into_the_pictures(count: int) -> None:
    pytest.importorskip("matplotlib")
    from dtf.runs.charts import _LIGHT, Axes, Bar, Chart, Line, _figure

    names = [
        f"train.epochs={n} \N{MIDDLE DOT} recipe.model.weights=mobilenet_v3_small-{n:060}.pth" for n in range(count)
    ]
    curves = Chart("curves", "", [Axes("loss", "epochs", [Line(n, [(0, 0), (1, 1)]) for n in range(count)])])
    bars = Chart("bars", "", [Axes("time", "s", bars=[Bar(name, 1.0, "run0", "1 s") for name in names])])
    for chart, legend in ((curves, names), (bars, [])):
        figure = _figure(chart, _LIGHT, legend)
        figure.savefig(io.BytesIO())  # lays it out
        place = figure.axes[0].get_window_extent()
        assert place.width > 0.4 * figure.bbox.width and place.height > 0.3 * figure.bbox.height
        drawn = figure.get_tightbbox().extents * figure.dpi  # in inches
        assert drawn[0] >= -2 and drawn[2] <= figure.bbox.width + 2, "nothing is cut off"


def test_a_run_is_named_by_values_as_they_are_written() -> None:
    words = [results._word("train.epochs", value) for value in (None, 2.0, 0.5, True, "a")]
    assert words == [f"train.epochs={text}" for text in ("null", "2", "0.5", "true", "a")]
