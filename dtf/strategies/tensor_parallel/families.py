"""How the models of known families are split, found by looking at their modules; nothing of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from torch import nn

from dtf.api.layout import Layout, Split, SplitBy, Splits
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.tensor_parallel.layers import is_a
from dtf.strategies.tensor_parallel.slices import DEGREE
from dtf.strategies.tensor_parallel.transformers_models import OUTPUTS, transformers_splits
from dtf.strategies.tensor_parallel.windows import WINDOWS

VIT_ENCODER = "torchvision.models.vision_transformer.Encoder"
_MLP = "torchvision.ops.misc.MLP"


def with_splits(layout: Layout, model: nn.Module, recipe: Recipe, name: str, sizes: MeshSizes) -> Layout:
    """The layout, with what `with_found` adds where several ranks compute a layer. Attention that it finds with fewer
    heads than ranks stays whole. `name`: of the strategy. ConfigError where nothing is divided, tables neither.
    """
    if sizes.layer_ranks == 1:
        return layout
    whole = with_found(layout, model)
    small = _few_heads(model, {key: by for key, by in whole.splits.items() if key not in layout.splits}, sizes.tensor)
    splits = {key: by for key, by in whole.splits.items() if key not in small}
    if not splits and not recipe.tables():  # tables are divided anyway
        what = "nothing was found in its model that dtf knows how to split"
        if small:
            what = f"{min(small)}, which was found in its model, has fewer heads than {sizes.tensor} ranks"
        raise ConfigError(
            f"{name}: the layout of {type(recipe).__name__} splits no module, and {what}; name layers in Recipe.layout "
            f"(docs/strategies.md), {f'use fewer ranks, see {DEGREE}, ' if small else ''}or use strategy=fsdp, which "
            "divides any model"
        )
    # the positions of attention that stays whole cannot be divided
    return replace(layout, splits=splits, positions=layout.positions if small else whole.positions)


def with_found(layout: Layout, model: nn.Module) -> Layout:
    """The layout, with the splits and positions that are found in its model where it names no splits but those of last
    layers by `classes`, which the loss has to know.
    """
    if any(by is not Split.classes for by in layout.splits.values()):
        return layout
    found = {key: by for key, by in found_splits(model).items() if key not in layout.splits}
    return replace(
        layout, splits={**found, **layout.splits}, positions=layout.positions or found_positions(model, found)
    )


def _few_heads(model: nn.Module, found: Splits, ranks: int) -> set[str]:
    """The found splits of attention with fewer heads, or groups of them, than ranks."""
    small = set[str]()
    for key, by in found.items():
        heads = cast(int, model.get_submodule(key).num_heads) if by is Split.heads else 0
        if 0 < (by.groups or by.heads if isinstance(by, SplitBy) else heads) < ranks:
            small.add(key)
    within = {key.rpartition(".")[0] for key in small if isinstance(found[key], SplitBy)}
    return small | {key for key, by in found.items() if by is Split.whole and key.rpartition(".")[0] in within}


def found_positions(model: nn.Module, splits: Splits) -> tuple[str, ...]:
    """Modules that compute position by position but for attention, in the order in which data flows: of causal models
    of transformers, of torchvision's ViT, and layers of torch's encoders. Empty: nothing is known.
    """
    causal = hasattr(model, "config") and any(base.__name__.endswith(OUTPUTS) for base in type(model).__mro__)
    for prefix, holder in model.named_modules():
        for key, blocks in holder.named_children():
            name = f"{prefix}.{key}" if prefix else key
            members = [f"{name}.{member}" for member, _ in blocks.named_children()]
            whole = causal or type(holder).forward is nn.TransformerEncoder.forward or is_a(holder, VIT_ENCODER)
            chained = whole or type(blocks).forward is nn.Sequential.forward  # else something may stand between them
            known = causal or (chained and all(_has_positions(block) for block in blocks.children()))
            if not known or not members or not all(_splits_in(member, splits) for member in members):
                continue
            siblings = [*holder.named_children()]
            after = siblings[[own for own, _ in siblings].index(key) + 1 :]
            norms = [f"{prefix}.{own}" if prefix else own for own, part in after[:1] if whole and _is_norm(part)]
            return (*members, *norms)
    return ()


def _has_positions(block: nn.Module) -> bool:
    """Whether a block of a known kind gets and gives (B, T, D)."""
    if isinstance(block, nn.TransformerEncoderLayer):
        return type(block) is nn.TransformerEncoderLayer and block.self_attn.batch_first
    return is_a(block, "torchvision.models.vision_transformer.EncoderBlock")


def _splits_in(member: str, splits: Splits) -> bool:
    return any(name.startswith(f"{member}.") for name in splits)


def _is_norm(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and "Norm" in type(module).__name__


def found_splits(model: nn.Module) -> Splits:
    """Splits by name, in the order of modules: of causal and BERT-like models of transformers, of torch's attention and
    layers of encoders and decoders, of torchvision's MLPs and shifted windows. Empty: nothing is known.
    """
    if hasattr(model, "config"):
        return transformers_splits(model)
    splits: dict[str, Split | SplitBy] = {}
    for name, module in model.named_modules():
        own = dict(_splits_of(module))
        splits |= {f"{name}.{key}" if name and key else name or key: split for key, split in own.items()}
    return splits


def _splits_of(module: nn.Module) -> Iterator[tuple[str, Split | SplitBy]]:
    """Of what is in one module; "" is the module itself."""
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention):
        if kind.forward is nn.MultiheadAttention.forward:
            yield "", Split.heads
    elif f"{kind.__module__}.{kind.__qualname__}" in WINDOWS:
        yield "", Split.heads
    elif isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        own = getattr(kind, "_ff_block", None)
        if own in (nn.TransformerEncoderLayer._ff_block, nn.TransformerDecoderLayer._ff_block):
            yield from (("linear1", Split.column), ("dropout", Split.local), ("linear2", Split.row))
    elif is_a(module, _MLP) and kind.forward is nn.Sequential.forward:
        linear = [key for key, layer in module.named_children() if isinstance(layer, nn.Linear)]
        if linear == ["0", "3"]:  # without a norm between
            yield from (("0", Split.column), ("2", Split.local), ("3", Split.row))
