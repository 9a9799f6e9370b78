"""A Kubernetes cluster, as far as jobs need it: objects are created, found and deleted, pods listed, their logs read.

By the `kubernetes` client library, which finds and signs in to the cluster; the requests are plain ones, so that kinds
which the library does not know are no different.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from dtf.core.errors import ConfigError, DtfError, PeerError

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse, PoolManager

_PATHS = {
    "Secret": "/api/v1/namespaces/{}/secrets",
    "Service": "/api/v1/namespaces/{}/services",
    "Pod": "/api/v1/namespaces/{}/pods",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainjobs",
    "TrainingRuntime": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{}/trainingruntimes",
}
_INSTALL = {"JobSet": "JobSet", "TrainJob": "Kubeflow Trainer", "TrainingRuntime": "Kubeflow Trainer"}
_TIMEOUT_S = 10.0
_LOOK_S = 2.0
"""Between two looks for pods whose logs are followed."""


class Cluster:
    """The cluster of a context of the kubeconfig file, or the one this process runs in. `namespace`: where objects are.

    ConfigError where there is no cluster to ask, or no client library.
    """

    def __init__(self, context: str, namespace: str) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise ConfigError(
                "launcher=kubernetes asks the cluster by the package kubernetes, which is not installed; "
                "pip install 'dtf[kubernetes]', or launcher.dry_run=true prints what kubectl apply -f - takes"
            ) from error
        configuration = client.Configuration()
        try:
            try:
                config.load_kube_config(context=context or None, client_configuration=configuration)
                known: tuple[list[Any], Any] = config.list_kube_config_contexts()
                chosen = next((one for one in known[0] if one["name"] == context), known[1])
                default = chosen["context"].get("namespace", "default")
            except config.ConfigException:
                if context:
                    raise
                config.load_incluster_config(client_configuration=configuration)
                default = _own_namespace()
        except config.ConfigException as error:
            raise ConfigError(
                f"launcher=kubernetes finds no cluster: {' '.join(str(error).split()).rstrip('.')}; give KUBECONFIG, "
                "launcher.context, or launcher.dry_run=true"
            ) from error
        self.namespace = namespace or default
        self._configuration = configuration
        self._pool: PoolManager = client.ApiClient(configuration).rest_client.pool_manager

    def create(self, value: dict[str, Any]) -> dict[str, Any]:
        """Create an object, and return it as the cluster has it. One of this name that is there is the same: names hold
        a digest. Fields that the cluster does not know are refused, not dropped.
        """
        kind, name = value["kind"], value["metadata"]["name"]
        namespace = value["metadata"].get("namespace", "")
        path = self._path(kind, namespace)
        query = {"fieldManager": "dtf", "fieldValidation": "Strict"}
        status, answer = self._ask("POST", path, query, value)
        if status == 409:
            status, answer = self._ask("GET", self._path(kind, namespace, name))
        if status == 404:
            needs = f"install {_INSTALL[kind]} or use launcher.kind=job" if kind in _INSTALL else "see the namespace"
            raise ConfigError(f"the cluster has no {kind} in namespace {self.namespace}: {_message(answer)}; {needs}")
        return self._checked(status, answer, f"take {kind} {name}")

    def own(self, value: dict[str, Any], owners: Sequence[dict[str, Any]]) -> None:
        """Let an object be deleted once all of its owners are."""
        references = [
            {"name": one["metadata"]["name"], "uid": one["metadata"]["uid"]}
            | {key: one[key] for key in ("apiVersion", "kind")}
            for one in owners
        ]
        name = value["metadata"]["name"]
        patch = {"metadata": {"ownerReferences": references}}
        path = self._path(value["kind"], value["metadata"].get("namespace", ""), name)
        status, answer = self._ask("PATCH", path, {"fieldManager": "dtf"}, patch)
        self._checked(status, answer, f"change {value['kind']} {name}")

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None where there is none of this name."""
        status, answer = self._ask("GET", self._path(kind, name=name))
        return None if status == 404 else self._checked(status, answer, f"show {kind} {name}")

    def delete(self, kind: str, name: str) -> None:
        """Delete an object once its pods have ended, which get their notice now."""
        query = {"propagationPolicy": "Foreground"}
        status, answer = self._ask("DELETE", self._path(kind, name=name), query)
        if status != 404:
            self._checked(status, answer, f"delete {kind} {name}")

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """The pods that there are, the oldest first."""
        status, answer = self._ask("GET", self._path("Pod"), {"labelSelector": selector})
        pods = self._checked(status, answer, "list pods").get("items", [])
        return sorted(pods, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))

    def logs(self, selector: str, follow: Callable[[], bool] | None = None) -> Iterator[str]:
        """Lines of all pods that there are, one pod after another. `follow`: goes on with pods that come, as long as it
        is true. Pods that were evicted and removed have taken theirs along.
        """
        seen = set[str]()
        while True:
            live = follow is not None and follow()  # asked first: what a job prints before it ends is shown
            news = [pod for pod in self.pods(selector) if pod["metadata"]["uid"] not in seen and _has_log(pod)]
            if follow is not None:
                news = news[:1]
            for pod in news:
                seen.add(pod["metadata"]["uid"])
                name = pod["metadata"]["name"]
                yield f"--- {name}"
                yield from self._log(name, follow is not None)
            if not live and not news:
                return
            if not news:
                time.sleep(_LOOK_S)
            elif follow is None:
                return

    def _log(self, pod: str, follow: bool) -> Iterator[str]:
        query = {"follow": "true"} if follow else {}
        response = self._send(
            "GET", f"{self._path('Pod', name=pod)}/log", query, timeout_s=None if follow else _TIMEOUT_S
        )
        if response.status >= 300:  # it was removed meanwhile
            return
        rest = b""
        for part in response.stream(65536, decode_content=True):
            *lines, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
        if rest:
            yield rest.decode(errors="replace")

    def _path(self, kind: str, namespace: str = "", name: str = "") -> str:
        """Of an object, or of all of a kind."""
        path = _PATHS[kind].format(quote(namespace or self.namespace, safe=""))
        return f"{path}/{quote(name, safe='')}" if name else path

    def _ask(
        self, method: str, path: str, query: dict[str, str] | None = None, body: dict[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer of a request. PeerError where the cluster does not answer."""
        response = self._send(method, path, query or {}, body, _TIMEOUT_S)
        content = response.read(decode_content=True) or b"{}"
        response.release_conn()
        try:
            answer = json.loads(content)
        except ValueError:
            answer = {"message": content.decode(errors="replace")[:500]}
        return response.status, answer

    def _send(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> BaseHTTPResponse:
        """The response, whose content has not been read."""
        from urllib3.exceptions import HTTPError

        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json, */*", "Content-Type": kind}
        settings: dict[str, Any] = dict(self._configuration.auth_settings())
        headers |= {setting["key"]: setting["value"] for setting in settings.values()}
        where = self._configuration.host
        content = None if body is None else json.dumps(body).encode()
        try:
            return self._pool.request(
                method, f"{where}{path}?{urlencode(query)}", body=content, headers=headers, timeout=timeout_s,
                retries=1, preload_content=False,
            )  # fmt: skip
        except (HTTPError, OSError) as error:
            raise PeerError(f"the cluster at {where} does not answer: {error}") from error

    def _checked(self, status: int, answer: dict[str, Any], what: str) -> dict[str, Any]:
        """The answer. PeerError for a cluster that may come to its senses, ConfigError for what it will never do."""
        if status < 300:
            return answer
        wrong: type[DtfError] = PeerError if status >= 500 or status == 429 else ConfigError
        raise wrong(f"the cluster does not {what} in namespace {self.namespace}: {_message(answer)} ({status})")


def _message(answer: dict[str, Any]) -> str:
    return " ".join(str(answer.get("message") or answer.get("reason") or "it says no more").split())


def _has_log(pod: dict[str, Any]) -> bool:
    """Whether its container has begun."""
    states = [one.get("state", {}) for one in pod.get("status", {}).get("containerStatuses", [])]
    return any("running" in state or "terminated" in state for state in states)


def _own_namespace() -> str:
    """Of a process in a pod."""
    try:
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
            return file.read().strip()
    except OSError:
        return "default"
