"""The pool that other tests stand on."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist


def add(rank: int, size: int, start: int) -> list[int]:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return [rank, size, int(total)]


def fail(rank: int, size: int) -> None:
    if rank == 1:
        raise ValueError("rank one has had enough")
    dist.barrier()


def hang(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(600)


def die(rank: int, size: int) -> None:
    os._exit(3)


def test_results_come_by_rank(ranks):
    assert ranks(3, "tests.unit.test_rank_pool:add", start=10) == [[0, 3, 33], [1, 3, 33], [2, 3, 33]]


def test_a_failing_rank_is_named_with_its_traceback(ranks):
    with pytest.raises(AssertionError, match="rank 1 of 2: ValueError: rank one has had enough"):
        ranks(2, "tests.unit.test_rank_pool:fail")


def test_a_hang_ends(ranks):
    with pytest.raises(AssertionError, match="of 2: no answer within 0.4 s"):
        ranks(2, "tests.unit.test_rank_pool:hang", timeout_s=0.4)


def test_a_death_is_seen(ranks):
    with pytest.raises(AssertionError, match="rank 0 of 1: ended with exit status 3"):
        ranks(1, "tests.unit.test_rank_pool:die")


def remember(rank: int, size: int) -> int:
    """How often this process was asked."""
    globals()["asked"] = globals().get("asked", 0) + 1
    return globals()["asked"]


def test_processes_are_shared_on_demand_only(ranks):
    asked = "tests.unit.test_rank_pool:remember"
    assert [ranks(2, asked), ranks(2, asked)] == [[1, 1], [1, 1]]
    answers = [ranks(2, asked, shared=True) for _ in range(3)]
    # a set that has answered CALLS makes room for another
    assert any(second == [count + 1 for count in first] for first, second in pairwise(answers))


def test_no_process_outlives_a_failure(ranks):
    asked = "tests.unit.test_rank_pool:remember"
    ranks(1, asked, shared=True)
    with pytest.raises(AssertionError):
        ranks(1, "tests.unit.test_rank_pool:die", shared=True)
    assert ranks(1, asked, shared=True) == [1]
