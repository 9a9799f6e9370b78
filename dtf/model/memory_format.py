"""Where the channels of images lie in memory: last, convolutions are faster, on models that bear it. Shapes, names,
checkpoints and results stay as they are; only strides change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dtf.api.precision import Format, Precision
from dtf.api.task import Task
from dtf.model.attributes import without_trace
from dtf.model.changing_buffers import buffers_restored
from dtf.model.shared_state import SharedState

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_ROUNDING = 0.01
"""How far outputs of both formats may lie apart, as a part of their norm: another meaning is farther off."""


def convolves(model: nn.Module) -> bool:
    """Whether a model has two-dimensional convolutions, as modules."""
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def channels_last(value: Any) -> Any:
    """Floating tensors (B, C, H, W) in `value`, a tensor or a structure of tensors, with their channels last."""
    return _put(value) if isinstance(value, Tensor) else tree_map(_put, value)


def weights_channels_last(model: nn.Module) -> None:
    """Put the channels of convolutions' weights last, in place. For models that no other rank has slices of. Weights
    that lie in the memory of another tensor stay as they are.
    """
    for weight in _weights(model):
        weight.data = _put(weight.data)


def objection_of_format(precision: Precision, device: str) -> str:
    """Why channels last are not for this precision on this device; empty: they are."""
    if precision.compute is Format.fp64:
        return "they are for fp32 and half precision"
    if device.startswith("cuda") and precision.compute is Format.fp32 and not precision.tf32:
        return "a GPU gains from them in half precision and tf32"
    return ""


def objection(task: Task, model: nn.Module, rows: int) -> str:
    """Why channels last are not for a model, on CPU with its values, as two rows show; empty: they are. `rows`: of a
    micro-batch. Without a trace.

    They cost more than they give where convolutions have more weights than outputs: `python -m bench.memory_format`.
    """
    try:
        return _objection(task, model, rows)
    except Exception as error:  # noqa: BLE001 - what is wrong is told where the model is used
        return f"two rows cannot be computed here ({type(error).__name__})"


def _objection(task: Task, model: nn.Module, rows: int) -> str:
    with _unchanged(model, task.recipe) as outputs:
        assert task.sample is not None
        inputs = tree_map(lambda leaf: leaf.float() if _is_floating(leaf) else leaf, task.sample(2))
        with _counted(model) as made:
            plain = outputs(inputs, training=False)
        with buffers_restored(model):  # running averages: the outputs below are compared with those above
            outputs(inputs, training=True)
        if not any(_is_image(leaf) for leaf in tree_leaves(inputs)):
            return "no input has the shape (B, C, H, W)"
        weights, put_out = sum(weight.numel() for weight in _weights(model)), sum(made) // 2 * rows
        if put_out < weights:
            return f"convolutions have more weights ({weights:,}) than outputs ({put_out:,} of {rows} rows)"
        weights_channels_last(model)
        try:
            with _watched(model) as misplaced:
                last = outputs(channels_last(inputs), training=False)
                outputs(channels_last(inputs), training=True)
        except Exception as error:  # noqa: BLE001 - it did compute them with channels first
            why = (str(error).splitlines() or [type(error).__name__])[0]
            return f"the model does not compute images whose channels are last: {why}"
    if misplaced:
        return f"{misplaced[0]} gets its input with channels first"
    if len(plain) != len(last) or any(not _close(*pair) for pair in zip(plain, last, strict=True)):
        return "the model's outputs are others with channels last: it reads memory by its place"
    return ""


@contextmanager
def _unchanged(model: nn.Module, recipe: object) -> Iterator[Callable[..., list[Tensor]]]:
    """A context whose function gives the floating outputs of passes over rows, on CPU, all of which draw the same
    random numbers. Their effects are undone, those on parameters too, which a pass may write to.
    """
    training, shared = {name: module.training for name, module in model.named_modules()}, SharedState(model, recipe)
    held = [(parameter, parameter.data, parameter.data.clone()) for parameter in model.parameters()]
    drawn = random.getstate(), np.random.get_state()

    def outputs(inputs: Any, training: bool) -> list[Tensor]:
        model.train(training)
        torch.default_generator.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        return [leaf for leaf in tree_leaves(model(inputs)) if _is_floating(leaf)]

    try:
        with without_trace([model], recipe), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield outputs
    finally:
        model.train(training[""])
        for name, module in model.named_modules():
            module.training = training[name]
        for parameter, data, before in held:
            parameter.data = data
            if not torch.equal(data, before):
                data.copy_(before)
        shared.restore()
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """A context for a pass. Its list gets how many numbers each convolution puts out."""
    counts: list[int] = []

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counts.append(output.numel())

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """A context for passes. Its list gets the names of convolutions whose input has its channels elsewhere."""
    found: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, inputs: Any) -> None:
            if inputs and _is_image(inputs[0]) and not inputs[0].is_contiguous(memory_format=torch.channels_last):
                found.append(name)

        return before

    hooks = [
        module.register_forward_pre_hook(look(name))
        for name, module in model.named_modules()
        if isinstance(module, _CONVOLUTIONS)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _weights(model: nn.Module) -> list[nn.Parameter]:
    """Those of convolutions that have memory of their own, each once."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}.values()
    places = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors)
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weight = module._parameters.get("weight") if isinstance(module, _CONVOLUTIONS) else None
        if weight is not None:
            storage = weight.untyped_storage()
            if places[storage.data_ptr()] == 1 and storage.nbytes() == weight.nbytes:
                found[id(weight)] = weight
    return list(found.values())


def _put(leaf: Any) -> Any:
    return leaf.contiguous(memory_format=torch.channels_last) if _is_image(leaf) else leaf


def _is_image(leaf: Any) -> bool:
    return _is_floating(leaf) and leaf.dim() == 4


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return False
    one, other = (tensor.nan_to_num(0.0, 0.0, 0.0).double() for tensor in (one, other))
    return bool((one - other).norm() <= _ROUNDING * one.norm())
