"""Bags of ids: how they are cut and joined, and what a table pools of them, against torch's EmbeddingBag."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dtf.api.options import StepOptions
from dtf.api.sparse_table import Placement, Pooling, Table, inputs_of
from dtf.api.task import Task
from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.core.nest import Bags
from dtf.core.types import Batch, Place
from dtf.data.answers import check_fetched, refuse_loose_bags
from dtf.distributed.world import World
from dtf.sparse.inference_module import InferenceModule
from dtf.sparse.make_tables import tables_of
from dtf.sparse.row_optimizers import RowSgd
from dtf.sparse.table_inputs import TableInputs
from tests.support.harness import PRECISIONS
from tests.support.sparse_toy import Tabled

LENGTHS = torch.tensor([[2, 0], [3, 1], [0, 0], [1, 2]])
VALUES = torch.tensor([7, 3, 3, 3, 5, -1, 9, 7, 9])


def inputs() -> dict[str, Any]:
    return {"tags": Bags(VALUES, LENGTHS), "dense": torch.arange(4.0)}


def test_rows_are_cut_and_joined_with_their_ids() -> None:
    assert nest.count({"tags": Bags(VALUES, LENGTHS)}) == 4
    parts = [nest.rows(inputs(), *ends) for ends in pairwise([0, 1, 3, 4])]
    assert [part["tags"].values.tolist() for part in parts] == [[7, 3], [3, 3, 5, -1], [9, 7, 9]]
    whole = nest.concatenate(parts)
    assert whole["tags"].values.equal(VALUES) and whole["tags"].lengths.equal(LENGTHS)
    assert all(not part["tags"].fault(len(part["dense"])) for part in parts)
    described = nest.form(inputs())
    again = nest.from_form(described, iter(nest.leaves(inputs())))
    assert isinstance(again["tags"], Bags) and nest.formats(again, 4) == nest.formats(parts[0], 1)
    on_meta = nest.rows(nest.map_leaves(lambda tensor: tensor.to("meta"), inputs()), 1, 3)
    assert on_meta["tags"].lengths.shape == (2, 2) and not len(on_meta["tags"].values)


@pytest.mark.parametrize(
    ("bags", "words"),
    [
        (Bags(VALUES, LENGTHS[:3]), "and lengths (3, 2) that are not (n,) and (4,)"),
        (Bags(VALUES[1:], LENGTHS), "lengths that add up to 9, and 8 values"),
        (Bags(VALUES, LENGTHS - 1), "lengths below 0"),
        (Bags(VALUES.int(), LENGTHS), "not int64 tensors"),
        (Bags(VALUES[None], LENGTHS), "values (1, 9)"),
    ],
)
def test_bags_of_other_rows_are_refused_by_name(bags: Bags, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_fetched(nn.Module(), 4, ({"tags": bags}, torch.zeros(4)))  # type: ignore[arg-type]
    assert words in str(error.value) and "returned Bags among inputs" in str(error.value)
    assert nest.formats({"tags": bags}, 4) is None


def test_bags_need_a_pooling_and_an_input_one_table() -> None:
    with pytest.raises(ConfigError, match=r"inputs\['tags'\] are Bags, and their table does not say"):
        TableInputs(inputs(), ["tags"], None)
    with pytest.raises(ConfigError, match=r"inputs\['b'\] belong to two tables, of which other is one"):
        inputs_of({"a": Table(1, 0, 9, 0, ("a", "b")), "other": Table(1, 0, 9, 0, ("b",))})


def test_bags_that_no_table_pools_are_refused() -> None:
    recipe = Tabled(bags=True)
    data = recipe.open_data("train", 0)
    rows = Batch(*data.fetch(np.arange(2), 0), torch.ones(2), np.arange(2))
    refuse_loose_bags(data, rows, recipe)
    with pytest.raises(ConfigError, match=r"returned Bags as inputs\['who'\], and their table does not"):
        refuse_loose_bags(data, rows, Tabled())
    loose = rows._replace(inputs=rows.inputs | {"loose": rows.inputs["tags"]})
    with pytest.raises(ConfigError, match=r"returned Bags as inputs\['loose'\], and no table of Tabled"):
        refuse_loose_bags(data, loose, recipe)
    named = rows._replace(inputs={name: value for name, value in rows.inputs.items() if name != "who"})
    with pytest.raises(ConfigError, match=r"has a table for inputs\['who'\], and Clicks.fetch\(\) returned"):
        refuse_loose_bags(data, named, recipe)

    class Receives(Tabled):
        def receive(self, inputs: Any) -> Any:
            return inputs

    refuse_loose_bags(data, loose, Receives())
    with pytest.raises(ConfigError, match="table ids has capacity=0"):
        refuse_loose_bags(data, loose, Receives(capacity=0))


class Two(Tabled):
    """Two inputs of one table, one of bags; another table of bags alone."""

    pooling = Pooling.sum

    def tables(self) -> dict[str, Table]:
        return {
            "items": Table(3, 0, 100, 1.0, ("item", "tags"), self.pooling),
            "words": Table(2, 20, 20, 1.0, pooling=self.pooling),
        }


def task_of(pooling: Pooling) -> Task:
    recipe = Two()
    recipe.pooling = pooling
    return Task(recipe, None, PRECISIONS["fp64"], StepOptions(batch_size=4), 0, rows=RowSgd())  # type: ignore[arg-type]


def embedding_bag(weights: Tensor, bags: Bags, mode: str) -> Tensor:
    """torch's, with row 0 for the id -1."""
    flat = bags.lengths.reshape(-1)
    offsets = flat.cumsum(0) - flat
    pooled = nn.functional.embedding_bag(bags.values + 1, weights, offsets, mode=mode, padding_idx=0)
    return pooled.view(*bags.lengths.shape, -1)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("long", [False, True])
