"""How a model falls into parts, as data: what a recipe says once, for every strategy that divides models.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Split(Enum):
    """How a module is divided among n ranks.

    Channels are axis 1 of convolutions and their norms, the last axis of Linear and Embedding.
    """

    column = "column"  # by output channels: all inputs -> a slice of the outputs
    row = "row"  # by input channels: a slice of the inputs -> all outputs, summed over the ranks; an Embedding by ids
    row_scatter = "row_scatter"  # by input channels, the sum divided: a slice of the inputs -> a slice of the outputs
    local = "local"  # every channel (or group of channels) for itself: normalisation, dropout, grouped convolutions
    # as column, for the last layer: the recipe's loss and metrics get a DTensor, see `dtf.model.losses`
    classes = "classes"


@dataclass(frozen=True)
class Layout:
    """Names as in `model.named_modules()`."""

    blocks: tuple[tuple[str, ...], ...] = ()
    """The modules with parameters in the order in which data flows, those that belong together as one block; empty:
    unknown.
    """

    splits: Mapping[str, Split] = field(default_factory=dict)
    """What tensor parallelism divides, in the order in which data flows; all other modules are computed alike by all.

    Empty: nothing.
    """

    def stages(self) -> tuple[tuple[str, ...], ...]:
        """Neighbouring blocks that lie in the same child of the model, as one."""
        found: list[list[str]] = []
        for block in self.blocks:
            if found and {name.partition(".")[0] for name in (*found[-1], *block)} == {block[0].partition(".")[0]}:
                found[-1].extend(block)
            else:
                found.append([*block])
        return tuple(tuple(stage) for stage in found)
