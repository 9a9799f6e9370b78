"""observer=prometheus: a page of the latest numbers, on this host alone."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from dtf.api.observer import Observers
from dtf.core.types import Measured, Note, Started
from dtf.observers import metrics_server
from dtf.observers.jsonl import Jsonl
from dtf.observers.openmetrics import CONTENT_TYPE, Family, page
from dtf.observers.prometheus import Prometheus
from tests.support.launching import HANG_S
from tests.unit.test_observers import CONFIG, lines, whole_run

Sample = tuple[str, tuple[tuple[str, str], ...]]


@pytest.fixture
def observer(tmp_path: Path) -> Iterator[Prometheus]:
    watching = Prometheus()
    watching.open(tmp_path, CONFIG)
    yield watching
    watching.close()


def address(folder: Path) -> str:
    """As a Prometheus server reads it (`file_sd_configs`)."""
    ((target,),) = [one["targets"] for one in json.loads((folder / "prometheus.json").read_text())]
    return f"http://{target}/metrics"


def fetched(folder: Path) -> str:
    with urlopen(address(folder), timeout=HANG_S) as answer:
        assert answer.headers["Content-Type"] == CONTENT_TYPE
        return answer.read().decode()


def samples(text: str) -> dict[Sample, float]:
    found: dict[Sample, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([a-z_]+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            pairs = tuple(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels or ""))
            assert (name, pairs) not in found
            found[name, pairs] = float(value)
    return found


def test_the_page_says_what_metrics_jsonl_says_last(observer: Prometheus, tmp_path: Path) -> None:
    jsonl = Jsonl()
    jsonl.open(tmp_path, CONFIG)
    for event in whole_run():
        jsonl.see(event)
        observer.see(event)
        there, shown = lines(tmp_path) if (tmp_path / "metrics.jsonl").exists() else [], samples(fetched(tmp_path))
        for row in {line["split"]: line for line in there}.values() if isinstance(event, Measured) else ():
            split = ("split", row.pop("split"))
            assert shown["dtf_step", (split,)] == row.pop("step")
            for name, value in row.items():
                number = shown["dtf_metric", (split, ("metric", name))]
                assert number == value or (value is None and number != number)
    jsonl.close()
    assert shown["dtf_restarts_total", ()] == 1 and shown["dtf_warnings_total", ()] == 1
    assert shown["dtf_best", (("metric", "top1"),)] == 0.96 and shown["dtf_saved_step", ()] == 120
    assert shown["dtf_plan_steps", ()] == 480 and shown["dtf_ended", ()] == 1


def test_the_text_is_that_of_openmetrics(observer: Prometheus, tmp_path: Path) -> None:
    for event in whole_run():
        observer.see(event)
    text = fetched(tmp_path)
    names = re.findall(r"^# TYPE (\S+) ", text, flags=re.MULTILINE)
    assert text.endswith("# EOF\n") and len(names) == len(set(names)) >= 8
    parser = pytest.importorskip("prometheus_client.openmetrics.parser")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert sorted(families) == sorted(names)
    (info,) = families["dtf_run"].samples
    assert info.labels == {"folder": str(tmp_path), "run": tmp_path.name, "recipe": "shapes", "strategy": "ddp"}


def test_labels_hold_any_text() -> None:
    family = Family("a", "gauge", "help\nof two lines")
    family.set(float("-inf"), {"x": 'quote " back \\ line\n'})
    assert page([family]) == (
        '# TYPE a gauge\n# HELP a help\\nof two lines\na{x="quote \\" back \\\\ line\\n"} -Inf\n# EOF\n'
    )


def test_a_run_that_goes_on_shows_what_there_was(observer: Prometheus, tmp_path: Path) -> None:
    recent = (Measured("train", 4, 0.1, 0.5, {"loss": 1.0}), Measured("eval", 8, 0.2, 0.9, {"loss": 0.5}, True))
    observer.see(Started(8, 480, 120, {}, 0, recent))
    shown = samples(fetched(tmp_path))
    assert shown["dtf_metric", (("split", "eval"), ("metric", "loss"))] == 0.5
    assert shown["dtf_restarts_total", ()] == 0


def test_clients_that_say_nothing_keep_nobody_waiting(observer: Prometheus, tmp_path: Path) -> None:
    """As many as it answers, and more; the run sees its events and ends all the same."""
    port = int(address(tmp_path).split(":")[2].split("/")[0])
    with ExitStack() as silent:
        for _ in range(2 * metrics_server._MOST_CLIENTS):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), HANG_S))
        for event in whole_run():
            observer.see(event)
        observer.close()
    assert not (tmp_path / "prometheus.json").exists()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), HANG_S)


def test_other_addresses_have_nothing(observer: Prometheus, tmp_path: Path) -> None:
    with pytest.raises(HTTPError, match="404"):
        urlopen(address(tmp_path).replace("metrics", "config"), timeout=HANG_S)


def test_a_port_that_is_taken_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        observers = Observers({"prometheus": Prometheus(port=port)}, warnings.append)
        observers.open(tmp_path, CONFIG)
        observers.see(Note("info", "x"))
        observers.close()
    assert len(warnings) == 1 and f"observer.prometheus.port={port}: Address already in use; use anoth" in warnings[0]
    assert not (tmp_path / "prometheus.json").exists()
