"""Models of which each rank holds slices: their initial numbers, and the slices as updates and checkpoints use them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import is_dtensor, local, slice_of
from dtf.model.draw_by_name import init_modules
from dtf.model.init import build_on_meta, formats
from dtf.optim.sharding import ParamShard
from dtf.strategies.tensor_parallel.slices import slices_of


def cast_parts(model: nn.Module, precision: Precision, computing: bool) -> dict[str, Tensor]:
    """Cast a model, in place; it may be on meta, or have values.

    `computing`: to the formats in which its tensors compute, else to those in which its parameters are kept. Scalars
    always get the format in which they compute: they have no slices, which would be cast when gathered.

    Returns master copies by name, of the parameters that compute in another format than they are kept in.
    """
    dtypes, masters = formats(model, precision), {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in dtypes:
            kept, to = dtypes[name][0], dtypes[name][computing or not tensor.dim()]
            if to is not kept:
                masters[name] = tensor.detach().to(kept)
            tensor.data = tensor.data.to(to)
    return masters


def settle(model: nn.Module, precision: Precision, device: torch.device) -> dict[str, Tensor]:
    """Move a model that is cut already, with its values, to its device and to the formats in which it computes, in
    place.

    Returns master copies by name, of the parameters that compute in another format than they are kept in.
    """
    dtypes, masters = formats(model, precision), {}
    for name, parameter in model.named_parameters():
        kept, computing = dtypes[name]
        if computing is not kept:
            masters[name] = parameter.detach().to(device, kept)
        parameter.data = parameter.data.to(device, computing)
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(device, dtypes.get(name, (buffer.dtype, buffer.dtype))[1])
    return masters


def lay_out(model: nn.Module, precision: Precision, device: torch.device) -> dict[str, Tensor]:
    """Allocate a model on meta on a device, in place, without initial numbers.

    Returns memory for master copies by name, of the parameters that compute in another format than they are kept in.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, key))
    model.to_empty(device=device)
    for (first, name), *others in owners.values():  # `to_empty` unties shared parameters
        for module, key in others:
            module._parameters[key] = first._parameters[name]
    dtypes, parameters = formats(model, precision), dict(model.named_parameters())
    return {
        name: torch.empty_like(local(p.detach()), dtype=dtypes[name][0])
        for name, p in parameters.items()
        if p.dtype is not dtypes[name][0]
    }


def param_shards(model: nn.Module, masters: Mapping[str, Tensor] | None, dims: ParallelDims) -> dict[str, ParamShard]:
    """This rank's slices of a model, by name. Parameters are DTensors or plain tensors, perhaps of divided modules.

    The optimizer steps the slices, or their `masters` where there are some. What several ranks hold, the first of them
    counts and writes.
    """
    shards, divided, place = {}, slices_of(model), dims.place
    for name, parameter in model.named_parameters():
        data = local(parameter.detach())
        part = slice_of(parameter, divided.get(name))
        shards[name] = ParamShard(
            parameter,
            data,
            (masters or {}).get(name, data),
            part.shape,
            part.pieces[0].offset,
            (is_dtensor(parameter) or not place["shard"])
            and (name in divided or not place["tensor"])
            and not place["context"],
            part.pieces if len(part.pieces) > 1 else (),
        )
    return shards


@torch.no_grad()
def draw(model: nn.Module, task: Task, masters: Mapping[str, Tensor] | None = None) -> None:
    """Fill a model and its master copies with the numbers that `init.init_model` would give it, in place.

    Never holds more than one module in whole. Of weights to start from, this rank reads its own slices.
    """
    weights = task.weights
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    divided = slices_of(model)
    for module, initial in init_modules(task.recipe, task.seed, build_on_meta(task.recipe)):
        for name, whole in initial.items():
            if name not in tensors:  # another rank has it
                continue
            data = local(tensors[name].detach())
            for piece in slice_of(tensors[name], divided.get(name)).pieces:
                if weights is not None and name in weights:
                    part = weights.read(name, piece.offset, piece.shape)
                else:
                    part = piece.of(whole)
                piece.here(data).copy_(part)
                if masters and name in masters:
                    piece.here(masters[name]).copy_(part)
        module._parameters.clear()
        module._buffers.clear()
