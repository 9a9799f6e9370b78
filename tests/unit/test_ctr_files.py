"""Files of click logs: their rows in order, whatever their format; what is kept of them in memory and in the cache;
what is no log.
"""

from __future__ import annotations

import gzip
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtf.core.errors import DataError
from dtf.recipes.ctr import cache, files
from dtf.recipes.ctr import log as log_module
from dtf.recipes.ctr.hashing import key_of, value_of
from dtf.recipes.ctr.log_data import BadRecords, Format, Ids, Integers, LogOptions, Mode
from tests.support.ctr_log import ROWS, content, numbers, options, written


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seams everywhere, in logs of a few kB."""
    for module, name, value in (
        (files, "CHUNK", 4096),
        (log_module, "PIECE", 512),
        (files, "SEGMENT", 8192),
        (files, "MARGIN", 512),
        (files, "_INPUT", 256),
    ):
        monkeypatch.setattr(module, name, value)


LAYOUTS = {
    "one file": [content(0, ROWS)],
    "several, one empty": [content(0, 10), b"", content(10, 700), content(700, ROWS)],
    "CRLF, no newline at the end": [content(0, 600).replace(b"\n", b"\r\n"), content(600, ROWS)[:-1]],
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_those_of_the_files_in_order(layout: str, zipped: bool, mode: Mode, tmp_path: Path) -> None:
    parts = [gzip.compress(part) if zipped else part for part in LAYOUTS[layout]]
    data = options(written(tmp_path, *parts, suffix=".tsv.gz" if zipped else ".tsv"), mode=mode).open("train", 0)
    assert numbers(data) == list(range(ROWS))
    some = np.random.default_rng(0).integers(0, ROWS, 300)
    assert numbers(data, some) == some.tolist()
    inputs, targets = data.fetch(np.arange(6), 0)
    assert targets.tolist() == [1, 0, 0, 1, 0, 0] and targets.dtype == torch.float32
    assert (
        inputs["ids"].shape == (6, 26) and inputs["ids"].dtype == torch.int64 and inputs["dense"].dtype == torch.float32
    )
    assert (inputs["ids"][:, 25] == -1).all() and int(inputs["ids"][3, 0]) == key_of(13, np.uint64(3)) % (1 << 20)
    assert inputs["dense"][5, 1:].eq(0).all() and inputs["dense"][6 - 3, 1:].eq(3 - 2).all()


@pytest.mark.usefixtures("small_pieces")
def test_gzip_of_several_members_can_be_entered_anywhere(tmp_path: Path) -> None:
    parts = gzip.compress(content(0, 400)) + gzip.compress(b"") + gzip.compress(content(400, ROWS)) + bytes(700)
    data = options(written(tmp_path, parts, suffix=".gz"), mode=Mode.queue).open("train", 0)
    bounds = data.runs()
    assert bounds is not None and len(bounds) > 10 and bounds[-1] == ROWS
    for first, last in reversed(list(itertools.pairwise(bounds))):
        assert numbers(data, np.arange(first, last)) == list(range(first, last))


@pytest.mark.usefixtures("small_pieces")
def test_what_compressed_files_take_in_memory_is_bounded_over_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STATES", 16)
    monkeypatch.setattr(files, "SEGMENTS_BYTES", 30_000)
    bounds = [0, 100, 250, 600, ROWS]
    parts = [gzip.compress(content(first, last)) for first, last in itertools.pairwise(bounds)]
    made = options(written(tmp_path, *parts, suffix=".gz"), mode=Mode.queue)
    made_log = made._log(made.paths("train"), 2)
    assert isinstance(made_log, log_module.TextLog)
    zipped = [source for source in made_log._sources if isinstance(source, files.Zipped)]
    assert len(zipped) == 4 and 8 <= sum(len(source._points) for source in zipped) <= 16
    data = made.open("train", 0)
    for first in reversed(range(0, ROWS, 50)):
        assert numbers(data, np.arange(first, first + 50)) == list(range(first, first + 50))
        made_log.parse(first, first + 50)
        held = [len(text) for text in zipped[0]._segments._found.values()]
        assert sum(held) <= 30_000 or len(held) == 2


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    "damage", [lambda c: c[:-9], lambda c: c[:200] + b"\0" + c[201:], lambda c: c + b"more", lambda c: b"label\t1\n"]
)
def test_a_damaged_gzip_file_is_named(damage: Any, mode: Mode, tmp_path: Path) -> None:
    made = options(written(tmp_path, damage(gzip.compress(content(0, ROWS))), suffix=".gz"), mode=mode)
    with pytest.raises(DataError, match=r"part_0\.gz is no intact gzip file"):
        made.open("train", 0)


def test_a_file_that_shrinks_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    data = options(written(tmp_path, content(0, ROWS)), mode=Mode.queue).open("train", 0)
    (tmp_path / "train" / "part_0.tsv").write_bytes(content(0, 500))
    with pytest.raises(DataError, match="is not the file it was"):
        numbers(data)


def test_columns_are_made_once_and_again_when_damaged_or_when_the_log_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = options(written(tmp_path, content(0, ROWS)))
    first = made.open("train", 0)
    [columns] = [path.parent for path in (tmp_path / "cache").glob("*/ids.npy")]
    before = (columns / "meta.json").stat().st_mtime_ns
    assert (
        made.open("train", 0).fingerprint() == first.fingerprint()
        and (columns / "meta.json").stat().st_mtime_ns == before
    )
    del first
    with open(columns / "ids.npy", "r+b") as file:
        file.seek(500)
        file.write(b"\xff")
    assert numbers(made.open("train", 0)) == list(range(ROWS)) and "damaged" in caplog.text
    written(tmp_path, content(5, ROWS))
    assert numbers(made.open("train", 0)) == list(range(5, ROWS))


def test_parquet_is_read_by_the_names_of_columns(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = [None if i % 9 == 0 else f"word {i % 20}" for i in range(ROWS)]
    table = {
        "click": [None if i == 77 else i % 2 for i in range(ROWS)],
        "n": [None if i % 4 == 0 else i for i in range(ROWS)],
        "word": words,
        "again": pa.array(words).dictionary_encode(),
        "place": [i // 10 for i in range(ROWS)],
    }
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table(table), tmp_path / "train" / "a.parquet", row_group_size=300)
    columns = {
        "label": "click",
        "numbers": ["n"],
        "categories": ["word", "again", "place"],
        "bad_records": BadRecords["skip"],
        "format": Format.parquet,
    }
    found = {}
    for mode in Mode:
        data = options(tmp_path, mode=mode, ids=Ids.raw, **columns).open("train", 0)
        inputs, targets = data.fetch(np.arange(250, 900), 0)
        assert targets.tolist() == [i % 2 for i in range(250, 900)]
        assert inputs["dense"][:, 0].int().tolist() == [0 if i % 4 == 0 else i for i in range(250, 900)]
        found[mode] = inputs["ids"].numpy()
        numbers(data)
        assert data.bad == {77: f"{tmp_path}/train/a.parquet row 78: the label is neither 0 nor 1"}
        assert data.runs() is None if mode is Mode.memory else data.runs().tolist() == [0, 300, 600, 900, 1000]  # type: ignore[union-attr]
    ids = found[Mode.queue]
    assert np.array_equal(ids, found[Mode.memory])
    assert [row < 0 for row in ids[:, 0]] == [words[i] is None for i in range(250, 900)] and len(set(ids[:, 0])) == 21
    assert (ids[:, 0] != ids[:, 1])[ids[:, 0] >= 0].all() and ids[3, 2] == key_of(3, np.uint64(25))
    with pytest.raises(DataError, match="has no column clicks; it has again, click"):
        options(tmp_path, **columns | {"label": "clicks"}).open("train", 0)


def bags_of(inputs: dict[str, Any]) -> list[list[list[int]]]:
    """The ids of each bag of each row."""
    values, lengths = inputs["bags"]
    parts = iter(values.split(lengths.view(-1).tolist()))
    return [[next(parts).tolist() for _ in row] for row in lengths]


@pytest.mark.parametrize("ids", [Ids.raw, Ids.hash, Ids.vocabulary])
def test_columns_of_lists_and_of_texts_with_a_separator_are_bags(ids: Ids, tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [None if i % 7 == 0 else "|".join(f"w{k}" for k in range(i % 4)) + "|" * (i % 3 == 0) for i in range(ROWS)]
    lists = [None if i % 11 == 0 else [i % 5, None, i % 13][: i % 4] for i in range(ROWS)]
    table = {"click": [3 if i == 77 else i % 2 for i in range(ROWS)], "user": list(range(ROWS)), "t": texts, "l": lists}
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table(table), tmp_path / "train" / "a.parquet", row_group_size=300)
    columns: dict[str, Any] = {"label": "click", "categories": ["user"], "bags": ["t", "l"], "format": Format.parquet}
    columns |= {"bad_records": BadRecords["skip"], "integers": Integers.log, "ids": ids}
    found = []
    for mode in Mode:
        made = options(tmp_path, mode=mode, **columns)
        assert (made.fields, made.bag_fields, made.field_names) == (1, 2, ("user", "t", "l"))
        some = np.random.default_rng(0).permutation(ROWS)[:700]
        data = made.open("train", 0)
        found.append(bags_of(data.fetch(some, 0)[0]))
        assert data.fetch(np.array([77]), 0)[0]["bags"].values.tolist() == []
    assert found[0] == found[1]
    words = [[] if row == 77 else [f"w{k}".encode() for k in range(row % 4 if row % 7 else 0)] for row in some]
    numbers_of = [[] if row == 77 else lists[row] or [] for row in some]
    expected = [
        [
            [key_of(1, np.uint64(value_of(np.frombuffer(word, np.uint8), 0, len(word)))) for word in row],
            [-1 if number is None else key_of(2, np.uint64(number)) for number in others],
        ]
        for row, others in zip(words, numbers_of, strict=True)
    ]
    if ids is Ids.hash:
        expected = [[[key % (1 << 20) if key >= 0 else -1 for key in bag] for bag in row] for row in expected]
    if ids is Ids.vocabulary:  # one number for each value, fields one after the other
        made_ids = {
            key: one
            for a, b in zip(expected, found[0], strict=True)
            for key, one in zip(chain(*a), chain(*b), strict=True)
        }
        assert len(set(made_ids.values())) == len(made_ids) == 1 + 3 + 13
        rows = made.rows_of_fields()
        assert rows == [ROWS, 4, 14] and min(one for one in made_ids.values() if one >= 0) >= rows[0]
        assert max(made_ids.values()) < made.table_rows == sum(rows)
    else:
        assert found[0] == expected
    with pytest.raises(DataError, match="column l holds lists; name it in recipe.data.bags"):
        other = columns | {"categories": ["l"], "bags": ["t"], "ids": Ids.raw}
        options(tmp_path, mode=Mode.queue, **other).open("train", 0).fetch(np.arange(3), 0)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("pairs", [0, 2])
@pytest.mark.parametrize("ids", [Ids.raw, Ids.given])
def test_further_pairs_of_a_line_are_a_bag(ids: Ids, pairs: int, mode: Mode, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows = [draw.integers(0, 99, 2 + int(draw.integers(0, 40))).tolist() for _ in range(ROWS)]
    rows[5] += [100] * (ids is Ids.given)  # a bad one
    text = "".join(f"{i % 2} {' '.join(f'{number}:1' for number in row)}\n" for i, row in enumerate(rows))
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a").write_text(text)
    size = {"table_size": 100} if ids is Ids.given else {}
    chosen: dict[str, Any] = {"format": Format.libsvm, "pairs": pairs, "more_pairs": True, "ids": ids, **size}
    chosen |= {"integers": Integers.log, "bad_records": BadRecords["skip"]}
    data = options(tmp_path, mode=mode, **chosen).open("train", 0)
    some = draw.permutation(ROWS)[:600]
    inputs, _ = data.fetch(some, 0)
    bad = {5} if ids is Ids.given else set()

    def wanted(row: int, field: int, number: int) -> int:
        return number if ids is Ids.given else int(key_of(field, np.uint64(number)))

    assert bags_of(inputs) == [
        [[] if row in bad else [wanted(row, pairs, number) for number in rows[row][pairs:]]] for row in some
    ]
    single = [[-1 if row in bad else wanted(row, f, rows[row][f]) for f in range(pairs)] for row in some]
    assert inputs["ids"].tolist() == single if pairs else "ids" not in inputs


def test_a_parquet_file_edited_in_place_is_another_log(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "train").mkdir()
    found = []
    for first in (0, 1, 0):
        table = pa.table({"label": [0, 1] * 50, "place": list(range(first, first + 100))})
        pq.write_table(table, tmp_path / "train" / "a.parquet", compression="none", use_dictionary=False)
        made = options(tmp_path, format=Format.parquet, categories=["place"], integers=Integers.log, mode=Mode.queue)
        found.append(made.open("train", 0).fingerprint())
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("suffix", [".tsv", ".gz"])
def test_a_log_that_vanishes_is_not_blamed_on_the_cache(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = options(written(tmp_path, gzip.compress(content(0, 9)) if suffix == ".gz" else content(0, 9), suffix=suffix))
    paths = made.paths("train")
    monkeypatch.setattr(LogOptions, "paths", lambda self, split: paths)
    real = log_module.opened

    def late(paths: list[Path]) -> list[files.Source]:
        found = real(paths)
        paths[0].unlink()
        return found

    monkeypatch.setattr(log_module, "opened", late)
    for _ in range(2):  # while columns are made; before
        with pytest.raises(DataError, match=rf"^{paths[0]} (cannot be read|is no intact gzip file)"):
            made.open("train", 0)


def test_ranks_check_what_is_kept_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = options(written(tmp_path, content(0, 9)))
    made.open("train", 0)
    monkeypatch.setattr(cache.fcntl, "flock", lambda *_: pytest.fail("waits for others"))
    assert numbers(made.open("train", 0)) == list(range(9))


def test_of_processes_that_want_the_same_one_makes_it(tmp_path: Path) -> None:
    made, start = [], threading.Barrier(4)

    def make(folder: Path) -> dict[str, Any]:
        made.append(folder)
        np.save(folder / "some.npy", np.arange(5))
        return {"rows": 5}

    def want(_: int) -> tuple[Path, dict[str, Any]]:
        start.wait()
        return cache.cached(tmp_path, "key", make)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(want, range(4)))
    assert (
        len(made) == 1
        and len({str(folder) for folder, _ in found}) == 1
        and all(said == {"rows": 5} for _, said in found)
    )
