"""Stands in for MLflow: a store in one file of JSON, which a step reaches whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from misbehaviour import misbehave  # type: ignore[import-not-found]

from .exceptions import MlflowException  # type: ignore[import-not-found]


class MlflowClient:
    def __init__(self, uri: str) -> None:
        misbehave("open")
        self._path = Path(uri.removeprefix("sqlite:///"))

    def _change(self, change: Any) -> Any:
        store = json.loads(self._path.read_text()) if self._path.exists() else {"experiments": [], "runs": {}}
        result = change(store)
        self._path.write_text(json.dumps(store))
        return result

    def get_experiment_by_name(self, name: str) -> Any:
        names = self._change(lambda store: store["experiments"])
        return SimpleNamespace(experiment_id=str(names.index(name))) if name in names else None

    def create_experiment(self, name: str) -> str:
        return self._change(lambda store: (store["experiments"].append(name), str(len(store["experiments"]) - 1))[1])

    def create_run(self, experiment_id: str, run_name: str, tags: dict[str, str] | None = None) -> Any:
        def make(store: Any) -> str:
            id = f"run{len(store['runs'])}"
            run = {"name": run_name, "experiment": experiment_id, "status": "RUNNING", "params": {}, "metrics": []}
            store["runs"][id] = run | {"tags": tags or {}}
            return id

        return SimpleNamespace(info=SimpleNamespace(run_id=self._change(make)))

    def get_run(self, id: str) -> Any:
        runs = self._change(lambda store: store["runs"])
        if id not in runs:
            raise MlflowException(f"no run {id}", "RESOURCE_DOES_NOT_EXIST")
        return SimpleNamespace(data=SimpleNamespace(params=runs[id]["params"]))

    def update_run(self, id: str, status: str) -> None:
        self._change(lambda store: store["runs"][id].update(status=status))

    def set_terminated(self, id: str, status: str = "FINISHED") -> None:
        misbehave("end")
        self.update_run(id, status)

    def set_tag(self, id: str, key: str, value: str) -> None:
        self._change(lambda store: store["runs"][id]["tags"].update({key: value}))

    def log_metric(self, id: str, key: str, value: float, step: int) -> None:
        self._change(lambda store: store["runs"][id]["metrics"].append([key, value, 0, step]))

    def get_metric_history(self, id: str, key: str) -> list[Any]:
        metrics = self._change(lambda store: store["runs"][id]["metrics"])
        return [SimpleNamespace(step=step) for name, _, _, step in metrics if name == key]

    def log_batch(self, id: str, metrics: Any = (), params: Any = (), tags: Any = ()) -> None:
        if metrics:
            misbehave("log")
        assert len(metrics) <= 1000 and len(params) <= 100

        def add(store: Any) -> None:
            run = store["runs"][id]
            for key, value in params:
                if run["params"].setdefault(key, value) != value:
                    raise MlflowException(f"{key} has another value", "INVALID_PARAMETER_VALUE")
            run["tags"].update(dict(tags))
            run["metrics"] += [list(metric) for metric in metrics]

        self._change(add)
