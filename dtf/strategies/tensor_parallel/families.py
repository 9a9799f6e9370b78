"""How the models of known families are split, found by looking at their modules; nothing of them runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from dtf.api.layout import Layout, Split, SplitBy
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.strategies.tensor_parallel.layers import is_a
from dtf.strategies.tensor_parallel.transformers_models import transformers_splits
from dtf.strategies.tensor_parallel.windows import WINDOWS

Splits = dict[str, Split | SplitBy]
_MLP = "torchvision.ops.misc.MLP"


def with_splits(layout: Layout, model: nn.Module, recipe: Recipe, name: str, degree: int) -> Layout:
    """The layout, with the splits that are found in its model where it names none and `degree` ranks divide layers.
    `name`: of the strategy. ConfigError where there are none, and no sparse tables either.
    """
    if degree == 1:
        return layout
    splits = layout.splits or found_splits(model)
    if not splits and not recipe.tables():  # tables are divided anyway
        raise ConfigError(
            f"{name}: the layout of {type(recipe).__name__} splits no module, and nothing was found in its model that "
            "dtf knows how to split; name layers in Recipe.layout (docs/strategies.md), or use strategy=fsdp, which "
            "divides any model"
        )
    return replace(layout, splits=splits)


def found_splits(model: nn.Module) -> Splits:
    """Splits by name, in the order of modules: of causal and BERT-like models of transformers, of torch's attention and
    layers of encoders and decoders, of torchvision's MLPs and shifted windows. Empty: nothing is known.
    """
    if hasattr(model, "config"):
        return transformers_splits(model)
    splits: Splits = {}
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
