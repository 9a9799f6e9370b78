"""`python -m bench`: its parts import, and what they find is kept and shown as it was found."""

from __future__ import annotations

import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import bench
from bench import __main__ as command
from bench import page, peers, results
from bench.commands import started
from bench.contest import Contestant, Running, Turn, apart, contest, step_rows
from bench.medians import bounds
from bench.parts import PARTS, Part
from bench.processes import Process
from bench.rounds import in_turn
from bench.rows import Row, as_json, row_of, table, with_ratios
from dtf.config.compose import compose
from dtf.recipes.resnet.recipe import ResnetShapes

ROOT = Path(bench.__path__[0]).parent
IMPORT = """
import importlib
from pathlib import Path
from bench.parts import PARTS
for path in sorted(Path("bench").rglob("*.py")):
    importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
for part in PARTS.values():
    assert callable(getattr(importlib.import_module(f"bench.{part.module}"), part.function))
"""


@pytest.mark.slow
def test_every_module_imports_and_every_part_has_its_function() -> None:
    """In a process of its own, as some register recipes. Those of peers too: they import a peer when they are asked."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_peers_are_pinned() -> None:
    assert {name for part in PARTS.values() for name in part.peers} <= set(peers.declared())
    for wish in peers.declared().values():
        assert all("==" in text for text in [*wish["packages"], *wish.get("alone", [])])


@pytest.mark.slow
def test_contestants_take_turns_and_train_alike() -> None:
    """The toy network, by dtf's engine and by hand: the same rows, the same loss; who cannot run says why."""
    from bench.overhead import contestants
    from bench.toy import Work

    both = contestants(Work("mlp", 8), 1)[:2]
    lacking = Contestant("nobody", "bench.no_such_module")
    turns, absent = contest("work", [*both, lacking], rounds=2, steps=3, warm=2)
    assert [len(turns[one.who]) for one in both] == [2, 2]
    assert not apart("work", turns, both, 1e-6)
    assert [row.who for row in absent] == ["nobody"] and "No module named bench.no_such" in absent[0].not_run
    dtf, hand = step_rows("work", both, turns, 3, "us", 1e6)
    assert (dtf.loss, dtf.unit) == (pytest.approx(hand.loss, rel=1e-6), "us a step") and dtf.loss


class Impatient(Running):
    """Waits for the answer of its third turn no longer than for something to read."""

    begun = 0

    def turn(self, steps: int) -> Turn:
        self.begun += 1
        with pytest.MonkeyPatch.context() as patch:
            if self.begun == 3:
                patch.setattr("bench.processes.PATIENCE_S", 0.0)
            return super().turn(steps)


class Dying(NamedTuple):
    """A contestant whose process does something else in its second round, and nothing after it."""

    who: str
    end: str
    kind: type[Running] = Running
    settings: str = ""
    alone: bool = False

    def start(self) -> Running:
        code = f"""if True:
            import json, sys, time
            print("{{}}", flush=True)
            for number, line in enumerate(sys.stdin):
                if number == 2:
                    {self.end}
                print(json.dumps(dict(seconds=1.0, cpu=1.0, loss=0.5, shortest=0.0)), flush=True)
        """
        return self.kind([Process([sys.executable, "-c", code])])


@pytest.mark.slow
def test_who_dies_is_silent_or_talks_is_a_row_and_the_others_go_on(capsys: pytest.CaptureFixture) -> None:
    noise = r"sys.stderr.buffer.write(b'\xffout of luck'); sys.exit(1)"
    those = [
        Dying("well", "pass"), Dying("dead", noise), Dying("silent", "time.sleep(600)", Impatient),
        Dying("talking", "print('ready')"),
    ]  # fmt: skip
    turns, absent = contest("work", those, rounds=3, steps=1, warm=1)
    assert {who: len(some) for who, some in turns.items()} == {"well": 3}
    why = {row.who: row.not_run for row in absent}
    assert why == {
        "dead": "in round 2: its process ended with 1: \ufffdout of luck", "silent": "in round 2: no answer in 0 s",
        "talking": "in round 2: this is no answer: ready",
    }  # fmt: skip
    assert capsys.readouterr().err.splitlines() == [f"  {one.who} starts" for one in those]


