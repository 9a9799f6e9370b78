"""Models of which each rank holds slices: their initial numbers, and the slices as updates and checkpoints use them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from dtf.api.precision import Precision
from dtf.api.task import Task
from dtf.distributed.sharding import is_dtensor, local, offset
from dtf.model.draw_by_name import init_modules
from dtf.model.init import build_on_meta, formats
from dtf.optim.sharding import ParamShard


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
    place. Parameters may be DTensors; these are made anew.

    Returns master copies by name, of the parameters that compute in another format than they are kept in.
    """
    dtypes, masters = formats(model, precision), {}
    for name, parameter in model.named_parameters():
        part = local(parameter.detach())
        kept, computing = dtypes[name]
        if computing is not kept:
            masters[name] = part.to(device, kept)
        part = part.to(device, computing)
        if not is_dtensor(parameter):
            parameter.data = part
        elif part.device != parameter.device or part.dtype is not parameter.dtype:
            _replace(model, name, parameter, part)
    for name, buffer in model.named_buffers():
        part = local(buffer).to(device, dtypes.get(name, (buffer.dtype, buffer.dtype))[1])
        if not is_dtensor(buffer):
            buffer.data = part
        elif part.device != buffer.device or part.dtype is not buffer.dtype:
            _replace(model, name, buffer, part)
    return masters


def _replace(model: nn.Module, name: str, old: Tensor, part: Tensor) -> None:
    """Put a DTensor with another local part into the place of one."""
    from torch.distributed.tensor import DTensor

    prefix, _, key = name.rpartition(".")
    module = model.get_submodule(prefix)
    new = DTensor.from_local(
        part,
        old.device_mesh,  # type: ignore[attr-defined]
        old.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
    if isinstance(old, nn.Parameter):
        module._parameters[key] = nn.Parameter(new, old.requires_grad)
    else:
        module._buffers[key] = new


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


def param_shards(
    model: nn.Module, masters: Mapping[str, Tensor] | None = None, first: bool = True
) -> dict[str, ParamShard]:
    """This rank's slices of a model, by name. Parameters are DTensors or plain tensors.

    The optimizer steps the slices, or their `masters` where there are some. `first`: whether this rank writes the
    tensors that all ranks of its group hold in whole.
    """
    shards = {}
    for name, parameter in model.named_parameters():
        data = local(parameter.detach())
        shards[name] = ParamShard(
            parameter,
            data,
            (masters or {}).get(name, data),
            tuple(parameter.shape),
            offset(parameter),
            first or is_dtensor(parameter),
        )
    return shards


@torch.no_grad()
def draw(model: nn.Module, task: Task, masters: Mapping[str, Tensor] | None = None) -> None:
    """Fill a model and its master copies with the numbers that `init.init_model` would give it, in place.

    Never holds more than one module in whole. Of weights to start from, this rank reads its own slices.
    """
    weights = task.weights
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for module, initial in init_modules(task.recipe, task.seed, build_on_meta(task.recipe)):
        for name, whole in initial.items():
            if name not in tensors:  # another rank has it
                continue
            data = local(tensors[name].detach())
            begin = offset(tensors[name])
            if weights is not None and name in weights:
                part = weights.read(name, begin, tuple(data.shape))
            else:
                part = whole[tuple(slice(at, at + size) for at, size in zip(begin, data.shape, strict=True))]
            data.copy_(part)
            if masters and name in masters:
                masters[name].copy_(part)
        module._parameters.clear()
        module._buffers.clear()
