"""launcher=slurm and Slurm's commands, which are stand-ins: what is asked, how answers are read, what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dtf.cli.main import main
from dtf.cluster.platform import JobState, State, Unanswered
from dtf.cluster.slurm_options import check_extra, check_srun, for_sbatch
from dtf.cluster.slurm_state import fields, notes_of, of_array, of_job
from dtf.config.compose import compose
from dtf.core.errors import ConfigError, Exit, PeerError
from tests.cluster.test_slurm_script import REQUEST, slurm

RUNNING = (
    "JobId=1 JobName=shapes-8a4bb8 UserId=root(0) Priority=4294901759 Account=(null) JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=1 Restarts=2 BatchFlag=1 ExitCode=0:0 StartTime=2026-11-26T19:48:24 Partition=low "
    "NodeList=n[1-2] TRES=cpu=4,node=2,billing=4 Comment=dtf 5b0d stopped, starts again from step 110. dtf: "
    "error[E_PREEMPTED] rank=0 step=110: asked to stop WorkDir=/tmp Power= "
)


def changed(**others: str) -> dict[str, str]:
    return {**fields(RUNNING), **others}


def test_a_line_of_scontrol_is_read_with_its_spaces() -> None:
    read = fields(RUNNING)
    assert read["NodeList"] == "n[1-2]" and read["Power"] == ""
    assert read["Comment"] == (
        "dtf 5b0d stopped, starts again from step 110. dtf: error[E_PREEMPTED] rank=0 step=110: asked to stop"
    )


@pytest.mark.parametrize(
    "others, state, detail",
    [
        (
            {},
            State.running,
            "RUNNING; on n[1-2]; 2 restart(s)",
        ),
        (
            {
                "JobState": "PENDING",
                "Reason": "Resources",
                "Restarts": "0",
                "NodeList": "(null)",
                "Comment": "dtf 5b0d",
            },
            State.queued,
            "PENDING Resources",
        ),
        (
            {"JobState": "PENDING", "Reason": "BeginTime", "NodeList": ""},
            State.requeued,
            "PENDING BeginTime; 2 restart(s); stopped, starts again from step 110. dtf: error[E_PREEMPTED] rank=0 "
            "step=110: asked to stop",
        ),
        (
            {"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "65:0", "Comment": "no data"},
            State.failed,
            "FAILED NonZeroExitCode; on n[1-2]; exit code 65; 2 restart(s); no data",
        ),
        ({"JobState": "COMPLETED", "Restarts": "0", "Comment": ""}, State.finished, "COMPLETED; on n[1-2]"),
        ({"JobState": "CANCELLED", "Restarts": "0", "Comment": ""}, State.cancelled, "CANCELLED; on n[1-2]"),
        (
            {"JobState": "CANCELLED", "Restarts": "0", "Comment": "stopped, starts again from step 110"},
            State.cancelled,
            "CANCELLED; on n[1-2]",
        ),
        ({"JobState": "ODD", "Restarts": "0", "Comment": ""}, State.unknown, "ODD; on n[1-2]"),
    ],
)
def test_states(others: dict[str, str], state: State, detail: str) -> None:
    assert of_job([changed(**others)], []) == JobState(state, detail)


def test_an_array_is_counted_and_lives_while_one_of_it_does() -> None:
    tasks = [
        changed(ArrayTaskId=str(at), JobState=state) for at, state in enumerate(["COMPLETED", "FAILED", "RUNNING"])
    ]
    assert of_array(tasks, [], 3) == JobState(State.running, "1 COMPLETED, 1 FAILED, 1 RUNNING")
    assert of_array(tasks[:2], [], 2).state is State.failed
    waiting = changed(ArrayTaskId="3-7%2", JobState="PENDING", Restarts="0")  # one record of five tasks
    assert of_array([*tasks, waiting], [], 8).detail == "1 COMPLETED, 1 FAILED, 5 PENDING, 1 RUNNING"
    rest = changed(ArrayTaskId="4294967294", JobState="CANCELLED")
    assert of_array([rest, *tasks[:2]], [], 8) == JobState(State.failed, "6 CANCELLED, 1 COMPLETED, 1 FAILED")


def test_tasks_that_slurm_has_forgotten_are_known_by_their_notes() -> None:
    done = [changed(ArrayTaskId="1", JobState="COMPLETED")]
    notes = notes_of({"ended.0": "failed 65 41_0 no data here\n", "ended.1": "failed 1 40_1 of an earlier job"}, "41")
    assert of_array(done, notes, 2) == JobState(
        State.failed, "1 COMPLETED, 1 FAILED; task 0: no data here; exit code 65"
    )
    rest = changed(ArrayTaskId="4294967294", JobState="CANCELLED")
    assert of_array([rest, *done], notes, 3).detail.startswith("1 CANCELLED, 1 COMPLETED, 1 FAILED; task 0: ")
    assert of_array(done, [], 3) == JobState(
        State.unknown, "1 COMPLETED; Slurm has forgotten 2, whose scripts noted no end"
    )


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of stand-ins that comes first on the PATH. Each writes what it was called with to `calls`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return folder


def stand_in(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/bash\necho "{name} $*" >>{folder.parent}/calls\n{text}\n')
    path.chmod(0o755)


def request_in(folder: Path):

    request = replace(REQUEST, folder=folder / "run", run_dir=str(folder / "run"))
    request.job_folder.mkdir(parents=True)
    files = {}
    for name, text in slurm(nodes=2).render(request).items():
        files[name] = request.job_folder / name
        files[name].write_text(text)
    return request, files


def test_a_submission_and_one_whose_answer_was_lost(commands: Path, tmp_path: Path) -> None:
    request, files = request_in(tmp_path)
    stand_in(commands, "sbatch", "echo '41;cluster'")
    (request.job_folder / "cancel").touch()  # of an earlier job
    handle = slurm(nodes=2).submit(request, files)
    assert handle == {"job": "41", "folder": str(request.job_folder), "trials": "0"}
    assert not (request.job_folder / "cancel").exists()
    stand_in(commands, "sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    stand_in(commands, "squeue", f"echo '40 dtf other'; echo '42 dtf {REQUEST.digest[:16]}'")
    assert slurm(nodes=2).submit(request, files)["job"] == "42"
    assert (tmp_path / "calls").read_text().splitlines()[-1] == (
        "squeue --noheader --me --name=shapes-8a4bb8 --format=%F %k"
    )
    stand_in(commands, "sbatch", "echo 'Welcome to the cluster'; echo 42")  # a site's own wrapper
    assert slurm(nodes=2).submit(request, files)["job"] == "42"
    stand_in(commands, "squeue", "true")
    with pytest.raises(PeerError, match="Welcome to the cluster"):
        slurm(nodes=2).submit(request, files)
    stand_in(commands, "sbatch", "echo 'Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(PeerError, match="sbatch ended with 1: Socket timed out"):
        slurm(nodes=2).submit(request, files)


def test_a_submission_that_was_cut_off_finds_its_job_before_it_makes_another(commands: Path, tmp_path: Path) -> None:
    request, files = request_in(tmp_path)
    request = replace(request, again=True)
    stand_in(commands, "sbatch", "echo 43")
    stand_in(commands, "squeue", f"echo '42 dtf {REQUEST.digest[:16]}'")
    assert slurm(nodes=2).submit(request, files)["job"] == "42"
    stand_in(commands, "squeue", f"echo '42 dtf {REQUEST.digest[:16]} stopped, starts again from step 8'")
    assert slurm(nodes=2).submit(request, files)["job"] == "42"
    stand_in(commands, "squeue", "true")
    assert slurm(nodes=2).submit(request, files)["job"] == "43"
    stand_in(commands, "squeue", "echo 'slurmctld is down' >&2; exit 1")
    with pytest.raises(Unanswered, match="slurmctld is down"):
        slurm(nodes=2).submit(request, files)


@pytest.mark.parametrize(
    ("said", "option"),
    [
        ("sbatch: error: invalid partition specified: gpuu", "partition=gpuu"),
        (
            "sbatch: error: Batch job submission failed: Invalid account or account/partition combination",
            "account=mine",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos=high"),
        ("sbatch: error: Batch job submission failed: Job's QOS not permitted to use this partition", "qos=high"),
        ("sbatch: error: Batch job submission failed: Invalid feature specification", "constraint=a100"),
        ("sbatch: error: Invalid --mem specification", "memory=lots"),
        (
            "sbatch: error: Batch job submission failed: Requested time limit is invalid (missing or exceeds)",
            "hours=99",
        ),
        ("sbatch: error: Batch job submission failed: Node count specification invalid", "nodes=2"),
        (
            "sbatch: error: Batch job submission failed: User's group not permitted to use this partition",
            "partition=gpuu",
        ),
        ("sbatch: unrecognized option '--foo=1'", "extra=.--foo=1."),
    ],
)
def test_what_sbatch_refuses_names_the_option_and_leaves_nothing(
    commands: Path, capsys: pytest.CaptureFixture[str], said: str, option: str
) -> None:
    stand_in(commands, "sbatch", f'echo "{said}" >&2; exit 1')
    words = ["account=mine", "qos=high", "constraint=a100", "partition=gpuu", "memory=lots", "hours=99", "nodes=2"]
    given = [f"launcher.{word}" for word in [*words, 'extra=["--foo=1"]']]
    assert main(["launcher=slurm", "train.steps=2", "run.dir=mine", *given]) == Exit.CONFIG
    assert re.search(rf"launcher\.{option}[.0]*: Slurm refuses .*{re.escape(said)}", capsys.readouterr().err)
    assert not Path("mine").exists()
    assert (commands.parent / "calls").read_text().count("\n") == 1  # there is no job to look for


def test_without_slurm_its_commands_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, files = request_in(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="sbatch is not on the PATH"):
        slurm(nodes=2).submit(request, files)
    with pytest.raises(Unanswered, match="squeue is not on the PATH"):  # its job may be there
        slurm(nodes=2).submit(replace(request, again=True), files)


def test_variables_do_not_override_the_script(tmp_path: Path) -> None:
    text = slurm(partition="gpu", memory="1G").render(REQUEST)["job.sh"]
    kept = {"PATH": "/bin", "SLURM_CONF": "/c", "SBATCH_RESERVATION": "mine", "SBATCH_TIMELIMIT": "60"}
    overriding = {
        "SBATCH_PARTITION": "x", "SBATCH_MEM_PER_NODE": "1", "SBATCH_NO_REQUEUE": "1", "SBATCH_EXPORT": "NONE",
        "SBATCH_OPEN_MODE": "truncate", "SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "1", "SLURM_NTASKS": "3",
        "SBATCH_ARRAY_INX": "0-3", "SBATCH_WAIT": "1", "SBATCH_CLUSTERS": "other", "SBATCH_SIGNAL": "USR1",
    }  # fmt: skip
    assert for_sbatch({**kept, **overriding}, text) == kept


def test_a_job_that_slurm_has_forgotten_is_known_by_its_own_note(commands: Path, tmp_path: Path) -> None:
    stand_in(commands, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    handle = {"job": "41", "folder": str(tmp_path), "trials": "0"}
    assert slurm().state(handle).state is State.unknown
    (tmp_path / "ended").write_text("failed 65 41 no data here\n")
    assert slurm().state(handle) == JobState(State.failed, "no data here; exit code 65")
    (tmp_path / "ended").write_text("failed 65 40 of an earlier job\n")
    assert slurm().state(handle).state is State.unknown
    (tmp_path / "ended").unlink()
    (tmp_path / "ended.0").write_text("finished 0 41_0 step 9\n")
    assert slurm().state({**handle, "trials": "3"}) == JobState(
        State.unknown, "1 COMPLETED; Slurm has forgotten 2, whose scripts noted no end"
    )
    stand_in(commands, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(PeerError, match="Unable to contact slurm controller"):
        slurm().state(handle)


@pytest.mark.parametrize("what", ["folder", "pipe", "binary", "huge"])
def test_a_note_that_no_script_wrote_is_an_error_that_names_it(commands: Path, tmp_path: Path, what: str) -> None:
    stand_in(commands, "scontrol", "echo 'Invalid job id specified' >&2; exit 1")
    path = tmp_path / "ended.0"
    make = {
        "folder": path.mkdir, "pipe": lambda: os.mkfifo(path), "binary": lambda: path.write_bytes(b"\xff"),
        "huge": lambda: path.write_bytes(b" " * (1 << 21)),
    }  # fmt: skip
    make[what]()
    with pytest.raises(PeerError, match="ended.0 cannot be read"):
        slurm().state({"job": "41", "folder": str(tmp_path), "trials": "0"})
    with pytest.raises(ConfigError, match="at most 4,000,001"):
        slurm().state({"job": "41", "folder": str(tmp_path), "trials": "999999999999"})


def test_cancelling_asks_the_run_to_save_first(commands: Path, tmp_path: Path) -> None:
    stand_in(
        commands, "scancel", "echo 'scancel: error: Kill job error on job id 41: Invalid job id specified' >&2; exit 1"
    )
    slurm().cancel({"job": "41", "folder": str(tmp_path), "trials": "0"})  # it has ended
    with pytest.raises(ConfigError, match="its run folder was moved; move it back, or end the job with scancel 41"):
        slurm().cancel({"job": "41", "folder": str(tmp_path / "gone"), "trials": "0"})
    told = ["scancel --state=PENDING 41", "scancel --state=RUNNING --signal=TERM 41"]
    assert (tmp_path / "calls").read_text().splitlines() == told and (tmp_path / "cancel").exists()


@pytest.mark.parametrize("job", ["--me", "", "41 --me", "41_0"])
def test_a_record_from_elsewhere_gives_slurms_commands_no_options(commands: Path, tmp_path: Path, job: str) -> None:
    for name in ("scancel", "scontrol"):
        stand_in(commands, name, "true")
    handle = {"job": job, "folder": str(tmp_path), "trials": "0"}
    for ask in (slurm().cancel, slurm().state, lambda handle: list(slurm().logs(handle, tmp_path, follow=False))):
        with pytest.raises(ConfigError, match="which is no number"):
            ask(handle)
    with pytest.raises(ConfigError, match="trials='x'"):
        slurm().state({**handle, "job": "41", "trials": "x"})
    assert not (tmp_path / "calls").exists() and not (tmp_path / "cancel").exists()


def test_logs_of_an_array_stand_below_the_names_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    for name, text in {"41_10": "b\n", "41_2": "a\nunfinished", "410": "of another job\n", "40_1": "other\n"}.items():
        (tmp_path / "job" / f"slurm-{name}.log").write_text(text)
    handle = {"job": "41", "folder": str(tmp_path / "job"), "trials": "11"}
    printed = list(slurm().logs(handle, tmp_path, follow=False))
    assert [line for line in printed if not line.startswith("==>")] == ["a", "unfinished", "b"]
    assert "==> slurm-41_10.log <==" in printed


def test_following_a_log_ends_with_the_job_and_asks_seldom(commands: Path, tmp_path: Path) -> None:
    stand_in(
        commands,
        "scontrol",
        f"echo {RUNNING.replace('RUNNING', 'COMPLETED')!r}; echo last >>{tmp_path}/job/slurm-41.log",
    )
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "slurm-41.log").write_text("first\n")
    handle = {"job": "41", "folder": str(tmp_path / "job"), "trials": "0"}
    assert list(slurm().logs(handle, tmp_path, follow=True)) == ["first", "last"]
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_a_time_limit_that_leaves_no_time_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="launcher.hours=0.02: of 72 s the run needs 25 to save"):
        slurm(hours=0.02).render(REQUEST)


def test_a_sweep_over_roles_on_several_nodes_is_no_array() -> None:
    request = replace(REQUEST, roles={"server": 1, "trainer": 2}, trials=("a", "b"))
    with pytest.raises(ConfigError, match="no array of heterogeneous jobs"):
        slurm(nodes=2).render(request)


def test_a_path_with_a_newline_makes_no_line_of_the_script() -> None:
    for request in (replace(REQUEST, folder=Path("a\nb")), replace(REQUEST, run_dir="a\nb")):
        with pytest.raises(ConfigError, match="would end its line"):
            slurm(nodes=2).render(request)
    with pytest.raises(ConfigError, match="has a backslash"):  # the job would fail without a word
        slurm(nodes=2).render(replace(REQUEST, folder=Path("a\\b")))


def test_lines_of_a_site_are_passed_on_also_with_values_apart_and_for_one_role() -> None:
    check_extra("launcher.extra", ["--mail-type FAIL", "--nodelist=n1", "--gpus-per-node=a100:4", "--mem-bind=local"])
    check_extra("launcher.role_extra.server", ["--partition=cpu", "--mem=2G"], role=True)
    check_srun(["--container-image=a b", "--mpi=none"])


@pytest.mark.parametrize(
    "words, said",
    [
        (['launcher.extra=["reservation=x"]'], "launcher.extra: 'reservation=x' is no option of sbatch"),
        (
            ['launcher.role_extra.server=["--partition=cpu"]'],
            "role_extra.server: strategy=ddp on launcher.nodes=1 has no",
        ),
        (["launcher.srun=[container]"], "launcher.srun: 'container' is no option of srun"),
        (['launcher.srun=["--wait=5"]'], "--wait of srun is not yours to give here"),
        (['launcher.extra=["-a 0-3"]'], "launcher.extra: '-a 0-3' is no option of sbatch; write it out"),
        (['launcher.extra=["--reservation=x --array=0-3"]'], "--array of sbatch is not yours to give here"),
        (['launcher.extra=["--comment=\'a"]'], "No closing quotation"),
        (['launcher.extra=["--partition=cpu"]'], "give launcher.partition"),
        *(
            ([f'launcher.extra=["{word}"]'], "of sbatch is not yours to give here")
            for word in ("--arr=0-3", "--no-requeue", "--output=/x", "--open-mode=truncate", "--export=NONE")
        ),
        *(
            ([f'launcher.extra=["{word}"]'], "is not yours to give")
            for word in ("--signal=B:USR1", "--comment=x", "--wait")
        ),
        (["launcher.account='x\ntouch /tmp/p\n#'"], r"launcher.account='x\\ntouch /tmp/p\\n#' has the character"),
        (["launcher.memory='1G\n'"], "launcher.memory"),
        (["launcher.export=''"], "launcher.export"),
    ],
)
def test_what_no_job_could_run_with_is_refused(elsewhere: Path, words: list[str], said: str) -> None:
    composed = compose(["launcher=slurm", *words])
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        composed.settings.launcher.check(composed.settings.strategy)


def test_a_dry_submission_prints_the_script_and_leaves_nothing(
    elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launcher=slurm", "launcher.nodes=2", "launcher.dry_run=true", "train.steps=2"]) == 0
    assert "# job.sh\n#!/bin/bash\n#SBATCH --job-name=resnet-shapes-" in capsys.readouterr().out
    assert not list(elsewhere.iterdir())


LIGHT = {"antlr4", "attr", "cython_runtime", "dtf", "hydra", "omegaconf", "packaging", "yaml", "zlib_ng"}
"""What a submission may import besides the standard library: each takes milliseconds. `attr`: for omegaconf."""
NAMES = "*{name.partition('.')[0] for name in sys.modules if name[0] != '_'} - sys.stdlib_module_names"


def test_a_submission_imports_little_and_starts_nothing_but_sbatch(elsewhere: Path, commands: Path) -> None:
    """It takes less than a second by this: torch alone would take longer, and a fork server loads it."""
    stand_in(commands, "sbatch", "echo 41")
    code = (
        "import sys; from pathlib import Path; from dtf.cli.main import main; "
        "code = main(['launcher=slurm', 'launcher.nodes=2', 'train.steps=2', 'run.dir=mine']); "
        f"print({NAMES}, file=sys.stderr); "
        "assert not Path('/proc/thread-self/children').read_text(); sys.exit(code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "slurm job 41 was submitted" in done.stdout
    bare = subprocess.run([sys.executable, "-c", f"import sys; print({NAMES})"], capture_output=True, text=True)
    assert set(done.stderr.split()) - set(bare.stdout.split()) <= LIGHT
    assert len((commands.parent / "calls").read_text().splitlines()) == 1
