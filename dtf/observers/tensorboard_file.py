"""TensorBoard event files in tensorboard's own protocol classes: no torch, no TensorFlow, no writer thread.

Takes 0.1 s to import.
"""
# pyright: reportAttributeAccessIssue=false
# (generated protocol modules make their classes when imported)

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.text import metadata as text_plugin
from tensorboard.summary.writer.record_writer import RecordWriter

from dtf.core.files import naming, open_private

Value = Any  # summary_pb2.Summary.Value


class EventFile:
    """A new file in `folder`. It opens by telling readers to forget what earlier files hold after `step`."""

    def __init__(self, folder: Path, step: int) -> None:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        # makes the name new: processes of two containers share numbers
        earlier = len(list(folder.glob("events.out.tfevents.*")))
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{earlier}"
        self._path = folder / name
        self._writer = RecordWriter(open_private(self._path, "xb"))
        self._write(file_version="brain.Event:2")
        self._write(step=step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))

    def add(self, step: int, *values: Value) -> None:
        self._write(step=step, summary=summary_pb2.Summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        with naming(self._path):
            self._writer.write(event_pb2.Event(wall_time=time.time(), **fields).SerializeToString())
            self._writer.flush()


def scalar(tag: str, value: float) -> Value:
    return summary_pb2.Summary.Value(tag=tag, simple_value=value)


def code(tag: str, text: str) -> Value:
    """Shown as it stands, on the Text page."""
    indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown for code
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[indented.encode()])
    return summary_pb2.Summary.Value(tag=tag, metadata=text_plugin.create_summary_metadata("", ""), tensor=tensor)


def hyperparameters(settings: Mapping[str, Any]) -> Value:
    """What the HParams page compares runs by. Its metrics are the scalars of the same folder."""
    info = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        match value:
            case bool():
                info.hparams[name].bool_value = value
            case int() | float():
                info.hparams[name].number_value = value
            case _:
                info.hparams[name].string_value = value if isinstance(value, str) else json.dumps(value, default=str)
    return _hparams(hparams.SESSION_START_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_start_info=info))


def completed() -> Value:
    """Tells the HParams page that the run came to its end."""
    info = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams(hparams.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=info))


def _hparams(tag: str, data: Any) -> Value:
    return summary_pb2.Summary.Value(
        tag=tag, metadata=hparams.create_summary_metadata(data), tensor=hparams.NULL_TENSOR
    )
