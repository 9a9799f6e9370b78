"""Data sets of click logs: every row once, in which order and as which ids; bad lines; what is refused."""

from __future__ import annotations

import gzip
import itertools
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtf.api.recipe import Dataset
from dtf.api.sampler import Tail
from dtf.core.errors import ConfigError, DataError
from dtf.core.types import Shard
from dtf.data.batches import Epochs
from dtf.data.loader import Loader
from dtf.data.samplers import Shuffle
from dtf.recipes.ctr import lines
from dtf.recipes.ctr import log as log_module
from dtf.recipes.ctr.encode import Encoder
from dtf.recipes.ctr.hashing import key_of
from dtf.recipes.ctr.log import Parsed
from dtf.recipes.ctr.log_data import BadRecords, Format, Ids, Integers, LogOptions, Mode
from dtf.recipes.ctr.vocabulary import Vocabulary, count
from tests.support.ctr_log import ROWS, content, numbers, options, written

# ---------------------------------------------------------------- order


def visited(data: Dataset, shards: int, batch: int, keys: list[tuple[int, int]]) -> list[list[int]]:
    """Numbers of the rows of each global batch, as the ranks' loaders deliver them one after the other."""
    found = []
    loaders = [
        Loader(data, Epochs(Shuffle(), len(data), batch, 7, None, data.runs()), Shard(i, shards), -(-batch // shards))
        for i in range(shards)
    ]
    for place, key in enumerate(keys):
        rows = []
        for loader in loaders:
            loader.ahead(keys[place : place + 1 + loader.prefetch])
            part = loader.get(*key)
            assert part is not None
            rows += part.inputs["dense"][part.weight > 0, 0].int().tolist()
        found.append(rows)
    for loader in loaders:
        loader.close()
    return found


@pytest.mark.parametrize("mode", Mode)
def test_every_row_comes_once_whoever_reads_and_wherever_a_run_was_cut(mode: Mode, tmp_path: Path) -> None:
    values = {"mode": mode, "queue_rows": 96} | ({"block_rows": 30} if mode is Mode.queue else {})
    data = options(written(tmp_path, content(0, 333), content(333, ROWS)), **values).open("train", 0)
    keys = [(epoch, index) for epoch in range(2) for index in range(math.ceil(ROWS / 64))]
    whole = visited(data, 1, 64, keys)
    for epoch in range(2):
        assert sorted(row for rows, key in zip(whole, keys, strict=True) if key[0] == epoch for row in rows) == list(
            range(ROWS)
        )
    assert (
        visited(data, 3, 64, keys[:11]) + visited(data, 2, 64, keys[11:20]) + visited(data, 1, 64, keys[20:]) == whole
    )


def test_batches_of_a_queue_are_cut_from_the_seeded_order_of_blocks(tmp_path: Path) -> None:
    data = options(written(tmp_path, content(0, 333), content(333, ROWS)), mode=Mode.queue, block_rows=30).open(
        "train", 0
    )
    bounds = data.runs()
    assert bounds is not None and bounds.tolist() == [*range(0, 333, 30), *range(333, ROWS, 30), ROWS]
    blocks = [list(range(first, last)) for first, last in itertools.pairwise(bounds)]
    order = Shuffle().order(len(blocks), 7, 0, None)
    rows = [row for block in order for row in blocks[block]]
    assert visited(data, 2, 64, [(0, k) for k in range(16)]) == [rows[k * 64 : (k + 1) * 64] for k in range(16)]


def test_data_that_would_come_in_another_order_or_as_other_ids_have_another_fingerprint(tmp_path: Path) -> None:
    root = written(tmp_path, content(0, ROWS))
    sizes = (600, 700)  # two blocks each
    blocks = [options(root, mode=Mode.queue, block_rows=rows).open("train", 0) for rows in (*sizes, sizes[0])]
    assert blocks[0].fingerprint() == blocks[2].fingerprint() != blocks[1].fingerprint()
    (root / "pairs").write_text("1 3:1 4:1\n" * 9)
    pairs: dict[str, Any] = {
        "train": str(root / "pairs"),
        "format": Format.libsvm,
        "pairs": 2,
        "integers": Integers.log,
    }
    for mode in Mode:
        raw, given = (
            options(root, mode=mode, **pairs | more).open("train", 0)
            for more in ({"ids": Ids.raw}, {"ids": Ids.given, "table_size": 9})
        )
        assert raw.fingerprint() != given.fingerprint()


@pytest.mark.parametrize("tail", Tail)
def test_runs_of_single_rows_are_the_order_of_rows(tail: Tail) -> None:
    plain, runs = (Epochs(Shuffle(tail=tail), 50, 12, 3, None, bounds) for bounds in (None, np.arange(51)))
    for epoch in range(3):
        for index in range(plain.batches):
            assert np.array_equal(plain.ids(epoch, index), runs.ids(epoch, index))


def test_a_queue_holds_no_more_rows_than_it_may(tmp_path: Path) -> None:
    data = options(written(tmp_path, content(0, ROWS)), mode=Mode.queue, queue_rows=200, block_rows=30).open("train", 0)
    loader = Loader(data, Epochs(Shuffle(), ROWS, 64, 7, None, data.runs()), Shard(0, 2), 32)
    assert (1 + loader.prefetch) * 32 == 192
    loader.ahead([(0, k) for k in range(1 + loader.prefetch)])
    for k in range(3):
        loader.get(0, k)
    said = loader.reading()
    loader.close()
    assert said["read_rows_per_s"] > 0 and 0 <= said["queue_batches"] <= 6 and 0 <= said["stalled"] <= 1
    # a server of parameters, which reads no rows
    assert not Loader(data, Epochs(Shuffle(), ROWS, 64, 7, None, data.runs()), None, 32).reading()


@pytest.mark.parametrize("mode", Mode)
def test_small_batches_are_not_fetched_ahead_by_the_thousand(mode: Mode, tmp_path: Path) -> None:
    data = options(written(tmp_path, content(0, ROWS)), mode=mode, queue_rows=1 << 40).open("train", 0)
    loader = Loader(data, Epochs(Shuffle(), ROWS, 4, 7, None, data.runs()), Shard(0, 2), 2)
    loader.close()
    assert loader.prefetch == 64


# ---------------------------------------------------------------- bad lines


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("suffix", [".tsv", ".gz"])
def test_bad_lines_are_named_or_skipped_within_a_budget(suffix: str, mode: Mode, tmp_path: Path) -> None:
    damaged = content(0, 10) + b"what\n" + content(11, 40) + b"\n" + content(41, ROWS)
    root = written(tmp_path, content(0, 5), gzip.compress(damaged) if suffix == ".gz" else damaged, suffix=".tsv")
    if suffix == ".gz":
        (root / "train" / "part_1.tsv").rename(root / "train" / "part_1.gz")
    name = f"{root}/train/part_1{suffix}"
    with pytest.raises(
        DataError,
        match=rf"^{name}:11: the label is neither 0 nor 1; repair or remove it; .*: recipe.data.bad_records=skip$",
    ):
        numbers(options(root, mode=mode).open("train", 0))
    data = options(root, mode=mode, bad_records=BadRecords["skip"], bad_share=0.01).open("train", 0)
    loader = Loader(data, Epochs(Shuffle(), len(data), 64, 7, None, data.runs()), Shard(0, 1), 64)
    weights = {
        int(row): float(weight)
        for k in range(16)
        for batch in [loader.get(0, k)]
        if batch
        for row, weight in zip(batch.ids, batch.weight, strict=True)
    }
    loader.close()
    assert (
        [row for row in sorted(weights) if not weights[row]] == [15, 45] and loader.bad(0) == 2 and loader.allowed == 11
    )
    assert data.bad == {15: f"{name}:11: the label is neither 0 nor 1", 45: f"{name}:41: the line is blank"}
    inputs, targets = data.fetch(np.array([45]), 0)
    assert (inputs["ids"] == -1).all() and (inputs["dense"] == 0).all() and targets == 0


def test_too_many_bad_lines_end_the_making_of_columns(tmp_path: Path) -> None:
    root = written(tmp_path, b"what\n" * 3 + content(3, 100))
    with pytest.raises(
        DataError, match=r"3 of 100 rows are bad, recipe.data.bad_share allows 1; the first: .*part_0.tsv:1: "
    ):
        options(root, bad_records=BadRecords["skip"], bad_share=0.01).open("train", 0)


def test_what_is_no_log_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_FARTHEST", 1 << 20)
    with pytest.raises(DataError, match="has a line of more than 1 MiB"):
        options(written(tmp_path, content(0, 9) + bytes(3 << 20)), mode=Mode.queue).open("train", 0)
    with pytest.raises(DataError, match=r"part_0.tsv:1: the first line must be id,click,hour"):
        options(written(tmp_path, content(0, 9)), integers=Integers.log, format=Format.avazu).open("train", 0)


# ---------------------------------------------------------------- what becomes of the values


def test_integers_are_transformed_as_documented() -> None:
    values = np.array([[0, 1, -1, 2, 3, 20, 10**6, -(10**17), lines.NONE]])
    parsed = Parsed(np.zeros(1, np.float32), values, np.full((1, 1), 5), np.zeros(1, np.uint8))
    dense, ids = Encoder("log", 0).encode(parsed)
    known = [math.copysign(math.log1p(abs(x)), x) if x != lines.NONE else 0.0 for x in values[0].tolist()]
    assert dense is not None and dense[0].tolist() == np.array(known, np.float32).tolist() and ids.tolist() == [[5]]
    plain, _ = Encoder("raw", 0).encode(parsed)
    assert plain is not None and plain[0].tolist() == np.array([*values[0, :-1], 0], np.float32).tolist()
    nothing, ids = Encoder("bucket", 0).encode(parsed)
    codes = [
        -3,
        -2,
        -4,
        -1,
        math.floor(math.log(3) ** 2),
        math.floor(math.log(20) ** 2),
        math.floor(math.log(10**6) ** 2),
        -(10**17) - 3,
    ]
    assert nothing is None and ids[0].tolist() == [
        *(key_of(d, np.uint64(code % 2**64)) for d, code in enumerate(codes)),
        -1,
        5,
    ]
    assert min(ids[0, :-2]) >= 0


def test_a_vocabulary_numbers_frequent_values_by_field() -> None:
    rng = np.random.default_rng(0)
    keys = np.stack([rng.zipf(1.5, 30_000) % 5000, np.array([-1, 10_000, 10_001])[rng.integers(0, 3, 30_000)]], 1)
    made = count((list(keys[first : first + 777].T) for first in range(0, len(keys), 777)), 2, 3)
    again = count((list(keys[::-1][first : first + 5000].T) for first in range(0, len(keys), 5000)), 2, 3)
    assert made.digest == again.digest
    often = [
        sorted(value for value, times in Counter(column.tolist()).items() if times >= 3 and value >= 0)
        for column in keys.T
    ]
    assert len(made) == sum(map(len, often)) + 2
    ids = Encoder("log", 0, made).encode(Parsed(np.zeros(0), np.zeros((len(keys), 0)), keys, np.zeros(0)))[1]
    start = {0: 0, 1: 1 + len(often[0])}
    for field in (0, 1):
        place = {value: start[field] + 1 + i for i, value in enumerate(often[field])}
        assert ids[:, field].tolist() == [
            -1 if value < 0 else place.get(value, start[field]) for value in keys[:, field].tolist()
        ]


def test_the_vocabulary_is_that_of_the_training_split(tmp_path: Path) -> None:
    written(tmp_path, content(0, 100))
    (tmp_path / "eval.tsv").write_bytes(content(90, 200))
    made = options(tmp_path, eval=str(tmp_path / "eval.tsv"), ids=Ids.vocabulary)
    assert made.table_rows == 26 + 100 + 24 * 50
    ids = made.open("eval", 0).fetch(np.arange(110), 0)[0]["ids"]
    assert ids[:10, 0].min() > 0 and (ids[10:, 0] == 0).all() and (ids[:, 25] == -1).all()
    assert "vocabulary" in made.open("train", 0).fingerprint()
    other = options(tmp_path, ids=Ids.vocabulary, min_count=2).open("train", 0)
    assert other.fingerprint() != made.open("train", 0).fingerprint()


def test_checking_a_recipe_reads_no_log_and_needs_no_torch(tmp_path: Path) -> None:
    written(tmp_path, content(0, 9))
    code = (
        "import sys\n"
        "from dtf.recipes.ctr.log_data import Ids, LogOptions\n"
        "from dtf.recipes.ctr.model_options import EmbeddingKind, ModelOptions\n"
        "from dtf.recipes.ctr.recipe import ClickLog\n"
        f"data = LogOptions(train={str(tmp_path / 'train')!r}, eval={str(tmp_path / 'train')!r}, "
        f"cache={str(tmp_path / 'cache')!r}, ids=Ids.vocabulary)\n"
        "recipe = ClickLog(data=data, model=ModelOptions(table=EmbeddingKind.sparse, dim=4))\n"
        "recipe.check()\n"
        "assert list(recipe.table_widths()) == ['ids']\n"
        "print(sorted({'torch', 'numpy', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert not (tmp_path / "cache").exists()


def test_a_process_takes_a_vocabulary_from_its_cache_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = options(written(tmp_path, content(0, 100)), ids=Ids.vocabulary)
    assert made.table_rows == 26 + 100 + 24 * 50
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "load", lambda folder: pytest.fail("loaded again"))
        assert made.table_rows == len(made._encoder().vocabulary or ()) == 26 + 100 + 24 * 50
    written(tmp_path, content(0, 200))
    assert made.table_rows == 26 + 200 + 24 * 50


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train": ""}, "recipe.data.train is not set"),
        ({"test": "nowhere*"}, r"recipe.data.test=nowhere\*: there is no such file"),
        ({"pairs": 3}, "recipe.data.pairs=3 has a meaning for recipe.data.format=libsvm only"),
        ({"categories": ["a"]}, "recipe.data.format=parquet only"),
        ({"label": "click"}, "recipe.data.format=parquet only"),
        (
            {"ids": Ids.raw, "table_size": 9},
            "recipe.data.table_size=9 has a meaning for recipe.data.ids=hash and ids=given only",
        ),
        ({"min_count": 2}, "recipe.data.ids=vocabulary only"),
        ({"block_rows": 9}, "recipe.data.mode=queue only"),
        ({"ids": Ids.given, "table_size": 5}, "format=criteo has no ids"),
        ({"format": Format.libsvm, "integers": Integers.log}, "needs recipe.data.pairs"),
        (
            {"format": Format.libsvm, "integers": Integers.log, "pairs": 3, "ids": Ids.given},
            "needs recipe.data.table_size",
        ),
        ({"format": Format.parquet, "integers": Integers.log}, "needs recipe.data.categories"),
        ({"bags": ["a"]}, "recipe.data.format=parquet only"),
        ({"separator": ";"}, "recipe.data.separator=; has a meaning for recipe.data.bags only"),
        ({"more_pairs": True}, "recipe.data.more_pairs=True has a meaning for recipe.data.format=libsvm only"),
        (
            {"format": Format.parquet, "integers": Integers.log, "bags": ["a"], "separator": "ü"},
            "recipe.data.separator='ü' must be one ASCII character",
        ),
        ({"format": Format.avazu}, "recipe.data.integers=raw: recipe.data.format=avazu has no integers"),
    ],
)
def test_contradictory_options_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        options(written(tmp_path, content(0, 9)), **values)


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    written(tmp_path, b"", b"", b"")
    (tmp_path / "train" / "_SUCCESS").touch()
    folder = [path.name for path in options(tmp_path).paths("train")]
    assert folder == ["part_0.tsv", "part_1.tsv", "part_2.tsv"]
    assert [path.name for path in options(tmp_path, train=f"{tmp_path}/train/*[12].tsv").paths("train")] == folder[1:]
    assert [path.name for path in options(tmp_path, train=f"{tmp_path}/train/part_0.tsv").paths("train")] == folder[:1]
    with pytest.raises(DataError, match="there is no such file"):
        options(tmp_path, train=str(tmp_path / "nothing*"))
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    with pytest.raises(DataError, match="recipe.data.train=empty in recipe.data.root=.*: the folder holds no files"):
        LogOptions(train="empty", root=str(tmp_path)).paths("train")
    with pytest.raises(
        DataError, match=f"recipe.data.train=nothing: there is no such file in recipe.data.root={tmp_path}"
    ):
        LogOptions(train="nothing", root=str(tmp_path)).paths("train")


def test_fields_have_names(tmp_path: Path) -> None:
    criteo = LogOptions(integers=Integers.bucket)
    assert (criteo.fields, *criteo.field_names[:14:13]) == (39, "I1", "C1")
    assert (
        LogOptions(format=Format.avazu).field_names[:2] == ("hour", "C1")
        and LogOptions(format=Format.avazu).fields == 22
    )
    parquet = LogOptions(format=Format.parquet, numbers=["age"], categories=["user", "ad"], integers=Integers.bucket)
    assert parquet.field_names == ("age", "user", "ad")
