"""Nested mappings by dotted keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from dtf.api.schema import show

UNSAID = object()


def parts_of(key: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", key)


def at(content: Any, parts: Sequence[str]) -> Any:
    """The value at a path, or `UNSAID`. A name in a mapping may hold dots, as patterns of parameters do."""
    if not parts:
        return content
    if isinstance(content, list) and parts[0].isdecimal() and int(parts[0]) < len(content):
        return at(content[int(parts[0])], parts[1:])
    named = {str(name): inner for name, inner in content.items()} if isinstance(content, dict) else {}
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name in named and (found := at(named[name], parts[end:])) is not UNSAID:
            return found
    return UNSAID


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The keys at or below `key` that are no mappings, or empty ones, with their values."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def nested(content: Any, key: str) -> str:
    """How to write a key whose last name holds dots, as mappings of YAML; empty for another key.

    In the file of a group the name may begin with the group, which stands above it already:
    `strategy.strategy.bucket_mb` is `bucket_mb: 3` there.
    """
    parts = parts_of(key)
    for start in range(len(parts) - 1):
        parent, name = at(content, parts[:start]), ".".join(parts[start:])
        if isinstance(parent, dict) and name in parent:
            outer, *inner = parts[start + 1 :] if start and parts[start] == parts[start - 1] else parts[start:]
            return f"{outer}: " + "".join(f"{{{part}: " for part in inner) + show(parent[name]) + "}" * len(inner)
    return ""
