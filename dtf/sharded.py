"""Models of which each rank holds slices: drawing them, and the slices as an update takes them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dtf.build import drawn, sketch
from dtf.recipe import Recipe
from dtf.update import Piece


def pieces(model: nn.Module) -> dict[str, Piece]:
    """This rank's slices of a model whose parameters are DTensors or plain tensors; the optimizer steps the slices themselves."""
    found = {}
    for name, parameter in model.named_parameters():
        local = _local(parameter)
        found[name] = Piece(parameter, local, local, tuple(parameter.shape), _offset(parameter))
    return found


@torch.no_grad()
def draw(model: nn.Module, recipe: Recipe, seed: int) -> None:
    """Fill a model with the numbers that `build.draw_model` would give it. Never holds more than a module in whole."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for module, found in drawn(recipe, seed, sketch(recipe)):
        for name, whole in found.items():
            local = _local(tensors[name])
            part = tuple(slice(at, at + size) for at, size in zip(_offset(tensors[name]), local.shape, strict=True))
            local.copy_(whole[part])
        module._parameters.clear()
        module._buffers.clear()


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _offset(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])
