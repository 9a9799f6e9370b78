"""The kubelet of a `KubeBox`: pods are processes of this machine.

Of what a pod's container sees, three things differ from a real cluster, and are rewritten in its command and its
environment: paths of mounts become folders of the test, but for claims, whose path is the same here; names of pods
become addresses 127.x.y.z, one for each name, which stays when the pod is replaced; and its interpreter is this one.
"""

from __future__ import annotations

import base64
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kubebox import Object, Store, is_over, now

MARK = "KUBEBOX_POD"
"""In the environment of all processes of a pod: its uid."""


@dataclass
class _Running:
    process: subprocess.Popen[bytes]
    reason_file: Path
    log: Path
    told_at: float | None = None
    grace_s: float = 30.0
    deadline: float = field(default=float("inf"))


class Kubelet:
    """Called with the store's lock held."""

    def __init__(self, store: Store, folder: Path, environment: dict[str, str]) -> None:
        self._store, self._folder, self._environment = store, folder, environment
        self._running: dict[str, _Running] = {}
        self._addresses: dict[str, str] = {}
        self._net = random.SystemRandom().randrange(1, 1 << 14)  # two boxes at a time must not share addresses
        self.started: list[tuple[str, float]] = []
        """Names of pods and when each process began, by time.monotonic()."""

    def sync(self) -> None:
        for pod in self._store.of_kind("Pod"):
            uid = pod["metadata"]["uid"]
            if is_over(pod):
                continue
            running = self._running.get(uid)
            if running is None:
                if "deletionTimestamp" in pod["metadata"]:  # it never began
                    pod["status"]["phase"] = "Failed"
                else:
                    self._start(pod)
                continue
            self._watch(pod, running)

    def _watch(self, pod: Object, running: _Running) -> None:
        code, time_now = running.process.poll(), time.monotonic()
        if code is None:
            late = time_now > running.deadline
            if running.told_at is None and ("deletionTimestamp" in pod["metadata"] or late):
                running.told_at = time_now
                if late:
                    pod["status"]["reason"] = "DeadlineExceeded"
                running.process.send_signal(signal.SIGTERM)
            elif running.told_at is not None and time_now - running.told_at > running.grace_s:
                self.kill(pod)
            return
        self._end_processes(pod["metadata"]["uid"])
        exit_code = 128 - code if code < 0 else code
        message = running.reason_file.read_text() if running.reason_file.exists() else ""
        ended = {"exitCode": exit_code, "finishedAt": now(), "message": message}
        pod["status"] |= {
            "phase": "Failed" if exit_code or "reason" in pod["status"] else "Succeeded",
            "containerStatuses": [{"name": "node", "state": {"terminated": ended}}],
        }

    def _start(self, pod: Object) -> None:
        spec, metadata = pod["spec"], pod["metadata"]
        (container,) = spec["containers"]
        place = self._folder / "pods" / metadata["uid"]
        place.mkdir(parents=True)
        paths = self._mounted(container, spec, place)
        reason_file = place / "reason"
        paths[container["terminationMessagePath"]] = str(reason_file)
        names: dict[str, str] = {}
        for one in container.get("env", []):
            value = one["value"] if "value" in one else _field(pod, one["valueFrom"]["fieldRef"]["fieldPath"])
            names[one["name"]] = value
        words = [re.sub(r"\$\((\w+)\)", lambda m: names.get(m[1], m[0]), word) for word in container["command"]]
        words = [self._rewritten(word, paths) for word in words]
        if words[0] == "python":
            words[0] = sys.executable
        words[-1] = words[-1].replace("exec python ", f"exec {sys.executable} ")
        names = {name: self._rewritten(value, paths) for name, value in names.items()}
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **self._environment, **names}
        log = place / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                words, env={**environment, MARK: metadata["uid"]}, cwd=place, stdin=subprocess.DEVNULL, stdout=out,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        seconds = spec.get("activeDeadlineSeconds")
        self._running[metadata["uid"]] = _Running(
            process, reason_file, log, grace_s=float(spec["terminationGracePeriodSeconds"]),
            deadline=time.monotonic() + seconds if seconds else float("inf"),
        )  # fmt: skip
        self.started.append((metadata["name"], time.monotonic()))
        status = [{"name": container["name"], "state": {"running": {"startedAt": now()}}, "ready": True}]
        pod["status"] |= {"phase": "Running", "containerStatuses": status}

    def _mounted(self, container: Object, spec: Object, place: Path) -> dict[str, str]:
        """Path in the container -> path here."""
        volumes = {one["name"]: one for one in spec["volumes"]}
        paths: dict[str, str] = {}
        for mount in container["volumeMounts"]:
            volume, path = volumes[mount["name"]], mount["mountPath"]
            if "secret" not in volume:
                continue
            here = place / mount["name"]
            here.mkdir()
            secret = self._store.objects["Secret", volume["secret"]["secretName"]]
            for name, content in secret["data"].items():
                (here / name).write_bytes(base64.b64decode(content))
            paths[path] = str(here)
        return paths

    def _rewritten(self, text: str, paths: dict[str, str]) -> str:
        for path, here in paths.items():
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=/|$)", here, text)
        return re.sub(r"[a-z0-9-]+-[0-9]+\.[a-z][a-z0-9-]+(?=:29500)", lambda name: self._address(name[0]), text)

    def _address(self, name: str) -> str:
        number = len(self._addresses) + 1
        return self._addresses.setdefault(name, f"127.{64 + (self._net >> 8)}.{self._net & 255}.{number}")

    def kill(self, pod: Object) -> None:
        """Without notice, all processes at once."""
        running = self._running.get(pod["metadata"]["uid"])
        if running:
            running.process.kill()
            self._end_processes(pod["metadata"]["uid"])

    def _end_processes(self, uid: str) -> None:
        """What is left of a container when its first process has ended."""
        mark = f"{MARK}={uid}\0".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        os.kill(int(entry.name), signal.SIGKILL)
                except OSError:
                    continue

    def kill_all(self) -> None:
        for uid, running in self._running.items():
            running.process.kill()
            running.process.wait()
            self._end_processes(uid)

    def log(self, pod: Object, follow: bool) -> Iterator[bytes]:
        """Without the lock."""
        running = self._running.get(pod["metadata"]["uid"])
        if running is None:
            return
        with running.log.open("rb") as file:
            while True:
                ended = running.process.poll() is not None  # asked before the file is read to its end
                if part := file.read():
                    yield part
                elif ended or not follow:
                    return
                else:
                    time.sleep(0.05)

    def text(self, pod: Object) -> str:
        """What a pod printed."""
        return b"".join(self.log(pod, follow=False)).decode(errors="replace")


def _field(pod: Object, path: str) -> str:
    """As of the downward API."""
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    assert match, path
    values: dict[str, Any] = pod["metadata"].get(match[1], {})
    return values.get(match[2], "")
