"""The options of strategies that spread a model over a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from dtf.api.registry import option
from dtf.api.sparse_table import Placement, Placements
from dtf.strategies.pipeline.schedules import Schedule


class Unit(Enum):
    layer = "layer"
    block = "block"
    stage = "stage"


class Balance(Enum):
    time = "time"
    flops = "flops"


class MeshOptions:
    """All of them. What a strategy has no option for has the value here."""

    tables: Placements = Placement.row_wise
    unit: Unit = Unit.block
    zero: int = 3
    reshard_after_forward: bool = True
    offload: bool = False
    prefetch: int = 1
    schedule: Schedule = Schedule["1f1b"]  # type: ignore[valid-type]
    virtual: int = 1
    balance: Balance = Balance.time
    cuts: Sequence[str] = ()
    memory_gb: float = 0.0

    one_share: str = "launcher.processes=1"
    """Keys with which no rows are divided."""


@dataclass(kw_only=True)
class TableOptions:
    """How sparse tables are placed."""

    tables: Placements = option(
        default=Placement.row_wise,
        doc="how sparse tables are sharded: `rows` (or `row_wise`): by a hash of the id; `columns` (`column_wise`): "
        "each rank some columns of all rows; `tables` (`table_wise`): each rank whole tables; `replicated`: not at "
        "all; `auto`: for each table what sends least; or a mapping of tables to these",
    )


@dataclass(kw_only=True)
class ShardOptions:
    """How parameters, gradients and optimizer state are in slices."""

    unit: Unit = option(
        default=Unit.block,
        doc="what is gathered at once: each layer, each block that the recipe's layout names or that is found in the "
        "model, or the blocks of each stage together; a model that repeats no block is cut into eight parts of equal "
        "size, for `block` and `stage`, unless the layout names blocks",
    )
    zero: int = option(
        default=3,
        least=1,
        most=3,
        doc="what is in slices between passes, the stage of ZeRO: 1: the optimizer state; 2: also gradients, which are "
        "reduce-scattered after each micro-batch; 3: also parameters. With 1 and 2 parameters are gathered once a step "
        "and held until its last backward pass",
    )
    reshard_after_forward: bool = option(
        default=True,
        doc="drop gathered parameters between forward and backward: less memory, one more gathering; for zero=3",
    )
    offload: bool = option(
        default=False, doc="keep parameters, gradients and optimizer state in host memory; the update runs there"
    )
    prefetch: int = option(
        default=1,
        least=0,
        doc="units gathered ahead of the one that computes; 0: torch's own choice, the next one in backward on CUDA",
        unit="units",
    )


@dataclass(kw_only=True)
class PipelineOptions:
    """How a model is cut into stages, and in which order they compute."""

    schedule: Schedule = option(  # type: ignore[valid-type]
        default=Schedule["1f1b"],
        doc="`gpipe`: all forward passes of a step, then all backward passes; `1f1b`: a backward pass as soon as there "
        "is one to do, which holds the activations of fewer micro-batches; the numbers are the same",
    )
    virtual: int = option(
        default=1,
        least=1,
        most=64,
        doc="stages on each rank (interleaving): more make the bubble smaller and send more",
        unit="stages",
    )
    balance: Balance = option(
        default=Balance.time,
        doc="what stages should have in equal parts: `time` measures each block's forward and backward pass at the "
        "start, `flops` counts and runs nothing",
    )
    cuts: list[str] = option(
        factory=list,
        doc="blocks with which a stage begins, by the names in the recipe's layout; empty: cut by `balance`",
    )
    memory_gb: float = option(
        default=0.0,
        least=0,
        most=1_000_000,
        doc="most memory of a rank for parameters, optimizer and activations; 0: no bound",
        unit="GiB",
    )
