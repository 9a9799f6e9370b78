"""Data parallelism over processes: torch's DistributedDataParallel, one replica a rank."""

from __future__ import annotations

import functools
from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.registry import option, register, with_default
from dtf.api.sparse_table import Placement, Placements
from dtf.api.strategy import Program, Strategy, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.nn import Parameter
    from torch.nn.parallel import DistributedDataParallel

    from dtf.api.options import Compile
    from dtf.distributed.world import World


class CommHook(Enum):
    none = "none"
    fp16 = "fp16"
    bf16 = "bf16"
    powersgd = "powersgd"


class Backend(Enum):
    auto = "auto"
    gloo = "gloo"
    nccl = "nccl"
    mpi = "mpi"


@register("strategy", "ddp")
class Ddp(Strategy):
    """Every rank holds the model and computes its share of the micro-batches; gradients are all-reduced in buckets
    during backward.

    Bytes per step and rank: 2 (n - 1) / n x gradient bytes (ring all-reduce); with `shard_optimizer` also one broadcast
    of the parameters.
    """

    bucket_mb: float = option(
        default=25.0,
        above=0,
        most=1_000_000,  # holds any model's gradients: a bucket never spans more
        doc="gradients are all-reduced in buckets of this size",
        unit="MiB",
    )
    static_graph: bool = option(
        default=False,
        doc="promise that every step uses the same parameters in the same order, which saves bookkeeping; that of "
        "torch's DistributedDataParallel",
    )
    find_unused_parameters: bool = option(
        default=False, doc="look for parameters that a step did not use; costs a walk over the graph each step"
    )
    comm_hook: CommHook = option(
        default=CommHook.none,
        doc="what crosses the network: gradients as they are, rounded to fp16 or bf16, or a low-rank approximation "
        "(PowerSGD). All but `none` change the numbers",
    )
    powersgd_rank: int = option(default=2, least=1, doc="rank of the PowerSGD approximation")
    powersgd_start: int = option(
        default=10,
        least=2,
        doc="plain all-reduce before PowerSGD begins (start_powerSGD_iter in torch), whose state needs two such steps",
        unit="steps",
    )
    backend: Backend = option(default=Backend.auto, doc="torch.distributed backend; auto: nccl on CUDA, gloo on CPU")  # type: ignore[assignment]
    tables: Placements = option(
        default=Placement.replicated,
        doc="how sparse tables are sharded: `replicated`: not at all; `rows` (or `row_wise`): by a hash of the id; "
        "`columns` (`column_wise`): some columns of all rows each; `tables` (`table_wise`): whole tables each; "
        "`auto`: for each table what sends least; or a mapping of tables to these",
    )
    shard_optimizer: bool = option(
        default=False,
        doc="divide the optimizer's state among ranks (ZeRO stage 1, arXiv:1910.02054), as strategy=zero1 does",
    )

    def check(self, task: Task, processes: int, devices: str) -> None:
        check_tables(task, self.tables, processes)
        if self.backend is Backend.nccl and devices != "cuda":
            raise ConfigError(f"strategy.backend=nccl needs CUDA, this run is on {devices}; use strategy.backend=gloo")
        if self.comm_hook is CommHook.powersgd and task.precision.loss_scale:
            raise ConfigError(
                "strategy.comm_hook=powersgd remembers its errors, and one overflow would stay in them; use "
                "precision=bf16, which needs no loss scale"
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                "strategy.static_graph=true promises that all parameters are used; set "
                "strategy.find_unused_parameters=false"
            )

    def unguarded(self, processes: int) -> str:
        if self.shard_optimizer and processes > 1:
            return "each parameter is updated on one rank, which all others copy in each step; use strategy=ddp"
        return super().unguarded(processes)

    def uncompiled(self, kind: Compile, processes: int) -> str:
        return ""

    def communication(self, devices: str) -> str | None:
        return {"cuda": "nccl"}.get(devices, "gloo") if self.backend is Backend.auto else self.backend.value

    def setup(self, task: Task, world: World) -> Program:
        from dtf.distributed.sharding import byte_count, greedy_balance
        from dtf.model.init import cast, whole_model
        from dtf.optim.sharding import Sharding, full_params
        from dtf.sparse.make_tables import tables_of
        from dtf.strategies.own_memory import refuse_shared_memory
        from dtf.strategies.replica import Replica
        from dtf.strategies.spmd import Spmd, microbatch_load

        model = whole_model(task)
        if self.shard_optimizer and world.size > 1:  # two ranks would step one memory
            refuse_shared_memory(
                model, "strategy.shard_optimizer=true", "strategy.shard_optimizer=false", parameters_only=True
            )
        masters = cast(model, task.precision, world.device)
        forward, exchange = None, 0
        if world.size > 1:  # on one rank the bare model is the same program
            forward = wrap_ddp(model, self.bucket_mb, self.static_graph, self.find_unused_parameters)
            self._install_hook(forward)
            exchange = inflight_bytes(model, microbatch_load(task, world.size)[0])
            if self.shard_optimizer:  # parameters, as they are broadcast
                exchange = max(exchange, byte_count([p for p in model.parameters() if p.requires_grad]))
        owned, fetch_others = None, None
        if self.shard_optimizer and world.size > 1:
            shares = greedy_balance(
                {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}, world.size
            )
            owned, fetch_others = shares[world.rank], _broadcaster(dict(model.named_parameters()), shares)
        tables = tables_of(task, world, self.tables, share=1 / world.size)
        sharding = Sharding(
            params=full_params(model, masters),
            writes=world.rank == 0,
            owned=owned,
            fetch_others=fetch_others,
            tables=tables,
        )
        replica = Replica(model, task, world.device, forward, reach=forward is not None and not self.static_graph)
        to_sum = functools.partial(_sum_gradients, forward) if self.comm_hook is CommHook.none and forward else None
        return Spmd(replica, sharding, task, world, exchange=exchange, to_sum=to_sum)

    def _install_hook(self, model: DistributedDataParallel) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        match self.comm_hook:
            case CommHook.fp16:
                model.register_comm_hook(None, default_hooks.fp16_compress_hook)
            case CommHook.bf16:
                model.register_comm_hook(None, default_hooks.bf16_compress_hook)
            case CommHook.powersgd:
                # the passes of `warmup` count
                state = powerSGD_hook.PowerSGDState(
                    None, self.powersgd_rank, start_powerSGD_iter=self.powersgd_start + 2
                )
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@register("strategy", "zero1", variant_of="ddp")
class Zero1(Ddp):
    """ddp with the optimizer's state divided among ranks: less memory, one more broadcast of the parameters a step."""

    shard_optimizer: bool = with_default(Ddp, "shard_optimizer", True)