def test_rows_and_gradients_are_those_of_embedding_bag(mode: str, long: bool) -> None:
    """Also a step of SGD, with an input of single ids that shares the table, and a program without dtf."""
    task = task_of(Pooling(mode))
    tables = tables_of(task, World(Place()), Placement.replicated)
    assert tables is not None
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 200, (4, 2), generator=draw) if long else LENGTHS
    values = torch.randint(-1, 20, (int(lengths.sum()),), generator=draw) if long else VALUES
    given: dict[str, Any] = {
        "item": torch.tensor([[7], [-1], [9], [11]]),
        "tags": Bags(values, lengths),
        "words": Bags(torch.tensor([1, 1, 4, -1, 2]), torch.tensor([3, 1, 1, 0])),
    }
    batch = Batch(given, torch.zeros(4), torch.ones(4), np.arange(4))
    rows = tables.lookup(batch, train=True).inputs
    weights = {}
    for name, table in tables._tables.items():
        drawn = torch.from_numpy(table.store.lookup(np.arange(-1, 20), False))
        weights[name] = drawn.requires_grad_()
    expected = {
        "item": nn.functional.embedding(given["item"] + 1, weights["items"], padding_idx=0),
        "tags": embedding_bag(weights["items"], given["tags"], mode),
        "words": embedding_bag(weights["words"], given["words"], mode),
    }
    for name, value in expected.items():
        torch.testing.assert_close(rows[name], value.detach(), rtol=1e-14, atol=1e-14)
    gradients = {
        name: torch.randn(value.shape, generator=draw, dtype=torch.float64) for name, value in expected.items()
    }
    sum((value * gradients[name]).sum() for name, value in expected.items()).backward()  # type: ignore[union-attr]
    tables.backward(gradients)
    tables.apply(1.0, 0.5, 0)
    for name, table in tables._tables.items():
        after, before = torch.from_numpy(table.store.lookup(np.arange(-1, 20), False)), weights[name]
        assert before.grad is not None
        torch.testing.assert_close(after, before.detach() - 0.5 * before.grad, rtol=1e-12, atol=1e-12)

    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, inputs: dict[str, Tensor]) -> Tensor:
            return self.one * torch.cat([inputs[name].flatten(1) for name in ("item", "tags", "words")], 1)

    now = tables.lookup(batch, train=False).inputs
    program = InferenceModule.of(Each(), tables)
    called = {name: value._asdict() if isinstance(value, Bags) else value for name, value in given.items()}
    torch.testing.assert_close(program(called), Each()(now), rtol=1e-12, atol=1e-12)


def test_of_equal_rows_the_first_gets_the_gradient_of_a_maximum() -> None:
    asked = TableInputs({"tags": Bags(torch.tensor([4, 8, 6]), torch.tensor([3]))}, ["tags"], Pooling.max)
    rows = asked.rows(np.array([[1.0, 2.0], [1.0, 5.0], [0.0, 5.0]]))["tags"]
    assert rows.tolist() == [[1, 5]] and asked.distinct.tolist() == [4, 8, 6]
    assert asked.gradients({"tags": torch.ones(1, 2)}, 2).tolist() == [[1, 0], [0, 1], [0, 0]]


def test_each_id_of_a_bag_that_is_shown_counts() -> None:
    batch = Batch(inputs(), torch.tensor([1.0, 0, 0, 0]), torch.tensor([1.0, 1, 1, 0]), np.arange(4))
    asked = TableInputs(batch.inputs, ["tags"], Pooling.sum)
    seen = dict(zip(asked.distinct.tolist(), asked.seen(batch, lambda targets: targets > 0).tolist(), strict=True))
    assert seen == {7: [1, 1], 3: [3, 1], 5: [1, 0], -1: [1, 0], 9: [0, 0]}  # the last row is padding


def test_memory_follows_the_ids_and_not_the_longest_bag() -> None:
    lengths = torch.ones(4096, dtype=torch.int64)
    lengths[5] = 10_000
    bags = {"tags": Bags(torch.arange(int(lengths.sum())) % 5000, lengths)}
    rows = np.ones((5000, 64), np.float32)
    for pooling in Pooling:
        TableInputs(bags, ["tags"], pooling).rows(rows)  # compiles
        tracemalloc.start()
        asked = TableInputs(bags, ["tags"], pooling)
        pooled = asked.rows(rows)["tags"]
        asked.gradients({"tags": pooled}, 64)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert pooled.shape == (4096, 64) and peak < 8 << 20  # 10 GB as (4096, 10000, 64)
