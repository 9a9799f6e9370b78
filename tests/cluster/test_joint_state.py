"""What job=status says of a job and of its run, in each state of both: nothing that contradicts itself."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dtf.cli.main import main
from dtf.cli.trials import find
from dtf.cluster import record
from dtf.cluster.joint_state import job_state, run_state
from dtf.cluster.platform import JobState, State
from dtf.config.compose import compose
from dtf.core.errors import BusyError, Exit, PeerError
from dtf.core.run_record import SUBMISSION, SUBMITTED_FOLDER
from dtf.core.text import about_text
from dtf.runs import run_folder
from dtf.runs.run_folder import check_folder, take_lock
from dtf.runs.standing import Standing, lines, standing
from tests.support.submission import HERE, SMALL

RUN = Standing(
    id="2", live=False, launches=2, started="", ended="then", exit=75, cause="asked to stop after step 9", saved=9,
    newest={"train": {"step": 11}}, total=40, left_s=4200.0,
)  # fmt: skip
LIVE, KILLED = replace(RUN, live=True, ended=None, exit=None), replace(RUN, ended=None, exit=None)
DONE = replace(RUN, exit=0, cause="finished")
WAITS = "waits for the next start of its job"


@pytest.mark.parametrize(
    ("said", "run", "before", "state", "told"),
    [
        (State.queued, RUN, "2", State.queued, f"{RUN.state}; that was before this job, which has not begun yet"),
        (State.queued, RUN, "1", State.requeued, f"saved and stopped; {WAITS}"),
        (State.requeued, RUN, "1", State.requeued, f"saved and stopped; {WAITS}"),
        (State.requeued, KILLED, "1", State.requeued, f"was killed; {WAITS}"),
        (State.requeued, LIVE, "1", State.requeued, "running, though its job is requeued"),
        (State.running, LIVE, "1", State.running, "running"),
        (State.running, RUN, "1", State.running, "saved and stopped; its job starts it again"),
        (State.finished, DONE, "1", State.finished, "finished"),
        (State.failed, LIVE, "1", State.failed, "running, though its job is failed"),
        (State.failed, KILLED, "1", State.failed, "was killed, or its node was lost"),
        (State.failed, replace(RUN, exit=65, cause="no data"), "1", State.failed, "ended with E_DATA: no data"),
        (State.cancelled, RUN, "1", State.cancelled, "ended with E_PREEMPTED: asked to stop after step 9"),
        (State.unknown, DONE, "1", State.finished, "finished"),
        (State.unknown, DONE, "2", State.unknown, "finished"),
        (State.unknown, replace(RUN, exit=65, cause="no data"), "1", State.failed, "ended with E_DATA: no data"),
        (State.unknown, LIVE, "1", State.unknown, "running"),
    ],
)  # fmt: skip
def test_a_job_and_its_run_agree(said: State, run: Standing, before: str, state: State, told: str) -> None:
    assert job_state(JobState(said, "why"), run, before) == JobState(state, "why")
    assert run_state(state, run, before) == told
    assert run_state(state, run, before, ends=True) == told.replace("its job starts it again", "its job ends")


def test_how_far_a_run_is_and_what_is_left() -> None:
    assert list(lines(LIVE))[:3] == [
        "run 2, launch 2: running", "step 11 of 40, 27 %, about 1 h 10 min left", "newest checkpoint: step 9",
    ]  # fmt: skip
    assert RUN.progress == "step 9 of 40, 22 %", "it goes on from there"
    assert replace(LIVE, total=None).progress == ""
    assert [about_text(s) for s in (40, 700, 7260, 180_000)] == ["40 s", "12 min", "2 h 1 min", "2 d 2 h"]


def test_what_is_left_is_told_by_the_pace_of_this_launch(tmp_path: Path) -> None:
    launch = {"id": "b", "started": "", "ended": None, "exit": None, "cause": ""}
    (tmp_path / "run.json").write_text(
        json.dumps(launch | {"earlier": [{"id": "a", "plan": {"steps": 110, "steps_per_epoch": 1}}]})
    )
    rows = [(10, 1000.0), (20, 2000.0), (30, 5.0), (40, 15.0)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"split": "train", "step": step, "seconds": at}) + "\n" for step, at in rows)
    )
    found = standing(tmp_path)
    assert found is not None and (found.total, found.left_s) == (110, 70.0)


@pytest.fixture
def submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> record.JobRecord:
    """Of a job in the folder `mine`, which waits."""
    monkeypatch.chdir(tmp_path)
    node = compose([*SMALL, "run.dir=mine"]).config["launcher"]
    known = record.JobRecord(node, {"job": "7", "pids": ""}, "2026-11-26T20:00:00", "abc", "mine")
    (tmp_path / "mine" / "job").mkdir(parents=True)
    record.keep(Path("mine"), known)
    monkeypatch.setattr(type(known.platform), "state", lambda *_: JobState(State.queued, "Resources"))
    return known


LOCAL = [HERE[0], "launcher=local", "launcher.processes=1", "launcher.devices=cpu", "train.steps=1", "run.dir=mine"]


@pytest.mark.usefixtures("elsewhere", "platform")
def test_a_folder_whose_job_waits_is_not_used_here(
    submitted: record.JobRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job=status", HERE[0], "job.run_folder=mine"]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "here job 7: queued (Resources), submitted 2026-11-26T20:00:00", "the run has not begun yet",
    ]  # fmt: skip
    assert main(LOCAL) == Exit.BUSY
    assert (
        "mine belongs to here job 7, which is queued; wait for it, or end it with job=cancel" in capsys.readouterr().err
    )
    Path("mine/sweep.json").write_text("{}")
    assert main([*LOCAL[:-1], "run.dir=mine/trial"]) == Exit.BUSY  # of its sweep
    Path("mine/sweep.json").write_text('{"exit": null}')
    assert main(["job=status", HERE[0], "job.run_folder=mine"]) == Exit.OK
    assert capsys.readouterr().out.endswith("\nsweep: handed over to its job\n")
    Path("mine/sweep.json").unlink()
    with monkeypatch.context() as unseen:
        unseen.setattr(type(submitted.platform), "sees_folder", False)
        assert main(["job=status", HERE[0], "job.run_folder=mine"]) == Exit.OK
    assert "\nmine is not seen from here; job=logs prints what the run does\n" in capsys.readouterr().out

    assert main(["job=logs", HERE[0], "job.run_folder=mine"]) == Exit.OK
    assert capsys.readouterr().err == "dtf: here job 7 is queued (Resources): it has printed nothing yet\n"

    def silent(*_: object) -> JobState:
        raise PeerError("nobody answers")

    capsys.readouterr()
    monkeypatch.setattr(type(submitted.platform), "state", silent)
    assert main(LOCAL) == Exit.BUSY
    assert "job.forget=true" in capsys.readouterr().err
    assert os.listdir("mine") == ["job"]
    monkeypatch.setenv(SUBMISSION, "abc")  # any process of any job
    assert main(LOCAL) == Exit.BUSY
    opened = Mock(side_effect=BusyError("opened"))
    monkeypatch.setattr(run_folder, "take_lock", opened)
    monkeypatch.setenv(SUBMITTED_FOLDER, os.path.abspath("mine"))  # the job itself
    assert main(LOCAL) == Exit.BUSY and opened.called


@pytest.mark.usefixtures("elsewhere", "platform")
def test_a_job_of_which_nothing_is_known_is_told_to_end_all_the_same(
    submitted: record.JobRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = Mock()
    monkeypatch.setattr(type(submitted.platform), "state", lambda *_: JobState(State.unknown, "silent"))
    monkeypatch.setattr(type(submitted.platform), "cancel", told)
    record.keep(Path("mine"), replace(submitted, handle={"job": "7", "names": " ".join(["trial"] * (1 << 18))}))
    assert main(["job=cancel", HERE[0], "job.run_folder=mine"]) == Exit.OK and told.called
    assert capsys.readouterr().out == "dtf: here job 7 is unknown (silent); it was asked to end, should it live\n"


@pytest.mark.usefixtures("elsewhere", "platform")
def test_a_job_that_is_submitted_while_a_run_begins_is_seen(
    submitted: record.JobRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lock(folder: Path) -> int:
        record.keep(folder, submitted)
        return take_lock(folder)

    Path("mine/job/job.json").unlink()
    monkeypatch.setattr(run_folder, "take_lock", lock)
    assert main(LOCAL) == Exit.BUSY and "belongs to here job 7" in capsys.readouterr().err
    assert not Path("mine/run.json").exists()


# ------------------------------------------------------------ files from elsewhere

DEEP = "[" * 100_000
HANDLE = {"job": "7", "pids": ""}
JOB = {"launcher": {"name": "here"}, "handle": HANDLE, "submitted": "", "digest": "", "run_dir": ""}
BROKEN = ["folder", "pipe", b"\xff\xfe", b" " * (1 << 20) + b"{}", DEEP.encode(), b"[]", b"7", b"{"]


def put(path: Path, what: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(what, bytes):
        path.write_bytes(what)
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)


FOREIGN: list[dict[str, object]] = [
    *({**JOB, key: value} for key in JOB for value in (None, 7, ["x"])),
    {**JOB, "launcher": {"name": ["here"]}},
    {**JOB, "launcher": {}},
    {**JOB, "handle": {"job": 7}},
    {**JOB, "handle": {"job": "a\0b"}},
    {**JOB, "handle": {"job": "\ud800"}},
    {**JOB, "other": 1},
]


@pytest.mark.usefixtures("elsewhere", "platform")
@pytest.mark.parametrize("name", ["job.json", "submitting.json"])
@pytest.mark.parametrize("what", [*BROKEN, *(json.dumps(each).encode() for each in FOREIGN)])
def test_a_broken_record_is_an_error_that_names_it(name: str, what: str | bytes, tmp_path: Path) -> None:
    put(tmp_path / "job" / name, what)
    with pytest.raises(BusyError, match=f"/job/{name} cannot be read"):
        record.find(tmp_path)


@pytest.mark.usefixtures("elsewhere", "platform")
@pytest.mark.parametrize("what", [*BROKEN[:3], DEEP.encode(), b"[]", b'{"id": ["x"], "ended": null}'])
def test_a_broken_record_of_a_run_is_an_error_that_names_it(
    what: str | bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Path("mine/run.json"), what)
    assert main(["job=status", "job.run_folder=mine"]) == Exit.BUSY
    told = capsys.readouterr().err
    assert "mine/run.json cannot be read" in told and "Traceback" not in told
    with pytest.raises(BusyError, match="mine/run.json cannot be read"):  # to go on there
        check_folder(Path("mine"), {"checkpoint": {}})
    Path("mine/config.yaml").write_text("{}")
    with pytest.raises(BusyError, match="mine holds what is no trial"):
        find(Path("mine"), {})


@pytest.mark.usefixtures("elsewhere", "platform")
def test_what_is_no_file_is_neither_waited_for_nor_read_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    run = {"id": "1", "ended": "x", "exit": 0, "cause": "", "started": ""}
    put(Path("mine/run.json"), json.dumps(run).encode())
    for name in ("metrics.jsonl", "rank_0.log", "live.json"):
        os.mkfifo(f"mine/{name}")
    assert standing(Path("mine")) is not None
    assert main(["job=logs", "job.run_folder=mine"]) == Exit.DATA
    assert "mine/rank_0.log cannot be read" in capsys.readouterr().err
    Path("home/a").mkdir(parents=True)
    put(Path("home/sweep.json"), b"{}")
    assert main(["job=logs", "job.run_folder=home"]) == Exit.DATA
    assert "is a sweep whose trials have logs of their own; give one, once one has begun" in capsys.readouterr().err
    put(Path("home/a/run.json"), json.dumps(run).encode())
    assert main(["job=logs", "job.run_folder=home"]) == Exit.DATA
    assert "give one, such as job.run_folder=home/a" in capsys.readouterr().err
    assert main(["job=status", "job.run_folder=mine"]) == Exit.PEER
    assert "mine/live.json cannot be read" in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere", "platform")
def test_a_record_without_what_finds_its_job_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    put(Path("mine/job/job.json"), json.dumps(JOB | {"launcher": {"name": "slurm"}, "handle": {"job": "7"}}).encode())
    assert main(["job=status", "job.run_folder=mine"]) == Exit.OK
    assert "cannot be asked: job/job.json lacks the trials of its job" in capsys.readouterr().out
    assert main(["job=cancel", "job.run_folder=mine"]) == Exit.CONFIG


@pytest.mark.usefixtures("elsewhere", "platform")
def test_nothing_from_a_folder_moves_the_cursor(
    submitted: record.JobRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b1A\r"
    record.keep(Path("mine"), replace(submitted, handle={"job": f"7{evil}", "pids": ""}, submitted=evil))
    run = {"id": f"1{evil}", "ended": "x", "exit": 1, "cause": evil, "started": ""}
    Path("mine/run.json").write_text(json.dumps(run))
    Path("mine/job/node0.log").write_text(f"\x1b[31mred\x1b[0m\tand {evil}more\n")
    for job in ("status", "logs", "cancel"):
        main([HERE[0], f"job={job}", "job.run_folder=mine"])
    Path("mine/run.json").write_text(json.dumps(run | {"exit": evil}))
    main([HERE[0], "job=status", "job.run_folder=mine"])
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert not set(text) & set("\x1b\x07\x9b\r") and "red\tand \\x1b]0;title\\x07" in text
    assert "mine/run.json cannot be read" in text


def test_the_lock_of_a_folder_may_be_no_file_either(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {"id": "1", "ended": None, "exit": None, "cause": "", "started": ""}
    (tmp_path / "run.json").write_text(json.dumps(run))
    lock = take_lock(tmp_path)
    try:
        (tmp_path / ".lock").write_bytes(b"process 99999999999999999999 on \xff\n")
        assert main(["job=cancel", f"job.run_folder={tmp_path}"]) == Exit.DATA
        assert ".lock cannot be read" in capsys.readouterr().err
    finally:
        os.close(lock)
