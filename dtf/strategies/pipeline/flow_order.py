"""The order in which data flows through the blocks that were found in a model, and a layout written out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from dtf.api.layout import Layout
from dtf.api.recipe import Recipe
from dtf.core.errors import ConfigError
from dtf.model.found_blocks import Blocks, FoundLayout, as_code, found_blocks, parts
from dtf.model.init import construct, layout_of
from dtf.strategies.pipeline.trace import trace
from dtf.strategies.tensor_parallel.families import with_found

WHERE = "outside of the blocks that were found in it"


def blocks_in_order(model: nn.Module, layout: Layout) -> Blocks:
    """The blocks of a layout; of found ones those that the forward pass comes to, in its order.

    ConfigError for a model whose forward cannot be followed between them.
    """
    if not isinstance(layout, FoundLayout):
        return layout.blocks
    names = parts(model)
    if not names:
        return ()
    around = {outer for name in names for outer in _around(name)}
    called = dict.fromkeys(str(node.target) for node in trace(model, around, WHERE) if node.op == "call_module")
    order = [name for name in called if name in names]
    return found_blocks(model, order) if order else ()


def layout_code(recipe: Recipe) -> str:
    """A `layout()` in Python with the blocks and splits of the recipe's model, those that it names or those that are
    found.
    """
    model = construct(recipe)
    layout = with_found(layout_of(recipe, model), model)
    try:
        return as_code(replace(layout, blocks=blocks_in_order(model, layout)))
    except ConfigError as error:  # for a pipeline; the others need no order
        why = " ".join(str(error).split())
        return f"{as_code(layout)}\n# in the order of names, as strategy=pipeline cannot cut this model: {why}"


@contextmanager
def found_blocks_named(layout: Layout) -> Iterator[None]:
    """A context in which a refusal of a model with found blocks says so: it is no mistake in a layout."""
    try:
        yield
    except ConfigError as error:
        if not isinstance(layout, FoundLayout):
            raise
        raise ConfigError(
            f"{error} (its blocks were found by looking at its modules: name others in Recipe.layout, see job=describe "
            "job.layout=true, or use strategy=fsdp)"
        ) from error


def _around(name: str) -> list[str]:
    """The modules around one, the model first."""
    names = name.split(".")
    return [".".join(names[:length]) for length in range(len(names))]
