"""Fully sharded data parallelism: torch's FSDP2, parameters, gradients and optimizer state divided among ranks."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from dtf.api.options import Compile
from dtf.api.precision import Cast
from dtf.api.registry import option, register
from dtf.api.sparse_table import Placement, Placements
from dtf.api.strategy import Program, Strategy, check_divides, check_tables
from dtf.api.task import Task
from dtf.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from dtf.distributed.world import World
    from dtf.strategies.param_use import ParamUse


SUMS_UNUSED = "set_reduce_scatter_unused_params"
"""A method of FSDP modules, from torch 2.14 on."""
TRIALS = 3
"""Passes over two rows each that show which modules some rows use and others do not."""


class Unit(Enum):
    layer = "layer"
    block = "block"
    stage = "stage"


@register("strategy", "fsdp")
class Fsdp(Strategy):
    """Every rank keeps a slice of each parameter, its gradient and its optimizer state; a unit is gathered for as long
    as it computes.

    Bytes per step and rank, for n ranks that share P bytes of parameters: (n - 1) / n x P for each gathering, of which
    every micro-batch has one, or two with `reshard_after_forward`, and (n - 1) / n x P for the reduce-scatter of
    gradients. With `replicate` > 1 also an all-reduce of P / n bytes among the replicas. Source: Rajbhandari et al.
    2020, stage 3 (arXiv:1910.02054).
    """

    uses_blocks = True

    unit: Unit = option(
        default=Unit.block,
        doc="what is gathered at once: each layer, each block that the recipe's layout names or that is found in the "
        "model, or the blocks of each stage together; a model that repeats no block is cut into eight parts of equal "
        "size, for `block` and `stage`, unless the layout names blocks",
    )
    reshard_after_forward: bool = option(
        default=True, doc="drop gathered parameters between forward and backward: less memory, one more gathering"
    )
    replicate: int = option(
        default=1,
        least=1,
        doc="copies of the sharded model (hybrid sharding): gradients are reduce-scattered within a copy, all-reduced "
        "between copies",
    )
    offload: bool = option(
        default=False, doc="keep parameters, gradients and optimizer state in host memory; the update runs there"
    )
    tables: Placements = option(
        default=Placement.row_wise,
        doc="how sparse tables are sharded: `rows` (or `row_wise`): by a hash of the id; `columns` (`column_wise`): "
        "each rank some columns of all rows; `tables` (`table_wise`): each rank whole tables; `replicated`: not at "
        "all; `auto`: for each table what sends least; or a mapping of tables to these",
    )
    prefetch: int = option(
        default=1,
        least=0,
        doc="units gathered ahead of the one that computes; 0: torch's own choice, the next one in backward on CUDA",
        unit="units",
    )

    def check(self, task: Task, processes: int, devices: str) -> None:
        check_tables(task, self.tables, processes)
        check_divides("strategy.replicate", self.replicate, processes)
        if self.offload and processes == 1:
            raise ConfigError(
                "strategy.offload=true needs at least 2 processes; use offload=false, or launcher.processes=2 and more"
            )
        if self.offload and devices == "cpu":
            raise ConfigError(
                "strategy.offload=true moves parameters from GPUs to the host, this run is on cpu, where they are "
                "already; use offload=false"
            )

    def unguarded(self, processes: int) -> str:
        if self.replicate == 1:
            return "each slice of a parameter is on one rank; use strategy.replicate=2 or more"
        return super().unguarded(processes)

    def uncompiled(self, kind: Compile, processes: int) -> str:
        if processes == 1:
            return ""
        if kind is Compile.model:
            return "parameters are gathered part by part within a pass; use step.compile=blocks, or step.compile=off"
        if self.unit is Unit.layer:
            return "strategy.unit=layer gathers parameters within a block; use strategy.unit=block, or step.compile=off"
        return ""

    def communication(self, devices: str) -> str | None:
        return "nccl" if devices == "cuda" else "gloo"

    def setup(self, task: Task, world: World) -> Program:
        import torch

        from dtf.distributed.sharding import byte_count
        from dtf.model.draw_by_name import draws_by_name
        from dtf.model.init import layout_of, model_to_cut
        from dtf.sparse.make_tables import tables_of
        from dtf.strategies.fsdp_hooks import hook_gathered, parameter_hooks
        from dtf.strategies.fsdp_sharding import fsdp_sharding
        from dtf.strategies.fsdp_units import gathered_units
        from dtf.strategies.fsdp_waits import watch_collectives
        from dtf.strategies.own_memory import Originals, refuse_shared_memory
        from dtf.strategies.pass_probes import refuse_hooks_on_sums
        from dtf.strategies.replica import Replica
        from dtf.strategies.sharded_init import cast_parts
        from dtf.strategies.spmd import Spmd, microbatch_load, single_process

        if world.size == 1:
            return single_process(task, world)

        mesh = world.mesh({"replicate": self.replicate, "shard": world.size // self.replicate})
        model = model_to_cut(task)
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigError(
                "strategy=fsdp: the model is TorchScript, whose modules cannot gather their parameters; return it from "
                "build_model() without torch.jit, or use strategy=ddp"
            )
        refuse_shared_memory(model, "strategy=fsdp", "strategy=ddp")
        use = _use(model, task)
        masters = cast_parts(model, task.precision, computing=False)
        # torch divides axes: these stay whole
        scalars = [name for name, p in model.named_parameters() if not p.dim() or not p.numel()]
        if scalars and self.offload:
            raise ConfigError(
                f"strategy.offload=true: the parameter {scalars[0]} has no axis to divide; give it the shape (1,), or "
                "use offload=false"
            )
        layout = layout_of(task.recipe, model)
        # inside a transform of torch.func nothing can be gathered: all comes with the whole model
        transforms = use is not None and use.transforms
        units = [] if transforms else gathered_units(model, layout, self.unit.value, use, task.compiled)
        exchange = self._exchange(
            [byte_count(p for module in unit for p in module.parameters()) for unit in units],
            microbatch_load(task, world.size)[0],
        )
        refuse_hooks_on_sums(model, "launcher.processes=1")
        hooks = parameter_hooks(model)
        originals = Originals(model)
        sharded = self._shard(model, units, mesh, task, keep=use is not None and use.keeps)
        originals.refuse_held(model, "strategy=fsdp", "strategy=ddp")
        watch_collectives(model, units, mesh["shard"].get_group())
        if draws_by_name(task.recipe):
            masters = self._fill(model, task, world)
        else:
            masters = self._place(model, masters, world)
            hook_gathered(model, hooks)
        tables = tables_of(task, world, self.tables, share=1 / world.size)
        sharding, to_sum = fsdp_sharding(world, mesh, model, masters, tables)
        replica = Replica(model, task, world.device, sync=sharded.set_requires_gradient_sync, layout=layout)
        return Spmd(replica, sharding, task, world, exchange=exchange, to_sum=to_sum)

    def _fill(self, model: nn.Module, task: Task, world: World) -> dict[str, torch.Tensor]:
        """Give a sharded model on meta its memory and initial numbers, in place; returns its master copies by name."""
        import torch
        from torch.distributed.fsdp import FSDPModule

        from dtf.strategies.sharded_init import draw, lay_out

        masters = lay_out(model, task.precision, torch.device("cpu") if self.offload else world.device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(world.device)
        for module in model.modules():
            # FSDP allocates at first use; force it before anything refers to the memory
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
        draw(model, task, masters)
        return masters

    def _place(self, model: nn.Module, masters: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
        """Move what is not sharded to its device, in place; returns the master copies, of what is not sharded."""
        from dtf.distributed.sharding import is_dtensor

        device = "cpu" if self.offload else world.device
        for parameter in model.parameters():
            if not is_dtensor(parameter):
                parameter.data = parameter.data.to(device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(world.device)
        return {name: master.to(device) for name, master in masters.items()}

    def _exchange(self, sizes: list[int], micro_batches: int) -> int:
        """Bytes that exist in whole during a step: gathered parameters, and gradients before they are scattered.

        `sizes`: bytes of each unit. Of a gradient there are two copies, as computed and as sent; with several
        micro-batches all gradients add up.
        """
        sizes = sizes or [0]
        at_once = 1 + self.prefetch if self.reshard_after_forward else len(sizes)
        gathered = max(sum(sizes[i : i + at_once]) for i in range(len(sizes)))
        return gathered + 2 * max(sizes) + (sum(sizes) if micro_batches > 1 else 0)

    def _shard(
        self, model: nn.Module, units: list[list[nn.Module]], mesh: DeviceMesh, task: Task, keep: bool
    ) -> FSDPModule:
        """Make a model an FSDP model, in place; its parameters become DTensors under the same names. Collective.

        `keep`: parameters stay gathered between forward and backward, whatever the option says.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from dtf.model.init import DTYPES, is_statistics

        _refuse_own_equality(model)
        _keep_weights_in_place(model)
        for parameter in model.parameters():
            if not parameter.is_contiguous():  # torch divides rows in memory
                parameter.data = parameter.data.contiguous()
        scalars = {p for p in model.parameters() if not p.dim() or not p.numel()}
        offload = CPUOffloadPolicy() if self.offload else OffloadPolicy()
        plain = MixedPrecisionPolicy(cast_forward_inputs=False)
        policy = plain
        if task.precision.cast is Cast.module and task.precision.compute is not task.precision.param:
            policy = MixedPrecisionPolicy(
                DTYPES[task.precision.compute], DTYPES[task.precision.param], cast_forward_inputs=False
            )

        def wrap(modules: list[nn.Module], policy: MixedPrecisionPolicy) -> None:
            fully_shard(
                modules,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward and not keep,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=scalars,
            )

        if len({p.dtype for p in model.parameters()}) > 1 or policy is not plain:
            for module in model.modules():  # their parameters stay in fp32, and a unit has one format
                if is_statistics(module) and module._parameters:
                    wrap([module], plain)
        for unit in units:
            rest = [module for module in unit if not isinstance(module, FSDPModule)]
            if rest:
                wrap(rest, policy)
        if not isinstance(model, FSDPModule):
            wrap([model], policy)
        _refuse_cuts(model, task.compiled)
        assert isinstance(model, FSDPModule)
        if hasattr(model, SUMS_UNUSED):  # rows of one rank may use what those of another do not
            getattr(model, SUMS_UNUSED)(True)
        _unmark(model, task.compiled)
        _prefetch([unit[0] for unit in units if isinstance(unit[0], FSDPModule)], self.prefetch)
        return model


