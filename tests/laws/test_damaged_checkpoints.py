"""No damage to a checkpoint of any strategy is silent: it is found before a tensor is read, by whichever ranks look."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dtf.api.registry import registered
from dtf.checkpoint.boxes import loading_fault
from dtf.config.settings import load_parts
from tests.support.checkpoints import damage
from tests.support.harness import spread

DAMAGES = 20_000
"""Over all strategies, among the slow tests."""


def strategies() -> list[str]:
    """Every registered strategy, without faulty ones of tests."""
    load_parts([])
    return [name for name, cls in registered("strategy").items() if cls.__module__.startswith("dtf.")]


def counts() -> list[object]:
    return [25, pytest.param(-(-DAMAGES // len(strategies())), marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint of a strategy on two processes, made once."""

    @cache
    def make(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp("checkpoints")
        spread(strategy, 2, steps=1, save_every=1, folder=str(folder), optimizer="adamw", eval_every=0)
        return folder / "step_000001"

    return make


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def restore(folder: Path, whole: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in whole:
            path.unlink()
    for name, data in whole.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != data:
            path.write_bytes(data)


@pytest.mark.parametrize("count", counts())
@pytest.mark.parametrize("strategy", strategies())
def test_no_damage_is_silent(strategy: str, count: int, saved: Callable[[str], Path]) -> None:
    folder = saved(strategy)
    whole, harmless, silent = contents(folder), 0, []
    for seed in range(count):
        draw = random.Random(f"{strategy} {seed}")
        what, ranks = damage(folder, draw), draw.choice((1, 1, 2, 3))
        if not any(loading_fault(folder, rank, ranks) for rank in range(ranks)):
            if contents(folder) == whole:  # two files of the same bytes changed places
                harmless += 1
            else:
                silent.append(f"{seed}: {what}, {ranks} ranks")
        restore(folder, whole)
    print(f"{strategy}: {count} damages of {len(whole)} files, {harmless} harmless, {len(silent)} silent")
    assert silent == []
    assert harmless < 0.02 * count and loading_fault(folder) is None
