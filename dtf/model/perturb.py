"""Parameters that start one rounding away: what rounding alone does to a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dtf.core.seeding import seed_of
from dtf.distributed.sharding import local


@torch.no_grad()
def perturb(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Replace every number of each parameter by a neighbour of its format, up or down as hash(seed, name) says. Zeros
    stay.
    """
    for name, parameter in parameters.items():
        values = local(parameter)
        generator = torch.Generator().manual_seed(seed_of(seed, "perturb", name))
        up = torch.rand(values.shape, generator=generator).to(values.device) < 0.5
        towards = torch.where(up, torch.inf, -torch.inf).to(values.dtype)
        values.copy_(torch.where(values == 0, values, torch.nextafter(values, towards)))
