"""Where the channels of images lie in memory: last, convolutions are faster, on models that bear it. Shapes, names,
checkpoints and results stay as they are; only strides change.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dtf.api.precision import Format, Precision
from dtf.api.task import Task
from dtf.model.attributes import without_trace
from dtf.model.changing_buffers import buffers_restored
from dtf.model.norm_calls import is_torchs_own
from dtf.model.seeded_dropout import seeded_dropouts
from dtf.model.shared_state import SharedState

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_ROUNDING, _KINKS = 1e-3, 0.05
"""How far outputs and gradients of both formats may lie apart, as a part of their norm: another meaning is farther off.
Gradients jump where a number is rounded over the kink of a ReLU.
"""
_AT_ONCE = 1 << 20
"""Numbers compared at once: double precision is for them alone."""
_MOST = 1 << 28
"""Parameters of a model that is tried. That takes the memory of four more models for a while."""


def convolves(model: nn.Module) -> bool:
    """Whether a model has two-dimensional convolutions, as modules."""
    return any(isinstance(module, _CONVOLUTIONS) for module in model.modules())


def channels_last(value: Any) -> Any:
    """Floating tensors (B, C, H, W) in `value`, a tensor or a structure of tensors, with their channels last."""
    return _last(value) if isinstance(value, Tensor) else tree_map(_last, value)


def channels_first(value: Any) -> Any:
    """The same with their channels first, however the recipe's data have them."""
    return _first(value) if isinstance(value, Tensor) else tree_map(_first, value)


def weights_channels_last(model: nn.Module) -> None:
    """Put the channels of convolutions' weights last, in place. For models that no other rank has slices of. Weights
    that lie in the memory of another tensor stay as they are.
    """
    for weight in _weights(model):
        weight.data = _last(weight.data)


def objection_of_format(precision: Precision, device: str) -> str:
    """Why channels last are not for this precision on this device; empty: they are."""
    if precision.compute is Format.fp64:
        return "they are for fp32 and half precision"
    if device.startswith("cuda") and precision.compute is Format.fp32 and not precision.tf32:
        return "a GPU gains from them in half precision and tf32"
    return ""


def objection(task: Task, model: nn.Module, rows: int) -> str:
    """Why channels last are not for a model, on CPU with its values, as two rows show in training, forward and
    backward, and in evaluation; empty: they are. `rows`: of a micro-batch, at most. Without a trace.

    They cost more than they give where convolutions have more weights than outputs: `python -m bench.memory_format`.
    """
    try:
        return _objection(task, model, rows)
    except Exception as error:  # noqa: BLE001 - what is wrong is told where the model is used
        return f"two rows cannot be computed here ({type(error).__name__})"


def _objection(task: Task, model: nn.Module, rows: int) -> str:
    if sum(parameter.numel() for parameter in model.parameters()) > _MOST:
        return f"models of more than {_MOST:,} parameters are not tried"
    with _unchanged(model, task.recipe) as compute:
        assert task.sample is not None
        inputs = tree_map(lambda leaf: leaf.float() if _is_floating(leaf) else leaf, task.sample(2))
        inputs = channels_first(inputs)
        with _counted(model) as made:
            plain = compute(inputs, training=False)
        if not any(_is_image(leaf) for leaf in tree_leaves(inputs)):
            return "no input has the shape (B, C, H, W)"
        weights, put_out = sum(weight.numel() for weight in _weights(model)), sum(made) // 2 * rows
        if put_out < weights:
            return f"convolutions have more weights ({weights:,}) than outputs ({put_out:,} of {rows} rows)"
        trained = compute(inputs, training=True)
        weights_channels_last(model)
        try:
            with _watched(model) as misplaced:
                last = compute(channels_last(inputs), training=False)
                last_trained = compute(channels_last(inputs), training=True)
        except Exception as error:  # noqa: BLE001 - it did compute them with channels first
            why = (str(error).splitlines() or [type(error).__name__])[0].partition(" (")[0]
            return f"the model does not compute images whose channels are last: {why}"
    if misplaced:
        return f"{misplaced[0]} gets its input with channels first"
    if not _same(plain.outputs, last.outputs):
        return "the model's outputs are others with channels last: it reads memory by its place"
    if not _same(trained.outputs, last_trained.outputs):
        return "the model's outputs in training are others with channels last: it draws or reads by places in memory"
    module = _differing_module(trained.gradients, last_trained.gradients)
    if module is not None:
        return f"gradients of {module or 'the model'} are others with channels last: backward reads memory by its place"
    return ""


