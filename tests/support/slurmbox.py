"""A real Slurm on this machine: a controller and nodes, each with a network, a process tree and a host name of its own.

Everything runs in namespaces below one process, which ends when the process that made it does: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel", "nsenter", "unshare", "ip")
LOGIN = "10.78.0.100"
PATIENCE_S = 60.0
"""What takes as long hangs; no test judges by less."""
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")

_CONFIG = """\
ClusterName=box
SlurmctldHost=login(10.78.0.100)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PropagateResourceLimits=NONE
ReturnToService=2
JobRequeue=1
InactiveLimit=0
MinJobAge=86400
KillWait={kill_wait_s}
SlurmdTimeout={node_timeout_s}
OverTimeLimit=0
EnforcePartLimits=ALL
NodeName=n[1-{nodes}] NodeAddr=10.78.0.[1-{nodes}] Port=6821 CPUs=8 RealMemory=4000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=cancel Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=CANCEL GraceTime={grace_s}
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

T = TypeVar("T")


class Refused(AssertionError):
    """A command of Slurm failed."""


@dataclass
class SlurmBox:
    """`folder`: configuration, state and logs of the cluster. Commands see the files of this machine."""

    folder: Path
    count: int = 2
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    _keepers: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _inner: dict[str, int] = field(default_factory=dict)

    @property
    def nodes(self) -> dict[str, str]:
        """Name -> address."""
        return {f"n{number}": f"10.78.0.{number}" for number in range(1, self.count + 1)}

    # ------------------------------------------------------------ commands

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` where users of the cluster log in."""
        configured = f"SLURM_CONF={self.folder / 'slurm.conf'}"
        return [*self._enter("login"), "env", configured, *words]

    def popen(self, *words: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*words),
            cwd=cwd,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *words: str, cwd: Path | None = None, **variables: str) -> str:
        """What the command prints. Refused, with its standard error, when it fails."""
        process = self.popen(*words, cwd=cwd, **variables)
        out, err = process.communicate(
            timeout=3 * PATIENCE_S
        )  # scancel asks again for a minute what cannot be done now
        if process.returncode:
            raise Refused(f"{' '.join(words)}: exit {process.returncode}: {err or out}")
        return out

    # ------------------------------------------------------------ jobs

    def jobs(self, number: str) -> list[dict[str, str]]:
        """What Slurm says of a job; of each task of an array, and each component of a heterogeneous job."""
        lines = self.call("scontrol", "show", "job", "-o", number).splitlines()
        return [dict(word.split("=", 1) for word in line.split(" ") if "=" in word) for line in lines if line.strip()]

    def job(self, number: str) -> dict[str, str]:
        """The one of this number; the first of an array or a heterogeneous job."""
        records = self.jobs(number)
        return next((record for record in records if record["JobId"] == number), records[0])

    def state(self, number: str) -> str:
        return self.job(number)["JobState"]

    def wait(self, found: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
        """The first value of `found()` that is true. Looks every twentieth of a second."""
        deadline = time.monotonic() + patience_s
        while not (value := found()):
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {patience_s:.0f} s: {what}\n{self.tail()}")
            time.sleep(0.05)
        return value

    def wait_state(self, number: str, *states: str, patience_s: float = PATIENCE_S) -> str:
        """Wait until the job is in one of these states."""

        def found() -> str:
            state = self.state(number)
            return state if state in states else ""

        return self.wait(found, f"job {number} {' or '.join(states)}", patience_s)

    def wait_end(self, number: str, patience_s: float = PATIENCE_S) -> str:
        """The final state of a job. A job that was requeued waits two minutes in Slurm: it starts at once here."""

        def found() -> str:
            job = self.job(number)
            self.release(job)
            return job["JobState"] if job["JobState"] in FINAL else ""

        return self.wait(found, f"the end of job {number}", patience_s)

    def release(self, record: dict[str, str]) -> None:
        """Let a job start soon that was requeued, of which `job` said this; nothing for any other."""
        eligible = record["EligibleTime"]
        if record["JobState"] != "PENDING" or record["Reason"] != "BeginTime" or not eligible[:1].isdecimal():
            return
        if datetime.fromisoformat(eligible) - datetime.now() > timedelta(seconds=5):
            # the number of an array's last task is that of the array
            task = f"{record['ArrayJobId']}_{record['ArrayTaskId']}" if "ArrayTaskId" in record else record["JobId"]
            with contextlib.suppress(Refused):  # it has started meanwhile
                # in the second of its end slurmd would still take it for killed
                self.call("scontrol", "update", f"JobId={task}", "StartTime=now+2")

    @contextmanager
    def preempted(self, nodes: int) -> Iterator[None]:
        """A context in which a job of a higher partition has all of this many nodes, or waits for them."""
        words = ("--partition=high", f"--nodes={nodes}", "--exclusive", "--job-name=higher", "--output=/dev/null")
        number = self.call("sbatch", "--parsable", *words, "--wrap=exec sleep 100000").strip()
        try:
            yield
        finally:
            self.call("scancel", number)

    # ------------------------------------------------------------ nodes

    def node_state(self, node: str) -> str:
        return self.call("sinfo", "-h", "-n", node, "-p", "low", "-o", "%T").strip()

    def drain(self, node: str) -> None:
        self.call("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def resume(self, node: str) -> None:
        self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def kill_node(self, node: str) -> None:
        """End slurmd and everything else on this node at once, as a loss of power does. Slurm is not told."""
        os.kill(self._inner[node], signal.SIGKILL)  # the first process of its namespace takes all others with it
        self._daemons.pop(node).wait(timeout=PATIENCE_S)

    def processes(self, words: str, node: str) -> list[int]:
        """The numbers, as seen here, of the node's processes whose command line has these words."""
        space = os.readlink(f"/proc/{self._inner[node]}/ns/pid")
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(path / "ns" / "pid") == space and words in (path / "cmdline").read_text():
                    found.append(int(path.name))
        return sorted(found)

    def start_node(self, node: str) -> None:
        script = 'hostname "$0" && mkdir -p "$1/spool-$0" && slurmd -D -N "$0" -f "$1/slurm.conf"; exit $?'
        apart = ("unshare", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
        self._daemons[node] = subprocess.Popen(
            [*self._enter(node), *apart, "sh", "-c", script, node, str(self.folder)],
            env={**self.environment, "SLURM_CONF": str(self.folder / "slurm.conf")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / f"{node}.err").open("ab"),
        )
        self._inner[node] = self._innermost(self._daemons[node].pid, "sh")

    def wait_idle(self) -> None:
        """Wait until all nodes can take jobs."""

        def idle() -> bool:
            try:
                return all(self.node_state(node) == "idle" for node in self.nodes)
            except Refused:  # the controller is not there yet
                return False

        self.wait(idle, "idle nodes")

    def tail(self, lines: int = 15) -> str:
        """The ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join("\n".join([f"== {log.name}", *log.read_text().splitlines()[-lines:]]) for log in logs)

    # ------------------------------------------------------------ namespaces

    def start(self, **limits: int) -> None:
        """Make the namespaces and start the daemons. OSError or CalledProcessError where that is not permitted."""
        settings = {"kill_wait_s": 5, "node_timeout_s": 5, "grace_s": 60, **limits}
        text = _CONFIG.format(folder=self.folder, nodes=self.count, **settings)
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "slurm.conf").write_text(text)
        hosts = "".join(f"{address} {name}\n" for name, address in {**self.nodes, "login": LOGIN}.items())
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        self._keep("login", "unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child", "--mount-proc")
        self._run("login", "mount", "--bind", str(self.folder / "hosts"), "/etc/hosts")
        self._run("login", "hostname", "login")
        for words in ("link add cables type bridge", f"address add {LOGIN}/24 dev cables"):
            self._run("login", "ip", *words.split())
        self._up("login", "lo", "cables")
        for node, address in self.nodes.items():
            self._keep(node, *self._enter("login"), "unshare", "--net")
            inside = self._inner[f"keep {node}"]
            # not in the namespace of processes: the number of the other one is as seen here
            add = f"link add to-{node} type veth peer name cable netns {inside}"
            outside = ["nsenter", f"--target={self._inner['keep login']}", "--net", "ip", *add.split()]
            subprocess.run(outside, check=True, capture_output=True, text=True)
            self._run("login", "ip", "link", "set", f"to-{node}", "master", "cables")
            self._run(node, "ip", "address", "add", f"{address}/24", "dev", "cable")
            self._up(node, "lo", "cable")
            self._up("login", f"to-{node}")
        self._daemons["slurmctld"] = subprocess.Popen(
            [*self._enter("login"), "slurmctld", "-D", "-f", str(self.folder / "slurm.conf")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder / "slurmctld.err").open("ab"),
        )
        for node in self.nodes:
            self.start_node(node)
        self.wait_idle()

    def close(self) -> None:
        for keeper in reversed(list(self._keepers.values())):
            keeper.kill()  # --kill-child
            keeper.communicate()
        for daemon in self._daemons.values():
            daemon.wait(timeout=PATIENCE_S)

    def _enter(self, name: str) -> list[str]:
        return [
            "nsenter", f"--target={self._inner[f'keep {name}']}", "--net", "--pid", "--mount", "--uts", "--wd=."
        ]  # fmt: skip

    def _keep(self, name: str, *command: str) -> None:
        """A process that keeps a namespace until its standard input is closed, which this process's end does too."""
        keeper = subprocess.Popen(
            [*command, "sh", "-c", "echo made; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._keepers[name] = keeper
        assert keeper.stdout and keeper.stderr
        if keeper.stdout.readline() != "made\n":
            raise OSError(keeper.stderr.read().strip())
        self._inner[f"keep {name}"] = self._innermost(keeper.pid, "cat")

    def _innermost(self, pid: int, name: str) -> int:
        """The descendant that runs this program, by its number outside."""

        def found() -> int:
            at = pid
            while Path(f"/proc/{at}/comm").read_text().strip() != name:
                children = Path(f"/proc/{at}/task/{at}/children").read_text().split()
                if not children:
                    return 0
                at = int(children[0])
            return at

        deadline = time.monotonic() + PATIENCE_S
        while not (inner := found()):
            if time.monotonic() > deadline:
                raise OSError(f"process {pid} never became {name}")
            time.sleep(0.005)
        return inner

    def _run(self, name: str, *words: str) -> None:
        subprocess.run([*self._enter(name), *words], check=True, capture_output=True, text=True)

    def _up(self, name: str, *links: str) -> None:
        for link in links:
            self._run(name, "ip", "link", "set", link, "up")


def missing() -> str:
    """Why there can be no Slurm here; empty where there can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")]
    if absent:
        return f"{', '.join(absent)} not installed; on Debian: apt-get install slurmctld slurmd slurm-client"
    if os.geteuid():
        return "a node of Slurm has to run as root here"
    return ""


@contextmanager
def slurmbox(folder: Path, nodes: int = 2, **limits: int) -> Iterator[SlurmBox]:
    """A cluster that is up. Skips the test, with the reason, where there can be none.

    `limits`: grace_s (of a preemption), kill_wait_s (from SIGTERM to SIGKILL at a time limit), node_timeout_s.
    """
    if why := missing():
        pytest.skip(f"no Slurm: {why}")
    box = SlurmBox(folder, nodes)
    try:
        try:
            box.start(**limits)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no Slurm: namespaces cannot be made here: {error} {getattr(error, 'stderr', '')}")
        yield box
    finally:
        box.close()