def _sum_gradients(model: DistributedDataParallel) -> None:
    """Sum gradients over ranks, which DistributedDataParallel would average."""
    import torch.distributed as dist

    def add(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations, which are texts here
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, add)


def _broadcaster(parameters: dict[str, Parameter], shares: list[frozenset[str]]) -> Callable[[], None]:
    """A function that sends the parameters each rank has updated to all others; calling it is collective.

    `shares`: the names of the parameters of each rank.
    """
    import torch
    import torch.distributed as dist

    groups = []  # (owner, tensors of one dtype): flat buffers hold one dtype
    for owner, share in enumerate(shares):
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for name in sorted(share):
            by_dtype.setdefault(parameters[name].dtype, []).append(parameters[name].data)
        groups += [(owner, tensors) for tensors in by_dtype.values()]

    def broadcast() -> None:
        flat = [torch.cat([t.reshape(-1) for t in tensors]) for _, tensors in groups]
        works = [
            dist.broadcast(buffer, src=owner, async_op=True) for (owner, _), buffer in zip(groups, flat, strict=True)
        ]
        for work, buffer, (owner, tensors) in zip(works, flat, groups, strict=True):
            assert work is not None
            work.wait()
            if owner != dist.get_rank():
                parts = buffer.split([t.numel() for t in tensors])
                torch._foreach_copy_(tensors, [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])

    return broadcast


def wrap_ddp(
    model: nn.Module,
    bucket_mb: float = 25.0,
    static_graph: bool = False,
    find_unused_parameters: bool = False,
) -> DistributedDataParallel:
    """A model of which every rank has the same numbers, with gradients all-reduced in buckets during backward.

    Collective. The options are those of `Ddp`.
    """
    from inspect import signature

    from torch.nn.parallel import DistributedDataParallel

    buffers = (
        "forward_sync_buffers"
        if "forward_sync_buffers" in signature(DistributedDataParallel).parameters
        else "broadcast_buffers"
    )
    return DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_mb,
        static_graph=static_graph,
        gradient_as_bucket_view=True,  # gradients live in the buckets, which saves a copy and one gradient's memory
        find_unused_parameters=find_unused_parameters,
        init_sync=False,  # every rank has the same numbers
        **{buffers: False},  # type: ignore[arg-type]  # running averages are averaged when needed, see Program.sync
    )


def inflight_bytes(model: nn.Module, micro_batches: int) -> int:
    """Bytes of gradients that exist beside the buckets, on their way into one."""
    from dtf.distributed.sharding import byte_count

    sizes = [byte_count([p]) for p in model.parameters() if p.requires_grad]
    beside = sum(sizes) if micro_batches > 1 else 0
    return beside + max(sizes)
