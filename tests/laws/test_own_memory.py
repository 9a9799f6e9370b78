"""Parameters that a model reaches past the module that owns them: refused by name where they would go stale."""

from __future__ import annotations

from typing import Any

import pytest

from dtf.config.settings import load_parts
from tests.support.harness import spread

load_parts([])


def case(kind: str) -> dict[str, Any]:
    recipe = {"name": "passes", "kind": kind}
    return {"plugin": "tests.support.author_passes", "recipe": recipe, "precision": "fp32"}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("listed", "the parameter mid.weight is also kept in the attribute kept"),
        ("closure", "the parameter mid.weight is also kept in the attribute kept"),
        ("penalty", "the parameter first.weight is also kept in the attribute kept"),
        ("alias", "mid.weight and kept share memory"),
    ],
)
def test_a_parameter_that_is_kept_elsewhere_is_refused_under_fsdp(kind: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        spread("fsdp", 2, **case(kind))
