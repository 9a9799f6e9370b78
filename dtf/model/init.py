"""From a recipe to an initialised model, which every strategy starts from: what its author's constructor made."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dtf.api.layout import BufferUpdate, Layout, Split, SplitBy
from dtf.api.name_patterns import covers
from dtf.api.precision import Cast, Format, Precision
from dtf.api.recipe import Recipe
from dtf.api.task import Task, Weights
from dtf.core.errors import ConfigError, LayoutError
from dtf.core.text import suggest
from dtf.model.draw_by_name import draws_by_name, init_modules
from dtf.model.found_blocks import found_layout
from dtf.model.freeze import freeze
from dtf.model.memory_format import weights_channels_last

DTYPES = {
    Format.fp64: torch.float64,
    Format.fp32: torch.float32,
    Format.bf16: torch.bfloat16,
    Format.fp16: torch.float16,
}


HOOKS_ON_SUMS = "_dtf_hooks_on_sums"
"""The attribute of a model that names parameters to which its author gave a hook that runs when gradients add up."""


def init_model(recipe: Recipe, seed: int, weights: Weights | None = None) -> nn.Module:
    """The recipe's model on CPU in fp32, with all values, frozen where the recipe says so. Not collective.

    It is what its author's code makes under this seed, bit for bit as after `torch.manual_seed(seed)` in plain PyTorch;
    Python's and numpy's generators are seeded too, and all of them are left as they were. A recipe that overrides
    `initialise` draws it by name instead. Tensors that `weights` has are taken from there, in their format.

    ConfigError for a model that cannot be trained, DataError for weights that cannot be read.
    """
    if draws_by_name(recipe):
        model = build_on_meta(recipe)
        for _ in init_modules(recipe, seed, model):
            pass
    else:
        with seeded(seed):
            model = _built(recipe)
    if weights is not None:
        start_from(model, weights)
    return model


def start_from(model: nn.Module, weights: Weights) -> None:
    """Put the tensors that `weights` has into a model on CPU, in their format. DataError when they cannot be read."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in weights:
            tensor.data = weights.read(name)


def model_of(task: Task) -> nn.Module:
    """The model of a task, as of `init_model`: the one that this process has built already, or one more like it."""
    return task.built.pop() if task.built else init_model(task.recipe, task.seed, task.weights)


def whole_model(task: Task) -> nn.Module:
    """As `model_of`, for ranks that compute with whole parameters: those of convolutions are in the run's memory
    format.
    """
    model = model_of(task)
    if task.channels_last:
        weights_channels_last(model)
    return model


def build_on_meta(recipe: Recipe) -> nn.Module:
    """The model of a recipe that draws by name, without memory, frozen where the recipe says so."""
    with torch.device("meta"):
        return _built(recipe)


def model_to_cut(task: Task) -> nn.Module:
    """The model of a task for a strategy that keeps parts of it: as of `model_of`, or on meta where the recipe draws by
    name.
    """
    return build_on_meta(task.recipe) if draws_by_name(task.recipe) else model_of(task)


def construct(recipe: Recipe, seed: int = 0) -> nn.Module:
    """The recipe's model for its names and shapes: with values, or on meta where the recipe draws by name."""
    return build_on_meta(recipe) if draws_by_name(recipe) else init_model(recipe, seed)


