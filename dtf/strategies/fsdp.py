"""Fully sharded data parallelism: torch's FSDP2, parameters, gradients and optimizer state divided among ranks."""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.api.strategy import check_divides
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.mesh_options import ShardOptions, TableOptions
from dtf.strategies.mesh_strategy import MeshStrategy


@register("strategy", "fsdp")
class Fsdp(ShardOptions, TableOptions, MeshStrategy):
    """Every rank keeps a slice of each parameter, its gradient and its optimizer state; a unit is gathered for as long
    as it computes.

    Bytes per step and rank, for n ranks that share P bytes of parameters: (n - 1) / n x P for each gathering, of which
    every micro-batch has one, or two with `reshard_after_forward`, and (n - 1) / n x P for the reduce-scatter of its
    gradients. With `zero=2` one gathering a step; with `zero=1` also one reduce-scatter a step. With `replicate` > 1
    also an all-reduce of P / n bytes among the replicas, once a step. Source: Rajbhandari et al. 2020
    (arXiv:1910.02054).
    """

    uses_blocks = True

    replicate: int = option(
        default=1,
        least=1,
        doc="copies of the sharded model (hybrid sharding): gradients are reduce-scattered within a copy, all-reduced "
        "between copies",
    )

    def sizes(self, processes: int) -> MeshSizes:
        check_divides("strategy.replicate", self.replicate, processes)
        return MeshSizes(replicate=self.replicate, shard=processes // self.replicate)
