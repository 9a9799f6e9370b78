"""The memory that a copy of a model needs in a step."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import nn

from dtf.core.types import Memory
from dtf.distributed.sharding import byte_count, local
from dtf.model.memory import Footprint, activations, pending_grad_bytes, unsummed_grad_bytes
from dtf.optim.update import LocalUpdate


class Wrapper(Enum):
    """What is around a model."""

    none = "none"
    sums = "sums"  # sums gradients over ranks in the backward pass
    gathers = "gathers"  # and knows where they wait


def replica_memory(
    model: nn.Module,
    wrapper: Wrapper,
    trials: Sequence[tuple[int, Footprint]],
    update: LocalUpdate,
    micro_batches: int,
    rows: int,
    exchange: int = 0,
) -> Memory:
    """Bytes of a step with this number of micro-batches, of this number of rows each, or of a trial pass where that
    needs more. `trials`: passes, with their rows. `exchange`: what a step has in flight between ranks.
    """
    parameters, gradients, optimizer, tables = update.bytes()
    sizes = [byte_count([local(parameter)]) for parameter in model.parameters() if parameter.requires_grad]
    if wrapper is Wrapper.none:
        gradients += pending_grad_bytes(sizes, micro_batches)
    elif wrapper is Wrapper.sums:
        exchange = max(exchange, unsummed_grad_bytes(sizes, trials, rows))
    buffers = byte_count(local(buffer) for buffer in model.buffers())
    return Memory(parameters + buffers, gradients, optimizer, activations(trials, rows), exchange, tables=tables)
