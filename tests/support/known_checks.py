"""What the check at the start found, by strategy and model: it is made once in a session, as by the runs of a user."""

from __future__ import annotations

import json
from typing import Any

MODEL = ("options", "recipe", "plugin", "precision", "remat", "compile", "freeze", "weights")
"""Of a case, what decides how the check ends."""

_found: dict[str, dict[str, str] | None] = {}


def known(strategy: str, case: dict[str, Any]) -> dict[str, str] | None:
    return _found.get(_key(strategy, case))


def keep(strategy: str, case: dict[str, Any], found: dict[str, str] | None) -> None:
    _found[_key(strategy, case)] = found


def _key(strategy: str, case: dict[str, Any]) -> str:
    return json.dumps([strategy, {key: case[key] for key in MODEL if key in case}], sort_keys=True)