def refuse_untrainable(recipe: Recipe, model: nn.Module, holds: bool) -> None:
    """Raise ConfigError for a model that has nothing to train. `holds`: whether this process has its values."""
    who = f"{type(recipe).__name__}.build_model()"
    parameters = dict(model.named_parameters())
    empty = next((name for name, parameter in parameters.items() if parameter.is_meta), None)
    if empty is not None and holds and not draws_by_name(recipe):
        raise ConfigError(
            f"{who} puts {empty} on meta, without values; leave the device out, or override Recipe.initialise for a "
            "model that is larger than a host"
        )
    if not recipe.tables() and not any(parameter.requires_grad for parameter in parameters.values()):
        frozen = "every parameter of the model is frozen, by requires_grad_(False) or recipe.model.freeze"
        raise ConfigError(f"there is nothing to train: {frozen if parameters else f'{who} has no parameter'}")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context under which torch, Python and numpy draw from this seed on CPU; their generators are restored."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        try:
            torch.set_default_dtype(torch.float32)
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)
            yield
        finally:
            torch.set_default_dtype(dtype)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _built(recipe: Recipe) -> nn.Module:
    """The recipe's model, checked and with frozen parameters. ConfigError for what cannot be kept or trained."""
    who = f"{type(recipe).__name__}.build_model()"
    model = recipe.build_model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{who} returned {type(model).__name__}; it must return a torch.nn.Module")
    if HOOKS_ON_SUMS in vars(model):
        raise ConfigError(f"{who} returned the model that it has returned before; it must make a new one each time")
    _refuse_untold(who, model)
    first: dict[str, str] = {}  # format -> the first parameter that has it
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        if is_lazy(parameter):
            raise ConfigError(
                f"{who} makes the parameter {name} without a shape (a lazy module); name its sizes, or run one batch "
                "through the model inside build_model()"
            )
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"{who} makes the parameter {name} {kind}; parameters are real numbers: make it a buffer, or its real "
                "and imaginary parts two"
            )
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigError(f"{who} puts {name} on {parameter.device}; leave the device out, the strategy chooses it")
        first.setdefault(kind, name)
    if len(first) > 1:
        listed = ", ".join(f"{name} is {kind}" for kind, name in first.items())
        raise ConfigError(
            f"{who} makes parameters of several formats ({listed}), but all become precision.param; leave the format "
            "out, and let the forward pass cast to that of a weight where it must"
        )
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if is_lazy(buffer):
            raise ConfigError(f"{who} makes the buffer {name} without a shape (a lazy module); name its sizes")
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"{who} makes the buffer {name} sparse ({buffer.layout}), which cannot be sent or saved; register its "
                "indices and values as two buffers, and make it of them in forward()"
            )
        if buffer.is_conj() or buffer.is_neg():
            raise ConfigError(
                f"{who} makes the buffer {name} a conjugate or negative view; register "
                "buffer.resolve_conj().resolve_neg()"
            )
        if torch._debug_has_internal_overlap(buffer) == 1:  # such as an expanded one: it could not be written
            buffer.data = buffer.data.clone(memory_format=torch.contiguous_format)
        if buffer.is_complex() and name in persistent:
            raise ConfigError(
                f"{who} makes the buffer {name} complex, which checkpoints cannot hold; register it with "
                "persistent=False if the constructor can make it again, else as real and imaginary parts"
            )
    hooked = [name for name, p in model.named_parameters() if getattr(p, "_post_accumulate_grad_hooks", None)]
    vars(model)[HOOKS_ON_SUMS] = hooked
    freeze(model, recipe.fine_tuning.freeze)
    return model


def _refuse_untold(who: str, model: nn.Module) -> None:
    """Raise ConfigError for a parameter that parameters() does not give."""
    told = {id(parameter) for parameter in model.parameters()}
    for at, part in model.named_modules():
        for name, parameter in nn.Module.named_parameters(part, recurse=False):
            if id(parameter) not in told:
                raise ConfigError(
                    f"{who} returned a model whose named_parameters() leaves out {f'{at}.{name}' if at else name}; "
                    "leave that method as torch has it, and freeze what is not to learn by requires_grad_(False)"
                )


