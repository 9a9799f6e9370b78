"""What a run looks like: greppable lines, and a terminal of any width."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console as Terminal

from dtf.core.errors import Exit
from dtf.core.text import MetricHistory, StepRate, number_text, plain_text, time_text
from dtf.core.types import Ended, Event, Failed, Measured, Note, Saved, Started
from dtf.observers.console import Console, Lines
from dtf.observers.terminal import Bar, TerminalView
from tests.unit.test_observers import CONFIG, evaluation, started, train, watch, whole_run


def rows_of(text: str) -> list[str]:
    """Lines as drawn, one after the other: colours removed, each movement of the cursor begins a new one."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "\n", re.sub(r"\x1b\[[0-9;]*m", "", text)).splitlines()


def printed(events: Iterable[Event]) -> list[str]:
    stream = io.StringIO()
    view = Lines(stream)
    for event in events:
        view.see(event)
    view.close()
    return stream.getvalue().splitlines()


def test_one_greppable_line_per_event():
    told = printed(
        [
            started(),
            train(120, 0.4123),
            evaluation(120, best=True),
            evaluation(240),
            Saved(120, "out/step_000120", True, 0.311, 0.0123),
            Ended(480, "finished", {"top1": 0.95, "best_step": 440.0}, guarded=5),
        ]
    )
    assert told == [
        'started step=0/480 attempt=0 parameters=272474 ranks=2 batch="64 rows = 2 x 32"',
        "step=120/480 epoch=1.00 loss=0.4123 top1=0.5877 lr=0.1 grad_norm=1.5000 rows/s=5120 eta=00:36",
        "eval step=120/480 epoch=1.00 loss=0.2500 top1=0.9500 best",
        "eval step=240/480 epoch=2.00 loss=0.2500 top1=0.9500",
        "saved step=120 path=out/step_000120 seconds=0.31 held=0.012 best",
        "ended step=480/480 reason=finished top1=0.9500 best_step=440 "
        'guard="5 guarded steps, nothing differed" wall=00:00',
    ]


@pytest.mark.parametrize(
    ("rates", "line", "bar"),
    [
        ({"model_flops_per_s": 12.34e9}, "rows/s=5120 FLOP/s=12.3G eta=", "FLOP/s 12.3G"),
        ({"model_flops_per_s": 4.07e14, "mfu": 0.4114}, "rows/s=5120 mfu=41.1% eta=", "mfu 41.1%"),
    ],
)
def test_a_share_of_the_peak_or_else_a_rate(rates: dict[str, float], line: str, bar: str) -> None:
    measured = train(120)
    measured = replace(measured, values=measured.values | rates)
    assert line in printed([started(), measured])[1]
    assert any(bar in row and "model_flops" not in row for row in rows_of(drawn([started(), measured], 140)))


def test_a_restart_is_one_line_and_its_pace_is_new():
    told = printed([started(), train(100, seconds=1000.0), started(60, attempt=1), train(80, seconds=2.0)])
    assert told[2] == "restarted step=60/480 attempt=1"
    assert told[3].endswith("eta=00:40")


def test_text_from_ranks_stays_one_line_without_control_characters(tmp_path, capsys):
    watch(Console(), whole_run(), tmp_path)
    out = capsys.readouterr().out
    assert all(c.isprintable() or c == "\n" for c in out)
    told = out.splitlines()
    assert told[0].startswith(r"info: données · データ \x1b[2J\n[bold]not markup") and len(told[0]) < 540
    assert len(told) == len([event for event in whole_run() if not isinstance(event, Failed)])
    assert "loss=nan" in out and "loss=inf" in out


def test_a_stream_of_few_characters_gets_escapes():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Lines(stream).see(Note("info", "données"))
    assert raw.getvalue() == rb"info: donn\xe9es" + b"\n"


# ---------------------------------------------------------------- a terminal


def drawn(events: Iterable[Event], width: int, folder: Path = Path("/runs/a")) -> str:
    stream = io.StringIO()
    screen = TerminalView(
        folder, CONFIG, Terminal(file=stream, force_terminal=True, width=width, height=24, highlight=False, emoji=False)
    )
    for event in events:
        screen.see(event)
    screen.close()
    return stream.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 140, 300])
