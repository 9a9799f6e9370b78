"""Click logs in files: the config node `recipe.data` of the recipes that read them.

Imports without torch, numpy and numba.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtf.api.registry import option
from dtf.core.errors import ConfigError, DataError
from dtf.recipes.ctr.columns import AVAZU, CRITEO
from dtf.recipes.ctr.data import MOST_ROWS, DataOptions
from dtf.recipes.ctr.paths import find_files

if TYPE_CHECKING:
    import numpy as np

    from dtf.api.recipe import Dataset
    from dtf.recipes.ctr.clicklog import Clicks
    from dtf.recipes.ctr.encode import Encoder
    from dtf.recipes.ctr.log import Log
    from dtf.recipes.ctr.vocabulary import Vocabulary

_vocabularies: dict[str, Vocabulary] = {}
"""The vocabulary that this process loaded last, by its cache key. Tables, model and splits ask for it in turn."""


class Format(Enum):
    criteo = "criteo"
    avazu = "avazu"
    libsvm = "libsvm"
    parquet = "parquet"


class Mode(Enum):
    memory = "memory"
    queue = "queue"


class Integers(Enum):
    log = "log"
    bucket = "bucket"
    raw = "raw"


class Ids(Enum):
    hash = "hash"
    raw = "raw"
    vocabulary = "vocabulary"
    given = "given"


BadRecords = Enum("BadRecords", {"raise": "raise", "skip": "skip"})


@dataclass(kw_only=True)
class LogOptions(DataOptions):
    root: str = option(
        default="", doc="folder in which `train`, `eval` and `test` are looked for; empty: the current one"
    )
    train: str = option(
        default="",
        doc="files of the training split, plain or .gz: a file, a folder of them or a pattern such as 'day_*.gz'; "
        "must be given",
    )
    eval: str = option(default="", doc="files of the evaluation split, likewise; must be given")
    test: str = option(
        default="",
        doc="files that job=evaluate and job=predict take with job.split=test, likewise; empty: there are none",
    )
    format: Format = option(
        default=Format.criteo,
        doc="`criteo` label, 13 integers, 26 hexadecimal categories, tabs between; `avazu` id, click, hour and 21 "
        "categories, with commas and the header; "
        "`libsvm` label and an `id:1` per field (also libfm); `parquet` columns by name",
    )
    mode: Mode = option(
        default=Mode.memory,
        doc="`memory` parses all rows once into `cache`, which the ranks of a host share, and shuffles rows; `queue` "
        "parses blocks of the files as they are wanted, in every epoch anew, and shuffles blocks",
    )
    integers: Integers = option(
        default=Integers.log,
        doc="how an integer x is encoded: `log` sign(x) log(1 + |x|), `raw` x itself, missing ones 0 under both; "
        "`bucket` a further category, floor(log(x)^2) or x up to 2",
    )
    ids: Ids = option(
        default=Ids.hash,
        doc="which row of the table a value has: `hash` hash(field, value) modulo `table_size`; `raw` the hash itself, "
        "of 63 bits; `vocabulary` its number among the values that the training split has `min_count` times, and one "
        "number per field for all others; `given` (libsvm) the id in the file",
    )
    table_size: int = option(
        default=0,
        least=0,
        most=1 << 62,
        doc="rows of the table: for ids=hash, where 0 means 2**20, and for ids=given, where it must be given",
        unit="rows",
    )
    min_count: int = option(
        default=1,
        least=1,
        most=1 << 40,
        doc="for ids=vocabulary: occurrences of a value in the training split that make it one of its own",
    )
    pairs: int = option(
        default=0, least=0, most=100_000, doc="for format=libsvm: `id:1` pairs of each line, which are its fields"
    )
    label: str = option(default="label", doc="for format=parquet: the column that is 1 for a click, else 0")
    numbers: list[str] = option(factory=list, doc="for format=parquet: columns of integers")
    categories: list[str] = option(factory=list, doc="for format=parquet: columns of categories, texts or integers")
    bags: list[str] = option(
        factory=list,
        doc="for format=parquet: columns of any number of categories a row, none too: lists, or texts with `separator` "
        "between; their rows are pooled, see recipe.model.pooling",
    )
    separator: str = option(
        default="|", doc="for recipe.data.bags: what is between the categories of a text, one ASCII character"
    )
    more_pairs: bool = option(
        default=False,
        doc="for format=libsvm: pairs of a line after the first `pairs` are the values of one more field, which has "
        "any number of them",
    )
    queue_rows: int = option(
        default=16_384,
        least=1,
        most=MOST_ROWS,
        doc="rows ready ahead of the model, on each rank; two batches at least, 65 at most",
        unit="rows",
    )
    block_rows: int = option(
        default=0,
        least=0,
        most=MOST_ROWS,
        doc="for mode=queue: rows that stay together when blocks are shuffled, 0 means 4096; those of .gz files have "
        "4 MiB of text or more, those of Parquet files are row groups",
        unit="rows",
    )
    threads: int = option(
        default=0,
        least=0,
        most=1024,
        doc="threads that read, on each rank; 0: as many as the rank computes with, in mode=memory all cores",
        unit="threads",
    )
    cache: str = option(
        default="",
        doc="folder for files that are made of them once, which may be deleted at any time; empty: "
        "$XDG_CACHE_HOME/dtf/clicks or ~/.cache/dtf/clicks",
    )
    bad_records: BadRecords = option(
        default=BadRecords["raise"],
        doc="lines that cannot be parsed: `raise` ends the run, `skip` reports each in the log and leaves it out",
    )
    bad_share: float = option(
        default=0.001,
        above=0,
        most=1,
        doc="share of a split that may be skipped, over all ranks; more ends the run",
        unit="share of the rows",
    )

    @property
    def fields(self) -> int:
        return self.pairs if self.format is Format.libsvm else len(self.field_names) - len(self.bags)

    @property
    def bag_fields(self) -> int:
        return int(self.more_pairs) if self.format is Format.libsvm else len(self.bags)

    @property
    def field_names(self) -> tuple[str, ...]:
        bucketed = (
            (self.numbers or [f"I{number}" for number in range(1, 1 + self._numbers)])
            if self.integers is Integers.bucket
            else ()
        )
        given = {Format.criteo: CRITEO, Format.avazu: AVAZU, Format.parquet: self.categories}.get(self.format, ())
        return (*bucketed, *given, *self.bags)

    @property
    def integers_count(self) -> int:
        return 0 if self.integers is Integers.bucket else self._numbers

    @property
    def table_rows(self) -> int:
        if self.ids is Ids.vocabulary:
            vocabulary = self._encoder().vocabulary
            assert vocabulary is not None
            return len(vocabulary)
        return {Ids.raw: 0, Ids.given: self.table_size}.get(self.ids, self.table_size or 1 << 20)

    def rows_of_fields(self) -> list[int]:
        vocabulary = self._encoder().vocabulary
        if vocabulary is None:
            return super().rows_of_fields()
        return (vocabulary.rare[1:] - vocabulary.rare[:-1]).tolist()

    @property
    def any_ids(self) -> bool:
        return self.ids is Ids.raw

    def check(self) -> None:
        for key, default, holds, where in (
            ("pairs", 0, self.format is Format.libsvm, "format=libsvm"),
            ("label", "label", self.format is Format.parquet, "format=parquet"),
            ("numbers", [], self.format is Format.parquet, "format=parquet"),
            ("categories", [], self.format is Format.parquet, "format=parquet"),
            ("bags", [], self.format is Format.parquet, "format=parquet"),
            ("separator", "|", bool(self.bags), "bags"),
            ("more_pairs", False, self.format is Format.libsvm, "format=libsvm"),
            ("table_size", 0, self.ids in (Ids.hash, Ids.given), "ids=hash and ids=given"),
            ("min_count", 1, self.ids is Ids.vocabulary, "ids=vocabulary"),
            ("block_rows", 0, self.mode is Mode.queue, "mode=queue"),
        ):
            value = getattr(self, key)
            if value != default and not holds:
                raise ConfigError(f"recipe.data.{key}={value} has a meaning for recipe.data.{where} only; leave it out")
        if self.format is Format.libsvm and not self.pairs and not self.more_pairs:
            raise ConfigError(
                "recipe.data.format=libsvm needs recipe.data.pairs: how many `id:1` each line has; where that differs, "
                "recipe.data.more_pairs=true"
            )
        if self.format is Format.parquet and not self.categories and not self.bags:
            raise ConfigError(
                "recipe.data.format=parquet needs recipe.data.categories, the names of columns; recipe.data.numbers "
                "may name columns of integers, recipe.data.bags those of several categories"
            )
        if len(self.separator.encode()) != 1:
            raise ConfigError(f"recipe.data.separator={self.separator!r} must be one ASCII character")
        if not self._numbers and self.integers is not Integers.log:
            raise ConfigError(
                f"recipe.data.integers={self.integers.name}: recipe.data.format={self.format.name} has no integers; "
                "leave it out"
            )
        if self.ids is Ids.given and self.format is not Format.libsvm:
            raise ConfigError(
                f"recipe.data.ids=given: recipe.data.format={self.format.name} has no ids; use hash, raw or "
                "vocabulary, or format=libsvm"
            )
        if self.ids is Ids.given and not self.table_size:
            raise ConfigError("recipe.data.ids=given needs recipe.data.table_size: one more than the largest id")
        for package, extra, needed in (("numba", "ctr", True), ("pyarrow", "parquet", self.format is Format.parquet)):
            if needed and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"recipe.data reads click logs with {package}, which is not installed; pip install 'dtf[{extra}]'"
                )
        for split in ("train", "eval", *(["test"] if self.test else [])):
            self.paths(split)
        if not _can_write(self._cache):
            raise DataError(f"recipe.data.cache={self._cache} cannot be written; set recipe.data.cache=DIR")

    def paths(self, split: str) -> list[Path]:
        """The files of a split, in the order of their names. ConfigError or DataError when there are none."""
        text = getattr(self, split)
        if not text:
            raise ConfigError(
                f"recipe.data.{split} is not set; give a file, a folder or a pattern: recipe.data.{split}=PATH"
            )
        return find_files(
            Path(self.root).expanduser() / Path(text).expanduser(), f"recipe.data.{split}={text}", self.root
        )

    def open(self, split: str, seed: int) -> Dataset:
        import torch

        from dtf.recipes.ctr.cache import cached, stamp
        from dtf.recipes.ctr.clicklog import Columns, Queued, cores

        paths, encoder, threads = self.paths(split), self._encoder(), self.threads or torch.get_num_threads()

        def allowed(rows: int) -> int:
            return math.ceil(self.bad_share * rows) if self.bad_records is BadRecords["skip"] else 0

        if self.mode is Mode.queue:
            log = self._log(paths, threads)
            return Queued(log, encoder, allowed(log.rows), self.queue_rows, threads, self.block_rows or 4096)
        small = self.ids is not Ids.raw and self.table_rows <= 1 << 31

        def make(folder: Path) -> dict[str, Any]:
            return Columns.make(folder, self._log(paths, self.threads), encoder, small, self.threads or cores())

        folder, columns = cached(self._cache, ["columns", stamp(paths), *self._shape, encoder.about()], make)
        return Columns(folder, columns, allowed(columns["places"]["starts"][-1]), self.queue_rows)

    def preprocessing(self) -> dict[str, Any]:
        from dtf.recipes.ctr.preprocessing import of_log

        bags = ["more pairs"] if self.more_pairs else self.bags
        return of_log(
            self.format.name, self.pairs, self.numbers, self.categories, self._encoder(), bags, self.separator
        )

    def preprocessing_arrays(self) -> dict[str, np.ndarray]:
        vocabulary = self._encoder().vocabulary
        return {} if vocabulary is None else {"keys": vocabulary.keys, "first": vocabulary.rare}

    def inputs(self, path: Path) -> Clicks:
        """Rows of a file or a folder of files, with or without labels, parsed as they are read.

        The first line decides whether there are labels; a line of the other kind is a bad one. Of Parquet files the
        column of labels is not read.
        """
        import torch

        from dtf.recipes.ctr.clicklog import Queued

        threads = self.threads or torch.get_num_threads()
        log = self._log(find_files(path, f"job.input={path}"), threads, labels=False)
        return Queued(log, self._encoder(), 0, self.queue_rows, threads, 4096)

    @property
    def _numbers(self) -> int:
        return {Format.criteo: 13, Format.parquet: len(self.numbers)}.get(self.format, 0)

    @property
    def _cache(self) -> Path:
        return Path(self.cache or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/dtf/clicks").expanduser()

    @property
    def _shape(self) -> list[Any]:
        """The options that decide how a file is parsed, and which ids it may hold."""
        limit = self.table_size if self.ids is Ids.given else 0
        bags = [self.bags, self.separator, self.more_pairs] if self.bag_fields else []
        return [self.format.name, self.pairs, self.label, self.numbers, self.categories, limit, *bags]

    def _log(self, paths: list[Path], threads: int, labels: bool = True) -> Log:
        """The log of these files. `threads=0`: one for each core. `labels`: whether each row must have one."""
        from dtf.recipes.ctr import avazu, criteo, libsvm, log
        from dtf.recipes.ctr.clicklog import cores

        threads = threads or cores()
        if self.format is Format.parquet:
            from dtf.recipes.ctr.parquet import ParquetLog

            return ParquetLog(
                paths,
                self.label if labels else None,
                self.numbers,
                self.categories,
                self._cache,
                threads,
                self.bags,
                self.separator,
            )
        lines = {Format.criteo: criteo, Format.avazu: avazu, Format.libsvm: libsvm}[self.format]
        labelled = labels or lines.has_label(log.first_line(paths))
        if self.format is Format.libsvm:
            limit = self.table_size if self.ids is Ids.given else 0
            text = log.libsvm_text(self.pairs, limit, labelled, self.more_pairs)
        else:
            text = log.criteo_text(labelled) if self.format is Format.criteo else log.avazu_text(labelled)
        return log.TextLog(paths, text, self._cache, threads)

    def _encoder(self) -> Encoder:
        from dtf.recipes.ctr.cache import cached, stamp
        from dtf.recipes.ctr.clicklog import cores, keys_of
        from dtf.recipes.ctr.encode import Encoder
        from dtf.recipes.ctr.vocabulary import Vocabulary, count

        plain = Encoder(self.integers.name, self.table_rows if self.ids is Ids.hash else 0, given=self.ids is Ids.given)
        if self.ids is not Ids.vocabulary:
            return plain
        paths = self.paths("train")

        def make(folder: Path) -> dict[str, Any]:
            return count(
                keys_of(self._log(paths, self.threads), plain, self.threads or cores()),
                self.fields + self.bag_fields,
                self.min_count,
            ).save(folder)

        key = ["vocabulary", stamp(paths), *self._shape, self.integers.name, self.min_count]
        name = json.dumps([str(self._cache), key])
        if name not in _vocabularies:
            folder, _ = cached(self._cache, key, make)
            _vocabularies.clear()
            _vocabularies[name] = Vocabulary.load(folder)
        return Encoder(self.integers.name, 0, _vocabularies[name])


def _can_write(folder: Path) -> bool:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
