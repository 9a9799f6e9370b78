"""Pipeline parallelism: the model cut into stages, one or more on every rank of a group; data parallelism over the rest of the ranks."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from dtf.errors import ConfigError
from dtf.recipe import Recipe
from dtf.registry import option, register
from dtf.schedules import Schedule, in_flight
from dtf.strategy import Program, Strategy, Task

if TYPE_CHECKING:
    from dtf.world import World

PER_RANK = 4
"""Micro-batches of a global batch for each rank of a pipeline, unless step.micro_batch_rows says otherwise: the bubble is below a fifth."""


class Balance(Enum):
    time = "time"
    flops = "flops"


@register("strategy", "pipeline")
class Pipeline(Strategy):
    """Ranks in groups of `degree` hold the model in stages, micro-batches flow through them; groups divide the rows.

    Bytes per micro-batch: what is live at each cut, forward, and its gradient, backward; groups all-reduce the gradients of what a rank holds
    once a step. A rank is idle for (p - 1) / (v m + p - 1) of a step, with p ranks, v stages on each and m micro-batches of equal length.
    Sources: Huang et al. 2019 (arXiv:1811.06965); Narayanan et al. 2019, 2021 (arXiv:1806.03377, arXiv:2104.04473).
    """

    degree: int = option(default=0, least=0, doc="ranks in a pipeline; it divides launcher.processes, the quotient divides the rows; 0: all ranks")
    schedule: Schedule = option(  # type: ignore[valid-type]
        default=Schedule["1f1b"],
        doc="`gpipe`: all forward passes of a step, then all backward passes; `1f1b`: a backward pass as soon as there is one to do, "
        "which holds the activations of fewer micro-batches; the numbers are the same",
    )
    virtual: int = option(default=1, least=1, doc="stages on each rank (interleaving): more make the bubble smaller and send more", unit="stages")
    balance: Balance = option(
        default=Balance.time,
        doc="what stages should have in equal parts: `time` measures each block's forward and backward pass at the start, `flops` counts and runs nothing",
    )
    cuts: list[str] = option(factory=list, doc="blocks with which a stage begins, by the names in the recipe's layout; empty: cut by `balance`")
    memory_gb: float = option(default=0.0, least=0, doc="most memory of a rank for parameters, optimizer and activations; 0: no bound", unit="GiB")

    def check(self, task: Task, processes: int, devices: str) -> None:
        if self.degree and processes % self.degree:
            possible = [str(n) for n in range(1, processes + 1) if not processes % n]
            raise ConfigError(f"strategy.degree={self.degree} does not divide launcher.processes={processes}; use {' or '.join(possible)}")
        if type(task.recipe).layout is Recipe.layout:
            raise ConfigError(
                f"strategy=pipeline: {type(task.recipe).__name__} has no layout() that names the blocks of its model; add one, or use strategy=fsdp, "
                "which divides any model"
            )
        stages = (self.degree or processes) * self.virtual
        if self.cuts and len(self.cuts) != stages - 1:
            raise ConfigError(f"strategy.cuts names {len(self.cuts)} blocks, but {stages} stages have {stages - 1} cuts between them")

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        import torch
        import torch.distributed as dist

        from dtf.build import cast_model, draw_model, sketch
        from dtf.spmd import Replica, Seat, Spmd
        from dtf.update import LocalUpdate, whole

        options = task.optimizer, task.step.clip_norm, task.precision.loss_scale
        if world.size == 1:  # nothing to cut: the bare model is the same program
            model = draw_model(task.recipe, task.seed)
            update = LocalUpdate(whole(model, cast_model(model, task.precision, world.device)), *options)
            return Spmd(Replica(model, task, world.device), update, task, world)

        from dtf.feed import Feed
        from dtf.gradients import GradientSum
        from dtf.pipelined import Line, Pipelined, Stage, links
        from dtf.sampler import cut
        from dtf.sharded import cast_sketch, draw, lay_out, pieces
        from dtf.stages import Wish, agree
        from dtf.values import Shard

        ranks = self.degree or world.size
        virtual = self.virtual if ranks > 1 else 1
        mesh = world.mesh({"dp": world.size // ranks, "pp": ranks})
        rows, group = mesh["dp"].get_group(), mesh["pp"].get_group()
        share = Shard(mesh["dp"].get_local_rank(), world.size // ranks)
        place, stages = mesh["pp"].get_local_rank(), ranks * virtual
        model = sketch(task.recipe)
        micro_batches = cut(task.step.batch_size, task.step.micro_batch_rows, PER_RANK * world.size)
        each = -(-(len(micro_batches) - 1) // share.count)  # of a pipeline, at most
        held = [in_flight(self.schedule, s, ranks, virtual, each) for s in range(stages)]
        wish = Wish(ranks, virtual, each, micro_batches[1], held, self.cuts, self.balance is Balance.time, int(self.memory_gb * 2**30))
        chain, bounds, table = agree(model, wish, task, world)
        cast_sketch(model, task.precision, computing=True)
        segments, found = {}, {}
        for s in range(place, stages, ranks):
            segments[s] = chain.segment(bounds[s], bounds[s + 1])
            masters = lay_out(segments[s], task.precision, world.device)
            draw(segments[s], task.recipe, task.seed, masters)
            found |= pieces(segments[s], masters)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        mine = torch.tensor([names.index(name) for name, piece in found.items() if piece.parameter.requires_grad], device=world.device)

        def gather(norms: torch.Tensor) -> torch.Tensor:
            """Norms of all parameters in the model's order, whichever stage has them: the same bits for every cut."""
            every = norms.new_zeros(len(names))
            every[mine] = norms
            dist.all_reduce(every, group=group)
            return every

        def average(flat: torch.Tensor) -> None:
            dist.all_reduce(flat, group=rows)
            flat.div_(share.count)

        lines = mesh.mesh.tolist()
        line = Line(lines[share.index], place, stages, *links(lines, stages, world.rank, world.device))
        update = LocalUpdate(found, *options, writes=share.index == 0, reduce=GradientSum(rows) if share.count > 1 else None, gather=gather)
        seat = Seat(share, Feed(group, world.device, inputs=False), average)
        parts = [Stage(s, segment, task, world.device) for s, segment in segments.items()]
        return Pipelined(parts, line, self.schedule, update, task, world, seat, PER_RANK * world.size, table)
