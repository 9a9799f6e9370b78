"""Where the channels of images lie in memory: last, convolutions are faster, on models that bear it. Shapes, names,
checkpoints and results stay as they are; only strides change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dtf.api.task import Task
from dtf.model.attributes import without_trace
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
    """Put the channels of convolutions' weights last, in place. For models that no other rank has slices of."""
    for module in model.modules():
        if isinstance(module, _CONVOLUTIONS) and isinstance(module._parameters.get("weight"), Tensor):
            module.weight.data = _put(module.weight.data)


def objection(task: Task, model: nn.Module, rows: int) -> str:
    """Why channels last are not for a model, on CPU with its values, as two rows show; empty: they are. `rows`: of a
    micro-batch. Without a trace.

    They cost more than they give where convolutions have more weights than outputs: `python -m bench.memory_format`.
    """
    with _unchanged(model, task.recipe) as outputs:
        try:
            assert task.sample is not None
            inputs = tree_map(lambda leaf: leaf.float() if _is_floating(leaf) else leaf, task.sample(2))
            with _counted(model) as made:
                plain = outputs(inputs, training=False)
        except Exception as error:  # noqa: BLE001 - what is wrong is told where the model is used
            return f"two rows cannot be computed here ({type(error).__name__})"
        if not any(_is_image(leaf) for leaf in tree_leaves(inputs)):
            return "no input has the shape (B, C, H, W)"
        weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, _CONVOLUTIONS))
        if sum(made) // 2 * rows < weights:
            return (
                f"convolutions have more weights ({weights:,}) than outputs ({sum(made) // 2 * rows:,} of {rows} rows)"
            )
        try:
            with _watched(model) as misplaced:
                last = outputs(channels_last(inputs), training=False)
                outputs(channels_last(inputs), training=True)
        except RuntimeError as error:
            return f"the model does not compute images whose channels are last: {str(error).splitlines()[0]}"
    if misplaced:
        return f"{misplaced[0]} gets its input with channels first"
    if len(plain) != len(last) or any(not _close(*pair) for pair in zip(plain, last, strict=True)):
        return "the model's outputs are others with channels last: it reads memory by its place"
    return ""


@contextmanager
def _unchanged(model: nn.Module, recipe: object) -> Iterator[Callable[..., list[Tensor]]]:
    """A context whose function gives the floating outputs of passes over rows, on CPU. Their effects are undone."""
    training, shared = {name: module.training for name, module in model.named_modules()}, SharedState(model, recipe)

    def outputs(inputs: Any, training: bool) -> list[Tensor]:
        model.train(training)
        torch.manual_seed(0)
        return [leaf for leaf in tree_leaves(model(inputs)) if _is_floating(leaf)]

    try:
        with without_trace([model], recipe), torch.random.fork_rng(devices=[]), torch.no_grad():
            yield outputs
    finally:
        shared.restore()
        for name, module in model.named_modules():
            module.training = training[name]


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


def _put(leaf: Any) -> Any:
    return leaf.contiguous(memory_format=torch.channels_last) if _is_image(leaf) else leaf


def _is_image(leaf: Any) -> bool:
    return _is_floating(leaf) and leaf.dim() == 4


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).norm() <= _ROUNDING * one.norm())
