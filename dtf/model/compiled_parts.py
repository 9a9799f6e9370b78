"""Which modules of a model are compiled, as step.compile says. Decided once, from the model as its author made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from dtf.api.options import Compile
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.model.found_blocks import FoundLayout, repeated_blocks
from dtf.model.init import layout_of


def choose_parts(kind: Compile, recipe: Recipe, model: nn.Module) -> tuple[tuple[str, ...], str]:
    """The modules to compile, as of `parts_to_compile`, and a text for people; empty where there are none."""
    names = parts_to_compile(kind, recipe, model)
    return names, describe_parts(kind, model, names)


def parts_to_compile(kind: Compile, recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """The names of the modules to compile; "" is the model. ConfigError where nothing of a model can be."""
    if kind is Compile.off:
        return ()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or _is_compiled(module):
            how = "TorchScript" if isinstance(module, torch.jit.ScriptModule) else "compiled by its own code"
            raise ConfigError(
                f"step.compile={kind.value}: {name or 'the model'} ({type(module).__name__}) is {how} already; take "
                "that out of build_model(), or use step.compile=off"
            )
    if kind is Compile.model:
        return ("",)
    names = repeated_blocks(model) or _blocks_of_layout(recipe, model)
    if not names:
        raise ConfigError(
            f"step.compile=blocks finds no blocks in {type(model).__name__}: no class of modules with layers inside "
            "is twice in its nn.Sequential and nn.ModuleList, and the recipe's layout() names no such blocks; use "
            "step.compile=model, or step.compile=off"
        )
    return tuple(names)


def describe_parts(kind: Compile, model: nn.Module, names: Sequence[str]) -> str:
    if not names:
        return ""
    counts = Counter(type(model.get_submodule(name)).__name__ for name in names)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    text = f"the whole model ({listed.removeprefix('1 ')})" if kind is Compile.model else f"{kind.value}: {listed}"
    return f"{text}; the first step waits for it"


def _blocks_of_layout(recipe: Recipe, model: nn.Module) -> list[str]:
    layout = layout_of(recipe, model)
    if isinstance(layout, FoundLayout):
        return []
    names = [name for block in layout.blocks for name in block]
    return [name for name in names if any(True for _ in model.get_submodule(name).children())]


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # type: ignore[attr-defined]
