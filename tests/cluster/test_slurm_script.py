"""The batch script of launcher=slurm: its text, and what it decides, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from dtf.api.schema import build_option, coerce_option
from dtf.cluster.platform import JobRequest
from dtf.cluster.slurm import Slurm
from dtf.cluster.slurm_script import JOB, TASK, JobText, duration

WHOLE = Path(__file__).parent / "slurm_job_of_two_nodes.sh"
REQUEST = JobRequest(
    name="shapes-8a4bb8",
    folder=Path("/data/my run"),
    run_dir="/data/my run",
    content=b"",
    digest="d60e22df" * 8,
    roles={"trainer": 4},
    nodes=2,
    configs=({},),
    grace_s=25.0,
)


def slurm(**options: object) -> Slurm:
    node = coerce_option("launcher", {"name": "slurm", "python": "/opt/python", **options}, "launcher")
    launcher = build_option("launcher", node)
    assert isinstance(launcher, Slurm)
    return launcher


def head(text: str) -> list[str]:
    """The #SBATCH lines."""
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def unlike(text: str, other: str) -> list[str]:
    """The lines of one script that the other does not have."""
    known = set(other.splitlines())
    return [line for line in text.splitlines() if line not in known]


def test_the_whole_script_of_two_nodes() -> None:
    made = slurm(
        nodes=2,
        threads=3,
        hours=12.5,
        partition="gpu",
        memory="64G",
        setup=["module load cuda", "source 'my venv/bin/activate'"],
        extra=["--mail-type=FAIL"],
    ).render(REQUEST)
    assert list(made) == [JOB, TASK]
    assert made[JOB] == WHOLE.read_text()
    assert (
        "    /opt/python -m dtf '--bundle=/data/my run/job/bundle.zip' --digest=" + REQUEST.digest + " &" in made[TASK]
    )


def test_the_script_of_roles_is_a_heterogeneous_job() -> None:
    request = replace(REQUEST, roles={"server": 3, "trainer": 4})
    extra = {"server": ["--partition=cpu"]}
    text = slurm(nodes=2, processes=2, gpus=2, partition="gpu", role_extra=extra).render(request)[JOB]
    start = head(text).index("hetjob")
    limits = ["--partition=gpu", "--signal=TERM@25"]
    assert head(text)[start - 5 : start] == [*limits, "--ntasks=3", "--cpus-per-task=1", "--partition=cpu"]
    assert head(text)[start + 1 :] == [
        *limits, "--nodes=2", "--ntasks-per-node=2", "--ntasks=4", "--cpus-per-task=1", "--gpus-per-task=1",
    ]  # fmt: skip
    assert "DTF_ROLES=server,trainer\n" in text
    step = next(line.strip() for line in text.splitlines() if line.strip().startswith("exec srun --het"))
    assert step == (
        "exec srun --het-group=0 --kill-on-bad-exit=0 --wait=0 --export=ALL --distribution=block --cpus-per-task=1 "
        "bash '/data/my run/job/task.sh' : --het-group=1 --cpus-per-task=1 bash '/data/my run/job/task.sh'"
    )
    assert "tasks=7" in text
    alone = replace(request, nodes=1)
    assert "hetjob" not in head(slurm(nodes=1).render(alone)[JOB])  # one supervisor starts all on its node


def test_the_script_of_a_sweep_is_an_array() -> None:
    request = replace(REQUEST, trials=("lr=0.1", "lr=0.2"), parallel=1, nodes=1, roles={"trainer": 2})
    made, plain = slurm().render(request), slurm().render(replace(request, trials=(), parallel=0))
    assert unlike(made[JOB], plain[JOB]) == [
        "#SBATCH --output='/data/my run/job/slurm-%A_%a.log'",
        "#SBATCH --array=0-1%1",
        "runs=('/data/my run/lr=0.1' '/data/my run/lr=0.2')",
    ]
    assert unlike(made[TASK], plain[TASK])[0].endswith('--trial="$SLURM_ARRAY_TASK_ID" &')


def test_each_option_is_a_line_and_nothing_is_left_out() -> None:
    options = {"account": "a b", "qos": "high", "constraint": "a100&ib", "cpus": 12, "gpus": 4, "export": "NONE"}
    text = slurm(nodes=2, srun=["--container-image=a b"], extra=["--reservation=x"], **options).render(REQUEST)[JOB]
    for line in (
        "--account='a b'", "--qos=high", "--constraint='a100&ib'", "--cpus-per-task=12", "--gpus-per-node=4",
        "--export=NONE", "--reservation=x",
    ):  # fmt: skip
        assert line in head(text)
    assert " --cpus-per-task=12 '--container-image=a b' bash " in text


