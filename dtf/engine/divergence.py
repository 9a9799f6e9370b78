"""What is said of a run whose loss or gradients are not finite. Looked for only where the run ends for it."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from dtf.api.evaluator import Peers
from dtf.api.strategy import Program
from dtf.core import nest
from dtf.core.errors import DivergedError
from dtf.core.types import Batch, Batches
from dtf.model.forward import rows_of

_NAMED = 3
"""Parameters, and samples, that a message names."""


class Everyone(Peers, Protocol):
    """All ranks. See `dtf.World`."""

    rank: int

    def gather(self, value: Any) -> list[Any] | None:
        """The JSON values of all ranks in order of rank, on rank 0; None on other ranks. Collective."""
        ...


class SteppedRank(Protocol):
    """What is asked of the loop."""

    program: Program
    train: Batches
    world: Everyone
    steps_per_epoch: int
    skip_nonfinite: int


def diverged(loop: SteppedRank, step: int, skipped: int, sums: list[float]) -> DivergedError:
    """The error of a run in which `skipped` of the first `step` updates were not made. Collective; the same on all
    ranks.

    `sums`: metric sums (M) over ranks of the steps since the last report.
    """
    return DivergedError(
        f"loss or gradient was not finite in {skipped} of the first {step} steps{_first(loop, sums)}; "
        f"train.skip_nonfinite={loop.skip_nonfinite} allows no more; "
        "no such update was made; lower lr.peak, set step.clip_norm or use a wider precision"
    )


def _first(loop: SteppedRank, sums: list[float]) -> str:
    """What is known of the first of these steps: `, first in step 7: ...`. Collective; the same on all ranks."""
    found = loop.program.first_skipped()
    if found is None:  # as in a process that was started after it
        return ""
    step, names = found
    epoch, index = divmod(step, loop.steps_per_epoch)
    parts = loop.world.gather([names, _unusable(loop, epoch, index)])
    text = ""
    if parts is not None:
        names = list(dict.fromkeys(name for part in parts for name in part[0]))
        unusable = sorted({sample for part in parts for sample in part[1]})
        finite = torch.isfinite(torch.tensor(sums)).all()
        text = f", first in step {step + 1}: the loss is {'finite' if finite else 'not finite'}, "
        text += f"the gradient is not finite in {_some(names)}" if names else "the norm of all gradients overflows"
        text += f"; the batch is number {index} of epoch {epoch}, with the samples "
        text += _some([str(sample) for sample in loop.train.batch_ids(epoch, index).tolist()])
        if unusable:
            text += f"; what the data set gives for {_some([str(sample) for sample in unusable])} is not finite"
    return loop.world.broadcast(text)


def _unusable(loop: SteppedRank, epoch: int, index: int) -> list[int]:
    """The samples of this rank in that batch whose inputs or targets are not finite."""
    with suppress(Exception):  # whatever the data set raises, it is not what ended the run
        batch = loop.train.get(epoch, index)
        if batch is not None:
            return [int(sample) for sample in batch.ids[~_finite_rows(batch).numpy()] if sample >= 0]
    return []


def _finite_rows(batch: Batch) -> Tensor:
    if isinstance(batch.inputs, nest.MicroBatches):
        return torch.cat([_finite_rows(rows_of(batch, *ends)) for ends in pairwise(batch.inputs.bounds)])
    rows = torch.ones(len(batch.ids), dtype=torch.bool)
    for tensor in (*nest.leaves(batch.inputs), *nest.leaves(batch.targets)):
        if tensor.is_floating_point():
            rows &= torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else torch.isfinite(tensor)
    return rows


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