def test_no_line_is_wider_than_the_terminal(width):
    assert max(cell_len(row) for row in rows_of(drawn(whole_run(), width))) <= width


@pytest.mark.parametrize("width", [40, 60, 71, 72, 80, 109, 110, 300])
def test_what_moves_is_two_lines_at_any_width(width):
    bar = Bar()
    bar.start(0, 480, 120)
    for step in range(20, 480, 20):
        bar.measure(train(step))
    stream = io.StringIO()
    Terminal(file=stream, width=width).print(bar)
    assert len(stream.getvalue().splitlines()) == 2
    assert "loss 0.00217" in stream.getvalue()


def test_what_stays_on_the_screen():
    text = "\n".join(rows_of(drawn([*whole_run()[:-1], replace(whole_run()[-1], guarded=5)], 100)))
    for words in (
        "dtf · shapes · ddp · bf16",
        "parameters  272,474",
        "eval  step  60  epoch 0.50  loss 0.2500  top1 0.9500  ★ best",
        "save  checkpoints/step_000060  0.31 s  ★",
        "!  rank 1 was killed; restart 1 of 3",
        "↻  restarted at step 60 of 480 (attempt 1)",
        "save  /elsewhere/step_000120  0.20 s",
        "480/480 ━",
        "finished after 480 steps",
        "eval top1   0.9500   best 0.9600 at step 440",
        "throughput  5,120 rows/s",
        "guard       5 guarded steps, nothing differed",
        "run folder  /runs/a",
        "[bold]not markup[/bold]",
    ):
        assert words in text, words
    assert text.count("parameters  272,474") == 1
    assert "120  epoch 1.00  loss 0.2500  top1 0.9500  ★" not in text


def test_the_table_comes_with_the_first_ranks_that_are_ready():
    text = "\n".join(rows_of(drawn([Failed(0, 0, 1, "x", ""), started(0, attempt=1), train(20)], 80)))
    assert "parameters  272,474" in text and "restarted" not in text


def test_a_resumed_run_says_so():
    assert any("resumed at step 60 of 480" in row for row in rows_of(drawn([started(60), train(80)], 80)))


@pytest.mark.parametrize(
    ("step", "events", "epoch"),
    [
        (480, [Ended(480, "finished")], "4.00"),
        (60, [Ended(90, "preempted")], "0.75"),
        (60, [train(80), Ended(90, "preempted")], "0.75"),
    ],
)
def test_the_last_bar_has_the_epoch_of_its_step(step, events, epoch):
    assert any(f"epoch {epoch}" in row for row in rows_of(drawn([started(step), *events], 80).rsplit("\x1b[2K", 1)[-1]))


def test_ranks_that_never_start_leave_nothing_behind():
    last = drawn([], 80).rsplit("\x1b[2K", 1)[-1]
    assert "".join(rows_of(last)).strip() == ""


def test_a_run_that_fails_leaves_its_bar_where_it_died():
    rows = rows_of(drawn([started(), train(240), Failed(1, 250, 1, "x", "secret trace")], 80))
    assert any("240/480" in row and "50 %" in row and "failed" in row for row in rows)
    assert not any("secret trace" in row for row in rows)
    asked = rows_of(drawn([started(), train(240), Failed(1, 250, int(Exit.PREEMPTED), "asked to stop", "")], 80))
    assert any("240/480" in row and "preempted" in row for row in asked) and not any("failed" in row for row in asked)


def test_drawing_keeps_up_with_any_number_of_measurements():
    steps = 10_000
    events = [
        Started(0, steps, 100, {}),
        *(Measured("train", step, step / 100, step / 10, {"loss": 1 / step}) for step in range(1, steps + 1)),
    ]
    threads = set(threading.enumerate())
    assert len(drawn(events, 80)) < 200_000  # drawn once per measurement it would be 4 million characters
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= threads


