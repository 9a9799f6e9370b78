"""Ray clusters: a driver on the head node places the job's supervisors and follows them, see `ray_driver.py`.

Ray is imported when something is asked of a cluster, and not before.
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
from dtf.cluster.platform import JobRequest, JobState, Platform, State
from dtf.core.errors import BusyError, ConfigError, PeerError
from dtf.core.files import small_json

if TYPE_CHECKING:
    from dtf.api.strategy import Strategy

_JOB_FILE, _STATE_FILE = "ray.json", "ray-state.json"
_MOST_STATE = 1 << 26
"""Bytes of a state: each trial adds some hundred."""
_NAMESPACE, _SECONDS, _ANSWER_S = "dtf", 30, 5.0
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
        job = json.loads(files[_JOB_FILE].read_text())
        actor = f"dtf-{hashlib.sha256(str(request.job_folder).encode()).hexdigest()[:12]}"  # a folder has one job
        ray = connect(self.address)
        try:
            # `auto` may be another cluster where the job is asked for
            address = self.address if self.address.startswith("ray://") else ray.get_runtime_context().gcs_address
            unseen = _start_driver(ray, actor, job)
        except ray.exceptions.RayError as error:
            raise PeerError(f"launcher.address={self.address}: Ray did not start the job's driver: {error}") from error
        finally:
            ray.shutdown()
        if unseen:
            raise ConfigError(f"Ray's head node {unseen}; put run.dir on storage that all nodes of the cluster share")
        where = {"address": address, "folder": str(request.job_folder)}
        return {"job": request.name, "id": job["id"], "actor": actor, **where}

    def state(self, handle: dict[str, str]) -> JobState:
        known = _known(handle)
        if known is not None and not known.state.is_live:
            return known
        ray = connect(handle["address"])
        try:
            ray.get_actor(handle["actor"])
        except ValueError:
            known = _known(handle)  # it may just have ended
            if known is not None and not known.state.is_live:
                return known
            lost = "the Ray cluster does not know the job's driver: its head node was started anew; submit again"
            return JobState(State.unknown, f"{lost} ({known.detail})" if known and known.detail else lost)
        finally:
            ray.shutdown()
        return known or JobState(State.queued)

    def cancel(self, handle: dict[str, str]) -> None:
        if not self.state(handle).state.is_live:
            return
        ray = connect(handle["address"])
        try:
            ray.get(ray.get_actor(handle["actor"]).cancel.remote(), timeout=_SECONDS)
        except (ValueError, ray.exceptions.RayActorError):
            return  # it ended meanwhile
        finally:
            ray.shutdown()

    def logs(self, handle: dict[str, str], folder: Path, follow: bool) -> Iterator[str]:
        known = time.monotonic() + 5, True

        def lives() -> bool:
            nonlocal known
            if time.monotonic() > known[0]:
                known = time.monotonic() + 5, self.state(handle).state.is_live
            return known[1]

        yield from followed(lambda: sorted(Path(handle["folder"]).glob("*.log")), lives if follow else lambda: False)


def connect(address: str) -> Any:
    """The module `ray`, connected to a cluster. ConfigError where it is not there, PeerError where nobody answers."""
    if find_spec("ray") is None:
        raise ConfigError(
            "launcher=ray needs the package ray, which is not installed: python -m pip install 'dtf[ray]'"
        )
    _check_answers(address)
    import ray  # pyright: ignore[reportMissingImports]

    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise PeerError(f"launcher.address={address}: no Ray cluster answers: {str(error).splitlines()[0]}") from error
    return ray


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


def _start_driver(ray: Any, actor: str, job: dict[str, Any]) -> str:
    """Start the driver, once. Returns why it cannot begin. BusyError while another job of the folder has its name."""
    from dtf.cluster import after_exit, ray_driver, ray_ends, ray_placement

    for module in (ray_driver, ray_placement, ray_ends, after_exit):
        ray.cloudpickle.register_pickle_by_value(module)
    options = {
        "name": actor,
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_concurrency": 4,
        "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},  # it lives as long as the cluster, and is never drained
    }
    deadline = time.monotonic() + _SECONDS
    while True:
        driver = ray.remote(ray_driver.Driver).options(**options).remote(job)
        try:
            id, unseen = ray.get(driver.ready.remote(), timeout=_SECONDS)
        except ray.exceptions.RayActorError:  # that of an earlier job, which was about to end
            id, unseen = "", ""
            if time.monotonic() > deadline:
                raise
        if id == job["id"]:
            if unseen:
                ray.kill(driver)
            return unseen
        if id and time.monotonic() > deadline:
            raise BusyError(f"{job['job_folder']} has a job on this cluster, the actor {actor}; end that first")
        time.sleep(0.2)


def _known(handle: dict[str, str]) -> JobState | None:
    """What the driver of this job wrote last; None where it has not. PeerError for a file that no driver writes."""
    path = Path(handle["folder"], _STATE_FILE)
    try:
        state = small_json(path, _MOST_STATE)
        return JobState(State(state["state"]), str(state["detail"])) if state["id"] == handle["id"] else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise PeerError(f"{path} cannot be read ({type(error).__name__}: {error})") from error


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
