"""How many bytes of a model last between steps, computed from shapes."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn

from dtf.api.optimizer import Optimizer
from dtf.api.precision import Precision
from dtf.distributed.sharding import byte_count
from dtf.model.init import formats


class StateSlices(NamedTuple):
    """How the state of a model is divided among ranks."""

    shard: int = 1  # ranks
    zero: int = 3  # see ShardOptions
    layers: tuple[tuple[str, float], ...] = ()  # modules that ranks divide, and the share of the rank that has most

    def here(self, name: str, numbers: int) -> tuple[int, int, int]:
        """How many numbers of a parameter, its gradient and each of its optimizer's tensors a rank has at most. What is
        gathered is there beside the slices.
        """
        share = next((share for module, share in self.layers if name.startswith(f"{module}.")), 1.0)
        here = math.ceil(share * numbers)
        if self.shard == 1:
            return here, here, here
        sliced = -(-here // self.shard)
        return sliced + here * (self.zero < 3), sliced + here * (self.zero < 2), sliced


WHOLE = StateSlices()


def state_bytes(
    model: nn.Module, optimizer: Optimizer, precision: Precision, slices: StateSlices = WHOLE, name: str = ""
) -> int:
    """Bytes of a model's parameters, gradients and optimizer state on a rank. The model may be on meta. `name`: of its
    only parameter, where `slices` know it by another one.
    """
    total, pairs = 0, formats(model, precision)
    for key, parameter in model.named_parameters():
        kept, computing = pairs.get(key, (parameter.dtype, parameter.dtype))
        values, gradient, state = slices.here(name or key, parameter.numel())
        total += values * computing.itemsize
        if parameter.requires_grad:
            master = torch.empty(parameter.shape, dtype=kept, device="meta")
            total += gradient * computing.itemsize + (0 if kept is computing else state * kept.itemsize)
            total += -(-byte_count(optimizer.init(master).values()) * state // max(1, parameter.numel()))
    return total
