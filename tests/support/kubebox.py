"""A Kubernetes cluster for tests: an API server over HTTP, controllers, and a kubelet that starts pods as processes.

It does what the documents of Kubernetes, JobSet and Kubeflow Trainer say of the fields that dtf sets: Jobs with pod
failure policies, JobSets with failure and success policies and dependsOn, TrainJobs, eviction with notice and grace.
What it leaves out: scheduling, quotas, delays between replacements of a pod, admission, users and their rights.
"""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

Object = dict[str, Any]
_ROUTE = re.compile(
    r"/(?:api|apis/[a-z0-9.-]+)/v[0-9a-z]+/namespaces/(?P<namespace>[a-z0-9-]+)/(?P<plural>[a-z]+)"
    r"(?:/(?P<name>[a-z0-9.-]+)(?:/(?P<part>log|eviction))?)?"
)
_KINDS = {
    "secrets": "Secret",
    "services": "Service",
    "pods": "Pod",
    "jobs": "Job",
    "jobsets": "JobSet",
    "trainjobs": "TrainJob",
    "trainingruntimes": "TrainingRuntime",
}


def now() -> str:
    return datetime.now(UTC).isoformat()


class Store:
    """All objects of one namespace. Whoever reads or changes them holds `lock`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[tuple[str, str], Object] = {}
        self.deleted: list[Object] = []
        """What is gone, with its last status, for tests to look at."""

    def add(self, value: Object, owner: Object | None = None) -> Object:
        value = json.loads(json.dumps(value))
        value["metadata"] |= {"uid": uuid.uuid4().hex, "creationTimestamp": now(), "namespace": "default"}
        value.setdefault("status", {})
        if owner is not None:
            value["metadata"]["ownerReferences"] = [
                {key: owner[key] for key in ("apiVersion", "kind")}
                | {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"], "controller": True}
            ]
        self.objects[value["kind"], value["metadata"]["name"]] = value
        return value

    def of_kind(self, kind: str) -> list[Object]:
        return [value for (known, _), value in self.objects.items() if known == kind]

    def children(self, owner: Object, kind: str) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [value for value in self.of_kind(kind) if uid in _owners(value)]

    def delete(self, value: Object) -> None:
        """Begin to delete an object and all that it owns; pods go once they have ended, owners once their pods have."""
        value["metadata"].setdefault("deletionTimestamp", now())
        for child in list(self.objects.values()):
            if value["metadata"]["uid"] in _owners(child) and "deletionTimestamp" not in child["metadata"]:
                self.delete(child)

    def collect(self) -> None:
        """Remove what is to be deleted and owns nothing more, and what all owners have left."""
        uids = {value["metadata"]["uid"] for value in self.objects.values()}
        for key, value in list(self.objects.items()):
            owners = _owners(value)
            if owners and not owners & uids:
                self.delete(value)
            if "deletionTimestamp" not in value["metadata"] or (value["kind"] == "Pod" and not is_over(value)):
                continue
            if not any(value["metadata"]["uid"] in _owners(child) for child in self.objects.values()):
                self.deleted.append(self.objects.pop(key))


def _owners(value: Object) -> set[str]:
    return {one["uid"] for one in value["metadata"].get("ownerReferences", [])}


def is_over(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def condition(value: Object, kind: str) -> Object | None:
    """The condition of this type, where it is true."""
    known = value["status"].get("conditions", [])
    return next((one for one in known if one["type"] == kind and one["status"] == "True"), None)


def set_condition(value: Object, kind: str, reason: str, message: str = "") -> None:
    conditions = value["status"].setdefault("conditions", [])
    conditions.append(
        {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": now()}
    )


class KubeBox:
    """The cluster. `kubeconfig`: the file by which clients find it. `folder`: for logs and for what pods mount; a
    PersistentVolumeClaim is the folder of the test itself, so that its path is the same in pods and outside.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        from tests.support.kubebox_controllers import reconcile
        from tests.support.kubebox_kubelet import Kubelet

        self.folder, self.store = folder, Store()
        self.kubelet = Kubelet(self.store, folder, environment)
        self.requests: list[tuple[str, str]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._stopped = threading.Event()
        self.errors: list[BaseException] = []

        def control() -> None:
            while not self._stopped.wait(0.02):
                try:
                    with self.store.lock:
                        self.kubelet.sync()
                        reconcile(self.store)
                        self.store.collect()
                except BaseException as error:
                    self.errors.append(error)
                    raise

        self._threads = [
            threading.Thread(target=self._server.serve_forever, args=(0.02,)),
            threading.Thread(target=control),
        ]
        self.kubeconfig = folder / "kubeconfig"
        where = f"http://127.0.0.1:{self._server.server_port}"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "box",
                    "clusters": [{"name": "box", "cluster": {"server": where}}],
                    "users": [{"name": "me", "user": {"token": "not-a-secret"}}],
                    "contexts": [{"name": "box", "context": {"cluster": "box", "user": "me"}}],
                }
            )
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        self.kubelet.kill_all()

    def find(self, kind: str, name: str) -> Object | None:
        """A copy of an object as it is now."""
        with self.store.lock:
            value = self.store.objects.get((kind, name))
            return json.loads(json.dumps(value)) if value else None

    def pods(self) -> list[Object]:
        """Copies of the pods that there are."""
        with self.store.lock:
            return json.loads(json.dumps(self.store.of_kind("Pod")))

    def evict(self, name: str) -> bool:
        """As `kubectl drain` does: the pod gets its notice and its grace. False where it is over or leaves already."""
        return self._disrupt(name, "EvictionByEvictionAPI", with_notice=True)

    def lose(self, name: str) -> bool:
        """The pod's node is gone, without notice."""
        return self._disrupt(name, "DeletionByPodGC", with_notice=False)

    def _disrupt(self, name: str, reason: str, with_notice: bool) -> bool:
        with self.store.lock:
            pod = self.store.objects.get(("Pod", name))
            if pod is None or is_over(pod) or "deletionTimestamp" in pod["metadata"]:
                return False
            set_condition(pod, "DisruptionTarget", reason)
            if not with_notice:
                self.kubelet.kill(pod)
            self.store.delete(pod)
            return True


