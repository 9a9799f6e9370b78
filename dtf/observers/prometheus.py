"""`observer=[prometheus]`: the numbers of a run as they are now, for a Prometheus server on this host to collect."""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.observer import Observer
from dtf.api.registry import option, register
from dtf.core.files import replace_text
from dtf.core.types import Ended, Event, Measured, Note, Saved, Started
from dtf.observers.measured_row import measured_row
from dtf.observers.openmetrics import Family, page

if TYPE_CHECKING:
    from dtf.observers.metrics_server import MetricsServer

TARGETS = "prometheus.json"


@register("observer", "prometheus")
class Prometheus(Observer):
    """Answer http://127.0.0.1:PORT/metrics with the latest numbers as OpenMetrics text, as long as the run lives.

    prometheus.json in the run folder tells a Prometheus server the address (`file_sd_configs`). The port is open to
    users of this host alone.
    """

    port: int = option(default=0, least=0, most=65535, doc="0: one that is free")

    def open(self, folder: Path, config: dict) -> None:
        from dtf.observers.metrics_server import HOST, MetricsServer  # 5 ms that --help need not wait

        self._targets = folder / TARGETS
        self._families, self._lock = _families(folder, config), threading.Lock()
        self._server: MetricsServer | None = None
        # not tried before: with ranks that others start, each of them checks the config, and one has the port
        try:
            self._server = MetricsServer(self._text, self.port)
        except OSError as error:
            raise OSError(
                error.errno, f"observer.prometheus.port={self.port}: {error.strerror}; use another one, or 0"
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="prometheus", daemon=True
        )
        self._thread.start()
        address = f"{HOST}:{self._server.server_address[1]}"
        labels = {"run": folder.name, "recipe": str(config.get("recipe", {}).get("name", ""))}
        replace_text(self._targets, json.dumps([{"targets": [address], "labels": labels}]) + "\n")

    def see(self, event: Event) -> None:
        with self._lock:
            _note_down(self._families, event)

    def _text(self) -> str:
        with self._lock:
            return page(self._families.values())

    def close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            self._thread.join()
            with suppress(OSError):
                self._targets.unlink()


def _families(folder: Path, config: dict) -> dict[str, Family]:
    made = {
        family.name: family
        for family in (
            Family("dtf_run", "info", "the run"),
            Family("dtf_metric", "gauge", "what the latest line of metrics.jsonl says, by split"),
            Family("dtf_step", "gauge", "optimizer steps finished at that line"),
            Family("dtf_plan_steps", "gauge", "optimizer steps of the whole run"),
            Family("dtf_best", "gauge", "the best evaluation so far"),
            Family("dtf_saved_step", "gauge", "the step of the latest checkpoint"),
            Family("dtf_restarts", "counter", "times that the ranks were started again"),
            Family("dtf_warnings", "counter", "warnings of the run"),
            Family("dtf_ended", "gauge", "1 once the ranks have ended"),
        )
    }
    info = {"folder": str(folder), "run": folder.name}
    info |= {group: str(config[group]["name"]) for group in ("recipe", "strategy") if group in config}
    made["dtf_run"].set(1, info)
    for name in ("dtf_restarts", "dtf_warnings", "dtf_ended"):
        made[name].set(0)
    return made


def _note_down(families: dict[str, Family], event: Event) -> None:
    match event:
        case Started():
            families["dtf_plan_steps"].set(event.total)
            families["dtf_ended"].set(0)
            if event.attempt:
                families["dtf_restarts"].add(1)
            for measured in event.recent:
                _measured(families, measured)
        case Measured():
            _measured(families, event)
        case Saved(step):
            families["dtf_saved_step"].set(step)
        case Note("warning"):
            families["dtf_warnings"].add(1)
        case Ended(_, _, values):
            families["dtf_ended"].set(1)
            for name, value in values.items():
                if name.startswith("best_") and name != "best_step":
                    families["dtf_best"].set(value, {"metric": name.removeprefix("best_")})


def _measured(families: dict[str, Family], event: Measured) -> None:
    row: dict[str, Any] = measured_row(event)
    split = row.pop("split")
    families["dtf_step"].set(row.pop("step"), {"split": split})
    for name, value in row.items():
        families["dtf_metric"].set(float("nan") if value is None else value, {"split": split, "metric": name})
