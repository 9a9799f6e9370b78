"""What divided modules say of their tensors: each is a plain tensor, and a table in its module has its place in the
global one.
"""

from __future__ import annotations

from torch import nn

from dtf.distributed.sharding import Slice
from dtf.model.batch_statistics import EMA_SUFFIX

TABLE = "_slices"
"""The attribute of a divided module: key of a parameter or buffer -> Slice."""


def slices_of(model: nn.Module) -> dict[str, Slice]:
    """Name of each divided parameter and buffer of a model, shared ones under each of their names -> what the tensor is
    of the global one. Empty: nothing is divided.
    """
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        table = module.__dict__.get(TABLE, {})
        # a running average's own average is divided as it is
        averages = {
            f"{key}{EMA_SUFFIX}": part for key, part in table.items() if f"{key}{EMA_SUFFIX}" in module._buffers
        }
        found |= {f"{prefix}.{key}" if prefix else key: part for key, part in {**table, **averages}.items()}
    return found
