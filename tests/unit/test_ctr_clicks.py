"""The generated click log: a function of (seed, number), with a known best score, that can be written as a Criteo log
and read back.
"""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dtf.core.errors import ConfigError
from dtf.recipes.ctr.clicks import BIAS, SHARES, Generated, World, write_criteo
from dtf.recipes.ctr.generated_data import ClicksOptions
from dtf.recipes.ctr.log_data import Ids, LogOptions, Mode


def opened(split: str = "eval", **values: float) -> Generated:
    return ClicksOptions(**values).open(split, 0)  # type: ignore[arg-type]


def test_a_row_depends_on_its_number_alone() -> None:
    data = opened()
    whole, targets = data.fetch(np.arange(3000), 0)
    some = np.random.default_rng(0).permutation(3000)[:500]
    inputs, others = data.fetch(some, 5)
    assert (
        inputs["ids"].equal(whole["ids"][some])
        and inputs["dense"].equal(whole["dense"][some])
        and others.equal(targets[some])
    )
    for different in (opened(seed=1), opened("train")):
        assert (
            not different.fetch(np.arange(3000), 0)[0]["ids"].equal(whole["ids"])
            and different.fingerprint() != data.fingerprint()
        )
    assert opened().fingerprint() == data.fingerprint()


@pytest.mark.parametrize(("categories", "values"), [(26, 5000), (1, 2), (3, 6), (26, 52), (40, 10_000_000)])
def test_ids_lie_in_the_range_of_their_field(categories: int, values: int) -> None:
    data = opened(categories=categories, values=values)
    offsets = data._world.offsets
    assert (
        offsets[0] == 0 and offsets[-1] == values and len(offsets) == categories + 1 and (np.diff(offsets) >= 1).all()
    )
    ids = data.draw(np.arange(20_000)).ids
    assert (ids >= offsets[:-1]).all() and (ids < offsets[1:]).all()


def test_frequencies_fall_as_the_power_law_says() -> None:
    data = opened(categories=1, values=1000, skew=1.0)
    counts = np.bincount(data.draw(np.arange(400_000)).ids[:, 0], minlength=1000)
    ranks = np.arange(1, 1001)
    expected = 400_000 * np.log((ranks + 1) / ranks) / np.log(1001)
    assert (np.abs(counts[:20] - expected[:20]) < 4.5 * np.sqrt(expected[:20])).all()
    assert counts[500:].sum() == pytest.approx(expected[500:].sum(), rel=0.03)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("values", [100, 5000])
def test_the_ceiling_is_as_high_as_wanted_and_the_clicks_are_as_likely_as_said(seed: int, values: int) -> None:
    data = opened(seed=seed, values=values)
    ceiling = data.best_possible()
    assert 0.78 < ceiling["auc"] < 0.86
    drawn = data.draw(np.arange(100_000))
    entropy = -(
        drawn.probabilities * np.log(drawn.probabilities) + (1 - drawn.probabilities) * np.log(1 - drawn.probabilities)
    ).mean()
    assert ceiling["loss"] == pytest.approx(entropy, abs=0.005)
    edges = np.quantile(drawn.probabilities, np.linspace(0, 1, 11))
    for low, high in pairwise(edges):
        inside = (drawn.probabilities >= low) & (drawn.probabilities < high)
        assert drawn.labels[inside].mean() == pytest.approx(drawn.probabilities[inside].mean(), abs=0.02)
    logits = np.log(drawn.probabilities / (1 - drawn.probabilities))
    assert logits.mean() == pytest.approx(BIAS, abs=0.1) and logits.std() == pytest.approx(
        np.sqrt(np.square(SHARES).sum()), rel=0.1
    )


def test_the_auc_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    data = Generated(World.make(3, 26, 5000, 1.1), 5000, 3, "eval", 1)
    drawn = data.draw(np.arange(5000))
    assert data.best_possible()["auc"] == pytest.approx(
        metrics.roc_auc_score(drawn.labels, drawn.probabilities), abs=1e-12
    )
    assert data.best_possible()["loss"] == pytest.approx(metrics.log_loss(drawn.labels, drawn.probabilities), abs=1e-12)


@pytest.mark.parametrize("mode", Mode)
def test_what_is_written_as_a_criteo_log_is_read_back(mode: Mode, tmp_path: Path) -> None:
    data = Generated(World.make(0, 26, 5000, 1.1), 3000, 0, "train", 1)
    write_criteo(data, tmp_path / "log.tsv", chunk=1024)
    path = str(tmp_path / "log.tsv")
    log = LogOptions(train=path, eval=path, mode=mode, ids=Ids.vocabulary, cache=str(tmp_path / "cache"))
    log.check()
    read, targets = log.open("train", 0).fetch(np.arange(3000), 0)
    inputs, expected = data.fetch(np.arange(3000), 0)
    assert targets.equal(expected) and read["dense"].equal(inputs["dense"])
    pairs = set(zip(read["ids"].flatten().tolist(), inputs["ids"].flatten().tolist(), strict=True))
    assert len(pairs) == len({mine for mine, _ in pairs}) == len({theirs for _, theirs in pairs}), (
        "the same values, under other numbers"
    )


def test_two_values_are_the_least_of_a_category() -> None:
    with pytest.raises(ConfigError, match="recipe.data.values=51 must be at least 52"):
        ClicksOptions(values=51).check()
    ClicksOptions(values=52).check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "packed"),
    [
        pytest.param(50_000, True, id="50000-gz"),  # read as a plain one is, and unpacked before
        pytest.param(50_000, False, id="50000-plain"),
        pytest.param(2_000_000, True, id="2000000-gz"),
        pytest.param(2_000_000, False, id="2000000-plain"),
    ],
)
def test_a_queue_takes_the_same_memory_however_long_the_log_is(rows: int, packed: bool, tmp_path: Path) -> None:
    """2,000,000 rows are 500 MB; `bench.logs` is the process that reads them."""
    log = tmp_path / "log.tsv"
    write_criteo(Generated(World.make(0, 26, 1_000_000, 1.1), rows, 0, "train", 1), log)
    if packed:
        log = tmp_path / "log.gz"
        with open(tmp_path / "log.tsv", "rb") as file, gzip.open(log, "wb", compresslevel=1) as out:
            shutil.copyfileobj(file, out, 1 << 20)
    command = [sys.executable, "-m", "bench.logs", "read", str(log), "--rounds", "1", "--cache", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = re.search(r"opened ([0-9,]+) rows.*peak ([0-9]+) MiB", done.stdout, re.DOTALL)
    assert found is not None and found[1] == f"{rows:,}" and int(found[2]) < 1000, done.stdout
