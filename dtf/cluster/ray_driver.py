"""The driver of a job in a Ray cluster: places it on nodes, follows it, and places it again where its end says so.

Carried by value, as `ray_placement.py` is.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]

from dtf.cluster.after_exit import goes_on, newest_checkpoint
from dtf.cluster.ray_driver_state import BEAT_S, beat, is_cancelled, last_state, write_state
from dtf.cluster.ray_ends import counted, joint, live
from dtf.cluster.ray_placement import Placement

_ENDS_KEPT = 10
_BUSY, _BUSY_S = 73, 20.0
"""A lost node may not know yet that it is lost: its run has the folder for as long."""


class Driver:
    """Places the job on nodes, follows it to its end, and places it again where its exit code says so.

    `job`: see `dtf.cluster.ray_platform.Ray.render`. Ray starts a driver that dies again; it goes on from its file.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._folder = job, Path(job["job_folder"])
        self._lock = threading.Lock()
        fresh = {"id": job["id"], "state": "queued", "detail": "", "cancelled": False, "runs": {}}
        self._state: dict[str, Any] = last_state(self._folder, job["id"]) or fresh
        self._unseen = "" if os.path.exists(job["bundle"]) else f"{socket.gethostname()} does not see {job['bundle']}"
        if not self._unseen:
            self._tell()
            for work in (self._drive, self._beat):
                threading.Thread(target=work, daemon=True).start()

    def ready(self) -> tuple[str, str]:
        """Which submission this is, and why it cannot begin; answers once it is at work."""
        return self._job["id"], self._unseen

    @property
    def cancelled(self) -> bool:
        """Whether the job is to end; its run saves first."""
        if not self._state["cancelled"] and is_cancelled(self._folder, self._job["id"]):
            self._tell(cancelled=True)
        return self._state["cancelled"]

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            beat(self._folder)

    def _drive(self) -> None:
        runs = self._job["trials"] or [""]
        try:
            with zipfile.ZipFile(self._job["bundle"]) as archive:
                run_dirs = [run["run_dir"] for run in json.loads(archive.read("bundle.json"))["runs"]]
            with ThreadPoolExecutor(self._job["parallel"] or len(runs)) as pool:
                list(pool.map(self._follow, range(len(runs)), runs, run_dirs))
            self._tell(state=joint([run["state"] for run in self._state["runs"].values()], self.cancelled))
        except BaseException as error:
            self._tell(state="failed", detail=f"the driver on Ray's head node: {type(error).__name__}: {error}")
            raise
        finally:
            ray.kill(ray.get_runtime_context().current_actor)

    def _follow(self, number: int, name: str, run_dir: str) -> None:
        """One run to its end."""
        fresh = {"state": "queued", "attempt": 0, "newest": 0, "stalled": 0, "detail": "", "ends": []}
        run = self._state["runs"].get(name) or fresh
        while run["state"] not in ("finished", "failed", "cancelled"):
            run["attempt"] += 1
            placement = Placement(self._job, number, run["attempt"], lambda: self.cancelled)
            self._keep(name, run, state="queued" if run["attempt"] == 1 else "requeued")
            code = placement.run(lambda **values: self._keep(name, run, **values))
            newest = newest_checkpoint(run_dir)
            again, run["stalled"] = goes_on(code, newest != run["newest"], run["stalled"])
            run["newest"] = newest
            end = "lost a node or an actor" if code is None else f"exit code {code}"
            run["ends"] = [*run["ends"], f"{end}{placement.cause and f': {placement.cause}'}"][-_ENDS_KEPT:]
            detail = f"{run['ends'][-1]}; {run['attempt']} placement(s)"
            if code == 0:
                self._keep(name, run, state="finished", detail=detail)
            elif again and self.cancelled:
                self._keep(name, run, state="cancelled", detail=detail)
            elif again:
                self._keep(name, run, state="requeued", detail=detail)
                self._wait(_BUSY_S if code == _BUSY else 2 ** run["stalled"] if run["stalled"] else 0)
            else:
                limit = f", and no new checkpoint in {run['stalled']} such ends" if run["stalled"] > 1 else ""
                self._keep(name, run, state="failed", detail=f"{detail}{limit}")

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.cancelled:
            time.sleep(0.2)

    def _keep(self, name: str, run: dict[str, Any], **values: str) -> None:
        before = self._state["runs"].get(name)
        run.update(values)
        if run != before:
            self._tell(run=(name, dict(run)))

    def _tell(self, run: tuple[str, dict[str, Any]] | None = None, **values: Any) -> None:
        """Change the state, and write it whole."""
        with self._lock:
            self._state.update(values)
            if run:
                self._state["runs"][run[0]] = run[1]
                runs = self._state["runs"]
                self._state["detail"] = run[1]["detail"] if not run[0] else counted(runs, len(self._job["trials"]))
                self._state["state"] = live([each["state"] for each in runs.values()])
            write_state(self._folder, self._state)
