"""From a recipe to an initialised model. Every strategy starts from the same numbers, without a broadcast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn

from dtf.api.layout import Layout, Split
from dtf.api.precision import Cast, Format, Precision
from dtf.api.recipe import Recipe
from dtf.api.task import Weights
from dtf.core.errors import ConfigError
from dtf.core.seeding import seed_of
from dtf.core.text import suggest
from dtf.model.freeze import freeze

DTYPES = {
    Format.fp64: torch.float64,
    Format.fp32: torch.float32,
    Format.bf16: torch.bfloat16,
    Format.fp16: torch.float16,
}


def init_model(recipe: Recipe, seed: int, weights: Weights | None = None) -> nn.Module:
    """The recipe's model on CPU in fp32, with all values; see `init_modules`. Not collective.

    Tensors that `weights` has are taken from there, in their format. ConfigError for a parameter that is never
    initialised, DataError for weights that cannot be read.
    """
    model = build_on_meta(recipe)
    for _, tensors in init_modules(recipe, seed, model):
        for name, tensor in tensors.items():
            if weights is not None and name in weights:
                tensor.data = weights.read(name)
    return model


def build_on_meta(recipe: Recipe) -> nn.Module:
    """The recipe's model on meta, without memory, with frozen parameters where the recipe says so.

    ConfigError for parameters of dtypes that cannot be kept: parameters that are not floating, or of several dtypes.
    """
    with torch.device("meta"):
        model = recipe.build_model()
    who, first = f"{type(recipe).__name__}.build_model()", {}  # format -> the first parameter that has it
    for name, parameter in model.named_parameters():
        kind = str(parameter.dtype).removeprefix("torch.")
        if not parameter.dtype.is_floating_point:
            raise ConfigError(
                f"{who} makes the parameter {name} {kind}; parameters are real numbers: make it a buffer, or its real "
                "and imaginary parts two"
            )
        first.setdefault(kind, name)
    if len(first) > 1:
        listed = ", ".join(f"{name} is {kind}" for kind, name in first.items())
        raise ConfigError(
            f"{who} makes parameters of several formats ({listed}), but all become precision.param; leave the format "
            "out, and let the forward pass cast to that of a weight where it must"
        )
    freeze(model, recipe.fine_tuning.freeze)
    return model


def layout_of(recipe: Recipe, model: nn.Module) -> Layout:
    """The recipe's layout of its model, checked.

    ConfigError when it names a module that does not exist, names one twice, or is no Layout.
    """
    who = f"{type(recipe).__name__}.layout()"
    try:
        layout = recipe.layout(model)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{who} raised {type(error).__name__}: {error}") from error
    if not isinstance(layout, Layout):
        raise ConfigError(f"{who} returned {type(layout).__name__}; it must return a dtf.Layout")
    names = [name for name, _ in model.named_modules() if name]
    for block in layout.blocks:
        if isinstance(block, str) or not block:
            raise ConfigError(f"{who} has the block {block!r}; a block is a tuple of names, such as ('fc',)")
    blocks = [name for block in layout.blocks for name in block]
    for name in (*blocks, *layout.splits):
        if name not in names:
            raise ConfigError(f"{who} names {name!r}, which is no module of its model; {suggest(name, names)}")
    for i, name in enumerate(blocks):
        if name in blocks[:i]:
            raise ConfigError(f"{who} names {name} twice; a module lies in one block")
        around = [other for other in blocks if name.startswith(f"{other}.")]
        if around:
            raise ConfigError(f"{who} names {name} and {around[0]}, which contains it; name one of them")
    for name, split in layout.splits.items():
        if not isinstance(split, Split):
            raise ConfigError(
                f"{who} splits {name} as {split!r}; use one of Split.{', Split.'.join(kind.name for kind in Split)}"
            )
    return layout


def init_modules(recipe: Recipe, seed: int, model: nn.Module) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
    """Initialise a model that is on meta, module by module, each under a generator seeded with hash(seed, module name).
    On CPU, in fp32 whatever the precision, so that runs of different precision start alike.

    Yields each module and the parameters and buffers that it now owns, by full name; a shared tensor under its first
    name. A caller that keeps only parts of them may drop the rest then. ConfigError when a parameter or buffer was
    never drawn.
    """
    names = {id(p): name for name, p in model.named_parameters()}  # the first name of a tied parameter
    # and its last owner, by when it must be drawn
    last = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for prefix, module in model.named_modules():
        unfinished: set[str] = set()
        owned: dict[str, Tensor] = {}
        # not named_parameters: that leaves out a second name of the same tensor
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, key_of = names[id(parameter)], id(parameter)
            drawing = made.pop(key_of, None)
            if drawing is None:
                drawing = nn.Parameter(
                    torch.full(parameter.shape, torch.nan, dtype=torch.float32), requires_grad=parameter.requires_grad
                )
            if last[key_of] is not module:
                made[key_of] = drawing
                unfinished.add(name)
            module._parameters[key] = owned[name] = drawing
        for key, buffer in module.named_buffers(recurse=False):
            floating = buffer.dtype.is_floating_point
            empty = torch.full(
                buffer.shape, torch.nan if floating else 0, dtype=torch.float32 if floating else buffer.dtype
            )
            module._buffers[key] = owned[f"{prefix}.{key}" if prefix else key] = empty
        buffers = {key: (buffer, buffer._version) for key, buffer in module.named_buffers(recurse=False)}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(seed_of(seed, "initialise", prefix))
            recipe.initialise(prefix, module)
        for key, (buffer, version) in buffers.items():
            if module._buffers[key] is buffer and buffer._version == version and key != "num_batches_tracked":
                name = f"{prefix}.{key}" if prefix else key
                _never_drawn(recipe, name, "what its constructor put there is lost, the model is built without memory")
        for name, tensor in owned.items():
            if name not in unfinished and tensor.dtype.is_floating_point and bool(tensor.detach().isnan().any()):
                _never_drawn(recipe, name, "or only in part")
        yield module, owned


def _never_drawn(recipe: Recipe, name: str, why: str) -> NoReturn:
    raise ConfigError(
        f"recipe={type(recipe).__name__}: {name} is never drawn ({why}); give its module a reset_parameters or extend "
        "initialise()"
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
