"""TensorBoard event files, written with tensorboard's own protocol classes: no torch, no TensorFlow, no writer thread."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.observer import Observer
from dtf.registry import option, register
from dtf.values import Ended, Event, Measured, Started

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.record_writer import RecordWriter


@register("observer", "tensorboard")
class Tensorboard(Observer):
    """Scalars `<split>/<metric>`, the config as text, and the config as hyperparameters to compare runs by."""

    path: str = option(default="tensorboard", doc="folder of the event files, relative to the run folder")

    def open(self, folder: Path, config: dict) -> None:
        self._folder, self._config = folder / self.path, config
        self._writer: RecordWriter | None = None
        self._files = 0

    def see(self, event: Event) -> None:
        match event:
            case Started():  # importing tensorboard takes 0.1 s: only now, while the ranks are at their first step
                self.close()
                self._writer = self._new_file(event.step)
                self._add(0, _text("config", json.dumps(self._config, indent=2, ensure_ascii=False, default=str)), _hparams(self._config))
            case Measured():
                self._add(event.step, *_scalars(event))
            case Ended():
                self._add(event.step, _session_end())

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _new_file(self, step: int) -> RecordWriter:
        """A file that opens by telling readers to forget what earlier files hold after `step`."""
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{self._files}"
        self._files += 1
        writer = RecordWriter((self._folder / name).open("xb"))
        for record in (
            Record(wall_time=time.time(), file_version="brain.Event:2"),
            Record(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)),
        ):
            writer.write(record.SerializeToString())
        writer.flush()
        return writer

    def _add(self, step: int, *values: Summary.Value) -> None:
        from tensorboard.compat.proto.event_pb2 import Event as Record
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._writer is not None:
            self._writer.write(Record(wall_time=time.time(), step=step, summary=Summary(value=values)).SerializeToString())
            self._writer.flush()


def _scalars(event: Measured) -> list[Summary.Value]:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return [Summary.Value(tag=f"{event.split}/{name}", simple_value=value) for name, value in event.values.items()]


def _text(tag: str, text: str) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for code
    tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode()])
    return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)


def _hparams(config: dict) -> Summary.Value:
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

    info = SessionStartInfo(start_time_secs=time.time())
    for name, value in flatten(config).items():
        match value:
            case bool():
                info.hparams[name].bool_value = value
            case int() | float():
                info.hparams[name].number_value = value
            case _:
                info.hparams[name].string_value = str(value)
    return _hparams_value(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))


def _session_end() -> Summary.Value:
    from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS
    from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    info = SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams_value(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def _hparams_value(tag: str, data: Any) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.metadata import NULL_TENSOR, create_summary_metadata

    return Summary.Value(tag=tag, metadata=create_summary_metadata(data), tensor=NULL_TENSOR)


def flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    """`{"lr": {"peak": 1}}` -> `{"lr.peak": 1}`: the keys as they are written on the command line."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
