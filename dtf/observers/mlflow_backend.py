"""Calls MLflow. Runs in the process of the tracker alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # a run on a host without network would wait for it

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric, Param, RunTag  # pyright: ignore[reportMissingImports]
from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]

from dtf.core.files import flat, replace_text
from dtf.observers.tracker_process import Step, locked

_FORBIDDEN = re.compile(r"[^\w\-. :/]", re.ASCII)  # in names
_LONGEST_VALUE = 500  # of parameters; what servers of all versions take
_LONGEST_TAG = 5000
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one request
_PARENT = "mlflow.parentRunId"
_NOTE = "mlflow.note.content"


class Backend:
    """See `tracker_process.Backend`."""

    at_once = 20  # a request takes 1000 numbers, and a step rarely has 50

    def open(self, order: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        options, config = order["options"], order["config"]
        uri = options["tracking_uri"] or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self._client = MlflowClient(uri)
        self._id = self._going_on(known) or self._new(order)
        self._set_parameters(dict(flat(config, "")))
        return {"id": self._id, "url": uri if "@" not in uri else ""}

    def _going_on(self, known: dict[str, Any]) -> str:
        """The run of an earlier launch, set to be running again; empty where there is none."""
        if "id" not in known:
            return ""
        try:
            self._client.get_run(known["id"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return ""  # of another store, or deleted
        self._client.update_run(known["id"], "RUNNING")
        return known["id"]

    def _new(self, order: dict[str, Any]) -> str:
        options, folder = order["options"], Path(order["folder"])
        name = options["experiment"] or os.environ.get("MLFLOW_EXPERIMENT_NAME") or order["config"]["recipe"]["name"]
        experiment = self._experiment(name)
        tags = {"run_folder": str(folder)}
        if order["group"]:
            tags |= {"sweep": order["group"], _PARENT: self._parent(experiment, folder.parent)}
        return self._client.create_run(experiment, run_name=folder.name, tags=tags).info.run_id

    def _experiment(self, name: str) -> str:
        for _ in range(2):
            if (found := self._client.get_experiment_by_name(name)) is not None:
                return found.experiment_id
            with contextlib.suppress(MlflowException):  # another process makes it at this moment
                return self._client.create_experiment(name)
        return self._client.create_experiment(name)

    def _parent(self, experiment: str, sweep: Path) -> str:
        """The run that stands for a sweep. Of trials that start together one makes it."""
        lock = locked(sweep / ".mlflow.lock")
        try:
            return self._known_parent(experiment, sweep, sweep / "mlflow.json")
        finally:
            if lock is not None:
                os.close(lock)

    def _known_parent(self, experiment: str, sweep: Path, path: Path) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, MlflowException):
            id = json.loads(path.read_text())["id"]
            self._client.get_run(id)
            return id
        id = self._client.create_run(experiment, run_name=sweep.name).info.run_id
        self._client.set_terminated(id)
        with contextlib.suppress(OSError):
            replace_text(path, json.dumps({"id": id}) + "\n")
        return id

    def _set_parameters(self, config: dict[str, Any]) -> None:
        """MLflow keeps the first value of a parameter: another one of a run that goes on becomes a tag."""
        texts = {_name(key): _text(value) for key, value in config.items()}
        there = self._client.get_run(self._id).data.params
        new = [Param(key, value) for key, value in texts.items() if key not in there]
        for part in _parts(new, _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=part)
        changed = [RunTag(f"now.{key}", text) for key, text in texts.items() if there.get(key, text) != text]
        for part in _parts(changed, _MOST_PARAMETERS):
            self._client.log_batch(self._id, tags=part)

    def sent(self) -> dict[str, int]:
        histories = {split: self._client.get_metric_history(self._id, f"{split}/epoch") for split in ("train", "eval")}
        return {split: max(metric.step for metric in history) for split, history in histories.items() if history}

    def log(self, steps: list[Step]) -> None:
        now = time.time()
        metrics = [
            Metric(_name(key), value, round(1000 * (at or now)), step)
            for step, values, at in steps
            for key, value in values.items()
        ]
        for part in _parts(metrics, _MOST_METRICS):
            self._client.log_batch(self._id, metrics=part)

    def note(self, text: str) -> None:
        self._client.set_tag(self._id, _NOTE, text[-_LONGEST_TAG:])

    def end(self, outcome: dict[str, Any]) -> None:
        best, exit = outcome.get("best"), outcome["exit"]
        tags = {"exit": str(exit), "cause": outcome["cause"][:_LONGEST_TAG]}
        for key, value in tags.items():
            self._client.set_tag(self._id, key, value)
        if best:
            step = outcome.get("values", {}).get("best_step", 0)
            self._client.log_metric(self._id, _name(f"best/{best[0]}"), best[1], step=int(step))
        status = "KILLED" if exit is None else "FAILED" if exit else "FINISHED"
        self._client.set_terminated(self._id, status)


def _parts(items: Sequence[Any], most: int) -> list[Sequence[Any]]:
    return [items[first : first + most] for first in range(0, len(items), most)]


def _name(key: str) -> str:
    return _FORBIDDEN.sub("_", key)[:250]


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 4]} ..."
