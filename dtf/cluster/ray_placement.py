"""What a job is on the nodes of a Ray cluster: an actor for each of its processes, placed together, until they end.

Ray carries these classes to its workers by value, so that the Python of its nodes needs no dtf: nothing is imported
here but what travels too. What trains is the command line of the job, a process of its own under each actor.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

from dtf.cluster.after_exit import ALWAYS
from dtf.cluster.ray_ends import verdict

_POLL_S = 1.0
_FAREWELL_S = 10.0
"""In which all processes of a run end by themselves once one has."""
_MARGIN_S = 30.0
"""What a supervisor may take beyond the time for a save, before it is killed."""
_PORTS = range(20_000, 30_000)
"""Below those that Linux gives out by itself, and above those of Ray's workers."""
_DIES_WITH_PARENT = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]): sys.exit(143)
os.execvp(sys.argv[2], sys.argv[2:])"""


class NodeActor:
    """The job's process on one node. It dies with this actor, and its ranks die with it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped, self._lock = False, threading.Lock()

    def place(self, needs: str) -> dict[str, Any]:
        """Where this is, a port that is free here, and whether the file `needs` is seen."""
        address = ray.util.get_node_ip_address()
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": address,
            "host": socket.gethostname(),
            "port": _free_port(address),
            "sees": os.path.exists(needs),
        }

    def run(self, command: list[str], environment: dict[str, str], log: str) -> int:
        """Run the command to its end; returns its exit code, or 128 + the number of the signal that ended it.

        What is printed goes to the file `log`, and to Ray's own log of this actor.
        """
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets it
        with self._lock:
            if self._stopped:
                return 143
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", _DIES_WITH_PARENT, str(os.getpid()), *command],
                env={**kept, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert process.stdout is not None
        with open(log, "ab", buffering=0) as file:
            for line in process.stdout:
                with contextlib.suppress(OSError):  # a full disk ends no run
                    file.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
        code = process.wait()
        return code if code >= 0 else 128 - code

    def stop(self, grace_s: float) -> None:
        """Tell the process to save and leave; it is killed when it is still there after `grace_s` seconds."""
        with self._lock:
            self._stopped = True
            process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            timer = threading.Timer(grace_s, process.kill)
            timer.daemon = True
            timer.start()


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket(family) as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise OSError(f"no free port on {address} among 100 of {_PORTS.start} to {_PORTS.stop}")


class Placement:
    """One placement of a run, from a placement group to the exit codes of its processes."""

    def __init__(self, job: dict[str, Any], number: int, attempt: int, cancelled: Callable[[], bool]) -> None:
        self._job, self._number, self._attempt, self._cancelled = job, number, attempt, cancelled
        self._label = f"trial-{number}-" if job["trials"] else ""
        self._folder = Path(job["job_folder"])
        self._alone_since = 0.0
        self.cause = ""

    def run(self, see: Any) -> int | None:
        """Returns the one exit code, None where a process was lost. `see(detail=, state=)` hears how it goes."""
        bundles = [process["resources"] for process in self._job["processes"]]
        name = f"{self._job['name']}-{self._label}{self._attempt}"
        group = placement_group(bundles, strategy=self._job["spread"], name=name)
        actors: list[Any] = []
        try:
            while not group.wait(_POLL_S):
                see(detail=f"waits for {len(bundles)} x {bundles[0]}")
                if self._cancelled():
                    self.cause = "cancelled"
                    return 75
            actors = [self._actor(group, index, resources) for index, resources in enumerate(bundles)]
            places = self._places(actors)
            if not places:
                self.cause = "cancelled"
                return 75
            blind = [_shown(place) for place in places if not place["sees"]]
            if blind:
                shared = "put run.dir on storage that all nodes of the cluster share"
                self.cause = f"{', '.join(blind)} does not see {self._job['bundle']}; {shared}"
                return 2
            see(detail=f"on {', '.join(dict.fromkeys(map(_shown, places)))}", state="running")
            return self._follow(actors, places)
        except ray.exceptions.RayError as error:
            self.cause = self.cause or f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            return None
        finally:
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)

    def _actor(self, group: Any, index: int, resources: dict[str, float]) -> Any:
        cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        others = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU", "memory")}
        return (
            ray.remote(NodeActor)
            .options(
                num_cpus=cpus,
                num_gpus=gpus,
                memory=resources.get("memory") or None,
                resources=others,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote()
        )

    def _places(self, actors: list[Any]) -> list[dict[str, Any]]:
        """Where the actors are; empty when the job was cancelled before they were anywhere."""
        asked = [actor.place.remote(self._job["bundle"]) for actor in actors]
        while len(ray.wait(asked, num_returns=len(asked), timeout=_POLL_S)[0]) < len(asked):
            if self._cancelled():
                return []
        return ray.get(asked)

    def _follow(self, actors: list[Any], places: list[dict[str, Any]]) -> int | None:
        """Until all processes have ended: one that ends otherwise than well takes the others with it."""
        grace_s = self._job["grace_s"] + _MARGIN_S
        hours = self._job["hours"]
        deadline = time.time() + 3600 * hours if hours else None
        reasons = [self._folder / f"{self._label}reason-{index}.txt" for index in range(len(actors))]
        running = {
            actor.run.remote(
                self._command(),
                {**self._environment(index, places, deadline), "DTF_REASON_FILE": str(reasons[index])},
                self._log(index, places[index]),
            ): index
            for index, actor in enumerate(actors)
        }
        codes: list[int | None] = [None] * len(actors)
        nodes, stopped_at = {place["node"] for place in places}, 0.0
        while running:
            ended, _ = ray.wait(list(running), num_returns=1, timeout=_POLL_S)
            for reference in ended:
                index = running.pop(reference)
                with contextlib.suppress(ray.exceptions.RayError):  # the actor or its node is gone
                    codes[index] = ray.get(reference)
                if codes[index] is None:
                    self.cause = self.cause or f"lost the process on {places[index]['address']}"
            why = self._why_stop(nodes, deadline, codes, set(running.values()))
            if why and not stopped_at:
                self.cause, stopped_at = self.cause or why, time.monotonic()
                for index in running.values():
                    actors[index].stop.remote(grace_s)
            if stopped_at and time.monotonic() > stopped_at + grace_s + _MARGIN_S:
                break  # not even the actors answer
        code = verdict(codes, self._job["deciding"])
        self.cause = _reason(reasons, codes, code) or self.cause
        return code

    def _why_stop(self, nodes: set[str], deadline: float | None, codes: list[int | None], running: set[int]) -> str:
        """Why all processes should leave now; empty while they should go on."""
        if self._cancelled():
            return "cancelled"
        drained = nodes & _draining()
        if drained:
            return f"Ray drains the node {', '.join(sorted(node[:8] for node in drained))}"
        if deadline and time.time() > deadline:
            return f"launcher.hours={self._job['hours']:g} are over"
        ended = set(range(len(codes))) - running
        if any(codes[index] is None for index in ended):
            return self.cause
        failed = any(codes[index] != 0 for index in ended) or ended >= set(range(self._job["deciding"]))
        if not failed or not running:
            return ""
        self._alone_since = self._alone_since or time.monotonic()
        waited = time.monotonic() - self._alone_since > _FAREWELL_S
        return "another process of the run has ended" if waited else ""

    def _command(self) -> list[str]:
        return [*self._job["command"], *([f"--trial={self._number}"] if self._job["trials"] else [])]

    def _environment(self, index: int, places: list[dict[str, Any]], deadline: float | None) -> dict[str, str]:
        """What the process knows of the job: see `dtf.cluster.allocation`."""
        at = [_endpoint(place["address"], place["port"]) for place in places]
        process = self._job["processes"][index]
        environment = {"DTF_RESTARTS": str(self._attempt - 1)}
        if deadline:
            environment["DTF_DEADLINE"] = f"{deadline:.0f}"
        if process["role"]:
            endpoints = at[: self._job["deciding"]]
            return {
                **environment,
                "DTF_ROLE": process["role"],
                "DTF_ID": str(process["id"]),
                "DTF_ENDPOINTS": ",".join(endpoints),
            }
        return {**environment, "DTF_NODES": str(len(places)), "DTF_NODE": str(index), "DTF_ADDRESS": at[0]}

    def _log(self, index: int, place: dict[str, Any]) -> str:
        """The file for what the process prints, with a line about this placement."""
        process = self._job["processes"][index]
        name = f"{process['role']}-{process['id']}" if process["role"] else f"node-{index}"
        path = self._folder / f"{self._label}{name}.log"
        where = f"{place['host']} ({place['address']}, node {place['node'][:8]})"
        with open(path, "a") as file:
            file.write(f"== placement {self._attempt}, on {where}\n")
        (self._folder / f"{self._label}reason-{index}.txt").unlink(missing_ok=True)
        return str(path)


def _reason(files: list[Path], codes: list[int | None], code: int | None) -> str:
    """What the process said that decided."""
    for file, own in zip(files, codes, strict=True):
        if own == code and code not in (0, *ALWAYS):
            with contextlib.suppress(OSError):
                return file.read_text().strip()
    return ""


def _draining() -> set[str]:
    """Ids of the nodes that Ray takes away. None while its head does not answer: the next look sees them."""
    with contextlib.suppress(ray.exceptions.RayError, RuntimeError, OSError):
        return set(ray._private.state.state.get_draining_nodes())
    return set()


def _shown(place: dict[str, Any]) -> str:
    return f"{place['address']} ({place['host']})"


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
