"""Code that asks for other processes is found, by whichever way it asks, and torch and dtf may ask."""

from __future__ import annotations

import os
from os import environ

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d, get_world_size

from dtf.core.errors import ConfigError
from dtf.model import communication
from dtf.model.communication import AsksForOthers, asks_for_no_others

WAYS = {
    "get_world_size": (dist.get_world_size, get_world_size),
    "os.environ['WORLD_SIZE']": (
        lambda: os.environ["WORLD_SIZE"],
        lambda: os.environ.get("WORLD_SIZE"),
        lambda: os.getenv("WORLD_SIZE"),
        lambda: environ["WORLD_SIZE"],
    ),
    "os.environ['LOCAL_RANK']": (lambda: os.environ["LOCAL_RANK"],),
}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, as far as is asked."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(communication, "_SIZE", lambda group: 2)
    monkeypatch.setattr(distributed_c10d, "_rank_not_in_group", lambda group: False)


@pytest.mark.parametrize(("what", "number"), [(what, i) for what, ways in WAYS.items() for i in range(len(ways))])
def test_a_question_is_found(two: None, what: str, number: int) -> None:
    with AsksForOthers() as asks:
        WAYS[what][number]()
    assert asks.found == [what]
    WAYS[what][number]() if what.startswith("os") else None
    assert asks.found == [what], "nobody watches any more"


def test_other_variables_are_free(two: None) -> None:
    with AsksForOthers() as asks:
        os.environ.get("HOME")
    assert asks.found == []


def test_one_process_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with AsksForOthers() as asks:
        os.environ.get("WORLD_SIZE")
    assert asks.found == []


def test_it_is_refused_by_name(two: None) -> None:
    with (
        pytest.raises(ConfigError, match="the model talks to other ranks itself .get_world_size."),
        asks_for_no_others(),
    ):
        dist.get_world_size()


def test_watches_may_overlap(two: None) -> None:
    one, other = AsksForOthers(), AsksForOthers()
    one.__enter__()
    other.__enter__()
    one.__exit__()
    os.environ.get("WORLD_SIZE")
    other.__exit__()
    assert (one.found, len(other.found)) == ([], 1)
    assert os._Environ.__getitem__ is communication._VARIABLE
