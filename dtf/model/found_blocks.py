"""The blocks of a model, found by looking at its modules: what is there several times, and the layers around it.

Torch modules alone are looked at; no code of the model runs. Says nothing about what becomes of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from dtf.api.layout import Layout, Split, SplitBy
from dtf.core.text import count_text

LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
ALIKE = 3
"""So many children of one class make a module a list of blocks, although it is no list of torch's."""
MOST = 0.5
"""Share of a block's parameters in blocks of one list inside of it from which on it counts as a list itself."""

Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class FoundLayout(Layout):
    """A layout whose blocks the recipe does not name: they were found in its model, and are in the order of names."""

    repeats: int = 0
    """How many of the blocks are there several times; 0: each block is a single layer."""


def found_layout(model: nn.Module, layout: Layout) -> FoundLayout:
    """The layout, which names no blocks, with those that are found."""
    blocks = found_blocks(model)
    repeats = len({*repeated_blocks(model)} & {name for block in blocks for name in block})
    return FoundLayout(blocks, layout.splits, layout.buffers, layout.positions, repeats)


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the members of lists of modules (nn.Sequential, nn.ModuleList, nn.ModuleDict) that have layers inside
    and whose class is a member at least twice, anywhere in the model. A module with several children of one class that
    have layers inside counts as a list, too.

    Of nested ones the outermost; but of one that is little more than a list of others, such as a stage of a network,
    those. An nn.Sequential counts only where no other class is there twice: its class says nothing of what is in it.
    """
    modules = dict(model.named_modules())
    members = _members(modules)
    counts = Counter(map(type, members.values()))
    repeated = [name for name, module in members.items() if counts[type(module)] > 1]
    own = [name for name in repeated if type(members[name]) is not nn.Sequential]
    return list(_opened(modules, own or repeated, ""))


def found_blocks(model: nn.Module, order: Sequence[str] = ()) -> Blocks:
    """The blocks of a model, as a layout names them: each repeated block, and the layers before, between and after
    them.

    `order`: names of the parts in the order in which data flows, see `parts`; what it leaves out is in no block. Empty:
    that in which the model names them. Neighbours that are not repeated form one block while it is smaller than the
    largest of the repeated ones. Where nothing is repeated each layer is a block, with the normalisation after it.
    """
    modules = dict(model.named_modules())
    repeated = set(repeated_blocks(model))
    most = max((_size(modules[name]) for name in repeated), default=0)
    blocks: list[list[str]] = []
    held = most  # by the last block, where more may join it
    last = ""
    for last in order or parts(model):
        module = modules[last]
        size = _size(module)
        joins = bool(blocks) and blocks[-1][-1] not in repeated
        if last in repeated:
            blocks.append([last])
        elif joins and (held + size < most or not _layers(module)):
            blocks[-1].append(last)
            held += size
        else:
            blocks.append([last])
            held = size
    if len(blocks) > 1 and blocks[-1] == [last] and not _layers(modules[last]):
        blocks[-2:] = [[*blocks[-2], last]]
    return tuple(tuple(block) for block in blocks)


def parts(model: nn.Module) -> list[str]:
    """Names of the modules that blocks are made of, none in another: repeated blocks, and around them modules with one
    layer, or with several that are not larger than a repeated block.
    """
    repeated = set(repeated_blocks(model))
    most = max((_size(module) for name, module in model.named_modules() if name in repeated), default=0)
    around = {outer for name in repeated for outer in _outer(name)}
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> Iterator[str]:
        if module in seen or not any(True for _ in module.parameters()):
            return
        seen.add(module)
        whole = _layers(module) < 2 or _is_torchs_own(module) or (not _is_list(module) and _size(module) <= most)
        if name in repeated or (name and name not in around and whole):
            yield name
            return
        for child, part in module.named_children():
            yield from visit(f"{name}.{child}" if name else child, part)

    return list(visit("", model))


def blocks_row(model: nn.Module, layout: Layout) -> dict[str, str]:
    """What the start-up table says of found blocks: how many of which classes; nothing of those that a recipe names."""
    if not isinstance(layout, FoundLayout):
        return {}
    modules = dict(model.named_modules())
    counts = Counter(type(modules[name]).__name__ for block in layout.blocks for name in block)
    listed = [f"{count} {name}" for name, count in counts.most_common(3)]
    more = f" and {count_text(len(counts) - 3, 'more kind')}" if len(counts) > 3 else ""
    text = f"{len(layout.blocks)} found in the model: {', '.join(listed)}{more}"
    return {"blocks": f"{text}; job=describe job.layout=true lists them"}


def as_code(layout: Layout) -> str:
    """A `layout()` in Python that names the blocks and splits of a layout."""
    kinds = sorted({"Split" if isinstance(split, Split) else "SplitBy" for split in layout.splits.values()})
    if any("Split." in _split_code(split) for split in layout.splits.values()):
        kinds = sorted({*kinds, "Split"})
    lines = [
        f"from dtf import {', '.join(['Layout', *kinds])}",
        "",
        "",
        "def layout(self, model):  # a method of the recipe",
        "    return Layout(",
        "        blocks=(  # in the order in which data flows",
    ]
    for block in layout.blocks:
        names = ", ".join(f'"{name}"' for name in block)
        lines.append(f"            ({names}{',' * (len(block) == 1)}),")
    lines.append("        ),")
    if layout.splits:
        lines.append("        splits={")
        lines += [f'            "{name}": {_split_code(split)},' for name, split in layout.splits.items()]
        lines.append("        },")
    if layout.positions:
        lines.append("        positions=(")
        lines += [f'            "{name}",' for name in layout.positions]
        lines.append("        ),")
    return "\n".join([*lines, "    )"])


def _split_code(split: Split | SplitBy) -> str:
    if isinstance(split, Split):
        return f"Split.{split.name}"
    given = [f"Split.{split.split.name}"] if split.split is not Split.column else []
    given += [f"{key}={value}" for key, value in asdict(split).items() if value and key != "split"]
    return f"SplitBy({', '.join(given)})"


def _members(modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """Name -> module of the members of lists that have layers inside."""
    lists = {name for name, module in modules.items() if isinstance(module, LISTS) or _holds_blocks(module)}
    return {
        name: module
        for name, module in modules.items()
        if name
        and name.rpartition(".")[0] in lists
        and type(module) not in (nn.ModuleList, nn.ModuleDict)
        and any(True for _ in module.children())
    }


def _holds_blocks(module: nn.Module) -> bool:
    """Whether it has several children of one class with layers inside, as attributes."""
    kinds = Counter(type(child) for child in module.children() if not _is_list(child))
    alike = {kind for kind, count in kinds.items() if count >= ALIKE}
    counts = Counter(type(child) for child in module.children() if type(child) in alike and _layers(child) > 1)
    return max(counts.values(), default=0) >= ALIKE


def _opened(modules: dict[str, nn.Module], names: Sequence[str], outer: str) -> Iterator[str]:
    """The outermost of the names inside of `outer`, or what is in those that are little more than lists."""
    inside = [name for name in names if not outer or name.startswith(f"{outer}.")]
    chosen = set(inside)
    for name in inside:
        if not any(around in chosen for around in _outer(name)):
            if _is_little_more(modules, name, names):
                yield from _opened(modules, names, name)
            else:
                yield name


def _is_little_more(modules: dict[str, nn.Module], name: str, names: Iterable[str]) -> bool:
    """Whether most of a block are several blocks of one list inside of it."""
    held: dict[str, list[int]] = {}
    for other in names:
        around = other.rpartition(".")[0]
        plain = around.startswith(f"{name}.") or around == name
        if plain and _is_list(modules[around]) and _layers(modules[other]) > 1:
            held.setdefault(around, []).append(_size(modules[other]))
    return any(len(sizes) > 1 and sum(sizes) >= MOST * _size(modules[name]) for sizes in held.values())


def _outer(name: str) -> Iterator[str]:
    """The names of the modules around one, without the model."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _layers(module: nn.Module) -> int:
    """How many modules in it have matrices or kernels. A normalisation or a scale is none."""
    return sum(any(p is not None and p.dim() > 1 for p in part._parameters.values()) for part in module.modules())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_list(module: nn.Module) -> bool:
    """Whether a module does nothing but hold others, or call them one after the other."""
    return isinstance(module, LISTS) and type(module).forward in (nn.Sequential.forward, nn.Module.forward)


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether it is a layer of torch, which need not call what is in it."""
    return type(module).__module__.startswith("torch.nn.") and not isinstance(module, LISTS)
