"""From a recipe to a model with drawn parameters: every layout starts from the same numbers, with no broadcast."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import nn

from dtf.errors import ConfigError
from dtf.precision import Cast, Format, Precision
from dtf.recipe import Recipe
from dtf.seeding import seed_of

DTYPES = {Format.fp64: torch.float64, Format.fp32: torch.float32, Format.bf16: torch.bfloat16, Format.fp16: torch.float16}


def draw_model(recipe: Recipe, seed: int) -> nn.Module:
    """The recipe's model on CPU in fp32, each module drawn under a generator seeded by hash(seed, module name).

    Always drawn in fp32, so that runs of different precision start alike. Raises ConfigError when a parameter or buffer was
    never drawn.
    """
    with torch.device("meta"):
        model = recipe.build_model()
    made: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    with torch.random.fork_rng(devices=[]):
        for name, module in model.named_modules():
            for key, parameter in module._parameters.items():  # not named_parameters: that leaves out a second name of the same tensor
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    empty = torch.full(parameter.shape, torch.nan, dtype=torch.float32)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                module._parameters[key] = made[id(parameter)]
            for key, buffer in module.named_buffers(recurse=False):
                floating = buffer.dtype.is_floating_point
                module._buffers[key] = torch.full(buffer.shape, torch.nan if floating else 0, dtype=torch.float32 if floating else buffer.dtype)
            empty_buffers = {key: (buffer, buffer._version) for key, buffer in module.named_buffers(recurse=False)}
            torch.default_generator.manual_seed(seed_of(seed, "initialise", name))
            with torch.no_grad():
                recipe.initialise(name, module)
            for key, (buffer, version) in empty_buffers.items():
                if module._buffers[key] is buffer and buffer._version == version and key != "num_batches_tracked":
                    _never_drawn(recipe, f"{name}.{key}" if name else key, "what its constructor put there is lost, the model is built without memory")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dtype.is_floating_point and bool(tensor.detach().isnan().any()):
            _never_drawn(recipe, name, "or only in part")
    return model


def _never_drawn(recipe: Recipe, name: str, why: str) -> NoReturn:
    raise ConfigError(f"recipe={type(recipe).__name__}: {name} is never drawn ({why}); give its module a reset_parameters or extend initialise()")


def cast_model(model: nn.Module, precision: Precision, device: torch.device) -> dict[str, torch.Tensor]:
    """Move the model to its device and formats; returns the tensors the optimizer updates, by parameter name.

    These are the module's own parameters unless `cast=module` computes in another format than `param`: then they are master
    copies in `param`. Batch normalisation keeps fp32 (or `param`, when that is fp64) parameters and statistics in half formats: running averages
    in bf16 lose most of their updates.
    """
    param = DTYPES[precision.param]
    compute = param if precision.cast is Cast.autocast else DTYPES[precision.compute]
    model.to(device)
    statistics = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    kept = {id(tensor) for module in statistics for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}

    def convert(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.data
        return tensor.data.to(torch.float32 if id(tensor) in kept and to.itemsize < 4 else to)

    masters = {}
    for name, parameter in model.named_parameters():
        masters[name] = convert(parameter, param)
        parameter.data = masters[name] if compute is param else convert(parameter, compute)
    for buffer in model.buffers():
        buffer.data = convert(buffer, compute)
    return masters
