"""Models of which each rank holds slices: drawing them, and the slices as an update and a checkpoint take them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.distributed.sharding import is_dtensor, local, offset
from dtf.model.init import build_on_meta, formats, init_modules
from dtf.optim.update import ParamShard


def cast_on_meta(model: nn.Module, precision: Precision, computing: bool) -> None:
    """Give a model without numbers the formats in which its tensors compute; or those in which its parameters are kept,
    but for scalars.

    Who gathers slices casts them; scalars have no slices.
    """
    found = formats(model, precision)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in found:
            tensor.data = tensor.data.to(found[name][computing or not tensor.dim()])


def lay_out(model: nn.Module, precision: Precision, device: torch.device) -> dict[str, Tensor]:
    """Memory for a model on meta; returns that of the master copies, by name, where parameters have another format than
    the one they are kept in.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, key))
    model.to_empty(device=device)
    for (first, name), *others in owners.values():  # it breaks ties
        for module, key in others:
            module._parameters[key] = first._parameters[name]
    found, parameters = formats(model, precision), dict(model.named_parameters())
    return {
        name: torch.empty_like(local(p.detach()), dtype=found[name][0])
        for name, p in parameters.items()
        if p.dtype is not found[name][0]
    }


def pieces(model: nn.Module, masters: Mapping[str, Tensor] | None = None, first: bool = True) -> dict[str, ParamShard]:
    """This rank's slices of a model whose parameters are DTensors or plain tensors; the optimizer steps the slices, or
    their `masters`.

    `first`: whether this rank counts for the tensors that all ranks of its group hold in whole.
    """
    found = {}
    for name, parameter in model.named_parameters():
        here = local(parameter.detach())
        found[name] = ParamShard(
            parameter,
            here,
            (masters or {}).get(name, here),
            tuple(parameter.shape),
            offset(parameter),
            first or is_dtensor(parameter),
        )
    return found


@torch.no_grad()
def draw(model: nn.Module, task: Task, masters: Mapping[str, Tensor] | None = None) -> None:
    """Fill a model and its master copies with the numbers that `init.draw_model` would give it. Never holds more than a
    module in whole.

    Of numbers to start from, this rank reads its own parts.
    """
    weights = task.weights
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for module, found in init_modules(task.recipe, task.seed, build_on_meta(task.recipe)):
        for name, whole in found.items():
            if name not in tensors:  # another rank has it
                continue
            here = local(tensors[name].detach())
            begin = offset(tensors[name])
            if weights is not None and name in weights:
                part = weights.read(name, begin, tuple(here.shape))
            else:
                part = whole[tuple(slice(at, at + size) for at, size in zip(begin, here.shape, strict=True))]
            here.copy_(part)
            if masters and name in masters:
                masters[name].copy_(part)
        module._parameters.clear()
        module._buffers.clear()
