"""Writes curves for TensorBoard. After a restart no step is there twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.types import Ended, Event, Measured, Started

if TYPE_CHECKING:
    from dtf.observers.tensorboard_file import EventFile


@register("observer", "tensorboard")
class Tensorboard(Observer):
    """Scalars `<split>/<metric>`, the config as text, and the config as hyperparameters to compare runs by."""

    path: str = option(default="tensorboard", doc="folder of the event files, relative to the run folder")

    def open(self, folder: Path, config: dict) -> None:
        self._folder, self._config = folder / self.path, config
        self._file: EventFile | None = None

    def see(self, event: Event) -> None:
        match event:
            case Started():
                from dtf.observers import tensorboard_file  # slow: only now, while the ranks are at their first step

                self.close()
                # the first step's may be there in part
                again = [measured for measured in event.recent if measured.step > event.recent[0].step]
                self._file = tensorboard_file.EventFile(self._folder, again[0].step - 1 if again else event.step)
                text = json.dumps(self._config, indent=2, ensure_ascii=False, default=str)
                self._file.add(
                    0, tensorboard_file.code("config", text), tensorboard_file.hyperparameters(flatten(self._config))
                )
                for measured in again:
                    self._draw(measured)
            case Measured() if self._file is not None:
                self._draw(event)
            case Ended() if self._file is not None:
                from dtf.observers.tensorboard_file import completed

                self._file.add(event.step, completed())

    def _draw(self, measured: Measured) -> None:
        from dtf.observers.tensorboard_file import scalar

        assert self._file is not None
        self._file.add(
            measured.step, *(scalar(f"{measured.split}/{name}", value) for name, value in measured.values.items())
        )

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """`{"lr": {"peak": 1}}` -> `{"lr.peak": 1}`: the keys as they are written on the command line."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