def _handler(box: KubeBox) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _serve(self) -> None:
            url = urlsplit(self.path)
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            body = yaml.safe_load(self.rfile.read(length)) if length else None
            box.requests.append((self.command, self.path))
            route = _ROUTE.fullmatch(url.path)
            if route is None or route["plural"] not in _KINDS:
                return self._answer(404, _status(404, "NotFound", "the server could not find the requested resource"))
            kind, name = _KINDS[route["plural"]], route["name"]
            if route["part"] == "log":
                return self._log(name, "follow" in query)
            with box.store.lock:
                return self._answer(*_change(box, self.command, kind, name, route["part"], query, body))

        do_GET = do_POST = do_PATCH = do_DELETE = _serve

        def _answer(self, status: int, value: Object) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _log(self, name: str, follow: bool) -> None:
            pod = box.find("Pod", name)
            if pod is None:
                return self._answer(404, _status(404, "NotFound", f'pods "{name}" not found'))
            self.send_response(200)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in box.kubelet.log(pod, follow):
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return None

    return Handler


def _change(
    box: KubeBox, method: str, kind: str, name: str | None, part: str | None, query: dict[str, str], body: Any
) -> tuple[int, Object]:
    """Status and answer of a request about objects."""
    store = box.store
    if method == "POST" and not name:
        if (kind, body["metadata"]["name"]) in store.objects:
            return 409, _status(409, "AlreadyExists", f"{kind} {body['metadata']['name']!r} already exists")
        return 201, store.add(body)
    if not name:
        key, _, value = query.get("labelSelector", "").partition("=")
        items = [one for one in store.of_kind(kind) if not key or one["metadata"].get("labels", {}).get(key) == value]
        return 200, {"kind": f"{kind}List", "items": items}
    known = store.objects.get((kind, name))
    if known is None:
        return 404, _status(404, "NotFound", f"{kind} {name!r} not found")
    if part == "eviction":
        box.evict(name)
        return 201, _status(201, "", "")
    if method == "PATCH":
        _merge(known, body)
    if method == "DELETE":
        store.delete(known)
    return 200, known


def _merge(target: Object, patch: Object) -> None:
    for key, value in patch.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _status(code: int, reason: str, message: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": message}


@contextmanager
def kubebox(folder: Path, environment: dict[str, str]) -> Iterator[KubeBox]:
    """A cluster for one test. `environment`: of each pod's processes, beside what its manifest sets."""
    folder.mkdir(parents=True, exist_ok=True)
    box = KubeBox(folder, environment)
    box.start()
    try:
        yield box
    finally:
        box.stop()
    assert not box.errors, box.errors
