"""Which texts of a config are secrets, told by the names of their keys, and what may be shown of them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

STARS = "***"
"""In the place of a secret."""

_SECRET = re.compile(r"secret|passwd|password|(token|key)(s|id|file|path|value)?(?![a-z])")
_CAPITAL_INSIDE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def is_secret(key: str) -> bool:
    """Whether texts under a key are secrets: `api_key` and `hubToken` are, `tokenizer` and `keyword` are not."""
    return bool(_SECRET.search(_CAPITAL_INSIDE.sub("_", key).lower()))


def redact(node: Any, key: str = "", stand_in: Callable[[str], str] = lambda text: STARS) -> Any:
    """A copy of plain values with every non-empty text under a key that names a secret replaced by its `stand_in`."""
    if isinstance(node, dict):
        return {name: redact(value, name if is_secret(name) else key, stand_in) for name, value in node.items()}
    if isinstance(node, list):
        return [redact(value, key, stand_in) for value in node]
    return stand_in(node) if isinstance(node, str) and node and is_secret(key) else node


def stars_and_digest(text: str) -> str:
    """What may stand for a secret where two are compared."""
    return f"{STARS} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def may_be(value: Any, recorded: Any) -> bool:
    """Whether a redacted value may be the one that was recorded: earlier versions starred texts that are no secrets."""
    return recorded in (value, STARS)
