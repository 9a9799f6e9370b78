"""Ray's client, in a process of its own: Ray is imported while the config is composed, and a submission waits neither
for the driver's first line nor for Ray's goodbye.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dtf.cluster.platform import Unanswered
from dtf.cluster.ray_driver_state import write_state
from dtf.core.errors import BusyError, ConfigError, PeerError

_NAMESPACE = "dtf"
_ANSWER_S, _ENDS_S, _READY_S = 60.0, 5.0, 60.0
"""For Ray's answer to a submission; for the driver of an earlier job to end; for the new one's first answer."""
_START = (
    "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\nfrom dtf.cluster.ray_client import main\nsys.exit(main())"
)
_NEEDED_LATER = ("ray._common.pydantic_compat", "ray._private.arrow_serialization", "starlette.datastructures")
"""What Ray imports when it sends something for the first time: 0.2 s, which pass while the config is composed."""
_ERRORS = {error.__name__: error for error in (PeerError, BusyError, ConfigError)}


class RayClient:
    """A process that imports Ray at once, and then waits for a job. It ends where none comes."""

    def __init__(self) -> None:
        path = [os.path.abspath(part) for part in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def submit(self, address: str, actor: str, job: dict[str, Any]) -> None:
        """Hand the job's driver to the cluster, which knows it by the name `actor`. PeerError where no cluster answers,
        BusyError where another job has that name, Unanswered where it is not known whether the cluster has the job.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as words:
            words.write(json.dumps([address, actor, job]).encode())
        with self._process.stdout as answers:
            answer = answers.readline() if select.select([answers], [], [], _ANSWER_S)[0] else b""
        if not answer:
            self._process.kill()
            raise Unanswered(
                f"launcher.address={address}: Ray's client has not answered; give the same command again, which finds "
                "a job that was taken"
            )
        kind, text = json.loads(answer)
        if kind:
            raise _ERRORS[kind](f"launcher.address={address}: {text}")


def start_client(words: Sequence[str]) -> None:
    """Let Ray be imported while the config is composed, where the words of a command line submit to Ray."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    submits = given.get("launcher") == "ray" and given.get("launcher.dry_run", "false") == "false"
    if submits and not _started and find_spec("ray") is not None:
        _started.append(RayClient())


def ray_client() -> RayClient:
    """The one that was started, or a new one."""
    return _started.pop() if _started else RayClient()


_started: list[RayClient] = []
"""One that waits for the job of this command line."""


def main() -> int:
    """The process itself."""
    import ray  # pyright: ignore[reportMissingImports]

    from dtf.cluster import after_exit, ray_driver, ray_driver_state, ray_ends, ray_placement

    for module in (ray_driver, ray_driver_state, ray_placement, ray_ends, after_exit):
        ray.cloudpickle.register_pickle_by_value(module)
    for name in _NEEDED_LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    asked = sys.stdin.buffer.read()
    if not asked:
        return 0
    address, actor, job = json.loads(asked)
    answers, sys.stdout = sys.stdout, sys.stderr  # Ray prints
    try:
        _connect(ray, address)
        driver = _start(ray, ray_driver.Driver, actor, job)
    except Exception as error:  # noqa: BLE001  told to whoever submits
        kind = type(error).__name__ if type(error).__name__ in _ERRORS else "PeerError"
        lines = str(error).strip().splitlines()
        text = lines[0] if lines else type(error).__name__
        print(json.dumps([kind, text if kind in _ERRORS and lines else f"Ray: {text}"]), file=answers, flush=True)
        return 1
    print(json.dumps(["", ""]), file=answers, flush=True)
    try:
        _see_it_begin(ray, driver, job)
    finally:
        ray.shutdown()
    return 0


def _connect(ray: Any, address: str) -> None:
    try:
        ray.init(
            address=address, namespace=_NAMESPACE, log_to_driver=False, logging_level="ERROR", configure_logging=False
        )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise PeerError(f"no Ray cluster answers: {str(error).splitlines()[0]}") from error


def _start(ray: Any, driver: type, actor: str, job: dict[str, Any]) -> Any:
    """Register the driver, once. BusyError while another job of the folder has its name."""
    options = {
        "name": actor,
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": 4,
        "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},  # it lives as long as the cluster, and is never drained
    }
    deadline = time.monotonic() + _ENDS_S
    while True:
        with contextlib.suppress(ValueError):  # the name is taken
            return ray.remote(driver).options(**options).remote(job)
        with contextlib.suppress(ValueError, ray.exceptions.RayActorError):  # that of an earlier job ends just now
            known = ray.get_actor(actor)
            if ray.get(known.ready.remote(), timeout=_READY_S)[0] == job["id"]:
                return known
        if time.monotonic() > deadline:
            raise BusyError(
                f"{job['job_folder']} has another job on this cluster, the actor {actor} of the namespace "
                f"{_NAMESPACE}; end that first"
            )
        time.sleep(0.05)


def _see_it_begin(ray: Any, driver: Any, job: dict[str, Any]) -> None:
    """Until the driver is at work. Why it cannot begin is written in its place: it may not see the folder."""
    try:
        unseen = ray.get(driver.ready.remote(), timeout=_READY_S)[1]
    except ray.exceptions.GetTimeoutError:
        return
    except ray.exceptions.RayError as error:
        unseen = f"did not start the job's driver: {str(error).strip().splitlines()[-1]}"
    if unseen:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(driver)
        state = {"id": job["id"], "state": "failed", "detail": f"Ray's head node {unseen}", "runs": {}}
        write_state(Path(job["job_folder"]), state)
