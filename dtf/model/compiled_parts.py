"""Which modules of a model are compiled, as step.compile says. Decided once, from the model as its author made it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn

from dtf.api.options import Compile
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.model.init import layout_of

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


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


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the members of lists of modules (nn.Sequential, nn.ModuleList, nn.ModuleDict) that have layers inside
    and whose class is a member at least twice, anywhere in the model. Of nested ones the outermost.

    An nn.Sequential counts only where no other class is there twice: its class says nothing of what is in it.
    """
    modules = dict(model.named_modules())
    inside = {
        name: module
        for name, module in modules.items()
        if name
        and isinstance(modules[name.rpartition(".")[0]], _LISTS)
        and type(module) not in (nn.ModuleList, nn.ModuleDict)
        and any(True for _ in module.children())
    }
    counts = Counter(map(type, inside.values()))
    repeated = [name for name, module in inside.items() if counts[type(module)] > 1]
    own = [name for name in repeated if type(inside[name]) is not nn.Sequential]
    return _outermost(own or repeated)


def describe_parts(kind: Compile, model: nn.Module, names: Sequence[str]) -> str:
    if not names:
        return ""
    counts = Counter(type(model.get_submodule(name)).__name__ for name in names)
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    text = f"the whole model ({listed.removeprefix('1 ')})" if kind is Compile.model else f"{kind.value}: {listed}"
    return f"{text}; the first step waits for it"


def _blocks_of_layout(recipe: Recipe, model: nn.Module) -> list[str]:
    if type(recipe).layout is Recipe.layout:
        return []
    names = [name for block in layout_of(recipe, model).blocks for name in block]
    return [name for name in names if any(True for _ in model.get_submodule(name).children())]


def _outermost(names: Sequence[str]) -> list[str]:
    chosen = set(names)

    def is_inside(name: str) -> bool:
        parts = name.split(".")
        return any(".".join(parts[:i]) in chosen for i in range(1, len(parts)))

    return [name for name in names if not is_inside(name)]


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None  # type: ignore[attr-defined]
