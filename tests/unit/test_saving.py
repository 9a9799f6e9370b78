"""Whether a run saves in the background is decided at the start, by all ranks alike."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dtf.checkpoint.options import Every
from dtf.core.types import Memory, Place, State
from dtf.engine import saving
from dtf.host import memory
from tests.support.checkpoints import Together, checkpointer, on_ranks, whole

MB = 10**6


class Ranks(Together):
    device = torch.device("cpu")
    mpi = False

    def channel(self) -> Any:
        return None if self.mpi else self

    def barrier(self) -> None:
        self.broadcast(None)


def opened(world: Any, folder: Any, every: int = 1, gpu: bool = False, **options: Any) -> saving.Saving:
    """Of a rank of a host with two; the first of them saves 8 MB."""
    world.__class__ = Ranks
    if gpu:
        world.device = torch.device("cuda", 0)
    boxes = [] if world.rank else [whole("w", torch.zeros(2 * MB))]
    place = replace(Place(), rank=world.rank, size=2, local_rank=world.rank, local_size=2)
    return saving.open_saves(
        SimpleNamespace(  # type: ignore[arg-type]
            program=SimpleNamespace(state=lambda: State(boxes, {}), memory=lambda: Memory(MB, MB, MB, 2 * MB)),
            joined=SimpleNamespace(
                world=world,
                see=print,
                rank=SimpleNamespace(settings=SimpleNamespace(checkpoint=Every(**options)), place=place),
            ),
            plan=SimpleNamespace(save_every=every),
            checkpointer=checkpointer(folder, world),
        )
    )


def background(one: saving.Saving) -> bool:
    return one.saves._barrier is not None


def test_the_copy_is_part_of_what_a_rank_needs(tmp_path: Any) -> None:
    first, second = on_ranks(2, lambda world: opened(world, tmp_path))
    assert background(first) and background(second) and not first.row
    assert (first.needs.copies, second.needs.copies) == (8 * MB, 0)


def test_beside_a_gpu_the_copy_has_a_line_of_its_own(tmp_path: Any) -> None:
    first, _ = on_ranks(2, lambda world: opened(world, tmp_path, gpu=True))
    assert background(first) and not first.needs.copies
    assert first.row == {"saves": "8.0 MB a process of the host's memory for a copy"}


@pytest.mark.parametrize("left", [14 * MB, 18 * MB])
def test_a_host_without_room_for_copies_waits_for_the_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """Two ranks still need 3 MB each, and 14 MB are most of 17.5."""
    monkeypatch.setattr(memory, "available_bytes", lambda: left)
    found = on_ranks(2, lambda world: opened(world, tmp_path))
    for one in found:
        assert background(one) is (left == 18 * MB) and bool(one.row) is (left == 14 * MB)
        assert one.needs.copies == 0 or background(one)
    if left == 14 * MB:
        assert found[0].row["saves"] == (
            "training waits for the disk, as a copy of 8.0 MB does not fit beside the 6.0 MB that training needs into "
            "the 14 MB that a host has left"
        )


def test_ranks_of_mpi_and_runs_that_do_not_want_it_wait_for_the_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwanted = on_ranks(2, lambda world: opened(world, tmp_path, background=False))
    unwanted += on_ranks(2, lambda world: opened(world, tmp_path, every=0))
    for one in unwanted:
        assert not background(one) and not one.row and not one.needs.copies
    monkeypatch.setattr(Ranks, "mpi", True)
    for one in on_ranks(2, lambda world: opened(world, tmp_path)):
        assert not background(one) and "MPI" in one.row["saves"]


def test_a_rank_that_copies_for_others_uses_their_cores(tmp_path: Any) -> None:
    first, second = on_ranks(2, lambda world: opened(world, tmp_path))
    assert copiers(first) == 2 and copiers(second) == 1


def copiers(one: saving.Saving) -> int:
    threads = one.saves._copies._threads
    return threads._max_workers if threads else 1
