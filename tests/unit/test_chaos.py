"""The parts of `job=chaos`: moments, faults, what is left of a run, what trials prove together, and the table."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dtf.core.errors import BusyError, Exit, Preempted
from dtf.host.heartbeat import Beat
from dtf.jobs.chaos import processes, reference, results, trial
from dtf.jobs.chaos.command import Command
from dtf.jobs.chaos.faults import FAULTS, Limit, Target, fits
from dtf.jobs.chaos.timeline import BEFORE, Moment, Timeline
from dtf.jobs.chaos.trial import BITS, LAW, SAMPLES, Outcome, Subject
from dtf.runs.recorded_run import RecordedRun
from tests.support.launching import HANG_S

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_each_fault_is_documented_and_none_else() -> None:
    _, _, section = DOCS.read_text().partition("## Which faults are there?")
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(FAULTS)


def test_a_fault_of_a_role_fits_strategies_with_that_role() -> None:
    assert fits(FAULTS["kill_server"], ("server", "trainer")) and fits(FAULTS["kill_rank"], ("trainer",))
    assert not fits(FAULTS["kill_server"], ("trainer", "trainer"))
    assert not fits(FAULTS["kill_trainer"], ("trainer",)), "with one role this is kill_rank"
    assert not fits(FAULTS["cut_network"], ("trainer",)), "nothing passes between processes"


# ---------------------------------------------------------------- moments


def test_moments_are_of_all_phases_and_within_what_was_seen() -> None:
    timeline = Timeline()
    for now, (phase, step) in enumerate([(BEFORE, 0), ("start", 0), ("step", 0), ("step", 1), ("save", 2), ("end", 2)]):
        timeline.add(0, phase, step, float(now))
        timeline.add(0, phase, step, now + 0.5)  # seen twice: the same stay
    timeline.finish(6.0)
    again = Timeline.from_json(json.loads(json.dumps(timeline.to_json())))
    drawn = [again.draw(random.Random(seed), 0, before=True) for seed in range(60)]
    assert {moment.phase for moment in drawn} == {BEFORE, "start", "step", "save", "end"}
    assert all(0 <= moment.after_s <= 1.0 for moment in drawn)
    assert {moment.step for moment in drawn if moment.phase == "step"} == {0, 1}
    assert BEFORE not in {again.draw(random.Random(seed), 0, before=False).phase for seed in range(60)}
    assert again.draw(random.Random(3), 0, True) == again.draw(random.Random(3), 0, True)


@pytest.mark.parametrize(
    ("moment", "beat", "come"),
    [
        ((BEFORE, 0), None, True),
        (("step", 0), None, False),
        (("start", 0), ("start", 0), True),
        (("start", 0), ("step", 0), True),  # it was so short that nobody saw it
        (("step", 3), ("start", 0), False),
        (("step", 3), ("step", 2), False),
        (("step", 3), ("fetch", 3), False),
        (("step", 3), ("step", 3), True),
        (("step", 3), ("fetch", 4), True),
    ],
)
def test_a_moment_has_come_when_the_rank_is_there_or_past_it(moment: Any, beat: Any, come: bool) -> None:
    phase, step = moment
    seen = Beat(0.0, beat[0], beat[1], 0) if beat else None
    assert Moment(phase, step, 0.0).has_come(seen) is come


def test_the_board_of_another_process_can_be_read() -> None:
    code = (
        "import sys; from dtf.host.heartbeat import Board\n"
        "for ranks in (2, 3): board = Board(ranks); print('made', flush=True); sys.stdin.readline(); board.close()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin and one.stdout
        seen = processes.Beats(one.pid)
        for ranks in (2, 3):  # the second attempt has a board of its own
            assert one.stdout.readline() == "made\n"
            while (beat := seen.read(ranks - 1)) is None:  # it looks again only now and then
                pass
            assert (beat.phase, beat.step) == ("start", 0) and seen.read(ranks) is None, "there is no such rank"
            one.stdin.write("\n")
            one.stdin.flush()
        seen.close()


# ---------------------------------------------------------------- what is left of a run


def ended(code: str, tmp_path: Path) -> tuple[int | None, list[str]]:
    command = Command([], tmp_path / "log", {}, program=["-c", code])
    try:
        assert command.watch(lambda: False, HANG_S)
        return command.code, command.left_behind()[1]
    finally:
        command.end()


def test_a_process_left_behind_is_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtf.jobs.chaos.command.OUTLIVE_S", 0.02)
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    status, left = ended(code, tmp_path)
    assert status == 0 and len(left) == 1 and "time.sleep(600)" in left[0]
    assert not processes.alive(int(left[0].split()[0]))
    assert ended("raise SystemExit(7)", tmp_path) == (7, [])


def test_a_command_that_hangs_or_ends_otherwise_breaks_its_trial(tmp_path: Path) -> None:
    subject = Subject("ddp", (), ("trainer",), True, (5.0, 60.0, 1.0), hang_s=0.2)
    outcome = Outcome(0, 0, "kill_rank", "ddp")
    command = Command([], tmp_path / "log", {}, program=["-c", "import time; time.sleep(600)"])
    trial._end(command, subject, frozenset({Exit.OK}), outcome)
    assert outcome.wrong.startswith("hangs") and outcome.codes == [-signal.SIGKILL]
    outcome = Outcome(0, 0, "kill_rank", "ddp")
    command = Command([], tmp_path / "log", {}, program=["-c", "print('dtf: error[E_BUG]: why'); raise SystemExit(1)"])
    trial._end(command, replace(subject, hang_s=HANG_S), frozenset({Exit.OK}), outcome)
    assert outcome.wrong == "exit code 1, expected one of [<Exit.OK: 0>]: dtf: error[E_BUG]: why"


# ---------------------------------------------------------------- the judgement


def recorded(**changed: Any) -> RecordedRun:
    values = {
        "metrics": {step: {"loss": 1.0, "grad_norm": 1.0} for step in (1, 2)},
        "ids": {0: [[0, 1], [2]], 1: [[3], [4, 5]]},
        "held": [],
        "tensors": {"model/w": np.array([1.0, 2.0])},
        "evaluated": {2: {"loss": 1.0}},
    }
    return RecordedRun(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "repeats", "expected"),
    [
        ({}, True, ("", BITS)),
        ({"ids": {0: [[0, 1, 2]], 1: [[3, 4], [5]]}}, True, ("", BITS)),  # other ranks read the same rows
        ({"tensors": {"model/w": np.array([1.0, 2.0 + 1e-13])}}, True, ("", LAW)),
        ({"tensors": {"model/w": np.array([1.0, 2.1])}}, True, ("differs: ", "")),
        ({"ids": {0: [[0, 1], [1]], 1: [[3], [4, 5]]}}, True, ("differs: sample ids at step 0", "")),
        ({"tensors": {"model/w": np.array([1.0, 2.1])}}, False, ("", SAMPLES)),
        ({"ids": {0: [[3, 4], [5]], 1: [[0], [1, 2]]}}, False, ("", SAMPLES)),
        ({"ids": {0: [[0, 1], [1]], 1: [[3], [4, 5]]}}, False, ("samples: ", "")),
    ],
)
def test_a_run_is_judged_by_its_reference(changed: dict[str, Any], repeats: bool, expected: tuple[str, str]) -> None:
    subject = Subject("ddp", (), ("trainer",), True, (5.0, 60.0, 1.0), repeats=repeats)
    wrong, equal = trial._equal(subject, recorded(), recorded(**changed))
    assert wrong.startswith(expected[0]) and bool(wrong) is bool(expected[0]) and equal == expected[1]


def events(folder: Path, *lines: tuple[float, str, dict[str, Any]]) -> Path:
    path = folder / "events.jsonl"
    written = [json.dumps({"monotonic": at, "event": kind, **fields}) for at, kind, fields in lines]
    path.write_text("\n".join(written) + '\n{"monotonic": 9')  # a killed writer leaves half a line
    return path


def measured(at: float, step: int) -> tuple[float, str, dict[str, Any]]:
    return at, "Measured", {"step": step, "split": "train"}


def test_steps_done_again_and_times_are_read_from_the_events(tmp_path: Path) -> None:
    path = events(
        tmp_path,
        (0.0, "Started", {"step": 0}),
        measured(1.0, 6),
        measured(1.1, 7),
        measured(1.3, 8),  # was on its way
        (1.5, "Note", {"level": "warning"}),
        (1.8, "Started", {"step": 5}),
        measured(2.0, 6),
    )
    outcome = Outcome(0, 0, "kill_rank", "ddp", codes=[0])
    trial._measure(path, 1.2, FAULTS["kill_rank"], True, outcome)
    assert (outcome.lost_steps, outcome.noticed_s, outcome.recovered_s) == (3, 0.3, 0.8)
    outcome = Outcome(0, 0, "kill_rank", "ddp", codes=[69, 0])
    trial._measure(path, 1.2, FAULTS["kill_rank"], True, outcome)
    assert outcome.lost_steps == 3 and outcome.recovered_s is None, "another start is no recovery of the run"


# ---------------------------------------------------------------- the table


def test_the_bound_is_three_over_n_without_failures() -> None:
    assert results.bound(0, 300) == pytest.approx(0.00994, rel=1e-3)
    assert results.bound(0, 1500) == pytest.approx(3 / 1500, rel=0.01)
    assert results.bound(1, 100) == pytest.approx(0.0466, rel=1e-2)
    assert results.bound(5, 5) == 1.0


def test_the_table_counts_by_fault_and_strategy(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    for number in range(20):
        recovered = {"codes": [0], "recovered_s": 0.5 + number / 100, "noticed_s": 0.1, "lost_steps": number % 4}
        results.append(path, Outcome(0, number, "kill_rank", "ddp", equal=BITS, **recovered))
    results.append(path, Outcome(0, 20, "term", "ddp", codes=[75, 0], equal=BITS))
    results.append(path, Outcome(0, 21, "term", "ddp", codes=[1], wrong="exit code 1"))
    results.append(path, Outcome(0, 22, "term", "ddp", codes=[0], equal=BITS, missed=True))
    rows = results.rows(results.read(path))
    assert [(row["fault"], row["trials"], row["recovered"], row["again"], row["broken"]) for row in rows] == [
        ("kill_rank", 20, 20, 0, 0),
        ("term", 2, 0, 1, 1),
        ("all", 22, 20, 1, 1),
    ]
    assert (
        rows[0]["recovered_s"] == pytest.approx([0.595, 0.68]) and rows[0]["lost_steps"] == 3 and rows[0]["timed"] == 20
    )
    text = results.table(rows)
    assert len({len(line) for line in text.splitlines()}) == 1, "the columns are as wide as their heads"
    assert results.markdown(rows).count("|\n") == 4


def test_several_faults_and_strategies_have_totals() -> None:
    pairs = [("kill_rank", "ddp"), ("kill_rank", "fsdp"), ("term", "ddp"), ("term", "ddp")]
    outcomes = [
        Outcome(0, n, fault, strategy, codes=[0], equal=BITS, recovered_s=float(n))
        for n, (fault, strategy) in enumerate(pairs)
    ]
    rows = results.rows(outcomes)
    assert [(row["fault"], row["strategy"], row["trials"], row["recovered_s"][1]) for row in rows[3:]] == [
        ("kill_rank", "all", 2, 1.0),
        ("term", "all", 2, 3.0),
        ("all", "ddp", 3, None),
        ("all", "fsdp", 1, None),
        ("all", "all", 4, None),
    ]
    assert [line.split()[0] for line in results.table(rows).splitlines()[1:]] == [
        *("kill_rank", "term", "ddp", "fsdp", "all")
    ]


def test_the_median_lies_between_two() -> None:
    assert results.percentile([2.77, 1.0], 0.5) == pytest.approx(1.885)
    assert results.percentile([], 0.5) is None


@pytest.mark.parametrize(("share", "text"), [(0.002, "0.2 %"), (0.099, "9.9 %"), (0.5271, "53 %"), (1.0, "100 %")])
def test_a_bound_has_the_digits_that_it_is_worth(share: float, text: str) -> None:
    assert results.rate(share) == text


# ---------------------------------------------------------------- faults


def test_a_limit_is_what_a_process_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time; time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        monkeypatch.setattr(processes, "ranks", lambda launcher: {0: child.pid})
        target = Target(child.pid, tmp_path, random.Random(0))
        Limit().strike(target)
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        child.kill()
    assert not re.search(r"Max address space +unlimited", limits), limits


@pytest.mark.parametrize("name", ["kill_rank", "kill_forkserver", "stop_rank", "memory_limit"])
def test_a_fault_that_finds_nobody_does_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "children", lambda pid: [])
    target = Target(os.getpid(), tmp_path, random.Random(0))
    FAULTS[name].strike(target)
    assert not target.done, "its trial does not count"


def test_rows_on_disk_share_the_full_disk_in_some_trials(tmp_path: Path) -> None:
    """The disks of some trials hold both folders, those of others one of them."""
    told, asked, rows = set(), [], tmp_path / "rows"
    control: Any = SimpleNamespace(disk=lambda mode, folders, *_: asked.append(frozenset(folders)))
    for seed in range(20):
        target = Target(0, tmp_path / "run", random.Random(seed), control=control, rows=rows)
        FAULTS["disk_full"].strike(target)
        told |= set(target.done)
    assert set(asked) == {frozenset(each) for each in ({target.folder, rows}, {rows}, {target.folder})}
    assert told == {f"the disk is full{where}" for where in ("", " below sparse.disk", " below the run folder")}


def test_a_reference_of_other_options_is_no_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject("ddp", ("strategy=ddp", "run.dir=a"), ("trainer",), True, (5.0, 60.0, 1.0))
    place = tmp_path / "references" / "ddp"
    place.mkdir(parents=True)
    made = {"command": subject.command, "seconds": 1.0, "repeats": True, "timeline": {}}
    (place / "reference.json").write_text(json.dumps(made))
    elsewhere = replace(subject, command=("strategy=ddp", "run.dir=b"))
    assert reference.add_reference(elsewhere, tmp_path, lambda: None).repeats
    other = replace(subject, command=("strategy=ddp", "strategy.bucket_mb=1", "run.dir=a"))
    made_anew: list[str] = []
    monkeypatch.setattr(reference, "_make", lambda plan, *_: made_anew.append(plan.strategy))
    reference.refuse_other_options([other], tmp_path)
    reference.add_reference(other, tmp_path, lambda: None)
    assert made_anew == ["ddp"], "no trial was compared with it"
    results.append(tmp_path / "trials.jsonl", Outcome(0, 0, "term", "ddp"))
    twice = replace(subject, command=("strategy=dp", "strategy=ddp"))
    reference.refuse_other_options([elsewhere, twice], tmp_path)
    with pytest.raises(BusyError, match="'ddp' with other options than strategy.bucket_mb=1; their"):
        reference.refuse_other_options([other], tmp_path)
    (place / "reference.json").write_text('{"command": ["a')  # by an older dtf that was killed
    reference.refuse_other_options([other], tmp_path)


def test_who_asks_to_stop_does_not_wait_for_the_trial(tmp_path: Path) -> None:
    def stopped() -> None:
        raise Preempted("asked to stop")

    command = Command([], tmp_path / "log", {}, check=stopped, program=["-c", "import time; time.sleep(600)"])
    with pytest.raises(Preempted):
        command.watch(lambda: False, HANG_S)
    command.end()
    assert command.code == -signal.SIGKILL


def test_a_fault_that_cannot_be_rehearsed_is_refused_by_name(run_dtf: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAULTS["cut_network"], "refused", lambda: "not here")
    done = run_dtf("job=chaos", "job.faults=[cut_network]")
    assert done.code == Exit.CONFIG
    assert "job.faults has 'cut_network', which cannot be rehearsed: not here; leave it out" in done.err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["job.faults=[kill_ranks]"], "did you mean kill_rank?"),
        (["job.faults=[kill_rank,kill_server]"], "job.faults has 'kill_server', which hits nobody"),
        (["job.faults=[hand_over]"], "it needs two job.strategies or more; leave it out"),
        (
            ["job.faults=[hand_over]", "job.strategies=['ddp processes=2','fsdp processes=2']"],
            "it needs precision=fp64, in which the numbers of all strategies are alike",
        ),
        (
            ["job.faults=[hand_over]", "job.strategies=['ddp processes=2','fsdp processes=2']", "precision=fp64"],
            "it needs step.micro_batch_rows",
        ),
        (["job.strategies=['ddp processes=none']"], "processes=none must be a whole number from 1 on"),
        (["job.strategies=['tensor degree=3 processes=2']"], "job.strategies has 'tensor degree=3 processes=2': "),
        (["checkpoint=off"], "checkpoint.every_steps=0 saves nothing, and job=chaos is about going on"),
        (["launcher=inline"], "launcher=inline has no ranks that job=chaos could disturb; use launcher=local"),
    ],
)
def test_what_cannot_be_rehearsed_is_refused_before_the_first_run(
    run_dtf: Any, overrides: list[str], expected: str
) -> None:
    done = run_dtf("job=chaos", "launcher.processes=2", *overrides)
    assert done.code == Exit.CONFIG and expected in done.err, done.err


def test_a_broken_off_save_is_no_checkpoint_to_damage(tmp_path: Path) -> None:
    for name in ("step_000005", "step_000010", "step_000015.tmp-20251125-1", "step_000020.suspect-9"):
        folder = tmp_path / "checkpoints" / name
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    for seed in range(20):
        target = Target(0, tmp_path, random.Random(seed))
        FAULTS["flip_checkpoint"].between(target)
        assert target.done[0].startswith(("step_000010/manifest.json", "before the second")), target.done
        (tmp_path / "checkpoints" / "step_000010" / "manifest.json").write_text("{}")


def test_without_a_trial_that_counts_there_is_a_table_and_no_picture(tmp_path: Path) -> None:
    assert results.table([]) == "no trial counts yet" and results.rows([]) == []