def test_percent_signs_begin_no_pattern_and_a_time_is_written_whole() -> None:
    text = slurm().render(replace(REQUEST, folder=Path("/a%j")))[JOB]
    assert "--output=/a%%j/job/slurm-%j.log" in head(text)
    assert [duration(hours) for hours in (0.5, 12.5, 25.0, 1 / 7)] == [
        "0-00:30:00",
        "0-12:30:00",
        "1-01:00:00",
        "0-00:08:34",
    ]


# ------------------------------------------------------------ decisions


@dataclass
class Machine:
    """A folder with a script, and stand-ins for Slurm's commands that write what they were told to `calls`."""

    folder: Path
    waits: bool = False  # `sleep` is another stand-in
    touches: Path | None = None  # a file that is made while the step runs
    setup: list[str] = field(default_factory=list)
    sees: str = "HOME"  # a variable whose value srun writes to `seen`
    says: str = ""  # what srun prints
    scontrol: str = ""  # what scontrol does besides

    def run(self, *codes: str, srun: int | None = None, tell: bool = False, shown: str = "", **variables: str) -> int:
        """The exit code of the script, when its tasks end with these codes; "" for one that leaves none.
        `srun`: that of srun, by default the highest.

        `tell`: the script is sent SIGTERM while its step runs. `shown`: what scontrol says of the job.
        """
        job = self.folder / "run" / "job"
        job.mkdir(parents=True, exist_ok=True)
        (self.folder / "calls").unlink(missing_ok=True)
        script = JobText(
            options=[[]], steps=[[]], tasks=len(codes), roles=[], comment="dtf 5b0d", job_folder=str(job),
            run_dirs=[str(self.folder / "run")], setup=self.setup, command=["true"],
        )  # fmt: skip
        (job / JOB).write_text(script.job())
        highest = max(int(code or 69) for code in codes)
        notes = "".join(f'echo {code} >"$DTF_ATTEMPT/code.{at}"\n' for at, code in enumerate(codes) if code)
        touch = f"touch '{self.touches}'\n" if self.touches else ""
        told = "kill -TERM $PPID\n" if tell else ""
        notes += f'echo "boom" >"$DTF_ATTEMPT/reason.1"\necho "${self.sees}" >{self.folder}/seen\n'
        notes += f"echo {shlex.quote(self.says)} >&2\n" if self.says else ""
        self.stand_in("srun", f"{notes}{touch}{told}exit {highest if srun is None else srun}")
        for name in ("scontrol", "scancel", *(["sleep"] if not self.waits else [])):
            more = self.scontrol if name == "scontrol" else ""
            self.stand_in(name, f'echo "{name} $*" >>{self.folder}/calls\n{more}\necho "{shown}"')
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        environment = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **variables}
        with (self.folder / "log").open("ab") as log:
            command = ["bash", str(job / JOB)]
            return subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=60).returncode

    def stand_in(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    @property
    def requeued(self) -> bool:
        return "scontrol requeue 7" in self.calls and self.calls[-1] == "sleep 60"

    def save(self, step: int) -> None:
        (self.folder / "run" / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


DECISIONS = [  # codes of the tasks, of srun; whether it starts again, and the code of the job
    (("0", "0"), 0, False, 0),
    (("75", "75"), 75, True, 75),
    (("0", "75"), 75, True, 75),
    (("143", "143"), 143, True, 143),
    (("", ""), 143, True, 143),  # told before they had begun
    (("69", "75"), 75, True, 69),
    (("74",), 74, True, 74),
    (("71",), 71, True, 71),
    (("", "75"), 233, True, 69),  # a node is gone
    (("137", "75"), 137, True, 137),
    (("", ""), 1, True, 69),  # srun itself failed
    (("", ""), 75, True, 75),  # none could note its code, as the folder is full
    (("", ""), 65, False, 65),
    (("", "75"), 75, True, 69),
    (("2", "2"), 2, False, 2),
    (("1", "69"), 69, False, 1),  # the others lost the one that failed
    (("75", "1"), 75, False, 1),
    (("65",), 65, False, 65),
    (("73",), 73, True, 73),
    (("139", "75"), 139, True, 139),
    (("79",), 79, False, 79),
    (("80",), 80, False, 80),
    (("93",), 93, False, 93),
    (("127",), 127, False, 127),  # no such interpreter
]


@pytest.mark.parametrize("codes, srun, again, code", DECISIONS)
def test_exit_codes_decide(machine: Machine, codes: tuple[str, ...], srun: int, again: bool, code: int) -> None:
    assert machine.run(*codes, srun=srun) == code
    assert machine.requeued == again
    noted = machine.folder / "run" / "job" / "ended"
    assert noted.exists() == (not again)
    if not again:
        assert noted.read_text().split()[:3] == ["finished" if code == 0 else "failed", str(code), "7"]


def test_a_code_that_is_seen_late_counts(machine: Machine) -> None:
    """As on storage that several machines share: it is there after the third look."""
    wait = f'echo "sleep $*" >>{machine.folder}/calls; '
    attempt = f"{machine.folder}/run/job/attempts/7.0"
    late = f"touch {attempt}/began.0; echo 65 >{attempt}/code.0"
    see = f"(($(grep -c sleep {machine.folder}/calls) < 3)) || {{ {late}; }}"
    machine.says = "srun: error: Invalid feature specification"  # as of a task's own srun
    (machine.folder / "bin").mkdir()
    machine.stand_in("sleep", wait + see)
    machine.waits = True
    assert machine.run("", srun=65) == 65
    assert machine.calls.count("sleep 1") == 3 and not machine.requeued


def test_losses_without_a_new_checkpoint_end_the_job(machine: Machine) -> None:
    for _ in range(2):
        machine.run("69")
        assert machine.requeued
    machine.save(10)
    for _ in range(2):
        machine.run("")
        assert machine.requeued
        machine.run("75")  # asked to stop: as often as it likes
        assert machine.requeued
    assert machine.run("69") == 69
    assert not machine.requeued
    assert "lost again and again" in (machine.folder / "run" / "job" / "ended").read_text()
    assert machine.run("69", SLURM_JOB_ID="8") == 69 and "scontrol requeue 8" in machine.calls, "submitted anew"


def test_losses_on_a_full_disk_end_the_job_too(machine: Machine) -> None:
    """Nothing can be noted there: neither codes nor losses."""
    (machine.folder / "run" / "job" / "lost").mkdir(parents=True)
    for restart in range(2):
        machine.run("69", SLURM_RESTART_COUNT=str(restart))
        assert machine.requeued
    assert machine.run("69", SLURM_RESTART_COUNT="2") == 69 and not machine.requeued


COMPLETING = "JobId=7 JobState=COMPLETING Reason=None PreemptTime=None Comment= "


@pytest.mark.parametrize(
    "shown, again",
    [
        (COMPLETING, False),  # scancel; or Slurm requeues it by itself
        (COMPLETING.replace("COMPLETING", "RUNNING"), True),  # scancel --batch --signal=TERM
        (COMPLETING.replace("Reason=None", "Reason=TimeLimit"), True),
        (COMPLETING.replace("PreemptTime=None", "PreemptTime=2026-11-26T20:05:53"), True),  # PreemptMode=CANCEL
    ],
)
def test_a_job_that_is_ended_from_outside(machine: Machine, shown: str, again: bool) -> None:
    assert machine.run("75", tell=True, shown=shown) == 75
    assert machine.requeued == again
    assert machine.run("1", tell=True, shown=shown) == 1  # whatever ends it, a mistake stays one
    assert not machine.requeued


def test_a_job_that_is_cancelled_saves_and_does_not_come_back(machine: Machine) -> None:
    folder = machine.folder / "run" / "job"
    machine.touches = folder / "cancel"
    assert machine.run("75") == 75
    assert "scancel 7" in machine.calls and not machine.requeued
    assert (folder / "ended").read_text().startswith("cancelled 75 7")


def test_a_job_that_is_cancelled_before_its_step_begins_none(machine: Machine) -> None:
    folder = machine.folder / "run" / "job"
    folder.mkdir(parents=True)
    (folder / "cancel").touch()
    assert machine.run("1") == 143
    assert "scancel 7" in machine.calls and not machine.requeued


def test_a_task_of_an_array_is_requeued_alone_and_shows_why(machine: Machine) -> None:
    machine.run("0", "75", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="0")
    assert "scontrol requeue 5_0" in machine.calls
    shown = [call for call in machine.calls if "Comment=" in call]
    assert shown == ["scontrol update JobId=5_0 Comment=dtf 5b0d stopped, starts again from step 0. boom "]


@pytest.mark.parametrize(
    "lines, said",
    [
        (["true", "module() { return 3; }", "module load cuda"], "ended with 3: module load cuda"),
        (["set -e", "false"], "ended with 1: false"),
        (["exit 0"], "ended with 0: exit 0"),
    ],
)
def test_a_line_of_the_setup_that_fails_ends_the_job(machine: Machine, lines: list[str], said: str) -> None:
    machine.setup = lines
    assert machine.run("0") == 2 and not machine.requeued
    assert f"a line of launcher.setup {said}" in (machine.folder / "run" / "job" / "ended").read_text()


def test_what_the_setup_does_to_its_shell_leaves_the_decision_as_it_is(machine: Machine) -> None:
    machine.setup = [
        "set -eu",
        "set -o noclobber",
        "trap '' TERM",
        "tasks=8 folder=/x id=99 run=/x attempt=/x verdict=done",
    ]
    machine.setup += ["judge() { :; }", "step_code() { :; }", "export MINE='of the setup'"]
    machine.sees = "MINE"
    assert machine.run("75") == 75 and machine.requeued
    assert (machine.folder / "seen").read_text() == "of the setup\n"
    for _ in range(3):
        assert machine.run("75") == 75 and machine.requeued  # asked to stop, which is no loss
    assert machine.run("0") == 0


def test_a_setup_that_is_told_to_stop_starts_no_step(machine: Machine) -> None:
    """The script alone is told. What the setup waits for comes never."""
    machine.setup = ["kill -TERM $$", f"mkfifo {machine.folder}/never; read <{machine.folder}/never"]
    assert machine.run("0", shown=COMPLETING.replace("Reason=None", "Reason=TimeLimit")) == 143
    assert machine.requeued and not (machine.folder / "run" / "job" / "attempts" / "7.0" / "code.0").exists()


def test_a_task_of_a_job_that_was_cancelled_meanwhile_starts_nothing(tmp_path: Path) -> None:
    """Between the script's look and the step that Slurm knows of."""
    started = tmp_path / "started"
    (tmp_path / "cancel").touch()
    assert noted(tmp_path, ["touch", str(started)]) == "143" and not started.exists()


def noted(folder: Path, command: list[str]) -> str:
    """The code that a task notes, whose command is this."""
    script = JobText(
        options=[[]], steps=[[]], tasks=1, roles=[], comment="dtf 5b0d",
        job_folder=str(folder), run_dirs=[""], setup=[], command=command
    )  # fmt: skip
    (folder / TASK).write_text(script.task())
    path = f"{folder}/bin:{os.environ['PATH']}"
    environment = {"PATH": path, "DTF_JOB": "5_7", "DTF_ATTEMPT": str(folder), "SLURM_PROCID": "4"}
    subprocess.run(["bash", folder / TASK], env=environment, timeout=60)
    return (folder / "code.4").read_text().strip()


def test_a_task_notes_the_code_of_its_process(tmp_path: Path) -> None:
    Machine(tmp_path).stand_in("scancel", "")
    assert noted(tmp_path, ["bash", "-c", "exit 3"]) == "3"
    (tmp_path / "code.4").unlink()
    assert noted(tmp_path, ["/no/such/python"]) == "127"


@pytest.mark.parametrize("code, told", [("2", True), ("137", True), ("69", True), ("0", False), ("75", False)])
def test_a_task_that_fails_or_is_lost_has_the_whole_job_told(tmp_path: Path, code: str, told: bool) -> None:
    """The others would wait for it; one that starts later than it ended sees its code."""
    Machine(tmp_path).stand_in("scancel", f'echo "$*" >>{tmp_path}/told')
    assert noted(tmp_path, ["bash", "-c", f"exit {code}"]) == code
    assert (tmp_path / "told").exists() == told
    if told:
        assert (tmp_path / "told").read_text() == "--signal=TERM 5_7\n"
    (tmp_path / "code.4").rename(tmp_path / "code.0")
    assert (noted(tmp_path, ["true"]) == "143") == told


def test_a_task_outlives_a_signal_and_waits_for_its_process(tmp_path: Path) -> None:
    """Slurm signals both. The process sees in /proc that the shell waits again, having heard the signal."""
    waits_again = (
        "until grep -q 'State:.S' /proc/$PPID/status && ! grep -q 'SigPnd:.*4000' /proc/$PPID/status; do :; done"
    )
    command = f"trap : TERM; kill -TERM $PPID; sleep 0; {waits_again}; exit 75"
    assert noted(tmp_path, ["bash", "-c", command]) in ("75", "143")  # bash may lose a code in that very moment