def _unmark(model: nn.Module, compiled: Sequence[str]) -> None:
    """Take away torch's mark of sharded modules, which is for its compiler: models of transformers that read it leave
    out no layers by chance (`layerdrop`), and so compute other numbers.
    """
    kept = {part for name in compiled for part in model.get_submodule(name).modules()}
    for module in model.modules():
        if module not in kept:
            vars(module).pop("_is_fsdp_managed_module", None)


def _prefetch(heads: Sequence[FSDPModule], count: int) -> None:
    """Have each unit gather the `count` units after it, in backward before it, while it computes."""
    for i, head in enumerate(heads):
        head.set_modules_to_forward_prefetch([*heads[i + 1 : i + 1 + count]])
        head.set_modules_to_backward_prefetch([*heads[max(0, i - count) : i][::-1]])


def _keep_weights_in_place(model: nn.Module) -> None:
    """On CUDA recurrent layers give their weights memory of their own in each pass that meets new ones. Gathered ones
    would never change again. cuDNN brings them together by itself.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _leave_in_place


def _leave_in_place() -> None:
    """A function of this module, so that a model that has it can be copied."""


def _refuse_cuts(model: nn.Module, compiled: Sequence[str]) -> None:
    """Raise ConfigError for a compiled module in the middle of which parameters are gathered."""
    from torch.distributed.fsdp import FSDPModule

    for name in compiled:
        for at, part in model.get_submodule(name).named_modules(prefix=name):
            if at != name and isinstance(part, FSDPModule):
                raise ConfigError(
                    f"step.compile=blocks: strategy=fsdp gathers {at} apart from the rest of {name}, in the middle of "
                    "what would be one piece; use strategy=ddp, or step.compile=off"
                )


def _refuse_own_equality(model: nn.Module) -> None:
    """Raise ConfigError for a module that says itself what it is equal to."""
    for name, module in model.named_modules():
        if type(module).__eq__ is not object.__eq__:
            raise ConfigError(
                f"strategy=fsdp: {name or 'the model'} ({type(module).__name__}) has an __eq__() of its own, and torch "
                "looks modules up in dicts; leave it out, or use strategy=ddp"
            )


def _use(model: nn.Module, task: Task) -> ParamUse | None:
    """What a pass over a few rows shows of the use of parameters. None without values, or without rows to pass.

    The rows are the same on all ranks. ConfigError for a model that cannot compute them.
    """
    import torch
    from torch.distributed.fsdp import FSDPModule

    from dtf.core import nest
    from dtf.model.draw_by_name import draws_by_name
    from dtf.strategies.param_use import ParamUse

    if task.sample is None or draws_by_name(task.recipe):
        return None
    use = ParamUse(model)
    rows = task.sample(2 * TRIALS)
    use.watch_passes(model, [nest.rows(rows, 2 * i, 2 * i + 2) for i in range(TRIALS)])
    if use.uneven and not hasattr(FSDPModule, SUMS_UNUSED):
        raise ConfigError(
            f"strategy=fsdp: some rows use {min(use.uneven)} and others do not, and torch "
            f"{torch.__version__} cannot sum gradients that only some ranks have; use torch 2.14 or "
            "newer, or strategy=ddp"
        )
    return use
