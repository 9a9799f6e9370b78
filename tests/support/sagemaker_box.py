"""Instances of SageMaker's training jobs on this host: what a CreateTrainingJob asks for is run as processes that see
their own /opt/ml and the names of the job's hosts. S3 is a folder: bucket and key are its path.

Needs mount and network namespaces.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.namespaces import ROOT, _namespace

_MOUNTS = (
    'mount -t tmpfs none /opt && mkdir /opt/ml && mount --rbind "$1" /opt/ml && mount --bind "$2" /etc/hosts && '
    'shift 2 && exec "$@"'
)


@contextmanager
def network() -> Iterator[int]:
    """The process id of a network namespace with a loopback interface. Skips the test where there is none."""
    keeper = None
    try:
        try:
            keeper = _namespace("unshare", "--map-root-user", "--net")
            subprocess.run([*_within(keeper.pid), "ip", "link", "set", "lo", "up"], check=True, capture_output=True)
            unshared = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /opt"]
            subprocess.run([*_within(keeper.pid), *unshared], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"namespaces cannot be made here: {error} {getattr(error, 'stderr', '')}")
        yield keeper.pid
    finally:
        if keeper is not None:
            keeper.kill()
            keeper.communicate()


def _within(pid: int) -> list[str]:
    return ["nsenter", f"--target={pid}", "--user", "--net", "--preserve-credentials"]


@dataclass
class Instances:
    """The instances of one start of a job. `folder`: for their disks. `s3`: the folder that stands for S3. `systems`:
    for file systems.
    """

    job: dict[str, Any]
    network: int
    folder: Path
    s3: Path
    systems: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        resources = self.job["ResourceConfig"]
        groups = resources.get("InstanceGroups") or [
            {"InstanceGroupName": "", "InstanceCount": resources["InstanceCount"]}
        ]
        number, named = 0, []
        for group in groups:
            hosts = [f"algo-{number + n + 1}" for n in range(group["InstanceCount"])]
            number += len(hosts)
            named.append({"instance_group_name": group["InstanceGroupName"], "hosts": hosts})
        every = [host for group in named for host in group["hosts"]]
        self.hosts = {"hosts": every, **({"instance_groups": named} if named[0]["instance_group_name"] else {})}
        for host in every:
            self._start(host)

    def _start(self, host: str) -> None:
        root = self.folder / host
        for part in ("input/config", "input/data", "output", "checkpoints"):
            (root / part).mkdir(parents=True)
        group = next(
            (g["instance_group_name"] for g in self.hosts.get("instance_groups", ()) if host in g["hosts"]), ""
        )
        resources = {"current_host": host, "current_group_name": group, **self.hosts}
        (root / "input" / "config" / "resourceconfig.json").write_text(json.dumps(resources))
        mounts = ""
        for channel in self.job["InputDataConfig"]:
            source, target = channel["DataSource"], root / "input" / "data" / channel["ChannelName"]
            if "S3DataSource" in source:
                shutil.copytree(self._path(source["S3DataSource"]["S3Uri"]), target)
            else:
                target.mkdir()
                mounts += f'mount --bind {self.systems} "$1/input/data/{channel["ChannelName"]}" && '
        if kept := self.kept:
            shutil.copytree(kept, root / "checkpoints", dirs_exist_ok=True)
        hosts = self.folder / f"{host}.hosts"
        hosts.write_text("".join(f"127.0.0.{n + 1} {name}\n" for n, name in enumerate(self.hosts["hosts"])))
        mounted = ["unshare", "--mount", "sh", "-c", mounts + _MOUNTS, "sh", str(root), str(hosts)]
        with (self.folder / f"{host}.log").open("wb") as log:
            self.processes[host] = subprocess.Popen(
                [*_within(self.network), *mounted, *self.job["AlgorithmSpecification"]["ContainerEntrypoint"]],
                env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": "/root", **self.job["Environment"]},
                cwd="/",
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def kept(self) -> Path | None:
        """The folder of S3 that keeps the checkpoints; None before there are any."""
        config = self.job.get("CheckpointConfig")
        path = self._path(config["S3Uri"]) if config else None
        return path if path and path.is_dir() else None

    def sync(self) -> None:
        """Copy the first instance's checkpoints to S3, file by file, as they are now. Nothing is removed there."""
        source = self.folder / self.hosts["hosts"][0] / "checkpoints"
        target = self._path(self.job["CheckpointConfig"]["S3Uri"])
        for path in sorted(source.rglob("*")):
            if path.is_file():
                copy = target / path.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                try:
                    shutil.copyfile(path, copy)
                except FileNotFoundError:  # renamed or removed meanwhile
                    copy.unlink(missing_ok=True)

    def _path(self, uri: str) -> Path:
        return self.s3 / uri.removeprefix("s3://").rstrip("/")

    def run_folder(self) -> Path:
        """Where the run is, as this host sees it."""
        kept = self.folder / self.hosts["hosts"][0] / "checkpoints"
        return kept if self.job.get("CheckpointConfig") else next(path for path in self.systems.iterdir())

    def at_step(self, step: int) -> None:
        """Wait until the run has come so far."""
        deadline, newest = time.monotonic() + 150, 0
        while newest < step:
            assert time.monotonic() < deadline and all(p.poll() is None for p in self.processes.values()), (
                self.printed()
            )
            time.sleep(0.05)
            try:
                lines = (self.run_folder() / "metrics.jsonl").read_text().splitlines()
                newest = max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)
            except (FileNotFoundError, StopIteration):
                continue

    def codes(self, *hosts: str) -> set[int]:
        """Exit codes of the instances, or of some, when they have ended."""
        return {self.processes[host].wait(timeout=150) for host in hosts or self.processes}

    def kill(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()

    def printed(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("*.log")))

    def failure(self, host: str) -> str:
        """What SageMaker shows as the reason."""
        path = self.folder / host / "output" / "failure"
        return path.read_text() if path.exists() else ""
