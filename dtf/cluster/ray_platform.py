"""Ray clusters: a driver on the head node places the job's supervisors and follows them, see `ray_driver.py`.

A submission alone asks the cluster, by a process that imports Ray, see `ray_client.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.registry import option, register
from dtf.api.schema import KeyProblem, show
from dtf.cluster.followed_logs import followed
from dtf.cluster.platform import JOB_FOLDER, JobRequest, JobState, Platform, State, moved
from dtf.cluster.ray_client import ray_client
from dtf.cluster.ray_driver_state import CANCEL_FILE, SILENT_S, STATE_FILE, age_s, last_state
from dtf.core.errors import ConfigError, PeerError
from dtf.core.files import replace_text

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

_JOB_FILE, _ANSWER_S = "ray.json", 5.0
_GONE = "the cluster may be gone; submit again with the same run.dir, which is refused where the job still lives"
_RESOURCE = re.compile(r"([A-Za-z_][A-Za-z0-9_:./-]*)=([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)")


@register("launcher", "ray")
class Ray(Platform):
    """Submit the run to a Ray cluster: one actor on each node runs its supervisor.

    The driver is a detached actor on the head node. Nodes that Ray drains are left with a save, and the run goes on on
    others. `extra`: further resources of each node, as NAME=AMOUNT.
    """

    address: str = option(
        default="auto",
        doc="the cluster: `auto`, by RAY_ADDRESS or the one of this machine; HOST:PORT of its head; ray://HOST:PORT",
    )

    def check(self, strategy: Strategy) -> None:
        super().check(strategy)
        _resources(self.extra)
        if not self.address.strip():
            raise KeyProblem(
                "launcher.address", "launcher.address='' names no cluster; give auto, or HOST:PORT of its head"
            )

    def render(self, request: JobRequest) -> dict[str, str]:
        """One file: what the driver gets."""
        first = next(iter(request.roles))
        job = {
            "id": request.digest[:16],
            "name": request.name,
            "job_folder": str(request.job_folder),
            "bundle": str(request.bundle),
            "command": request.command(self.python or sys.executable),
            "processes": self._processes(request),
            "spread": "SPREAD" if request.separate else "STRICT_SPREAD",
            "deciding": request.roles[first] if request.separate else request.nodes,
            "hours": self.hours,
            "grace_s": request.grace_s,
            "trials": list(request.trials),
            "parallel": request.parallel,
        }
        return {_JOB_FILE: json.dumps(job, indent=2) + "\n"}

    def _processes(self, request: JobRequest) -> list[dict[str, Any]]:
        """What the driver starts, in order, and the resources that each takes: a supervisor on each node, or each
        process of roles.
        """
        threads, others = max(1, self.threads), _resources(self.extra)
        if not request.separate:
            resources = {"CPU": float(self.per_node() * threads), "GPU": float(self.gpus), **others}
            return [{"role": "", "id": node, "resources": _needed(resources)} for node in range(request.nodes)]
        return [
            {
                "role": role,
                "id": number,
                "resources": _needed(
                    {"CPU": float(threads), "GPU": float(bool(self.gpus) and role == "trainer"), **others}
                ),
            }
            for role, count in request.roles.items()
            for number in range(count)
        ]

    def submit(self, request: JobRequest, files: dict[str, Path]) -> dict[str, str]:
        if find_spec("ray") is None:
            raise ConfigError(
                "launcher=ray needs the package ray, which is not installed: python -m pip install 'dtf[ray]'"
            )
        _check_answers(self.address)
        job = json.loads(files[_JOB_FILE].read_text())
        actor = f"dtf-{hashlib.sha256(str(request.job_folder).encode()).hexdigest()[:12]}"  # a folder has one job
        ray_client().submit(self.address, actor, job)
        return {"job": request.name, "id": job["id"], "folder": str(request.job_folder)}

    def state(self, handle: dict[str, str]) -> JobState:
        """By the files of the job's folder; nobody is asked."""
        folder = Path(handle["folder"])
        known = last_state(folder, handle["id"])
        if known is None:
            begins = age_s(folder / _JOB_FILE) < SILENT_S
            return JobState(State.queued) if begins else JobState(State.unknown, _never(folder))
        try:
            state = JobState(State(known["state"]), str(known["detail"]))
        except (ValueError, KeyError) as error:
            return JobState(State.unknown, f"{folder} has no state of dtf's driver ({type(error).__name__}: {error})")
        if not state.state.is_live or (silent_s := age_s(folder / STATE_FILE)) < SILENT_S:
            return state
        last = f"{state.state.value}{state.detail and f', {state.detail}'}"
        return JobState(State.unknown, f"its driver is silent for {silent_s:.0f} s; at last: {last}; {_GONE}")

    def cancel(self, handle: dict[str, str]) -> None:
        folder = Path(handle["folder"])
        state = self.state(handle).state
        if not state.is_live and state is not State.unknown:
            return
        if not (folder / _JOB_FILE).exists():
            raise moved(folder, "Ray's own commands")
        replace_text(folder / CANCEL_FILE, handle["id"])

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        known = time.monotonic() + 1, True

        def lives() -> bool:
            nonlocal known
            if time.monotonic() > known[0]:
                known = time.monotonic() + 1, self.state(handle).state.is_live
            return known[1]

        yield from followed(lambda: sorted((folder / JOB_FOLDER).glob("*.log")), lives if follow else lambda: False)


def _never(folder: Path) -> str:
    return f"its driver has written nothing in {SILENT_S:.0f} s: Ray's head node may not see {folder}; {_GONE}"


def _check_answers(address: str) -> None:
    """Raise PeerError where nobody listens at HOST:PORT, as Ray itself would wait for ever."""
    given = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    host, _, port = given.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # of this machine: Ray looks whether it runs
    try:
        socket.create_connection((host.strip("[]"), int(port)), _ANSWER_S).close()
    except OSError as error:
        name = "RAY_ADDRESS" if address == "auto" else "launcher.address"
        raise PeerError(f"{name}={given}: no Ray cluster answers there ({error})") from error


def _resources(extra: list[str]) -> dict[str, float]:
    """Resource -> amount. ConfigError for what is no such pair."""
    resources = {}
    for text in extra:
        pair = _RESOURCE.fullmatch(text)
        if not pair:
            raise KeyProblem(
                "launcher.extra",
                f"launcher.extra={show(text)} is no resource of Ray; give NAME=AMOUNT, as in "
                "launcher.extra=['CPU=16','spot=1']",
            )
        resources[pair[1]] = float(pair[2])
    return resources


def _needed(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in resources.items() if amount}
