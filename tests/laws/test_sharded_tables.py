"""Laws, for recipes with sparse tables: the same numbers under every strategy, one checkpoint, and a step that touches
nothing but its rows.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from dtf.api.options import StepOptions
from dtf.api.registry import lookup, registered
from dtf.api.sparse_table import Placement
from dtf.api.task import Task
from dtf.core.errors import DataError
from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.sparse.make_tables import tables_of
from dtf.sparse.sharded_tables import LIFE_COUNTS
from tests.support.arrays import SAME_PROGRAM, plain, seldom
from tests.support.harness import PRECISIONS, ROWS, difference, meshes, reference, spread, variants
from tests.support.sparse_toy import Tabled

slow = pytest.mark.slow
ANY: dict[str, Any] = {"name": "tabled", "rows": ROWS, "scale": -(2**54) - 1}  # ids of up to 62 bits below 0
RANGE: dict[str, Any] = {"name": "tabled", "rows": ROWS, "size": 150}
KINDS = {"any": ANY, "range": RANGE, "bags": ANY | {"bags": True}}


def cases() -> list[Any]:
    """All strategies, numbers of processes and kinds of ids; each program on three processes with bags of ids, and
    ranges of ids under ddp, run by default.
    """
    strategies = sorted({name for name, _ in variants()})
    found = []
    for strategy, processes, kind in product(strategies, (1, 2, 3, 4), KINDS):
        usual = processes == 3 and strategy not in SAME_PROGRAM
        usual = usual and (kind == "bags" or (kind, strategy) == ("range", "ddp"))
        found.append(
            pytest.param(
                strategy,
                processes,
                KINDS[kind],
                id=f"{strategy}-{processes}-{kind}",
                marks=() if usual else slow,
            )
        )
    return found


@pytest.mark.parametrize(("strategy", "processes", "recipe"), cases())
def test_every_strategy_follows_the_reference_in_fp64(strategy: str, processes: int, recipe: dict[str, Any]) -> None:
    assert difference(reference(recipe=recipe), spread(strategy, processes, recipe=recipe)) <= 1e-10


@pytest.mark.parametrize(("strategy", "options"), plain(variants()))
def test_gradients_of_rows_are_divided_by_the_counts_of_the_loss(strategy: str, options: dict) -> None:
    recipe = ANY | {"counts": True}
    assert difference(reference(recipe=recipe), spread(strategy, 2, options=options, recipe=recipe)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        *(pytest.param(*mesh, marks=slow if mesh[0] == "fsdp" else ()) for mesh in meshes()),
        pytest.param("pipeline", {"virtual": 2}, marks=slow),
        pytest.param("ddp", {"shard_optimizer": True}, marks=slow),
        pytest.param("dp", {"reduce": "all"}, marks=slow),
    ],
    ids=str,
)
def test_every_way_to_combine_strategies(strategy: str, options: dict) -> None:
    processes = 2 if "virtual" in options else 4
    assert difference(reference(recipe=ANY), spread(strategy, processes, options=options, recipe=ANY)) <= 1e-10


@pytest.mark.parametrize(
    ("strategy", "options"),
    [pytest.param("ddp", {}, marks=slow), ("tensor", {"degree": 2, "tables": "replicated"})],
    ids=str,
)
def test_tables_so_small_that_all_rows_are_summed_as_one_tensor(strategy: str, options: dict) -> None:
    """Twelve rows on four ranks; the last of them and missing ids are met, and three ranks of a tensor's four tell no
    gradient.
    """
    recipe = RANGE | {"size": 12}
    assert difference(reference(recipe=recipe), spread(strategy, 4, options=options, recipe=recipe)) <= 1e-10


def test_tensor_divides_tables_where_it_can_divide_nothing_else() -> None:
    recipe = ANY | {"splits": False}
    assert difference(reference(recipe=recipe), spread("tensor", 2, recipe=recipe)) <= 1e-10


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=slow), "pserver"])
def test_a_full_table_is_refused(strategy: str) -> None:
    with pytest.raises(AssertionError, match="table ids is full: capacity=50"):
        spread(strategy, 2, recipe=ANY | {"capacity": 50})


def test_a_table_that_met_no_id_yet_is_saved(tmp_path: Path) -> None:
    case: dict[str, Any] = {"recipe": ANY | {"unmet": True}, "steps": 4}
    spread("fsdp", 2, folder=str(tmp_path), save_every=3, halt=True, **case)
    whole = reference(**case)
    found = spread("ddp", 2, start=str(tmp_path / "step_000003"), **case)["tensors"]
    assert difference(whole, whole | {"tensors": found}) <= 1e-10


def rules() -> list[Any]:
    """Every rule under all three; by default under one of them, in turn."""
    two_servers = {"servers": 2, "min_block": 1}
    return [
        pytest.param(strategy, options, rule, id=f"{rule}-{strategy}-{options}", marks=() if i % 3 == j else slow)
        for i, rule in enumerate(sorted(registered("sparse")))
        for j, (strategy, options) in enumerate([("fsdp", {}), ("pserver", two_servers), ("ddp", {})])
    ]


@pytest.mark.parametrize(("strategy", "options", "rule"), rules())
def test_with_every_row_optimizer(strategy: str, options: dict, rule: str) -> None:
    assert (
        difference(reference(recipe=ANY, sparse=rule), spread(strategy, 2, options=options, recipe=ANY, sparse=rule))
        <= 1e-10
    )


@pytest.mark.parametrize(
    ("strategy", "precision"),
    seldom(
        [*product(["ddp", "pserver", "tensor"], ["fp32", "bf16", "bf16_params"])],
        lambda *case: case in (("ddp", "fp32"), ("ddp", "bf16_params"), ("pserver", "bf16"), ("pserver", "fp32")),
    ),
)
def test_other_precisions_stay_close(strategy: str, precision: str) -> None:
    bound = 1e-4 if precision == "fp32" else 0.3 if precision == "bf16_params" else 0.1
    a, b = reference(recipe=ANY, precision=precision), spread(strategy, 2, recipe=ANY, precision=precision)
    assert difference(a, b, () if precision == "fp32" else ("optimizer/", "table/")) <= bound


LIFE: dict[str, Any] = {
    "recipe": {"name": "tabled", "rows": 600, "values": 1000, "scale": -(2**52) - 1, "capacity": 256},
    "sparse_options": {"admit_count": 2, "admit_probability": 0.9, "evict_unseen": 3, "score_decay": 0.9},
    "batch_size": 150,
    "steps": 12,
}
"""Four virtual shards of 64 rows, which are full after a few steps."""


def lives() -> list[Any]:
    ways = [
        *((name, 4, {"tables": tables}) for name in ("ddp", "tensor") for tables in ("replicated", "rows", "tables")),
        *(("ddp", 2, {"tables": tables}) for tables in ("rows", "columns")),
        *(("pserver", 3, {"servers": n, "min_block": 1}) for n in (1, 2, 4)),
        *(("pserver", 2, {"servers": n, "dense": "allreduce"}) for n in (1, 3)),
        *((name, 3, {}) for name in ("dp", "fsdp", "pipeline")),
        ("pserver", 4, {"team": 2, "servers": 2, "min_block": 1}),
    ]
    usual = (4, 7, 9, 12, 16)
    return [
        pytest.param(*way, id=f"{way[0]}-{way[1]}-{way[2]}", marks=() if i in usual else slow)
        for i, way in enumerate(ways)
    ]


@pytest.mark.parametrize(("strategy", "processes", "options"), lives())
def test_rows_live_and_leave_alike_everywhere(strategy: str, processes: int, options: dict) -> None:
    one = reference(**LIFE)
    counts = {key: sum(values[key] for values in one["train"].values()) for key in LIFE_COUNTS}
    rows = sum(len(one["tensors"][f"table/{name}/ids"]) for name in ("ids", "who"))
    assert min(counts.values()) > 50 and counts["admitted"] - counts["evicted"] == rows <= 256 + 40
    assert difference(one, spread(strategy, processes, options=options, **LIFE)) <= 1e-10


WAYS = {
    "dp": ("dp", 3, {}),
    "replicated": ("ddp", 2, {}),
    "columns": ("ddp", 2, {"tables": "columns"}),
    "rows": ("fsdp", 3, {}),
    "whole": ("tensor", 4, {"degree": 2, "tables": "tables"}),
    "pipeline": ("pipeline", 3, {}),
    "server": ("pserver", 3, {}),
    "two servers": ("pserver", 2, {"servers": 2, "min_block": 1}),
    "server of rows": ("pserver", 2, {"dense": "allreduce"}),
    "two servers of rows": ("pserver", 3, {"dense": "allreduce", "servers": 2}),
    "one process": ("ddp", 1, {}),
}


def pairs() -> list[Any]:
    """A circle through all ways, and a way to itself; every third one runs by default."""
    found = [*zip(WAYS, [*list(WAYS)[1:], "dp"], strict=True), ("rows", "rows")]
    return [pytest.param(*pair, marks=slow if i % 3 else ()) for i, pair in enumerate(found)]


@pytest.mark.parametrize("rule", ["sgd", pytest.param("lazy_adam", marks=slow)])
@pytest.mark.parametrize(("first", "second"), pairs())
def test_a_checkpoint_goes_on_under_any_strategy_and_world_size(
    first: str, second: str, rule: str, tmp_path: Path
) -> None:
    """The last step of three is taken elsewhere, with weight decay that acts on rows nobody touches."""
    case: dict[str, Any] = {"recipe": ANY, "sparse": rule, "sparse_options": {"weight_decay": 0.1}}
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    a = spread(one, processes, options=options, folder=str(tmp_path), save_every=2, halt=True, **case)
    b = spread(other, more, options=others, start=str(tmp_path / "step_000002"), **case)
    whole = b | {key: a[key] | b[key] for key in ("train", "eval", "ids")}
    assert difference(reference(**case), whole) <= 1e-10


@pytest.mark.parametrize(
    ("first", "second", "step"),
    [
        pytest.param(*pair, step, marks=() if step == 3 and pair[0] == "rows" else slow)
        for pair, step in product(
            [("rows", "two servers"), ("two servers of rows", "columns"), ("replicated", "whole"), ("server", "rows")],
            (1, 3, 8),
        )
    ],
)
def test_a_life_goes_on_from_any_step(first: str, second: str, step: int, tmp_path: Path) -> None:
    """With the counts of an open metric window."""
    case = LIFE | {"log_every": 5}
    (one, processes, options), (other, more, others) = WAYS[first], WAYS[second]
    a = spread(one, processes, options=options, folder=str(tmp_path), save_every=step, halt=True, **case)
    b = spread(other, more, options=others, start=str(tmp_path / f"step_{step:06d}"), **case)
    whole = b | {key: a[key] | b[key] for key in ("train", "eval", "ids")}
    assert difference(reference(**case), whole) <= 1e-10


@pytest.mark.parametrize("rule", [pytest.param("sgd", marks=slow), "adagrad"])
def test_a_run_goes_on_in_another_precision(rule: str, tmp_path: Path) -> None:
    case: dict[str, Any] = {"recipe": ANY, "sparse": rule, "sparse_options": {"weight_decay": 0.1}}
    spread("fsdp", 2, folder=str(tmp_path), save_every=2, halt=True, precision="fp32", **case)
    found = spread("ddp", 2, start=str(tmp_path / "step_000002"), **case)["train"]
    expected = reference(**case)["train"]
    assert [found[step]["loss"] for step in found] == pytest.approx(
        [expected[step]["loss"] for step in found], rel=1e-4
    )
    assert list(found) == ["3"]


def test_rows_that_ftrl_keeps_go_on_at_the_same_alpha_and_with_the_same_tables_only(run_dtf: Any) -> None:
    run = [
        "plugins=[tests.support.sparse_toy]",
        "recipe=tabled",
        "train.steps=4",
        "sparse=ftrl",
        "step.batch_size=24",
        "launcher.processes=1",
        "observer=[]",
    ]
    three = [*run, "recipe.bags=true"]
    cut = run_dtf(*three, "train.until=2")
    refused = run_dtf(*three, "sparse.alpha=0.2", folder=cut.folder)
    assert (cut.code, refused.code) == (0, 2), refused.err
    assert "was written with sparse.alpha=0.1, this run has sparse.alpha=0.2" in refused.err
    fewer = run_dtf(*run, f"checkpoint.resume={cut.folder}")
    assert fewer.code == 65 and "holds the sparse table words, and this run has none; give" in fewer.err, fewer.err
    further = run_dtf(*three, "sparse.l2=0.5", "sparse.when_full=evict", folder=cut.folder)
    assert further.code == 0, further.err
    assert "with sparse.l2=0.5 (was 0.0), sparse.when_full=evict (was null)" in further.out + further.err


def test_a_checkpoint_that_counts_other_rows_than_it_has_is_refused() -> None:
    class Short:
        place, folder = "checkpoint here", Path()

        def __init__(self) -> None:
            self.scalars: dict[str, Any] = {}

        def names(self) -> set[str]:
            return {"table/ids/ids"}

        def read(self, name: str, offset: Any = None, shape: Any = None, whole: Any = None) -> torch.Tensor:
            return torch.tensor(3) if name.endswith("count") else torch.arange(2)

        def read_into(self, name: str, out: torch.Tensor, offset: Any = None, whole: Any = None) -> None:
            out.copy_(self.read(name))

    task = Task(Tabled(), None, PRECISIONS["fp64"], StepOptions(batch_size=8), 0, rows=lookup("sparse", "adagrad")())  # type: ignore[arg-type]
    tables = tables_of(task, World(Place(rank=0, size=1)), Placement.replicated)
    assert tables is not None
    with pytest.raises(DataError, match="checkpoint here: table ids has 3 rows by its own count, and ids of 2"):
        tables.load(Short())
