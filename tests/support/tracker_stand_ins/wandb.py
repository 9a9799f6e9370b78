"""Stands in for Weights & Biases: keeps what it is told in the file of the run, and drops steps that go back."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from misbehaviour import misbehave  # type: ignore[import-not-found]


class Settings:
    def __init__(self, **values: Any) -> None:
        self.values = values


class _Kept(dict):
    def __init__(self, run: Run, what: str) -> None:
        self._run, self._what = run, what

    def update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        self._run.write({"what": self._what, **values})


class Run:
    url = None

    def __init__(self, **given: Any) -> None:
        self.id, self._given, self._step = given["id"], given, -1
        self._path = Path(given["dir"], "stand_in.jsonl")
        self.config, self.summary = _Kept(self, "config"), _Kept(self, "summary")
        self.write({"what": "init"} | {key: value for key, value in given.items() if key != "settings"})

    def write(self, line: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self, values: dict[str, Any], step: int) -> None:
        misbehave("log")
        if step >= self._step:
            self._step = step
            self.write({"what": "row", "step": step, **values})

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "notes":
            self.write({"what": "notes", "text": value})
        super().__setattr__(name, value)

    def finish(self, exit_code: int = 0) -> None:
        misbehave("end")
        self.write({"what": "finish", "code": exit_code})


def init(**given: Any) -> Run:
    misbehave("open")
    os.makedirs(given["dir"], exist_ok=True)
    return Run(**given)
