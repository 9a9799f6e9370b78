"""Initial numbers of a recipe that draws its model by name: module by module, so that no rank ever holds all of it.

For models larger than a host. All others start from what their constructor made, see `dtf.model.init`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor, nn

from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.core.seeding import seed_of


def draws_by_name(recipe: Recipe) -> bool:
    """Whether the recipe overrides `initialise`, so that its model is built without memory and drawn by name."""
    return type(recipe).initialise is not Recipe.initialise


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