def test_a_command_that_cannot_be_started_is_absent() -> None:
    with pytest.raises(peers.Absent, match="No such file"):
        Process(["/nowhere/python"])


def test_an_environment_is_not_made_anew_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter is another than the one that it was made with, so that its mark differs."""
    (tmp_path / "dtf-bench" / "trainers").mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "dtf-bench" / "trainers"))
    with pytest.raises(peers.Absent, match="runs this command"):
        peers.environment.__wrapped__("trainers")
    assert (tmp_path / "dtf-bench" / "trainers").exists()


def test_a_command_that_makes_no_step_ends_no_part(tmp_path: Path) -> None:
    def once(code: str) -> int:
        with started([sys.executable, "-c", code], tmp_path) as running:
            return next(seen for seen in running.steps() if seen.step == 3).step

    stuck = "import os, time; os.close(1); time.sleep(0); raise SystemExit('stuck')"
    commands = {"well": r"print('\xff\n[0]: step=3/9', flush=True); input()", "ended": "0", "shut": stuck}
    found, absent = in_turn(2, commands, once)
    assert found == {"well": [3, 3]}
    assert absent == {
        "ended": "in round 1: its process ended with 0: it said nothing",
        "shut": "in round 1: its process ended with 1: stuck",
    }


STARTER = """if True:
    import json, os, signal, subprocess, sys, time
    from bench.processes import Process, answers
    code = '''if True:
        import json, os, signal, subprocess, sys, time
        more = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        os.kill(more.pid, signal.SIGSTOP)
        print(json.dumps({"pids": [os.getpid(), more.pid]}), flush=True)
        time.sleep(600)
    '''
    one = Process([sys.executable, "-c", code])
    try:
        print(json.dumps(answers([one])[0]["pids"]), flush=True)
        sys.stdin.readline()
    finally:
        if sys.argv[1] == "end":
            one.end()
    print("ended", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("by", ["end", "SIGINT", "SIGKILL"])
def test_nothing_outlives_a_contestant_or_the_parent(by: str) -> None:
    """Nor does what it has started: stopped, and in another session."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, by], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with parent:
        assert parent.stdout is not None and parent.stdin is not None
        handles = [os.pidfd_open(pid) for pid in json.loads(parent.stdout.readline())]
        if by == "end":
            print(file=parent.stdin, flush=True)
            assert parent.stdout.readline() == "ended\n"
        else:
            parent.send_signal(getattr(signal, by))
        for handle in handles:
            assert select.select([handle], [], [], 60)[0], "it has not ended"
            os.close(handle)
        parent.kill()


def test_a_loss_that_differs_is_a_row_without_figures() -> None:
    def compared(**losses: float | None) -> tuple[list[str], list[Row]]:
        turns = {name: [Turn(1, 1, loss, 0)] for name, loss in losses.items()}
        rows = apart("w", turns, [Contestant(name, "", settings=f"as {name}") for name in "abcde"], 1e-3)
        return list(turns), rows

    assert compared(a=0.5, c=None, d=0.5) == (["a", "c", "d"], [])
    left, rows = compared(a=0.5, b=0.6, c=None, d=0.5, e=math.nan)
    assert left == ["a", "c", "d"]
    assert [(row.who, row.settings, row.not_run) for row in rows] == [
        (who, f"as {who}", f"no figures: its loss is {x}, that of a 0.500000")
        for who, x in (("b", "0.600000"), ("e", "nan"))
    ]
    for others, missing in (({}, []), ({"a": None}, []), ({"a": math.nan}, ["no figures: its loss is nan"])):
        left, rows = compared(**others, b=0.6, d=0.5)
        assert left[-2:] == ["b", "d"]
        assert [row.not_run for row in rows] == [*missing, "not compared: there is none of a"]
    assert rows[-1].who == "loss of b, d"


def test_trainers_of_paddle_have_a_step_in_each_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from bench import pserver

    monkeypatch.setattr(pserver, "cores", lambda: 64)
    for steps, trainers in ((80, 8), (2, 2)):
        args = pserver._parser().parse_args(["--steps", str(steps)])
        who = [one.who for one in pserver.contestants(tmp_path, "64-32", args) if one.mode == "Paddle"]
        assert who == ["Paddle 3.0.0, 1 x 64", f"Paddle 3.0.0, {trainers} x {64 // trainers}"]


def test_a_ratio_says_what_is_compared_with_what() -> None:
    times = [Row("w", "dtf", "s", [1.0, 2.0]), Row("w", "other", "s", [2.0, 3.0]), Row("v", "lone", "s", [1.0, 1.0])]
    assert [row.ratios for row in with_ratios(times)] == [[], [2.0, 1.5], []]
    assert table(with_ratios(times)).splitlines()[0] == "| w | median | range | rounds | time / that of dtf (95 %) |"
    assert "| time / that of other (95 %) |" in table(with_ratios(times, "other"))
    assert "time /" not in table(times)
    memory = [Row("w", "dtf", "MB", [1.0]), Row("w", "other", "MB", [2.0])]
    assert [row.ratios for row in with_ratios(memory)] == [[], []], "no speed"
    rates = [Row("w", "dtf", "1/s", [8.0], True), Row("w", "other", "1/s", [2.0], True), Row("w", "odd", "s", [2.0])]
    assert [row.ratios for row in with_ratios(rates)] == [[], [4.0], []]


@pytest.mark.slow
def test_the_script_of_other_launchers_trains_what_dtf_trains_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network and images: else a comparison with them would be of different work. And it knows nothing of dtf."""
    from bench.plain_rows import from_file, rows_file
    from bench.plain_script import Rows, network

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "dtf" not in {name.partition(".")[0] for name in imports_of("bench.plain_script")}
    recipe, filed = (compose(words).settings.recipe for words in (["recipe=resnet_shapes"], from_file()))
    assert isinstance(recipe, ResnetShapes) and isinstance(filed, ResnetShapes) and filed.model == recipe.model
    ids = np.array([5, 3, 8191])
    (inputs, targets), others = recipe.open_data("train", 0).fetch(ids, 0), filed.open_data("train", 0).fetch(ids, 0)
    images, labels = Rows(str(rows_file())).fetch(ids)
    assert inputs.equal(others[0]) and targets.equal(others[1]) and targets.equal(labels)
    torch.testing.assert_close(images, inputs, rtol=0, atol=1e-6)
    assert images.stride() == inputs.stride()
    plain = network()
    torch.manual_seed(0)
    model = recipe.build_model()
    assert all(a.equal(b) for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True))
    assert plain.state_dict().keys() == model.state_dict().keys() and plain(inputs).equal(model(inputs))