def layout_of(recipe: Recipe, model: nn.Module) -> Layout:
    """The recipe's layout of its model, checked; a `FoundLayout` where it names no blocks.

    LayoutError when it names a module that does not exist, names one twice, or is no Layout.
    """
    who = f"{type(recipe).__name__}.layout()"
    try:
        layout = recipe.layout(model)
    except ConfigError:
        raise
    except Exception as error:
        raise LayoutError(f"{who} raised {type(error).__name__}: {error}") from error
    if not isinstance(layout, Layout):
        raise LayoutError(f"{who} returned {type(layout).__name__}; it must return a dtf.Layout")
    names = [name for name, _ in model.named_modules() if name]
    for block in layout.blocks:
        if isinstance(block, str) or not block:
            raise LayoutError(f"{who} has the block {block!r}; a block is a tuple of names, such as ('fc',)")
    blocks = [name for block in layout.blocks for name in block]
    for name in (*blocks, *layout.splits):
        if name not in names:
            raise LayoutError(f"{who} names {name!r}, which is no module of its model; {suggest(name, names)}")
    for i, name in enumerate(blocks):
        if name in blocks[:i]:
            raise LayoutError(f"{who} names {name} twice; a module lies in one block")
        around = [other for other in blocks if name.startswith(f"{other}.")]
        if around:
            raise LayoutError(f"{who} names {name} and {around[0]}, which contains it; name one of them")
    for name, split in layout.splits.items():
        if not isinstance(split, Split | SplitBy):
            raise LayoutError(
                f"{who} splits {name} as {split!r}; use SplitBy, or one of Split."
                f"{', Split.'.join(kind.name for kind in Split)}"
            )
    _check_buffers(who, layout, [name for name, _ in model.named_buffers()])
    return layout if layout.blocks else found_layout(model, layout)


def _check_buffers(who: str, layout: Layout, names: list[str]) -> None:
    """Raise ConfigError for a rule that is none, or that covers no buffer. Scratch memory may come later."""
    if not isinstance(layout.buffers, Mapping):
        raise LayoutError(
            f"{who} has buffers={layout.buffers!r}; use a dict of names and rules, such as "
            "Layout(buffers={'level': BufferUpdate.mean})"
        )
    for pattern, rule in layout.buffers.items():
        if not isinstance(pattern, str):
            raise LayoutError(
                f"{who} gives the buffers {pattern!r} the rule {rule!r}; name buffers by a text, such as "
                f"{names[0] if names else 'level'!r}"
            )
        if not isinstance(rule, BufferUpdate):
            raise LayoutError(
                f"{who} gives the buffers {pattern!r} the rule {rule!r}; use one of "
                f"BufferUpdate.{', BufferUpdate.'.join(kind.name for kind in BufferUpdate)}"
            )
        if rule is not BufferUpdate.local and not any(covers(pattern, name) for name in names):
            raise LayoutError(
                f"{who} names the buffers {pattern!r}, and its model has none of that name; "
                f"{suggest(pattern, names) if names else 'leave it out'}"
            )


def is_statistics(module: nn.Module) -> bool:
    """Whether a module stays in fp32 (in fp64 where `param` is) in half precision runs: running averages in bf16 lose
    most of their updates.
    """
    return isinstance(module, nn.modules.batchnorm._NormBase)


def formats(model: nn.Module, precision: Precision) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Name of each floating parameter and buffer -> the dtypes in which it is kept and computes.

    They differ only with `cast=module` and another `compute` than `param`. Those of a buffer never differ.
    """
    param = DTYPES[precision.param]
    compute = param if precision.cast is Cast.autocast else DTYPES[precision.compute]
    dtypes = {}
    for prefix, module in model.named_modules():
        wide = torch.float32 if is_statistics(module) else None
        kept, computing = (wide if wide and to.itemsize < wide.itemsize else to for to in (param, compute))
        for tensors, pair in (
            (module.named_parameters(recurse=False), (kept, computing)),
            (module.named_buffers(recurse=False), (computing, computing)),
        ):
            dtypes |= {
                f"{prefix}.{key}" if prefix else key: pair for key, tensor in tensors if tensor.dtype.is_floating_point
            }
    return dtypes


def cast(model: nn.Module, precision: Precision, device: torch.device) -> dict[str, torch.Tensor]:
    """Move the model to its device and dtypes, in place. Returns the tensors that the optimizer updates, by parameter
    name. Not collective.

    They are the module's own parameters, except where a parameter computes in another dtype than it is kept in: there
    they are master copies.
    """
    model.to(device)
    pairs, masters = formats(model, precision), {}
    for name, parameter in model.named_parameters():
        kept, computing = pairs.get(name, (parameter.dtype, parameter.dtype))
        masters[name] = parameter.data.to(kept)
        parameter.data = masters[name] if computing is kept else parameter.data.to(computing)
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(pairs.get(name, (buffer.dtype, buffer.dtype))[1])
    return masters
