"""Tables of a trained model, for evaluations and exports: they see rows as the run itself would, bit for bit, wherever
these lay, and hold no more of those on disk than they are asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtf.api.row_life import WhenFull
from dtf.checkpoint import boxes
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.sparse.disk.segment import LAST
from dtf.sparse.inference_module import InferenceModule, LookupModule
from dtf.sparse.life import LAST_STEP, SCORE
from dtf.sparse.living_tiered_table import LivingTieredTable
from dtf.sparse.pruning import Pruning
from dtf.sparse.row_optimizers import RowwiseAdagrad
from dtf.sparse.sharded_tables import ShardedTables
from dtf.sparse.store import SparseTable
from dtf.sparse.stored_table import StoredTable, frozen
from dtf.sparse.tiered_table import TieredTable
from tests.unit.test_row_files import CASES, GONE, IDS, MEMORY, SPEC, Trained, sharded

NEW = np.arange(100)  # ids without a row


@pytest.fixture(autouse=True)
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of tables alone. No file has to outlive a power cut."""
    monkeypatch.setattr(boxes, "read_scalars", lambda folder, manifest: {})
    monkeypatch.setattr(os, "fsync", lambda file: None)


def opened(table: Trained, folder: Path, scratch: Path | None = None) -> tuple[SparseTable, ShardedTables]:
    """What an evaluation makes of a checkpoint; with `scratch`, rows lie there."""
    weights: Any = SimpleNamespace(source=lambda: StoredCheckpoint(folder))
    where = {"disk": str(scratch), "memory_gb": 1.0} if scratch else {}
    rule = frozen(table.rule(**table.options, **where), weights)
    store: SparseTable = StoredTable(SPEC, rule, 1, "t", table.dtype)
    if scratch:
        store = TieredTable(SPEC, rule, 1, "t", table.dtype, MEMORY, (0, LAST))
    tables = sharded(store)
    tables.start_from(weights, None)  # type: ignore[arg-type]
    return store, tables


@pytest.mark.parametrize("case", CASES)
def test_an_evaluation_sees_what_the_run_sees(case: str, tmp_path: Path) -> None:
    """Rows that have not had all of their decay, and ids without a row, too."""
    table = Trained(tmp_path / "rows", **CASES[case])
    ids = np.random.default_rng(2).permutation(np.concatenate([np.unique(IDS), NEW, [-1]]))
    expected = np.empty((len(ids), SPEC.width), table.dtype)
    for store, mine in table.owned(ids):
        expected[np.isin(ids, mine)] = store.lookup(ids[np.isin(ids, mine)], create=False)
    for name, save in (("disk", table.save), ("memory", table.save_from_memory)):
        for scratch in (None, tmp_path / "scratch"):
            store, _ = opened(table, save(tmp_path / f"{name}{scratch is None}"), scratch)
            assert store.lookup(ids, create=False).tobytes() == expected.tobytes(), (name, scratch)
            assert (store.has(ids) == table.has(ids)).all()
            assert len(store) == (0 if name == "disk" and not scratch else table.has(ids).sum()), "where they lie"


def test_an_export_looks_at_some_rows_at_a_time(tmp_path: Path) -> None:
    """And takes those that it would take of a table in memory."""
    table = Trained(tmp_path / "rows", weight_decay=0.1)
    in_memory, _ = opened(table, table.save_from_memory(tmp_path / "b"))
    here = in_memory.export().ids
    norms = np.linalg.norm(in_memory.lookup(here, create=False), axis=1)
    for scratch in (None, tmp_path / "scratch"):
        store, tables = opened(table, table.save(tmp_path / f"a{scratch is None}"), scratch)
        sizes = [len(some.ids) for some in store.scan()]
        assert len(sizes) > 3 and sum(sizes) == len(here)
        for count in (1, 10, 600, 10_000):
            assert (Pruning(max_rows=count).kept(store, None) == np.sort(here[np.argsort(-norms)[:count]])).all()
        ids, rows = tables.learnt()["t"]
        assert (ids.numpy() == here).all() and (rows.numpy() == in_memory.lookup(here, create=False)).all()
        both = store.export(), in_memory.export()
        assert (both[0].rows == both[1].rows).all() and (both[0].states["decayed"] == both[1].states["decayed"]).all()


def test_scores_lie_beside_the_rows(tmp_path: Path) -> None:
    table = Trained(tmp_path / "rows", RowwiseAdagrad, when_full=WhenFull.evict, score_decay=0.5)
    store, _ = opened(table, table.save(tmp_path / "a"))
    source: Any = SimpleNamespace(scalars={"table_steps": table.step})
    ids = np.unique(IDS[table.has(IDS)])
    assert isinstance(table.stores[0], LivingTieredTable)
    kept = table.stores[0].export()
    at = np.searchsorted(kept.ids, ids)
    scores = table.stores[0].life.decayed(kept.states[SCORE][at], kept.states[LAST_STEP][at], table.step)
    for least in np.unique(scores)[1:]:
        expected = ids[scores >= least]
        assert (Pruning(min_score=float(least)).kept(store, source) == expected).all()
        highest = np.sort(expected[np.lexsort((expected, -scores[scores >= least]))[:70]])
        assert (Pruning(min_score=float(least), max_rows=70).kept(store, source) == highest).all()


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return inputs["t"].sum((1, 2)) * self.factor


def test_a_module_of_rows_where_they_are_gives_what_one_of_all_rows_gives(tmp_path: Path) -> None:
    table = Trained(tmp_path / "rows", weight_decay=0.1)
    _, tables = opened(table, table.save(tmp_path / "a"))
    ids = torch.from_numpy(np.concatenate([IDS[:20], GONE[:9], [-1], IDS[:3], NEW[:7]]).reshape(4, -1))
    whole, looking = InferenceModule.of(Sums(), tables), LookupModule(Sums(), tables)
    assert torch.equal(looking({"t": ids}), whole({"t": ids}))
    assert torch.equal(looking({"t": torch.full((2, 3), -1)}), torch.zeros(2))