def imports_of(module: str) -> list[str]:
    """What a new process has imported with it."""
    code = f"import sys, {module}; print(*sys.modules)"
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.split()


def test_a_row_has_figures_or_says_why_not() -> None:
    wrongs: list[dict[str, Any]] = [{}, {"values": [1.0], "not_run": "gone"}]
    for wrong in wrongs:
        with pytest.raises(ValueError, match="has values, or says why"):
            Row("w", "x", **wrong)
    with pytest.raises(ValueError, match="no row of figures"):
        row_of({"work": "w", "whose": "x"})


@pytest.mark.parametrize("count", [6, 7, 15, 20, 24, 51])
def test_the_interval_of_a_median_covers_95_percent_and_could_not_be_narrower(count: int) -> None:
    """By counting: the median lies between two ranks unless that many of `count` coins fall alike."""

    def covered(low: int) -> float:
        return 1 - 2 * sum(math.comb(count, heads) for heads in range(low + 1)) / 2**count

    low, high = bounds([float(rank) for rank in range(count)])
    assert low + high == count - 1 and covered(int(low)) >= 0.95 > covered(int(low) + 1)


def test_the_interval_of_few_values_is_all_of_them() -> None:
    assert bounds([5.0, 1.0, 3.0]) == (1.0, 5.0)


