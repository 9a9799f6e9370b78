"""Photos have the same pixels whoever reads them, in whichever order; and no thread waits between two batches."""

from __future__ import annotations

import threading
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from dtf.core.types import Shard
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Sequential
from dtf.recipes.resnet.buffers import Buffers
from dtf.recipes.resnet.store import Store, read_index
from tests.support.arrays import seldom
from tests.support.image_files import packed, tree
from tests.unit.test_photos import EVERYTHING, digest, recipe


@pytest.mark.parametrize(
    ("threads", "ranks"),
    seldom([*product([1, 2, 4], [1, 2, 3])], lambda threads, ranks: threads != 1 and ranks != 2),
)
def test_the_same_pixels_for_any_threads_ranks_and_restarts(tmp_path: Path, threads: int, ranks: int) -> None:
    """With every augmentation there is, mixing included. A restart is a new data set that begins in the middle."""
    root = tree(tmp_path / "t", train=6)
    ids = np.random.default_rng(0).permutation(12)
    for epoch in (0, 1, 5):
        expected = digest(*recipe(root, **EVERYTHING).open_data("train", 7).fetch(ids, epoch))
        found: list[int] = []
        for part in np.array_split(ids.reshape(-1, 2), ranks):  # pairs stay together
            data = recipe(root, threads=threads, **EVERYTHING).open_data("train", 7)
            half = len(part) // 2
            for piece in (part[:half], part[half:]):
                if len(piece):
                    found += digest(*data.fetch(piece.reshape(-1), epoch))
        assert found == expected
    other_epoch = digest(*recipe(root, **EVERYTHING).open_data("train", 7).fetch(ids, 6))
    other_seed = digest(*recipe(root, **EVERYTHING).open_data("train", 8).fetch(ids, 5))
    assert not {*other_epoch, *other_seed} & {*expected}


class Held(Store):
    """Files of which row `last` is held back until row `first` has been asked for."""

    def __init__(self, store: Store, last: int, first: int) -> None:
        self._store, self.names, self.digest, self._last, self._first = store, store.names, store.digest, last, first
        self.begun, self.in_time = threading.Event(), False

    def __getitem__(self, row: int) -> bytes:
        if row == self._first:
            self.begun.set()
        if row == self._last:
            self.in_time = self.begun.wait(10)
        return self._store[row]


@pytest.mark.parametrize("threads", [2, 3])
def test_a_batch_is_begun_while_the_last_image_of_the_one_before_is_decoded(tmp_path: Path, threads: int) -> None:
    data = recipe(tree(tmp_path / "t"), threads=threads).open_data("train", 0)
    epochs = Epochs(Sequential(), len(data), 4, 0)
    order = np.concatenate([epochs.ids(0, 0), epochs.ids(0, 1)])
    expected = [digest(*data.fetch(order[:4], 0)), digest(*data.fetch(order[4:], 0))]
    data._store = held = Held(data._store, int(order[3]), int(order[4]))
    loader = Loader(data, epochs, Shard(0, 1), 4)
    loader.ahead([(0, 0), (0, 1)])
    batches = [loader.get(0, index) for index in (0, 1)]
    loader.close()
    assert held.in_time, "the threads waited for the whole batch"
    assert [digest(batch.inputs, batch.targets) for batch in batches if batch is not None] == expected


def test_further_views_of_a_row_differ(tmp_path: Path) -> None:
    data = recipe(tree(tmp_path / "t")).open_data("train", 0)
    inputs, targets = data.fetch(np.array([3, 3 + len(data), 3 + 2 * len(data)]), 0)
    assert len({*digest(inputs, targets)}) == 3 and targets.tolist() == [0, 0, 0]


def test_images_grow_with_the_epochs(tmp_path: Path) -> None:
    data = recipe(tree(tmp_path / "t"), pixels=96, grow_from=32, grow_epochs=4).open_data("train", 0)
    sides = [data.fetch(np.array([0]), epoch)[0]["pixels"].shape[1] for epoch in range(6)]
    assert sides == [32, 48, 64, 80, 96, 96]


@pytest.mark.parametrize("name", ["t.tar", "t.tar.gz"])
def test_archives_hold_the_same_as_folders(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path / "t")
    archive = packed(root, tmp_path / name)
    folder = recipe(root).open_data("train", 0)
    for _ in range(2):  # listed, then from the kept list
        data = recipe(archive).open_data("train", 0)
        assert digest(*data.fetch(np.arange(8), 1)) == digest(*folder.fetch(np.arange(8), 1))
    assert recipe(archive, train_rows=3).open_data("train", 0).fingerprint() != data.fingerprint()


def test_a_changed_archive_is_listed_anew(tmp_path: Path) -> None:
    root = tree(tmp_path / "t")
    archive = packed(root, tmp_path / "t.tar")
    before = read_index(archive, tmp_path / "cache").tree
    tree(root, train=5)
    packed(root, archive)
    assert [sum(read_index(archive, tmp_path / "cache").tree.counts["train"]), sum(before.counts["train"])] == [10, 8]


def test_memory_of_a_batch_is_used_again_only_when_nobody_holds_a_part_of_it() -> None:
    buffers = Buffers()
    batch = buffers.take((4, 3, 2), torch.uint8)
    at, view = batch.data_ptr(), batch.permute(2, 0, 1)[1]
    del batch
    other = buffers.take((4, 3, 2), torch.uint8)
    assert other.data_ptr() != at, "a view of the first batch is still held"
    view.fill_(7)
    del view
    again = buffers.take((2, 3, 4), torch.uint8)
    assert again.data_ptr() == at and again.shape == (2, 3, 4)
    del again
    assert buffers.take((100, 100), torch.uint8).numel() == 10_000
    del other
    assert buffers.take((24,), torch.float32).dtype is torch.float32
