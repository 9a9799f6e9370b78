"""A measurement as a row of metrics.jsonl, which trackers show too."""

from __future__ import annotations

import math
from typing import Any

from dtf.core.types import Measured


def measured_row(event: Measured) -> dict[str, Any]:
    """`split`, `step`, `epoch`, `seconds` and the metrics. A number that is not finite is None: strict JSON, which any
    parser reads, has no NaN and no Infinity.
    """
    head = {"split": event.split, "step": event.step, "epoch": event.epoch, "seconds": round(event.seconds, 3)}
    row = head | event.values | head  # a metric of the same name hides none of the four
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