def a_record(part: str, commit: str) -> results.Record:
    rows = [Row("w", "dtf", "s", [1.0, 3.0], cpu=[2.0], cpu_unit="s", loss=0.25), Row("w", "peer", not_run="no wheel")]
    machine = results.Machine("A processor (avx2)", 2, 8, "Linux", "3.11.7")
    return results.Record(part, machine, commit, "2026-01-31", 12.5, {"torch": "2.14.1"}, rows)


def test_records_are_kept_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "machine.jsonl"
    assert results.read(path) == {}
    kept = {part: a_record(part, "abc") for part in ("start", "overhead")}
    results.write(path, kept)
    assert results.read(path) == kept and len(path.read_text().splitlines()) == 2
    assert as_json(kept["start"].rows[1]) == {"work": "w", "who": "peer", "not_run": "no wheel"}


def test_the_page_is_that_of_the_figures_that_are_kept() -> None:
    assert page.PAGE.read_text() == page.render(page.stored()), "run `python -m bench --page`"


def test_a_page_names_machine_command_range_and_who_did_not_run() -> None:
    text = page.render({"m": {"start": a_record("start", "abc")}, "empty": {}})
    assert "## On A processor (avx2), 2 cores, 8 GB, Linux, Python 3.11.7\n" in text
    assert "`python -m bench --only start`, 2026-01-31, commit abc, 12 s. torch 2.14.1." in text
    assert "| dtf | 2.00 s | 1.00 to 3.00 | 2 | 2.00 s | 0.250000 |  |" in text
    assert "| peer | not run |  |  |  |  | no wheel |" in text
    assert f"Not measured on this machine: {', '.join(part for part in PARTS if part != 'start')}.\n" in text
    other = replace(a_record("start", "def"), machine=replace(a_record("start", "").machine, python="3.12.0"))
    assert page.render({"m": {"start": a_record("start", "abc")}, "n": {"start": other}}).count("\n## On ") == 2
    assert page.render({"m": {"start": a_record("start", "abc"), "mirror": other}}).count("\n## On ") == 2
    assert table([]) == ""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Runs the command with two parts of its own; its exit status, and which parts it has measured."""
    measured: list[str] = []
    here = importlib.import_module(__name__)

    def part_of(name: str) -> Callable[[bool], list[Row]]:
        def measure(quick: bool) -> list[Row]:
            measured.append(name)
            if name == "bad":
                raise OSError("no disk")
            return [Row(name, "dtf", "s", [1.0])]

        return measure

    parts = {}
    for name in ("good", "bad"):
        monkeypatch.setattr(here, f"measure_{name}", part_of(name), raising=False)
        parts[name] = Part(name, "", function=f"measure_{name}")
    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr("bench.parts.importlib", _Importlib(here))
    monkeypatch.setattr(command, "this_commit", lambda: "abc")

    def call(*words: str) -> tuple[int, list[str]]:
        measured.clear()
        monkeypatch.setattr("sys.argv", ["bench", "--results", str(tmp_path), *words])
        return command.main(), list(measured)

    return call


class _Importlib:
    def __init__(self, module: Any) -> None:
        self.import_module = lambda name: module


def test_what_was_measured_on_this_commit_is_left_out_and_what_failed_is_not(
    run: Callable[..., tuple[int, list[str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    assert run("--quick") == (1, ["good", "bad"]) and not list(tmp_path.iterdir()), "a trial keeps nothing"
    assert "these figures mean nothing" in capsys.readouterr().out
    assert run() == (1, ["good", "bad"])
    (path,) = tmp_path.iterdir()
    assert "no disk" in results.read(path)["bad"].rows[0].not_run
    assert run() == (1, ["bad"])
    assert run("--only", "good") == (0, [])
    assert run("--only", "good", "--again") == (0, ["good"])
    monkeypatch.setattr(command, "this_commit", lambda: "def")
    assert run("--only", "good") == (0, ["good"])
    with pytest.raises(SystemExit):
        run("--only", "godo")
    with pytest.raises(SystemExit):
        run("--results", str(path))
