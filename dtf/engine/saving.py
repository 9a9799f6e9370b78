"""How a run saves: in the background, where memory allows it."""

from __future__ import annotations

import os
from typing import NamedTuple

from dtf.checkpoint.saves import Saves
from dtf.core.text import bytes_text
from dtf.core.types import Memory, Note
from dtf.engine.assemble import TrainingSetup
from dtf.host import memory

SHARE = 0.8
"""Of the memory that a host has left, what the copies of its ranks may take together with what they still need."""


MOST_COPIERS = 8
"""Threads that copy in one process: more get no more out of the memory of a host."""


class Saving(NamedTuple):
    """The saves of this run, and what the start-up table says of them."""

    saves: Saves
    needs: Memory | None
    """Of this rank, with the copy."""

    row: dict[str, str]


def open_saves(setup: TrainingSetup) -> Saving:
    """Get ready to save. Collective; once the state to go on from is loaded."""
    program, world, options = setup.program, setup.joined.world, setup.joined.rank.settings.checkpoint
    needs, checkpointer = program.memory(), setup.checkpointer

    def note(text: str) -> None:
        setup.joined.see(Note("warning", text))

    row = {"mirror": options.mirror} if options.mirror else {}
    if not options.background or not setup.plan.save_every:
        return Saving(Saves(checkpointer, note), needs, row)
    channel, boxes = world.channel(), program.state().boxes
    size = sum(box.tensor.nbytes for box in boxes)
    # optimizers have their state by now; gradients and activations are still to come
    coming = needs.gradients + needs.activations + needs.exchange if needs and world.device.type == "cpu" else 0
    why, copiers = "ranks of MPI have no second channel", 1
    if channel is not None:
        why, copiers = _planned(setup, size, coming)
    if channel is None or why:
        return Saving(Saves(checkpointer, note), needs, row | {"saves": f"training waits for the disk, as {why}"})
    saves = Saves(checkpointer.over(channel), note, world.barrier, copiers)
    saves.reserve(boxes)
    if world.device.type == "cpu":
        return Saving(saves, needs and needs._replace(copies=size), row)
    largest = max(world.gather(size) or [0])
    return Saving(saves, needs, row | {"saves": f"{bytes_text(largest)} a process of the host's memory for a copy"})


def _planned(setup: TrainingSetup, size: int, coming: int) -> tuple[str, int]:
    """Why a host has no room for copies of `size` bytes on this rank; empty: all have. And by how many threads this
    rank copies: as many as ranks of its host would have as much each, since all wait for the slowest.
    Collective.
    """
    world, place = setup.joined.world, setup.joined.rank.place
    everyone = world.gather([place.rank - place.local_rank, size, coming, memory.available_bytes()])
    why, copiers = "", dict[int, int]()
    for host in sorted({one[0] for one in everyone or ()}):
        ranks = [one for one in everyone or () if one[0] == host]
        copies, rest = sum(one[1] for one in ranks), sum(one[2] for one in ranks)
        for rank, one in enumerate(everyone or ()):
            if one[0] == host:
                copiers[rank] = max(1, min(MOST_COPIERS, round(len(ranks) * one[1] / max(1, copies))))
        left = min((one[3] for one in ranks if one[3] is not None), default=None)
        if left is not None and copies + rest > SHARE * left:
            why = (
                f"a copy of {bytes_text(copies)} does not fit beside the {bytes_text(rest)} that training needs into "
                f"the {bytes_text(left)} that a host has left"
            )
            break
    why, counts = world.broadcast([why, [copiers[rank] for rank in sorted(copiers)]])
    return why, 1 if why else min(counts[world.rank], len(os.sched_getaffinity(0)))  # ranks may be pinned
