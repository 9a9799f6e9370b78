"""How a model is made of parts, as data. A recipe says it once, for all strategies that divide models. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Split(Enum):
    """How tensor parallelism divides a module among n ranks.

    Channels are axis 1 of convolutions and of their norms, and the last axis of Linear and Embedding.
    """

    column = "column"  # by output channels: all inputs -> a slice of the outputs
    row = "row"  # by input channels: a slice of the inputs -> all outputs, summed over the ranks; an Embedding by ids
    row_scatter = "row_scatter"  # by input channels, the sum divided: a slice of the inputs -> a slice of the outputs
    local = "local"  # every channel (or group of channels) by itself: normalisation, dropout, grouped convolutions
    heads = "heads"  # attention with all that is in it, by heads: nn.MultiheadAttention, windows of torchvision's Swin
    # by nothing: whole weights at work on a slice, such as the normalisation of each head; their gradients are summed
    whole = "whole"
    # as column, for the last layer: the recipe's loss and metrics get a DTensor, see `dtf.model.losses`
    classes = "classes"


@dataclass(frozen=True)
class SplitBy:
    """A split by heads, or of a fused projection: `SplitBy(heads=8)` of the projection of queries,
    `SplitBy(Split.row, heads=8)` of that behind attention, `SplitBy(heads=8, parts=(512, 512, 512))` of one Linear that
    makes queries, keys and values.
    """

    split: Split = Split.column
    """`column`, `row`, or `local` of the dropout of attention weights (B, heads, T, T)."""

    heads: int = 0
    """Ranks get whole heads, as many as others or one more. A part may have query, key and value of a head one after
    another. 0: by channels.
    """

    groups: int = 0
    """Of grouped queries: how many heads keys and values have. Ranks get whole groups. 0: as many as `heads`."""

    parts: tuple[int, ...] = ()
    """Channels of the parts that lie one after another, each of which is split. Empty: one part."""


Splits = Mapping[str, Split | SplitBy]
"""Name of a module -> how it is divided."""


class BufferUpdate(Enum):
    """What becomes of a buffer that the forward pass changes, where a step has several micro-batches.

    Each micro-batch starts from the value before the step, so that the result does not depend on which rank computes
    which.
    """

    mean = "mean"  # the mean of what the micro-batches make of it: running averages, codebooks; of counters of passes
    sum = "sum"  # their changes are added up: counters of rows, histograms
    local = "local"  # scratch memory such as a cache: left alone, different on each rank, in no checkpoint


@dataclass(frozen=True)
class Layout:
    """The parts of a model. Names are those of `model.named_modules()`."""

    blocks: tuple[tuple[str, ...], ...] = ()
    """Modules that have parameters, in the order in which data flows. Modules that belong together form one block. FSDP
    gathers and pipelines cut by blocks. Empty: unknown.
    """

    splits: Splits = field(default_factory=dict)
    """Which modules tensor parallelism divides and how, in the order in which data flows. All ranks compute all other
    modules alike. Empty: none.
    """

    buffers: Mapping[str, BufferUpdate] = field(default_factory=dict)
    """Which buffers the forward pass changes, by patterns such as `quantizer.*`, and what becomes of them.

    Those of batch normalisation and of spectral normalisation are known. Any other that changes while rows are divided
    ends the run before that update.
    """

    positions: tuple[str, ...] = ()
    """Modules in the order in which data flows, each of which gets and gives activations (B, T, ...) and computes each
    of the T positions by itself, but for attention: the blocks of a transformer, and the norm behind them. Ranks that
    compute a layer together then divide the positions between its divided layers. Empty: unknown.
    """

    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The blocks, with neighbours that lie in the same child of the model joined into one."""
        joined: list[list[str]] = []
        for block in self.blocks:
            if joined and {name.partition(".")[0] for name in (*joined[-1], *block)} == {block[0].partition(".")[0]}:
                joined[-1].extend(block)
            else:
                joined.append([*block])
        return tuple(tuple(stage) for stage in joined)
