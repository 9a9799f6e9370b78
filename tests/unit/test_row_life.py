"""Rows that have a life: whatever is shown in whatever order, a table admits, scores and lets go as a plain dict of
rows would; alone, divided over owners, and after a checkpoint at any step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtf.api.row_life import WhenFull
from dtf.api.row_optimizer import RowOptimizer
from dtf.api.schema import KeyProblem
from dtf.api.sparse_table import Table
from dtf.core.seeding import seed_of
from dtf.sparse.id_arrays import unique
from dtf.sparse.life import LAST_STEP, SCORE
from dtf.sparse.living_table import table_class
from dtf.sparse.living_tiered_table import LivingTieredTable
from dtf.sparse.row_index import HashedIndex
from dtf.sparse.row_optimizers import RowAdagrad, RowSgd
from dtf.sparse.store import SparseTable
from dtf.sparse.table_layouts import bounds_of_shards, owner_of

WIDTH, CAPACITY, MASK = 2, 300, 2**64 - 1
MEMORY_BYTES = 24_000  # of two hundred rows, and a step has up to 160 ids
GOLDEN = 0x9E3779B97F4A7C15


def typed(options: dict[str, Any]) -> dict[str, Any]:
    return {key: WhenFull(value) if key == "when_full" else value for key, value in options.items()}


def rule(**options: Any) -> RowAdagrad:
    made = RowAdagrad(**typed(options))
    made.check_life()
    return made


def table_of(spec: Table, rule: RowOptimizer, dtype: type = np.float64) -> Any:
    """On disk, but for a few rows, where the rule says so."""
    if rule.disk:
        return LivingTieredTable(spec, rule, 1, "t", dtype, MEMORY_BYTES, (0, MASK))
    return table_class(rule)(spec, rule, 1, "t", dtype)


def mixed(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def power(base: float, exponent: int) -> float:
    out, factor = 1.0, base
    while exponent:
        out, factor, exponent = out * factor if exponent % 2 else out, factor * factor, exponent // 2
    return out


@dataclass
class Reference:
    """The same by the words of the documentation: rows, scores and filters in dicts."""

    rule: RowAdagrad
    spec: Table
    shards: int
    rows: dict[int, list[Any]] = field(default_factory=dict)  # id -> [row, sum, score, last step]
    cells: dict[tuple[int, int, int], int] = field(default_factory=dict)  # shard, row of cells, cell -> count
    added: dict[int, int] = field(default_factory=dict)
    admitted: int = 0
    refused: int = 0
    evicted: int = 0

    def shard(self, id: int) -> int:
        return mixed(id & MASK) * self.shards >> 64

    def room(self, shard: int) -> int:
        return self.spec.capacity * (shard + 1) // self.shards - self.spec.capacity * shard // self.shards

    def score(self, id: int, step: int) -> float:
        return float(self.rows[id][2]) * power(self.rule.score_decay, step - self.rows[id][3])

    def leave(self, ids: list[int]) -> None:
        for id in ids:
            del self.rows[id]
        self.evicted += len(ids)

    def cells_of(self, id: int) -> list[tuple[int, int, int]]:
        most = max(self.room(shard) for shard in range(self.shards))
        width, first = 1 << (4 * most - 1).bit_length(), mixed((id & MASK) * GOLDEN & MASK)
        return [(self.shard(id), row, (first + row * (mixed(first) | 1) & MASK) % width) for row in range(4)]

    def admits(self, new: dict[int, int], step: int) -> dict[int, int]:
        """Ids that may have a row, with the shows that are known of them."""
        known = dict(new)
        if self.rule.admit_count > 1:
            for id, shows in new.items():
                for cell in self.cells_of(id):
                    self.cells[cell] = min(255, self.cells.get(cell, 0) + shows)
                self.added[self.shard(id)] = self.added.get(self.shard(id), 0) + shows
            known = {id: min(self.cells[cell] for cell in self.cells_of(id)) for id in new}
            for shard, added in self.added.items():
                while added >= 2 * self.room(shard):
                    added //= 2
                    self.cells |= {cell: n // 2 for cell, n in self.cells.items() if cell[0] == shard}
                self.added[shard] = added
        key, chance = seed_of(1, "admit", "t"), self.rule.admit_probability

        def lucky(id: int) -> bool:
            h = mixed(key ^ mixed(((id & MASK) * GOLDEN + step) & MASK))
            return (h >> 11) * 2.0**-53 >= power(1 - chance, new[id])

        return {id: n for id, n in known.items() if n >= self.rule.admit_count and (chance == 1 or lucky(id))}

    def step(self, seen: dict[int, tuple[int, int]], gradients: dict[int, np.ndarray], drawn: Any, step: int) -> None:
        for id in seen.keys() & self.rows.keys():
            score = self.score(id, step) + seen[id][0] + seen[id][1]
            self.rows[id][2:] = [np.float32(score), step]
        turn = [id for id in self.rows if self.shard(id) == step % self.shards and self.rows[id][3] < step]
        unseen, bar = self.rule.evict_unseen, self.rule.evict_score
        self.leave([i for i in turn if (unseen and step - self.rows[i][3] > unseen) or self.score(i, step) < bar])
        new = {id: shows for id, (shows, _) in seen.items() if id not in self.rows}
        may = self.admits(new, step)
        for shard in {self.shard(id) for id in may}:
            coming, room = [id for id in may if self.shard(id) == shard], self.room(shard)
            here = [id for id in self.rows if self.shard(id) == shard]
            if len(here) + len(coming) > room and self.rule.evicts_when_full:
                keep = max(0, min(7 * room // 8, room - len(coming)))
                old = [id for id in here if self.rows[id][3] < step]
                old.sort(key=lambda id: (self.score(id, step), self.rows[id][3], id))
                self.leave(old[: max(0, len(here) - keep)])
                here = [id for id in self.rows if self.shard(id) == shard]
            coming.sort(key=lambda id: (-(may[id] + seen[id][1]), id))
            for id in coming[: max(0, room - len(here))]:
                self.rows[id] = [drawn[id].copy(), np.zeros(WIDTH), np.float32(may[id] + seen[id][1]), step]
                self.admitted += 1
                del new[id]
        self.refused += len(new)
        for id in seen.keys() & self.rows.keys():
            row, total = self.rows[id][:2]
            total += gradients[id] ** 2
            row -= 0.1 * gradients[id] / (np.sqrt(total) + self.rule.eps)


def traffic(seed: int, steps: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each step ids, what was seen of them, and gradients; some ids are missing, and some stand in padding."""
    random = np.random.default_rng(seed)
    batches = []
    for step in range(steps):
        shown = (900 * random.random(random.integers(0, 160)) ** 2).astype(np.int64) * random.choice([1, -(2**50)])
        ids = np.append(unique(shown + 37 * (step // 5))[0], -1)
        shows = random.integers(0, 4, len(ids))
        seen = np.stack([shows, random.binomial(shows, 0.3)], 1).astype(np.float64)
        batches.append((ids, seen, random.normal(size=(len(ids), WIDTH))))
    return batches


def step_reference(reference: Reference, batch: Any, drawn: np.ndarray, step: int) -> None:
    ids, seen, gradients = batch
    known = {i: (int(s), int(c)) for i, (s, c) in zip(ids.tolist(), seen.tolist(), strict=True) if s and i != -1}
    by_id, rows = (dict(zip(ids.tolist(), values, strict=True)) for values in (gradients, drawn))
    reference.step(known, by_id, rows, step)


def assert_same(table: Any, reference: Reference) -> None:
    ids, rows, states = table.export()
    assert ids.tolist() == sorted(reference.rows) and len(table) == len(ids)
    for place, id in enumerate(ids.tolist()):
        row, total, score, last = reference.rows[id]
        np.testing.assert_allclose(rows[place], row, rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(states["sum"][place], total, rtol=1e-12)
        assert (states[SCORE][place], states[LAST_STEP][place]) == (score, last)
    life = table.life
    assert (life.admitted, life.refused, life.evicted) == (reference.admitted, reference.refused, reference.evicted)


OPTIONS = st.fixed_dictionaries(
    {
        "admit_count": st.sampled_from([1, 1, 2, 5]),
        "admit_probability": st.sampled_from([1.0, 0.3]),
        "evict_unseen": st.sampled_from([0, 3]),
        "evict_score": st.sampled_from([0.0, 1.2]),
        "when_full": st.sampled_from(["evict", "refuse"]),
    }
).flatmap(
    lambda options: st.sampled_from([0.9999, 0.7, 1.0]).map(
        lambda decay: options | ({"score_decay": decay} if lets_rows_go(RowAdagrad(**typed(options))) else {})
    )
)


def lets_rows_go(rule: RowAdagrad) -> bool:
    return rule.evicts_when_full or rule.evict_unseen > 0 or rule.evict_score > 0


def _typed(options: dict[str, Any]) -> dict[str, Any]:
    return options | {"when_full": WhenFull(options["when_full"])}


TRAFFIC = given(OPTIONS, st.integers(0, 2**32), st.integers(0, 12))


DISKS = pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])


@DISKS
@settings(max_examples=6, deadline=None)
@TRAFFIC
def test_a_table_lives_as_its_reference(on_disk: bool, options: dict[str, Any], seed: int, cut: int) -> None:
    follow_reference(on_disk, options, seed, cut)


@DISKS
@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@TRAFFIC
def test_a_table_lives_as_its_reference_at_length(on_disk: bool, options: dict[str, Any], seed: int, cut: int) -> None:
    follow_reference(on_disk, options, seed, cut)


def follow_reference(on_disk: bool, options: dict[str, Any], seed: int, cut: int) -> None:
    """The table is saved and loaded, in pieces of another order, before step `cut`."""
    with TemporaryDirectory() as folder:
        follow(rule(**options, disk=folder if on_disk else ""), seed, cut)


def follow(chosen: RowAdagrad, seed: int, cut: int) -> None:
    spec = Table(WIDTH, 0, CAPACITY, 0.1)
    table = table_of(spec, chosen)
    reference = Reference(chosen, spec, chosen.shards(spec))
    assert reference.shards == 4
    for step, batch in enumerate(traffic(seed, 14)):
        if step == cut:
            table = reloaded(table, chosen, spec, step)
        ids, seen, gradients = batch
        drawn = SparseTable(spec, RowSgd(), 1, "t", np.float64).lookup(ids, create=False)
        held = len(table)
        rows = table.lookup(ids, create=True)
        assert len(table) == held
        for id, row, other in zip(ids.tolist(), rows, drawn, strict=True):
            np.testing.assert_allclose(row, reference.rows[id][0] if id in reference.rows else other, rtol=1e-12)
        table.update(ids, gradients, 0.1, 1.0, step, seen)
        step_reference(reference, batch, drawn, step)
        assert_same(table, reference)


def reloaded(table: Any, chosen: RowAdagrad, spec: Table, step: int) -> Any:
    fresh: Any = table_of(spec, chosen)
    put(fresh, table, 0, step)
    for name, array in table.life.by_shard().items():  # not how many rows there are: `put` has counted
        fresh.life.by_shard()[name][:] = array
    for count in ("admitted", "refused", "evicted"):
        setattr(fresh.life, count, getattr(table.life, count))
    return fresh


def put(into: Any, table: Any, seed: int, step: int) -> None:
    """In three pieces of another order."""
    ids, rows, states = table.export()
    for piece in np.array_split(np.random.default_rng(seed).permutation(len(ids)), 3):
        into.put(ids[piece], rows[piece], {name: values[piece] for name, values in states.items()}, step)


@DISKS
@pytest.mark.parametrize("options", [{}, {"evict_unseen": 20}])
def test_what_finds_no_room_stays_out_in_whatever_order_it_comes(
    options: dict[str, Any], on_disk: bool, tmp_path: Path
) -> None:
    """A table of another capacity, or one whose rows had no life, goes on with the highest of its rows."""
    large, small = Table(WIDTH, 0, 3 * CAPACITY, 0.1), Table(WIDTH, 0, CAPACITY, 0.1)
    source = table_of(large, rule(**options))
    for step, (ids, seen, gradients) in enumerate(traffic(3, 14)):
        if options:
            source.update(ids, gradients, 0.1, 1.0, step, seen)
        else:
            source.update(ids[seen[:, 0] > 0], gradients[seen[:, 0] > 0], 0.1, 1.0, step)
    disk = str(tmp_path) if on_disk else ""
    tables = [table_of(small, rule(when_full="evict", disk=disk)) for _ in range(3)]
    for seed, table in enumerate(tables):
        put(table, source, seed, 14)
    first, *others = [table.export() for table in tables]
    assert CAPACITY >= len(first.ids) > CAPACITY // 2 and len(source) > CAPACITY
    assert tables[0].life.evicted == len(source) - len(first.ids)  # type: ignore[attr-defined]
    for other in others:
        assert other.ids.tobytes() == first.ids.tobytes() and other.rows.tobytes() == first.rows.tobytes()
        assert all(other.states[name].tobytes() == first.states[name].tobytes() for name in first.states)
    left = np.setdiff1d(source.export().ids, first.ids)
    life = tables[0].life  # type: ignore[attr-defined]
    norms = dict(zip(source.export().ids.tolist(), np.linalg.norm(source.export().rows, axis=1).tolist(), strict=True))
    for shard in np.unique(life.shards(left)):
        assert life.counts[shard] == life.limits[shard], "rows stay out where there is no room, and only there"
        if not options:  # nobody kept scores
            stay, go = (ids[life.shards(ids) == shard].tolist() for ids in (first.ids, left))
            assert max(norms[id] for id in go) <= min(norms[id] for id in stay) + 1e-6


@DISKS
def test_rows_of_one_step_never_make_room_for_each_other(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "MEMORY_BYTES", 120_000)  # a step has a thousand ids
    table: Any = table_of(Table(WIDTH, 0, CAPACITY, 0.1), rule(when_full="evict", disk=on_disk * str(tmp_path)))
    for step in range(3):
        again = table.export().ids[:40]
        ids = np.concatenate([again, np.arange(1000) + 1000 * step])
        table.update(ids, np.ones((len(ids), WIDTH)), 0.1, 1.0, step, np.ones((len(ids), 2)))
        assert len(table) == CAPACITY and np.isin(again, table.export().ids).all()
        assert np.isin(table.export().ids, ids).all()
    assert (table.life.admitted, table.life.evicted, table.life.refused) == (820, 520, 2180)


def test_a_range_for_whose_ids_there_is_room_loses_none() -> None:
    table: Any = table_of(Table(WIDTH, 5000, 5000, 0.1), rule(when_full="evict"), np.float32)
    table.update(np.arange(5000), np.ones((5000, WIDTH)), 0.1, 1.0, 0, np.ones((5000, 2)))
    assert len(table) == 5000 and not table.life.refused


@DISKS
def test_decay_of_all_rows_follows_rows_that_move(
    on_disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against a table that never lets a row go."""
    monkeypatch.setattr(sys.modules[__name__], "MEMORY_BYTES", 3_000)
    decays: dict[str, Any] = {"weight_decay": 0.2}
    spec = Table(WIDTH, 0, CAPACITY, 0.1)
    living: Any = table_of(spec, RowSgd(evict_unseen=2, disk=on_disk * str(tmp_path), **decays))
    plain = SparseTable(Table(WIDTH, 0, 10**4, 0.1), RowSgd(**decays), 1, "t", np.float64)
    for step in range(12):
        ids = np.random.default_rng(step).permutation(60)[:20].astype(np.int64)
        for table in (living, plain):
            table.update(ids, np.zeros((20, WIDTH)), 0.1, 1.0, step, np.ones((20, 2)))
        np.testing.assert_allclose(living.lookup(np.arange(60), False), plain.lookup(np.arange(60), False), rtol=1e-12)
    assert living.life.evicted > 20


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(-40, 40), max_size=30)), max_size=20), st.integers(1, 64))
def test_an_index_forgets_ids_and_finds_the_others(calls: list[tuple[bool, set[int]]], stride: int) -> None:
    """Also where many ids begin to look at the same place."""
    from dtf.sparse import id_kernels

    index, known, next_position = HashedIndex(id_kernels), dict[int, int](), 0
    index.slots = np.zeros((128, 2), np.int64)
    for adds, some in calls:
        ids = np.array(sorted(id for id in some if id != -1 and (id * stride in known) != adds), np.int64) * stride
        if adds:
            positions = np.arange(next_position, next_position + len(ids))
            next_position += len(ids)
            index.insert(ids, positions)
            known |= dict(zip(ids.tolist(), positions.tolist(), strict=True))
        else:
            index.remove(ids)
            for id in ids.tolist():
                del known[id]
        there = np.arange(-40, 41) * stride
        wanted = [known.get(id, -1) if id != -1 else -1 for id in there.tolist()]
        assert index.find(there)[0].tolist() == wanted
        ids, positions = index.items()
        assert dict(zip(ids.tolist(), positions.tolist(), strict=True)) == known


@pytest.mark.parametrize(("count", "shards"), [*product((1, 2, 3, 4, 7), (1, 2, 8, 1024))])
def test_owners_have_whole_shards(count: int, shards: int) -> None:
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 2000)
    table: Any = table_of(Table(WIDTH, 0, 64 * shards, 0.1), rule(when_full="refuse"), np.float32)
    mine, owners = table.life.shards(ids), owner_of(ids, count, shards)
    assert len(table.life.counts) == shards and (np.bincount(mine, minlength=shards).sum(), owners.max() < count)
    assert len({(int(s), int(o)) for s, o in zip(mine, owners, strict=True)}) == len(np.unique(mine))
    ends = bounds_of_shards(shards, count)
    assert all(ends[owner] <= shard < ends[owner + 1] for shard, owner in zip(mine, owners, strict=True))
    assert shards < 8 or np.bincount(owners, minlength=count).min() > 2000 // count // 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"admit_count": 2, "when_full": "error"}, "sparse.when_full=error ends the run"),
        ({"score_decay": 0.5}, "sparse.score_decay=0.5 is of no account"),
        ({"score_decay": 0.5, "admit_count": 3, "when_full": "refuse"}, "is of no account"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(KeyProblem, match=words):
        rule(**options)
