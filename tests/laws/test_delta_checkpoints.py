"""Laws of saves that write only the rows that changed: what is loaded from them is what a whole save holds, to the bit
and wherever rows lie, and a run goes on from them as from that.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.api.options import StepOptions
from dtf.api.registry import lookup
from dtf.api.sparse_table import Placement
from dtf.api.task import Task
from dtf.checkpoint import storage
from dtf.checkpoint.boxes import StoredCheckpoint
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.sparse.make_tables import tables_of
from tests.laws.test_sharded_tables import ANY, LIFE, WAYS
from tests.support.checkpoints import same_tensors
from tests.support.harness import PRECISIONS, difference, reference, spread
from tests.support.sparse_toy import Tabled

slow = pytest.mark.slow
DECAY: dict[str, Any] = {"recipe": ANY, "sparse": "sgd", "sparse_options": {"weight_decay": 0.1}, "steps": 4}
CASES: dict[str, dict[str, Any]] = {"decay": DECAY, "adam": DECAY | {"sparse": "lazy_adam"}, "life": LIFE}


def rows(source: StoredCheckpoint, case: dict[str, Any]) -> dict[str, Any]:
    """All that one process has of the tables, once it has loaded a checkpoint."""
    rule = lookup("sparse", case.get("sparse", "adagrad"))(**case["sparse_options"])
    recipe = Tabled(**{key: value for key, value in case["recipe"].items() if key != "name"})
    task = Task(recipe, None, PRECISIONS["fp64"], StepOptions(batch_size=8), 0, rows=rule)  # type: ignore[arg-type]
    tables = tables_of(task, World(Place(rank=0, size=1)), Placement.replicated)
    assert tables is not None
    tables.load(source)
    return {box.name: box.tensor for box in tables.boxes()}


def pairs() -> list[Any]:
    """Who saves, who goes on, and how rows learn: a circle through all ways, of which some run by default."""
    ring = [*zip(WAYS, [*list(WAYS)[1:], "dp"], strict=True), ("rows", "rows")]
    usual = (
        "replicated-columns-decay",
        "rows-rows-life",
        "two servers-server of rows-life",
        "two servers of rows-one process-decay",
    )
    found = [(*pair, name) for name in CASES for pair in ring]
    return [pytest.param(*one, id="-".join(one), marks=() if "-".join(one) in usual else slow) for one in found]


@pytest.mark.parametrize(("first", "second", "name"), pairs())
def test_a_run_goes_on_from_changes_as_from_a_whole_save(first: str, second: str, name: str, tmp_path: Path) -> None:
    """Each step is saved. The first save of a run is whole, the last one, and those between that would be too large."""
    case = CASES[name]
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    run = spread(one, processes, options=options, folder=str(tmp_path / "a"), save_every=100, delta_every=1, **case)
    *kept, last = (StoredCheckpoint(path) for path in reversed(storage.checkpoints(tmp_path / "a")))
    assert last.manifest.base is None
    changed = next(source for source in reversed(kept) if source.manifest.base is not None)
    at = changed.manifest.step
    spread(one, processes, options=options, folder=str(tmp_path / "b"), save_every=at, halt=True, **case)
    whole = StoredCheckpoint(tmp_path / "b" / f"step_{at:06d}")

    layers = {key: found for key in changed.names() if (found := re.search(r"^table/\w+/delta_(\d+)/(\w+)", key))}
    numbers = {int(found[1]) for found in layers.values()}
    base = changed.manifest.base
    assert base is not None and base.step == at - 1 and numbers == set(range(1, len(numbers) + 1)) != set()
    assert any(found[2] == "removed" for found in layers.values()) == (name == "life")
    alike = {key for key in whole.names() if not re.fullmatch(r"table/\w+/(?!count$|decay$|life/).*", key)}
    assert alike <= changed.names() and all(torch.equal(whole.read(key), changed.read(key)) for key in alike)
    loaded, expected = rows(changed, case), rows(whole, case)
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[key], expected[key]) for key in expected)

    same_tensors(changed.folder, whole.folder)

    goes_on, expected = (
        spread(other, more, options=others, start=str(source.folder), **case) for source in (changed, whole)
    )
    assert goes_on["tensors"] == expected["tensors"] and goes_on["train"] == expected["train"]
    if first == second:
        assert goes_on["tensors"] == run["tensors"]
    joined = goes_on | {key: run[key] | goes_on[key] for key in ("train", "eval", "ids")}
    assert difference(reference(**case), joined) <= 1e-10
