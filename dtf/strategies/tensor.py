"""Tensor parallelism: every rank of a group computes slices of the channels of the same rows; data parallelism over the rest of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dtf.errors import ConfigError
from dtf.recipe import Recipe
from dtf.registry import option, register
from dtf.strategy import Program, Strategy, Task

if TYPE_CHECKING:
    import torch

    from dtf.world import World


@register("strategy", "tensor")
class Tensor(Strategy):
    """Ranks in groups of `degree` divide each layer that the recipe's layout splits; groups divide the rows. Inside a group, x being an
    activation's bytes for one micro-batch, each micro-batch costs

        all-reduce of x for each `column` and `classes` layer (x: its input; backward, unless the input needs no gradient),
        all-reduce of x for each `row` layer (x: its output; forward),
        reduce-scatter and all-gather of x for each `row_scatter` layer (x: its whole output; forward and backward),
        three to four numbers a row for the loss and two for the metrics of divided classes;

    each batch is broadcast once; groups all-reduce the gradients of what a rank holds once a step. A ring moves 2 (n - 1) / n of an
    all-reduced tensor and (n - 1) / n of the others through each of n ranks. Source: Shoeybi et al. 2019 (arXiv:1909.08053).
    """

    degree: int = option(default=0, least=0, doc="ranks that divide each layer; it divides launcher.processes, the quotient divides the rows; 0: all ranks")

    def check(self, task: Task, processes: int, devices: str) -> None:
        if self.degree and processes % self.degree:
            possible = [str(n) for n in range(1, processes + 1) if not processes % n]
            raise ConfigError(f"strategy.degree={self.degree} does not divide launcher.processes={processes}; use {' or '.join(possible)}")
        if type(task.recipe).layout is Recipe.layout:
            raise ConfigError(
                f"strategy=tensor: {type(task.recipe).__name__} has no layout() that says how its model is split; add one, or use strategy=fsdp, "
                "which divides any model"
            )

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        import torch.distributed as dist

        from dtf.build import cast_model, draw_model, sketch
        from dtf.spmd import Replica, Seat, Spmd
        from dtf.update import LocalUpdate, whole

        options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
        degree = self.degree or world.size
        splits = task.recipe.layout(sketch(task.recipe)).splits
        if not splits:
            raise ConfigError(f"strategy=tensor: the layout of {type(task.recipe).__name__} splits no module; use strategy=fsdp, which divides any model")
        if world.size == 1:  # nothing to divide: the bare model is the same program
            model = draw_model(task.recipe, task.seed)
            update = LocalUpdate(whole(model, cast_model(model, task.precision, world.device)), *options)
            return Spmd(Replica(model, task, world.device), update, task, world)

        from dtf.divided import divide
        from dtf.feed import Feed
        from dtf.gradients import GradientSum
        from dtf.sharded import cast_sketch, draw, lay_out, pieces
        from dtf.values import Shard

        mesh = world.mesh({"dp": world.size // degree, "tp": degree})
        rows, group = mesh["dp"].get_group(), mesh["tp"].get_group()
        share = Shard(mesh["dp"].get_local_rank(), world.size // degree)
        model = sketch(task.recipe)
        cast_sketch(model, task.precision, computing=True)
        divide(model, splits, mesh["tp"])
        masters = lay_out(model, task.precision, world.device)
        draw(model, task.recipe, task.seed, masters)

        def combine(sums: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(sums, group=group)
            return sums

        def average(flat: torch.Tensor) -> None:
            dist.all_reduce(flat, group=rows)
            flat.div_(share.count)

        feed = Feed(group, world.device)
        update = LocalUpdate(
            pieces(model, masters, first=feed.reads),
            *options,
            writes=share.index == 0,
            combine=combine,
            reduce=GradientSum(rows) if share.count > 1 else None,
        )
        return Spmd(Replica(model, task, world.device), update, task, world, seat=Seat(share, feed, average))
