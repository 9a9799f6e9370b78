"""The text in which Prometheus reads numbers.

Source: OpenMetrics 1.0.0, sections "Text format" and "Metric types" (RFC draft-richih-opsawg-openmetrics-00).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_SUFFIX = {"gauge": "", "counter": "_total", "info": "_info"}


class Family:
    """Numbers of one name, by labels. `kind`: `gauge`, `counter` or `info`."""

    def __init__(self, name: str, kind: str, help: str) -> None:
        self.name, self.kind, self.help = name, kind, help
        self._samples: dict[tuple[tuple[str, str], ...], float] = {}

    def set(self, value: float, labels: Mapping[str, str] | None = None) -> None:
        self._samples[tuple((labels or {}).items())] = value

    def add(self, value: float) -> None:
        self._samples[()] = self._samples.get((), 0) + value

    def lines(self) -> Iterable[str]:
        """Nothing where there is no number yet."""
        if not self._samples:
            return
        yield f"# TYPE {self.name} {self.kind}"
        yield f"# HELP {self.name} {_escaped(self.help)}"
        for labels, value in self._samples.items():
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            yield f"{self.name}{_SUFFIX[self.kind]}{'{' + inside + '}' if inside else ''} {_number(value)}"


def page(families: Iterable[Family]) -> str:
    return "".join(f"{line}\n" for family in families for line in family.lines()) + "# EOF\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
