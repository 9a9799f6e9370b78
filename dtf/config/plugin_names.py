"""Which plugins a command line and files name. Imports none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtf.config.messages import parse, typed
from dtf.core.errors import ConfigError


def plugins_in_overrides(overrides: Sequence[str]) -> list[str]:
    """ConfigError for a text in place of a list: without the plugin the error would be about what it brings."""
    named = [text for text in overrides if text.lstrip("+").startswith("plugins=")]
    values = [override.value() for override in parse(named) if not override.is_sweep_override()]
    for value in values:
        if isinstance(value, str) and value != "???":
            raise ConfigError(typed(f"plugins={value} is not of type list of text; write [{value}]", "plugins"))
    return [name for value in values for name in plugins_in({"plugins": value})]


def plugins_in(content: dict[str, Any]) -> list[str]:
    named = content.get("plugins")
    return [str(name) for name in named] if isinstance(named, list) else []
