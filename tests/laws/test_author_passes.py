"""What an author's forward pass does by itself gives the same numbers under every strategy that divides rows."""

from __future__ import annotations

import pytest

from dtf.config.settings import load_parts
from tests.support.harness import difference, reference, spread

PLUGIN = "tests.support.author_passes"
load_parts([])


@pytest.mark.parametrize("kind", ["reentrant", "vmap"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pserver"])
def test_every_strategy_follows_the_reference(strategy: str, kind: str) -> None:
    """On three ranks some have a micro-batch less: under fsdp these make a pass over padding."""
    case = {"plugin": PLUGIN, "recipe": {"name": "passes", "kind": kind}}
    assert difference(reference(**case), spread(strategy, 3, **case)) < 1e-10
