"""How the memory for rows that lie on disk is divided between tables, and held against what the host has."""

from __future__ import annotations

import pytest

from dtf.core.errors import ConfigError
from dtf.sparse import make_tables
from tests.laws.test_sharded_tables import ANY
from tests.support.harness import Case


def test_tables_have_equal_parts_or_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more than the host has free."""
    case = Case(strategy="ddp", recipe=ANY | {"capacity": 10**6}, sparse_options={"disk": "rows", "memory_gb": 2e-3})
    task = case.task()
    assert make_tables.memory_of(task, ["ids"]) == {"ids": 2_000_000}
    both = make_tables.memory_of(task, ["ids", "who"])
    assert both["who"] < 100_000 and both["ids"] + both["who"] == 2_000_000  # a table of forty rows
    monkeypatch.setattr(make_tables, "available_bytes", lambda: 1_500_000)
    with pytest.raises(
        ConfigError, match="sparse.memory_gb=0.002: .* take 0.002 GB .* host, which has 0.0015 GB free; give less"
    ):
        make_tables.memory_of(task, ["ids", "who"])
