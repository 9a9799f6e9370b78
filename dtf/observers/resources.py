"""Samples utilisation and memory of the devices of this host over the whole run, from the launching process."""

from __future__ import annotations

import json
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.files import naming, open_private
from dtf.core.json_lines import rows
from dtf.core.types import Ended, Event, Measured, Started
from dtf.host import devices
from dtf.host.usage import Gpus, Load, cpu_load, process_tree

if TYPE_CHECKING:
    from dtf.observers.tensorboard_file import EventFile


@register("observer", "resources")
class Resources(Observer):
    """Append utilisation and memory of every device to a file: `{"time", "step", "device", "utilisation", "memory"}`;
    curves where TensorBoard watches too.

    The device `cpu` is the process tree of the run against the cores it may use. With launcher=env it is the tree of
    rank 0 alone.
    """

    every_s: float = option(default=1.0, least=0.05, most=3600, doc="time between samples", unit="s")

    def open(self, folder: Path, config: dict) -> None:
        self._path, self._config = folder / "resources.jsonl", config
        self._step, self._thread, self._end = 0, None, threading.Event()
        self._failed: Exception | None = None

    def see(self, event: Event) -> None:
        self._raise_failure()
        match event:
            case Started() | Measured():
                self._step = event.step
                if self._thread is None:  # the ranks are ready: their start is not sampled
                    self._thread: threading.Thread | None = threading.Thread(
                        target=self._watch, name="resources", daemon=True
                    )
                    self._thread.start()
            case Ended():
                self._end.set()  # what follows is no longer the run

    def close(self) -> None:
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._end.set()
            thread.join()
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise what ended the thread, once."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _watch(self) -> None:
        try:
            self._sample()
        except Exception as error:  # noqa: BLE001 - raised where it ends this observer alone
            self._failed = error

    def _sample(self) -> None:
        chosen = devices.choose(self._config["launcher"].get("devices", "auto"))
        cards = Gpus(chosen.indices) if chosen.indices else None
        seconds = covered_s(self._path, self.every_s)
        curves = self._curves(round(seconds))
        cores, root = devices.cores(), os.getpid()
        before, at = process_tree(root), time.monotonic()
        with naming(self._path), open_private(self._path, "a") as file:
            while not self._end.wait(self.every_s):
                tree, now = process_tree(root), time.monotonic()
                seconds += now - at
                loads = [cpu_load(before, tree, now - at, cores), *(cards.loads() if cards else [])]
                file.writelines(_line(self._step, load) for load in loads)
                file.flush()
                if curves is not None:
                    _draw(curves, round(seconds), loads)
                before, at = tree, now
        if curves is not None:
            curves.close()
        if cards is not None:
            cards.close()

    def _curves(self, second: int) -> EventFile | None:
        """A TensorBoard run of its own, since its steps are seconds; it goes on after those of earlier launches."""
        tensorboard = self._config["observer"].get("tensorboard")
        if tensorboard is None:
            return None
        from dtf.observers.tensorboard_file import EventFile

        return EventFile(self._path.parent / tensorboard["path"] / "resources", second)


def covered_s(path: Path, every_s: float) -> float:
    """The seconds that the samples of earlier launches cover, without the time between launches."""
    times = [row["time"] for row in rows(path, {"time": float})]
    return (
        sum(min(max(0.0, later - earlier), 3 * every_s) for earlier, later in pairwise(times)) + bool(times) * every_s
    )


def _line(step: int, load: Load) -> str:
    return (
        json.dumps(
            {"time": round(time.time(), 2), "step": step} | load._asdict() | {"utilisation": round(load.utilisation, 1)}
        )
        + "\n"
    )


def _draw(curves: EventFile, second: int, loads: list[Load]) -> None:
    from dtf.observers.tensorboard_file import scalar

    both = (
        ((f"{load.device}/utilisation", load.utilisation) for load in loads),
        ((f"{load.device}/memory_gb", load.memory / 1e9) for load in loads),
    )
    curves.add(second, *(scalar(f"resources/{tag}", value) for pairs in both for tag, value in pairs))