def on_terminal(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch, encoding: str = "utf-8") -> str:
    """What `action` writes while standard output is a pseudo-terminal of 80 x 24."""
    control, user = os.openpty()
    fcntl.ioctl(user, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    got: list[bytes] = []

    def drain() -> None:
        try:
            while more := os.read(control, 65536):
                got.append(more)
        except OSError:  # the user's side is closed
            pass

    reader = threading.Thread(target=drain)
    reader.start()
    try:
        with os.fdopen(user, "w", encoding=encoding) as stream, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            action()
    finally:
        reader.join()
        os.close(control)
    return b"".join(got).decode(encoding)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


def test_on_a_terminal_it_draws_and_gives_the_terminal_back(tmp_path, monkeypatch):
    def action() -> None:
        before = sys.stdout, sys.stderr
        watch(Console(), whole_run(), tmp_path)
        assert (sys.stdout, sys.stderr) == before

    text = on_terminal(action, monkeypatch)
    assert re.search(r"\x1b\[[0-9;]*3[1-6]m", text), "no colour"
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is hidden, then shown
    assert "restarted at step 60" in text


def test_no_color_is_respected(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = on_terminal(lambda: watch(Console(), whole_run(), tmp_path), monkeypatch)
    assert "★ best" in text
    styles = {code for found in re.findall(r"\x1b\[([0-9;]*)m", text) for code in found.split(";") if code}
    assert styles <= {"0", "1", "2"}  # bold and dim


@pytest.mark.parametrize(
    ("live", "term", "encoding"), [(False, "xterm", "utf-8"), (True, "dumb", "utf-8"), (True, "xterm", "latin-1")]
)
def test_plain_lines_where_drawing_is_unwanted_or_impossible(live, term, encoding, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", term)
    text = on_terminal(lambda: watch(Console(live=live), [started(), train(20)], tmp_path), monkeypatch, encoding)
    assert "\x1b" not in text and "step=20/480 " in text


def test_redirected_errors_stay_redirected(tmp_path, monkeypatch):
    errors = io.StringIO()

    def action() -> None:
        monkeypatch.setattr(sys, "stderr", errors)
        observer = Console()
        observer.open(tmp_path, CONFIG)
        observer.see(started())
        print("dtf: error[E_PEER]", file=sys.stderr)
        observer.close()

    assert "E_PEER" not in on_terminal(action, monkeypatch)
    assert errors.getvalue() == "dtf: error[E_PEER]\n"


# ---------------------------------------------------------------- numbers as text


def test_pace_forgets_what_was_before_a_restart_and_long_ago():
    pace = StepRate(memory=3)
    pace.restart(0)
    assert pace.seconds_for(10) is None
    for step, seconds in ((10, 100.0), (20, 101.0), (30, 102.0), (40, 103.0)):
        pace.mark(step, seconds)
    assert pace.seconds_for(100) == pytest.approx(10.0)
    pace.restart(20)
    assert pace.seconds_for(10) is None
    pace.mark(20, 1.0)  # no step was made: says nothing
    assert pace.seconds_for(10) is None


def test_a_course_keeps_its_shape_in_bounded_memory():
    course = MetricHistory(memory=64)
    for step in range(100_000):
        course.add(step, float(step))
        course.add(step, float("nan"))
    line = course.sparkline(8)
    assert line == "▁▂▃▄▅▆▇█"
    course.forget_after(50_000)
    assert course.sparkline(8) == "▁▂▃▄▅▆▇█" and len(course.sparkline(10_000)) < 40
    course.forget_after(-1)
    assert course.sparkline(8) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.41234, "0.4123"),
        (1.0, "1.0000"),
        (0.0512, "0.0512"),
        (1.2e-5, "1.2e-05"),
        (51200.4, "51200"),
        (7, "7"),
        (float("nan"), "nan"),
        (0.0, "0"),
        (True, "True"),
    ],
)
def test_number_text(value, text):
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "--:--"),
        (11.6, "00:12"),
        (59.7, "01:00"),
        (3723, "1:02:03"),
        (183840, "2d 03:04"),
        (float("inf"), "--:--"),
    ],
)
def test_time_text(seconds, text):
    assert time_text(seconds) == text


def test_plain_text_is_cut_and_clean():
    assert plain_text("a\r\x07é\u202e") == r"a\r\x07é\u202e"
    assert plain_text("x" * 600) == "x" * 511 + "…"
