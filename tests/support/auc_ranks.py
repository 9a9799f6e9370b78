"""What ranks do for `tests/unit/test_auc.py`. They import this file, and so neither scikit-learn nor hypothesis."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dtf.core.types import Place
from dtf.distributed.world import World
from dtf.model import auc
from dtf.model.auc import AucEvaluator


def told(rank: int, size: int) -> list[dict[str, float]]:
    """What a rank is told: exactly and grouped, then of a histogram. The last has no rows, others uneven shares and
    padding.
    """
    world, values = World(Place(rank=rank, size=size, slots=size)), []
    for exact in (True, False):
        evaluator = AucEvaluator(0 if exact else auc.EXACT_ROWS + 1, exact)
        if rank < max(1, size - 1):
            part = rows_of(exact)[rank :: max(1, size - 1)]
            evaluator.add(torch.cat([part, part[:1] * torch.tensor([1.0, 1.0, 0.0, 1.0])[: part.shape[1]]]))
        values.append(evaluator.values(world))
    return values


def rows_of(grouped: bool) -> Tensor:
    random = np.random.default_rng(1)
    columns = [random.standard_normal(101).round(1), random.random(101) < 0.3, np.ones(101), random.integers(0, 5, 101)]
    return torch.from_numpy(np.stack(columns[: 3 + grouped], 1))
