"""Calls Weights & Biases. Runs in the process of the tracker alone."""

from __future__ import annotations

import os
import secrets
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from dtf.observers.tracker_process import Step


class Backend:
    """See `tracker_process.Backend`."""

    at_once = 1

    def open(self, order: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
        options, config = order["options"], order["config"]
        folder = os.environ.get("WANDB_DIR") or order["folder"]
        self._run = wandb.init(
            id=known.get("id") or secrets.token_hex(8),
            resume="allow",
            project=options["project"] or os.environ.get("WANDB_PROJECT") or config["recipe"]["name"],
            entity=options["entity"] or None,
            dir=folder,
            name=os.path.basename(order["folder"]),
            group=order["group"] or os.environ.get("WANDB_RUN_GROUP") or None,
            settings=wandb.Settings(console="off"),  # the ranks have logs of their own
        )
        # not given to init: a run that goes on may have other values
        self._run.config.update(config, allow_val_change=True)
        return {"id": self._run.id, "url": getattr(self._run, "url", None) or ""}

    def sent(self) -> dict[str, int]:
        return {}  # it drops what it has by itself

    def log(self, steps: list[Step]) -> None:
        for step, values, at in steps:
            self._run.log({**values, **({"_timestamp": at} if at else {})}, step=step)

    def note(self, text: str) -> None:
        self._run.notes = text

    def end(self, outcome: dict[str, Any]) -> None:
        best = outcome.get("best")
        self._run.summary.update(
            {"exit": outcome["exit"], "cause": outcome["cause"]}
            | ({f"best/{best[0]}": best[1]} if best else {})
            | ({"best/step": outcome["values"]["best_step"]} if "best_step" in outcome.get("values", {}) else {})
        )
        self._run.finish(exit_code=1 if outcome["exit"] is None else outcome["exit"])
