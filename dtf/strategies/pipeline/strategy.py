"""Pipeline parallelism: the model cut into stages, one or more on every rank of a group; data parallelism over the rest
of the ranks.
"""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.api.strategy import check_divides
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.mesh_options import PipelineOptions, TableOptions
from dtf.strategies.mesh_strategy import MeshStrategy


@register("strategy", "pipeline")
class Pipeline(PipelineOptions, TableOptions, MeshStrategy):
    """Ranks in groups of `degree` hold the model in stages, micro-batches flow through them; groups divide the rows.

    Bytes per micro-batch: what is live at each cut, forward, and its gradient, backward; groups all-reduce the
    gradients of what a rank holds once a step. A rank is idle for (p - 1) / (v m + p - 1) of a step, with p ranks, v
    stages on each and m micro-batches of equal length; for longer where v > 1 and p does not divide m. Sources: Huang
    et al. 2019 (arXiv:1811.06965); Narayanan et al. 2019, 2021 (arXiv:1806.03377, arXiv:2104.04473).
    """

    uses_blocks = True
    one_share = "strategy.degree=0"

    degree: int = option(
        default=0,
        least=0,
        doc="ranks in a pipeline; it divides launcher.processes, the quotient divides the rows; 0: all ranks",
    )

    def sizes(self, processes: int) -> MeshSizes:
        check_divides("strategy.degree", self.degree, processes)
        degree = self.degree or processes
        return MeshSizes(replicate=processes // degree, pipeline=degree)
