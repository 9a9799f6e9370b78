"""Which plugins a command line and files name. Imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtf.config.messages import parse


def plugins_in_overrides(overrides: Sequence[str]) -> list[str]:
    named = [text for text in overrides if text.lstrip("+").startswith("plugins=")]
    return [
        name
        for override in parse(named)
        if not override.is_sweep_override()
        for name in plugins_in({"plugins": override.value()})
    ]


def plugins_in(content: dict[str, Any]) -> list[str]:
    named = content.get("plugins")
    return [str(name) for name in named] if isinstance(named, list) else []
