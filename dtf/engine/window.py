"""Sums of metrics between two reports."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtf.api.evaluator import Peers
from dtf.core.errors import ConfigError
from dtf.core.types import StepOutput


class Window:
    """Sums since the last report, on the device; one small reduction closes it."""

    def __init__(self, carried: list[float] | None = None) -> None:
        self._sums: Tensor | None = None
        self._norms: Tensor | None = None  # where the device has them
        self._norm, self._known = 0.0, 0.0  # where the host has them
        self._skipped = 0  # rows that could not be read
        self._counts: dict[str, int] = {}
        self._carried = carried  # totals from before a checkpoint, the same on every rank

    def add(self, output: StepOutput) -> None:
        """No synchronisation, and no operation on tensors for what the host knows."""
        sums, norms = output
        self._sums = sums.clone() if self._sums is None else self._sums.add_(sums)
        if isinstance(norms, tuple):
            self._norm, self._known = self._norm + norms[0], self._known + norms[1]
        else:
            self._norms = norms.double() if self._norms is None else self._norms + norms

    def skip(self, rows: int) -> None:
        """Count rows that could not be read."""
        self._skipped += rows

    def count(self, counts: Mapping[str, int]) -> None:
        """Add what the program has counted."""
        self._counts = {name: self._counts.get(name, 0) + number for name, number in counts.items()}

    def total(self, world: Peers, width: int) -> list[float]:
        """Sums over ranks, [metric sums (M), sum of norms, their number, rows that could not be read, counts of the
        program]; waits for the device. Collective.
        """
        local = torch.zeros(width + 3 + len(self._counts), dtype=torch.float64)
        if self._sums is not None:
            if self._sums.shape != (width,):
                raise ConfigError(
                    f"the program's steps return sums of shape {tuple(self._sums.shape)}, and the recipe's metric "
                    f"state has {width} numbers; StepOutput.sums is what Recipe.measure returns"
                )
            local[:width] += self._sums.cpu()
        counted = [self._norm, self._known, self._skipped, *self._counts.values()]
        local[width:] += torch.tensor(counted, dtype=torch.float64)
        if self._norms is not None:
            local[width : width + 2] += self._norms.cpu()
        total = world.reduce(local)
        if self._carried is not None:  # earlier versions, and programs of other options, have counted less or more
            carried = self._carried[: len(total)]
            total[: len(carried)] += torch.tensor(carried, dtype=torch.float64)
        return total.tolist()
