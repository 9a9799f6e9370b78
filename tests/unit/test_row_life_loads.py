"""Saved rows that find no room in the table that goes on with them: the same ones stay, wherever they lie and lay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.api.sparse_table import Table
from dtf.checkpoint.manifest import StoredFile
from dtf.sparse.disk.saved_rows import Part
from dtf.sparse.living_tiered_table import LivingTieredTable
from dtf.sparse.row_parts import extras_of
from dtf.sparse.tiered_table import TieredTable
from tests.unit.test_row_life import CAPACITY, DISKS, MASK, MEMORY_BYTES, WIDTH, put, rule, table_of, traffic


@pytest.mark.parametrize("options", [{"when_full": "evict"}, {"when_full": "refuse"}])
@pytest.mark.parametrize("lived", [True, False])
@pytest.mark.parametrize("capacity", [CAPACITY, 200_000])
def test_a_saved_table_fills_one_of_another_capacity(
    capacity: int, lived: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Whose shards are others: as it lies on disk, in memory, and in whatever order."""
    on_disk, spec = {"disk": str(tmp_path / "rows")}, Table(WIDTH, 0, capacity, 0.1)
    kind = LivingTieredTable if lived else TieredTable
    saved = rule(**on_disk, **({"evict_unseen": 20} if lived else {}))
    source = kind(Table(WIDTH, 0, 3 * CAPACITY, 0.1), saved, 1, "t", np.float64, MEMORY_BYTES, (0, MASK))
    for step, (ids, seen, gradients) in enumerate(traffic(3, 14)):
        shown = slice(None) if lived else seen[:, 0] > 0
        source.update(ids[shown], gradients[shown], 0.1, 1.0, step, seen[shown])
    (tmp_path / "saved").mkdir()
    files: dict[str, list[Any]] = {key: [] for key in Part._fields}
    for told in source.set_aside().write(tmp_path / "saved", "rank_0.t", "table/t/disk_0"):
        stored = StoredFile(told["size"], tuple(told["crc32"]))
        files[told["boxes"][0][0].rpartition("/")[2]].append((tmp_path / "saved" / told["file"], stored))
    tables = [table_of(spec, rule(**options, **where)) for where in (on_disk, on_disk, {}, {})]
    if lived:
        assert tables[0].load([Part(**files)], extras_of(saved), 14)
    else:
        put(tables[0], source, 0, 14)
    for number, table in enumerate(tables[1:]):
        put(table, source, number, 14)
    first, *others = [table.export() for table in tables]
    assert len(first.ids) == len(tables[0]) == len(tables[0].tiers) <= len(source)
    assert (len(first.ids) < len(source)) == (capacity < len(source))
    for other in others:
        assert other.ids.tobytes() == first.ids.tobytes() and other.rows.tobytes() == first.rows.tobytes()
        assert all(other.states[name].tobytes() == first.states[name].tobytes() for name in first.states)


@DISKS
def test_rows_that_are_not_finite_go_first(on_disk: bool, tmp_path: Path) -> None:
    table: Any = table_of(Table(WIDTH, 0, CAPACITY, 0.1), rule(when_full="evict", disk=on_disk * str(tmp_path)))
    rows = np.ones((600, WIDTH))
    rows[::2], rows[::3] = np.inf, np.nan
    table.put(np.arange(600) * 7919, rows, None)
    kept = table.export().rows
    assert len(kept) <= CAPACITY and np.isfinite(kept).all(axis=1).sum() > 150
