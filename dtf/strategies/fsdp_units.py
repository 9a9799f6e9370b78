"""Which modules of a model are gathered together under FSDP. Their parameters are there while they compute."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from dtf.api.layout import Layout
from dtf.model.found_blocks import FoundLayout
from dtf.strategies.param_use import ParamUse

PARTS = 8
"""Units of a model without blocks: while one computes, an eighth of the parameters is there in whole."""

Units = list[list[nn.Module]]


def gathered_units(
    model: nn.Module, layout: Layout, size: str, use: ParamUse | None, compiled: Collection[str] = ()
) -> Units:
    """What is gathered at once: lists of modules. What lies in none of them is gathered with the whole model.

    `size`: `layer`, or `block` or `stage` of the layout; without blocks, and where those found are single layers, the
    model is cut into eight parts. `use`: where the parameters are used. A module of which a parameter is used elsewhere
    is taken apart, and units come in the order in which a pass calls them, which need not be that of their names.
    `compiled`: modules that compute in one piece; where blocks are none of the layout's they are not cut.
    """
    modules = dict(model.named_modules())
    owners = _owners(model, use, compiled)
    if size == "layer":
        units = [[module] for module in owners]
    elif not layout.blocks or (isinstance(layout, FoundLayout) and not layout.repeats):
        units = _by_size(owners)
    else:
        names = layout.stages() if size == "stage" else layout.blocks
        units = [[modules[name] for name in block] for block in names]
    if use is None:
        return _joined(units)
    names, turns = {module: name for name, module in modules.items()}, _turns(model, use)
    return sorted(_checked(units, names, use), key=lambda unit: min(turns[names[module]] for module in unit))


def _owners(model: nn.Module, use: ParamUse | None, compiled: Collection[str]) -> list[nn.Module]:
    """Modules with parameters and no layers inside; where others use their parameters, the module around all of them.

    Parameters of a module that has layers inside are gathered with the whole model, as units must not be nested.
    """
    names = [
        name
        for name, module in model.named_modules()
        if module._parameters and not any(True for child in module.children() for _ in child.parameters())
    ]
    names = list(
        dict.fromkeys(next((one for one in compiled if f"{name}.".startswith(f"{one}.")), name) for name in names)
    )
    if use is not None:
        names = list(dict.fromkeys(filter(None, (_user(model, name, use) for name in names))))
        names = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
        names.sort(key=_turns(model, use).__getitem__)
    return [model.get_submodule(name) for name in names]


def _turns(model: nn.Module, use: ParamUse) -> dict[str, int]:
    """The place of each module in the order in which a pass calls them; those that it does not call are last."""
    calls = {name: turn for turn, name in enumerate(use.calls)}
    return {name: calls.get(name, len(calls)) for name, _ in model.named_modules()}


def _user(model: nn.Module, name: str, use: ParamUse) -> str:
    """The innermost module around the one of this name in which all uses of its parameters lie; "": the model."""
    while name and not _is_whole(name, model.get_submodule(name), use):
        name = name.rpartition(".")[0]
    return name


def _is_whole(name: str, module: nn.Module, use: ParamUse) -> bool:
    """Whether a module is called, as often for all rows, and its parameters are used only then."""
    return (
        bool(use.calls.get(name))
        and name not in use.uneven
        and all(use.gathered_by(name, parameter) for parameter in module.parameters())
    )


def _checked(units: Units, names: dict[nn.Module, str], use: ParamUse) -> Iterator[list[nn.Module]]:
    """The units, or parts of them, whose parameters are used only while they are called."""
    taken: set[nn.Module] = set()
    for unit in units:
        parts = [part for module in unit for part in _parts(module, names, use) if part not in taken]
        taken.update(parts)
        # a group is gathered when the first of its modules is called, and dropped when all of them have been
        if parts == unit and all(use.calls.get(names[part]) == 1 for part in parts):
            yield parts
        else:
            yield from ([part] for part in parts)


def _parts(module: nn.Module, names: dict[nn.Module, str], use: ParamUse) -> Iterator[nn.Module]:
    if not any(True for _ in module.parameters()):
        return
    name = names[module]
    if _is_whole(name, module, use):
        yield module
    else:
        for child in module.children():
            yield from _parts(child, names, use)


def _joined(units: Units) -> Units:
    """The units, with those that share a parameter made one: a unit gathers what it owns."""
    joined: list[tuple[set[int], list[nn.Module]]] = []
    for unit in units:
        owned = {id(parameter) for module in unit for parameter in module.parameters()}
        same = [other for other in joined if other[0] & owned]
        if not same:
            joined.append((owned, [*unit]))
            continue
        same[0][0].update(owned)
        same[0][1].extend(unit)
        for other in same[1:]:
            same[0][0].update(other[0])
            same[0][1].extend(other[1])
            joined.remove(other)
    return [modules for _, modules in joined]


def _by_size(owners: list[nn.Module]) -> Units:
    """Runs of modules, in order of their use, that end when they hold an eighth of the parameters."""
    sizes = [sum(p.numel() for p in module.parameters()) for module in owners]
    enough, units, held = sum(sizes) / PARTS, [], 0
    for module, size in zip(owners, sizes, strict=True):
        if not units or held >= enough:
            units.append([])
            held = 0
        units[-1].append(module)
        held += size
    return units
