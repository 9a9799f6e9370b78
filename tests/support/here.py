"""A platform for tests: its scheduler is this host. Each node of a job is a process, with a port of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dtf.api.registry import register
from dtf.cluster.platform import JobRequest, JobState, Platform, State


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@register("launcher", "here")
class Here(Platform):
    """Run the job's processes on this host."""

    def render(self, request: JobRequest) -> dict[str, str]:
        command = request.command(sys.executable)
        trials = [[f"--trial={number}"] for number in range(len(request.trials))] or [[]]
        environments: list[dict[str, str]] = []
        if request.separate:
            first = next(iter(request.roles))
            endpoints = ",".join(f"127.0.0.1:{free_port()}" for _ in range(request.roles[first]))
            environments = [
                {"DTF_ROLE": role, "DTF_ID": str(number), "DTF_ENDPOINTS": endpoints}
                for role, count in request.roles.items()
                for number in range(count)
            ]
        else:
            address = f"127.0.0.1:{free_port()}"
            environments = [
                {"DTF_NODES": str(self.nodes), "DTF_NODE": str(node), "DTF_ADDRESS": address}
                for node in range(self.nodes)
            ]
        for environment in environments:
            environment["DTF_REASON_FILE"] = str(request.job_folder / "reason")
        processes = [[command + trial, environment] for trial in trials for environment in environments]
        return {"job.txt": json.dumps({"processes": processes, "extra": self.extra})}

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        job = json.loads(files["job.txt"].read_text())
        numbers = []
        for number, (command, environment) in enumerate(job["processes"]):
            with (request.job_folder / f"node{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    command, env=os.environ | environment, stdout=log, stderr=log, start_new_session=True
                )
            numbers.append(str(process.pid))
        return {"job": numbers[0], "pids": " ".join(numbers)}

    def state(self, handle: dict[str, str]) -> JobState:
        def lives(pid: str) -> bool:
            try:
                return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
            except OSError:
                return False

        live = [pid for pid in handle["pids"].split() if lives(pid)]
        return JobState(State.running, f"{len(live)} live") if live else JobState(State.finished)

    def cancel(self, handle: dict[str, str]) -> None:
        for pid in handle["pids"].split():
            os.kill(int(pid), signal.SIGTERM)

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        for path in sorted((folder / "job").glob("node*.log")):
            yield from path.read_text().splitlines()
