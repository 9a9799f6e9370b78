"""Tensor parallelism: every rank of a group computes slices of the channels of the same rows; data parallelism over the
rest of the ranks.
"""

from __future__ import annotations

from dtf.api.registry import option, register
from dtf.api.strategy import check_divides
from dtf.distributed.mesh_sizes import MeshSizes
from dtf.strategies.mesh_options import TableOptions
from dtf.strategies.mesh_strategy import MeshStrategy


@register("strategy", "tensor")
class Tensor(TableOptions, MeshStrategy):
    """Ranks in groups of `degree` divide each layer that the recipe's layout splits; groups divide the rows.

    Inside a group, x being an activation's bytes for one micro-batch, each micro-batch costs

        all-reduce of x for each `column` and `classes` layer
            (x: its input; backward, unless the input needs no gradient),
        all-reduce of x for each `row` layer
            (x: its output; forward),
        reduce-scatter and all-gather of x for each `row_scatter` layer
            (x: its whole output; forward and backward),
        three to four numbers a row for the loss and two for the metrics of divided classes;

    `step.remat=blocks` does those of forward in its blocks once more, `selective` keeps what they gave;
    each batch is broadcast once; groups all-reduce the gradients of what a rank holds once a step. A ring moves
    2 (n - 1) / n of an all-reduced tensor and (n - 1) / n of the others through each of n ranks. Source: Shoeybi et al.
    2019 (arXiv:1909.08053).
    """

    one_share = "strategy.degree=0"

    degree: int = option(
        default=0,
        least=0,
        doc="ranks that divide each layer; it divides launcher.processes, the quotient divides the rows; 0: all ranks",
    )

    def sizes(self, processes: int) -> MeshSizes:
        check_divides("strategy.degree", self.degree, processes)
        degree = self.degree or processes
        return MeshSizes(replicate=processes // degree, tensor=degree)