class _Computed(NamedTuple):
    outputs: list[Tensor]
    """The floating ones."""

    gradients: dict[str, Tensor]
    """By name of the parameter; empty in evaluation."""


@contextmanager
def _unchanged(model: nn.Module, recipe: object) -> Iterator[Callable[..., _Computed]]:
    """A context whose function makes passes over rows on CPU: forward, and backward too in training. All of them start
    from the same buffers and draw the same random numbers. Their effects are undone, those on parameters too, which a
    pass may write to.

    The values of parameters are those of the model but for zeros, see `_fill_zeros`. Batch normalisations use their
    averages: the statistics of two rows may be so small that gradients are rounding alone.
    """
    training, shared = {name: module.training for name, module in model.named_modules()}, SharedState(model, recipe)
    held = [(parameter, parameter.data, parameter.data.clone()) for parameter in model.parameters()]
    drawn = random.getstate(), np.random.get_state()

    def compute(inputs: Any, training: bool) -> _Computed:
        model.train(training)
        for module in filter(is_torchs_own, model.modules()):
            module.training = False
        masks.begin_micro_batch(0, 0)
        random.seed(0)
        np.random.seed(0)
        with buffers_restored(model), torch.set_grad_enabled(training):
            outputs = [leaf for leaf in tree_leaves(model(inputs)) if _is_floating(leaf)]
            return _Computed([leaf.detach() for leaf in outputs], _gradients(model, outputs) if training else {})

    try:
        with without_trace([model], recipe), torch.random.fork_rng(devices=[]), seeded_dropouts(model) as masks:
            _fill_zeros(model)
            yield compute
    finally:
        model.train(training[""])
        for name, module in model.named_modules():
            module.training = training[name]
        for parameter, data, before in held:
            parameter.grad = None  # a backward pass may have ended half-way
            parameter.data = data
            if not torch.equal(data, before):
                data.copy_(before)
        shared.restore()
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])


@torch.no_grad()
def _fill_zeros(model: nn.Module) -> None:
    """Put small numbers into parameters that are all zeros: what is multiplied by them would show nowhere."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.data.normal_(0, 0.02, generator=generator)


def _gradients(model: nn.Module, outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """Those of parameters, of a sum of outputs with drawn weights, by name. They are taken from the parameters."""
    generator = torch.Generator().manual_seed(0)
    ends = [leaf.contiguous() for leaf in outputs if leaf.requires_grad]  # as a loss gets them
    if ends:
        torch.autograd.backward(ends, [torch.randn(end.shape, generator=generator).to(end.dtype) for end in ends])
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for parameter in model.parameters():
        parameter.grad = None
    return found


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


def _last(leaf: Any) -> Any:
    return leaf.contiguous(memory_format=torch.channels_last) if _is_image(leaf) else leaf


def _first(leaf: Any) -> Any:
    return leaf.contiguous() if _is_image(leaf) else leaf


def _is_image(leaf: Any) -> bool:
    return _is_floating(leaf) and leaf.dim() == 4


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype.is_floating_point


def _same(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether outputs lie apart by rounding at most."""
    return len(ones) == len(others) and all(_apart([pair]) <= _ROUNDING for pair in zip(ones, others, strict=True))


def _differing_module(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> str | None:
    """The first module of whose parameters the gradients lie apart by more than kinks and rounding; None: none.

    The parameters of a module are taken together: that of a bias before a normalisation is rounding alone.
    """
    modules = dict.fromkeys(name.rpartition(".")[0] for name in (*ones, *others))
    for module in modules:
        names = [name for name in (*ones, *(others.keys() - ones.keys())) if name.rpartition(".")[0] == module]
        if any(name not in ones or name not in others for name in names):
            return module
        if not _apart([(ones[name], others[name]) for name in names]) <= _KINKS:
            return module
    return None


def _apart(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """How far the second of each pair lies from the first: the norm of all differences as a part of the norm of all
    first ones. Infinite where shapes differ, or which numbers are finite.
    """
    apart, size = [0.0], [0.0]
    for one, other in pairs:
        if one.shape != other.shape:
            return math.inf
        for some, others in zip(one.reshape(-1).split(_AT_ONCE), other.reshape(-1).split(_AT_ONCE), strict=True):
            if not torch.equal(some.isfinite(), others.isfinite()):
                return math.inf
            apart.append(_norm(some - others))
            size.append(_norm(some))
    return math.hypot(*apart) / max(math.hypot(*size), 1e-300)


def _norm(tensor: Tensor) -> float:
    """Of the finite numbers."""
    return float(tensor.double().nan_to_num(0.0, 0.0, 0.0).norm())
