"""Any map-style data set with its collate function, and what is refused by name."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from dtf import ConfigError, Dataset, map_style
from dtf.core import nest
from dtf.core.types import WHOLE, Batch, Shard
from dtf.data.answers import check_fetched, opened, refuse_varying
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.data.splits import FirstRows
from dtf.engine.inference import _allow_all
from dtf.model.forward import copy_of, rows_of

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (as people write them)
IDS = np.array([3, 0])


class Items:
    """Items that a function makes."""

    def __init__(self, make: Any, rows: int = 8) -> None:
        self._make, self._rows = make, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> Any:
        return self._make(row)


@pytest.mark.parametrize(
    ("item", "target", "parts"),
    [
        (lambda n: (torch.full((2,), n), n), None, (torch.tensor([[3, 3], [0, 0]]), [3, 0])),
        (lambda n: {"x": n, "y": float(n)}, "y", ({"x": [3, 0]}, [3.0, 0.0])),
        (lambda n: Pair({"a": [n, n + 1]}, n), None, ({"a": [[3, 0], [4, 1]]}, [3, 0])),
        (lambda n: Pair(n, n + 1), "left", ({"right": [4, 1]}, [3, 0])),
        (lambda n: (n, n + 1, n + 2), -1, (([3, 0], [4, 1]), [5, 2])),
        (lambda n: (n, np.float32(n)), 0, ([3.0, 0.0], [3, 0])),
    ],
)
def test_items_of_every_form_collate_as_torch_collates_them(item: Any, target: Any, parts: Any) -> None:
    rows = map_style(Items(item), target=target)
    check_fetched(rows, 2, found := rows.fetch(IDS, 0))
    lists = nest.map_leaves(lambda leaf: leaf.tolist(), found)
    assert lists == nest.map_leaves(lambda leaf: leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf, parts)
    (loaded,) = DataLoader(Items(item), batch_sampler=[IDS.tolist()])  # type: ignore[arg-type]
    values = nest.leaves(list(loaded.values()) if isinstance(loaded, dict) else list(loaded))
    assert {str(value) for value in values} == {str(leaf) for leaf in nest.leaves(found)}


@pytest.mark.parametrize(
    ("item", "target", "words"),
    [
        (lambda n: {"x": n, "y": n}, None, "a batch has x, y, and nothing says which is the target; .* or target='y'"),
        (lambda n: (torch.zeros(n + 1), n), None, "default_collate makes no batch of its items: .*give a collate_fn"),
        (lambda n: (n, None), None, "default_collate makes no batch of its items: .*NoneType.*give a collate_fn"),
        (lambda n: {"x": n}, "z", "target='z' is none of its keys"),
        (lambda n: (n, n, n), None, "3 parts, and nothing says which is the target"),
        (lambda n: (n, n), 5, "target=5 is none of them"),
        (lambda n: n, None, "a batch is a Tensor"),
    ],
)
def test_a_batch_without_a_target_says_what_to_give(item: Any, target: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        map_style(Items(item), target=target).fetch(IDS, 0)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            ({"name": ["a", "b"]}, torch.zeros(2)),
            r"map_style\(Items\) returned a str as inputs\['name'\]\[0\].*leave texts",
        ),
        (([], torch.zeros(2)), "an empty list as inputs"),
        (({"x": torch.zeros(3)}, torch.zeros(2)), r"inputs\['x'\] of shape \(3,\) for 2 ids"),
        ((torch.zeros(2), {(1,): torch.zeros(2)}), r"a dict with the key \(1,\) as targets"),
    ],
)
def test_what_is_no_nest_of_tensors_is_refused_by_its_place(batch: Any, words: str) -> None:
    rows = map_style(Items(lambda n: n), collate_fn=lambda items: batch)
    with pytest.raises(ConfigError, match=words):
        check_fetched(rows, 2, rows.fetch(IDS, 0))


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("data", [Stream(), (n for n in range(3)), iter([1])])
def test_a_stream_is_refused_with_the_remedy(data: Any) -> None:
    with pytest.raises(ConfigError, match="is a stream: its samples have no numbers.*dtf.write_samples"):
        map_style(data)


def test_a_loader_is_refused_for_its_data_set() -> None:
    loader = DataLoader(Items(None))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="collate_fn=loader.collate_fn"):
        map_style(loader)
    with pytest.raises(ConfigError, match="collate_fn=loader.collate_fn"):
        opened(SimpleNamespace(open_data=lambda split, seed: loader), "train", 0)  # type: ignore[arg-type]


def test_mappings_arrays_and_many_items_at_once_are_taken() -> None:
    class AtOnce(Items):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [{"x": np.array([n], np.float32), "y": n} for n in numbers]

    rows = map_style(AtOnce(None), target="y", collate_fn=lambda items: OrderedDict(default_collate(items)))
    inputs, targets = rows.fetch(IDS, 0)
    assert type(inputs) is dict and inputs["x"].tolist() == [[3.0], [0.0]] and targets.tolist() == [3, 0]
    plain = map_style(TensorDataset(torch.arange(8.0), torch.arange(8)))
    assert [part.tolist() for part in plain.fetch(IDS, 0)] == [[3.0, 0.0], [3, 0]]


def test_a_seed_makes_random_items_a_function_of_seed_epoch_and_row() -> None:
    def draw(n: int) -> Any:
        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand(), n]), n

    rows = map_style(Items(draw), seed=5)
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    once, again = rows.fetch(IDS, 0)[0], rows.fetch(IDS[::-1], 0)[0].flip(0)
    assert torch.equal(once, again) and not torch.equal(once, rows.fetch(IDS, 1)[0])
    assert not torch.equal(once, map_style(Items(draw), seed=6).fetch(IDS, 0)[0])
    assert len(set(once[:, :3].flatten().tolist())) == 6 and rows.prefetch == 0
    masked = map_style(Items(draw), seed=5, collate_fn=lambda items: (torch.rand(len(items)), torch.zeros(len(items))))
    assert torch.equal(masked.fetch(IDS, 0)[0], masked.fetch(IDS, 0)[0]) and masked.shapes_vary
    assert not torch.equal(masked.fetch(IDS, 0)[0], masked.fetch(IDS, 1)[0])
    cut = map_style(Items(draw), seed=5, collate_fn=masked._collate, shapes_vary=False)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"map_style\(Items\) draws .* leave shapes_vary out"):
        cut.fetch(IDS, 0)
    with pytest.raises(ConfigError, match="threads=2: with a seed, rows are read one after the other"):
        map_style(Items(draw), seed=5, threads=2)
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == str(np.random.get_state())


class Padded(Dataset):
    """Row n has n + 1 numbers."""

    prefetch = 0

    def __len__(self) -> int:
        return 8

    def fetch(self, ids: np.ndarray, epoch: int) -> Any:
        longest = int(ids.max()) + 1
        return torch.ones(len(ids), longest), torch.zeros(len(ids))


def test_shapes_that_vary_without_a_word_are_refused_and_micro_batches_are_not() -> None:
    rows = Padded()
    loader = Loader(rows, Epochs(Sequential(), 8, 4, 0), WHOLE, 2)
    loader.get(0, 0)
    with pytest.raises(ConfigError, match=r"rows of .*\(4,\).* and later of .*\(8,\).*shapes_vary=True"):
        loader.get(0, 1)
    rows.shapes_vary = True
    batch = Loader(rows, Epochs(Sequential(), 8, 4, 0), WHOLE, 2).get(0, 1)
    assert batch is not None
    assert [list(part.shape) for part in batch.inputs.parts] == [[2, 6], [2, 8]]
    assert rows_of(batch, 0, 2).inputs.shape == (2, 6) and rows_of(batch, 2, 3).inputs.shape == (1, 8)
    assert [list(part.shape) for part in rows_of(batch, 1, 3).inputs.parts] == [[1, 6], [1, 8]]
    other = Loader(rows, Epochs(Sequential(), 8, 4, 0), Shard(1, 2), 2).get(0, 1)
    assert other is not None and torch.equal(other.inputs, batch.inputs.parts[1])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_that_need_not_be_thread_safe_are_read_by_one_thread(threads: int) -> None:
    """Of both splits, which may share them: training rows are read ahead during an evaluation."""
    met = threading.Barrier(2)
    seen = list[bool]()

    def item(n: int) -> Any:
        try:
            met.wait(0.2)
        except threading.BrokenBarrierError:
            seen.append(False)
        else:
            seen.append(True)
        return n, n

    rows = Items(item)
    readers = [
        threading.Thread(target=map_style(part, threads=threads).fetch, args=(IDS[:1], 0))
        for part in (Subset(rows, range(4)), Subset(rows, range(4)))  # type: ignore[arg-type]
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert seen == [threads > 1] * 2


def test_the_first_rows_are_as_all_of_them() -> None:
    rows = Padded()
    rows.shapes_vary, rows.left_out, rows.bad = True, {"a.txt": "no image"}, {1: "damaged"}
    first = FirstRows(rows, 3)
    assert (len(first), first.shapes_vary, first.left_out, first.bad) == (3, True, rows.left_out, rows.bad)


def test_shapes_may_change_from_one_epoch_to_the_next() -> None:
    """As those of images that grow: all ranks have them alike."""

    class Growing(Padded):
        def fetch(self, ids: np.ndarray, epoch: int) -> Any:
            return torch.ones(len(ids), 2 + epoch), torch.zeros(len(ids))

    loader = Loader(Growing(), Epochs(Sequential(), 8, 4, 0), WHOLE, 2)
    shapes = [loader.get(epoch, index).inputs.shape for epoch in (0, 1, 0, 2) for index in (0, 1)]  # type: ignore[union-attr]
    assert shapes == [(4, 2 + epoch) for epoch in (0, 1, 0, 2) for _ in range(2)]


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (torch.ones(1), r"inputs of shape \(1,\) for 2 ids"),  # a row of a batch would count for all of them
        ("two texts", "a str as inputs"),
        (None, "None as inputs"),
    ],
)
def test_a_later_fetch_that_is_no_answer_is_refused_by_name(later: Any, words: str) -> None:
    """As of a collate function that leaves out items."""
    rows = map_style(Items(int), collate_fn=lambda items: (torch.ones(2) if 0 in items else later, torch.ones(2)))
    rows.shapes_vary = False
    loader = Loader(rows, Epochs(Sequential(), 8, 2, 0), WHOLE, 2)
    loader.get(0, 0)
    with pytest.raises(ConfigError, match=rf"map_style\(Items\) returned {words}"):
        loader.get(0, 3)


def test_rows_that_a_later_fetch_leaves_out_are_named() -> None:
    class Some(Items):
        def __getitems__(self, numbers: list[int]) -> list[Any]:
            return [self[number] for number in numbers if number != 6]

    loader = Loader(map_style(Some(lambda n: (torch.ones(2), n))), Epochs(Sequential(), 8, 4, 0), WHOLE, 2)
    loader.get(0, 0)
    with pytest.raises(ConfigError, match=r"map_style\(Some\) returned inputs of shape \(3, 2\) for 4 ids"):
        loader.get(0, 1)
    loader.close()


def test_what_varying_shapes_cannot_have_is_refused_before_the_first_step() -> None:
    rows = map_style(Items(lambda n: n), collate_fn=default_collate)
    assert not rows.shapes_vary and refuse_varying(rows, "mine", True, "model") is None
    rows.shapes_vary = True
    for tables, compiles, words in ((True, "", "sparse tables"), (False, "blocks", "step.compile=blocks")):
        with pytest.raises(ConfigError, match=f"recipe=mine: the shapes of .*map_style.* vary.*{words}"):
            refuse_varying(rows, "mine", tables, compiles)
    refuse_varying(rows, "mine", False, "")


def test_a_nest_keeps_its_form() -> None:
    inputs = {"a": [torch.arange(4), (torch.ones(4, 2),)], "b": Pair(torch.zeros(4), torch.arange(4.0))}
    nest.know_classes(inputs)
    described = nest.form(inputs)
    again = nest.from_form(described, iter(nest.leaves(inputs)))
    assert type(again["b"]) is Pair and nest.form(again) == described and str(again) == str(inputs)
    assert list(nest.named(inputs, "inputs")) == ["inputs['a'][0]", "inputs['a'][1][0]", "inputs['b'].left",
                                                  "inputs['b'].right"]  # fmt: skip
    cut = nest.rows(inputs, 1, 3)
    assert cut["b"].right.tolist() == [1.0, 2.0] and nest.count(cut) == 2
    cut["b"].right.add_(1)  # a model may: it is no change of the other rows
    assert inputs["b"].right.tolist() == [0.0, 2.0, 3.0, 3.0] and not inputs["b"].right._version
    cut["b"].right.sub_(1)
    assert str(nest.concatenate([nest.rows(inputs, 0, 1), nest.rows(inputs, 1, 4)])) == str(inputs)
    copy = copy_of(Batch(inputs, torch.arange(4), torch.ones(4), np.arange(4)))
    copy.inputs["a"][0].zero_()
    assert inputs["a"][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="inputs are elsewhere.Row, which no rows of this process were"):
        nest.from_form(["elsewhere.Row", None], iter([torch.zeros(1)]))


def test_classes_of_torchvisions_data_sets_are_groups() -> None:
    rows = Items(lambda n: (n, n % 2))
    rows.targets = [n % 2 for n in range(8)]  # type: ignore[attr-defined]
    groups = map_style(rows).groups()
    assert groups is not None and groups.tolist() == [0, 1] * 4
    assert map_style(Items(None)).groups() is None


def test_items_may_be_a_list_where_a_job_allows_unreadable_rows() -> None:
    rows = map_style([(torch.ones(2), row) for row in range(5)])
    _allow_all(FirstRows(rows, 3))
    assert rows.allowed == 5
