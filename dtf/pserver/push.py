"""What a trainer pushes for one lease, as a server gets it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from dtf.pserver.row_routing import RowGradients


class Push(NamedTuple):
    """Gradients of the sum of losses over the rows of the lease, divided by the rows of the global batch.

    With local training the changes of the state instead, see `messages.exchange_schemas`.
    """

    trainer: int
    step: int
    part: int
    dense: np.ndarray  # (bytes,) uint8: see `param_slices.views`
    rows: Mapping[str, RowGradients]  # by table: with local training changes of rows and their states
    # whether the gradient is, as far as is known, and `statistics` are; of differences how many steps had one that is
    finite: int
    norm: float  # of the whole gradient, all servers' parts, where the mode needs it
    seen: int  # updates that this server had made when the trainer pulled
    epoch: int
    unread: int  # of its rows
    skipped: int  # steps that the trainer itself did not make
    sums: np.ndarray  # (M,); empty but for server 0, as all that follows
    statistics: np.ndarray  # of each step, see `BatchNormStatistics.added`; not finite where a trainer skipped one
    ids: np.ndarray  # sample ids
    counts: float | None = None  # what the losses are divided by in place of rows, where they come with counts
    buffers: np.ndarray = np.empty(0)  # see `ChangingBuffers.total`; empty but for server 0

    def copied(self) -> Push:
        """The same with memory of its own."""
        rows = {name: part._replace(gradients=part.gradients.copy()) for name, part in self.rows.items()}
        return self._replace(dense=self.dense.copy(), rows=rows)
