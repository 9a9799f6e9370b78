"""A model in slices: torch's FSDP2. Parameters, gradients and optimizer state are divided among ranks that compute
other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from dtf.api.layout import Layout
from dtf.api.precision import Cast
from dtf.api.task import Task
from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.distributed.sharding import byte_count, is_dtensor
from dtf.distributed.world import World
from dtf.model.draw_by_name import draws_by_name
from dtf.model.init import DTYPES, is_statistics
from dtf.strategies.fsdp_hooks import hook_gathered, parameter_hooks
from dtf.strategies.fsdp_units import gathered_units
from dtf.strategies.fsdp_waits import watch_collectives
from dtf.strategies.mesh_options import MeshOptions
from dtf.strategies.own_memory import Originals, refuse_shared_memory
from dtf.strategies.param_use import ParamUse
from dtf.strategies.pass_probes import refuse_hooks_on_sums
from dtf.strategies.sharded_init import cast_parts, draw, lay_out

SUMS_UNUSED = "set_reduce_scatter_unused_params"
"""A method of FSDP modules, from torch 2.14 on."""
TRIALS = 3
"""Passes over two rows each that show which modules some rows use and others do not."""


class FullSharding:
    """Slices of a model, or of stages of it, over the axes `replicate` and `shard` of a mesh. To make one looks at
    the whole model, before anything divides it; `wrap` divides it or its stages.

    `options`: those of `ShardOptions`. `name`: of the strategy, for messages.
    """

    def __init__(self, model: nn.Module, layout: Layout, options: MeshOptions, name: str, task: Task) -> None:
        self._name, self._options, self._task = name, options, task
        if isinstance(model, torch.jit.ScriptModule):
            raise ConfigError(
                f"{name}: the model is TorchScript, whose modules cannot gather their parameters; return it from "
                "build_model() without torch.jit, or use strategy=ddp"
            )
        refuse_shared_memory(model, name, "strategy=ddp")
        use = _use(model, name, task)
        scalars = [key for key, p in model.named_parameters() if not p.dim() or not p.numel()]
        if scalars and options.offload:
            raise ConfigError(
                f"strategy.offload=true: the parameter {scalars[0]} has no axis to divide; give it the shape (1,), or "
                "use offload=false"
            )
        # inside a transform of torch.func nothing can be gathered: all comes with the whole model
        transforms = use is not None and use.transforms
        self.units = [] if transforms else gathered_units(model, layout, options.unit.value, use, task.compiled)
        self._keep = options.zero < 3 or not options.reshard_after_forward or (use is not None and use.keeps)
        _refuse_own_equality(model, name)
        refuse_hooks_on_sums(model, "launcher.processes=1")

    def exchange(self, roots: Iterable[nn.Module], micro_batches: int) -> int:
        """Bytes of these that exist in whole during a step: gathered parameters, and gradients before they are
        scattered. Before `wrap`.

        Of a gradient there are two copies, as computed and as sent; with `zero=1` and several micro-batches all
        gradients add up.
        """
        inside = {module for root in roots for module in root.modules()}
        units = [[module for module in unit if module in inside] for unit in self.units]
        sizes = [byte_count(p for module in unit for p in module.parameters()) for unit in units] or [0]
        at_once = len(sizes) if self._keep else 1 + self._options.prefetch
        gathered = max(sum(sizes[i : i + at_once]) for i in range(len(sizes)))
        added_up = sum(sizes) if micro_batches > 1 and self._options.zero == 1 else 0
        return gathered + 2 * max(sizes) + added_up

    def wrap(self, root: nn.Module, mesh: DeviceMesh, world: World) -> dict[str, torch.Tensor]:
        """Divide a model, or a stage of it, in place; its parameters become DTensors under the same names, on the
        device. Collective. Returns the master copies of what is not divided, by name.
        """
        masters = cast_parts(root, self._task.precision, computing=False)
        hooks, originals = parameter_hooks(root), Originals(root)
        inside = set(root.modules())
        units = [[module for module in unit if module in inside] for unit in self.units]
        units = [unit for unit in units if unit]
        self._shard(root, units, mesh)
        originals.refuse_held(root, self._name, "strategy=ddp")
        watch_collectives(root, units, mesh["shard"].get_group())
        if draws_by_name(self._task.recipe):
            return self._fill(root, world)
        masters = self._place(root, masters, world)
        hook_gathered(root, hooks)
        return masters

    def gradient_sync(self, roots: Sequence[nn.Module]) -> Callable[[bool], None]:
        """What to call before each backward pass of these, with whether it is the last of a step."""
        zero = self._options.zero

        def sync(last: bool) -> None:
            for root in roots:
                assert isinstance(root, FSDPModule)
                root.set_requires_gradient_sync(last or zero > 1)
                root.set_requires_all_reduce(last)
                root.set_reshard_after_backward(last or zero == 3)

        return sync

    def _fill(self, model: nn.Module, world: World) -> dict[str, torch.Tensor]:
        """Give a sharded model on meta its memory and initial numbers, in place; returns its master copies by name."""
        device = torch.device("cpu") if self._options.offload else world.device
        masters = lay_out(model, self._task.precision, device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(world.device)
        for module in model.modules():
            # FSDP allocates at first use; force it before anything refers to the memory
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()
        draw(model, self._task, masters)
        return masters

    def _place(self, model: nn.Module, masters: dict[str, torch.Tensor], world: World) -> dict[str, torch.Tensor]:
        """Move what is not sharded to its device, in place; returns the master copies, of what is not sharded."""
        device = "cpu" if self._options.offload else world.device
        for parameter in model.parameters():
            if not is_dtensor(parameter):
                parameter.data = parameter.data.to(device)
        for buffer in model.buffers():
            buffer.data = buffer.data.to(world.device)
        return {name: master.to(device) for name, master in masters.items()}

    def _shard(self, model: nn.Module, units: list[list[nn.Module]], mesh: DeviceMesh) -> None:
        task = self._task
        _keep_weights_in_place(model)
        for parameter in model.parameters():
            if not parameter.is_contiguous():  # torch divides rows in memory
                parameter.data = parameter.data.contiguous()
        scalars = {p for p in model.parameters() if not p.dim() or not p.numel()}
        offload = CPUOffloadPolicy() if self._options.offload else OffloadPolicy()
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
                reshard_after_forward=not self._keep,
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
        _refuse_cuts(model, task.compiled, self._name)
        assert isinstance(model, FSDPModule)
        if hasattr(model, SUMS_UNUSED):  # rows of one rank may use what those of another do not
            getattr(model, SUMS_UNUSED)(True)
        _unmark(model, task.compiled)
        _refuse_copies(model, self._name)
        _prefetch([unit[0] for unit in units if isinstance(unit[0], FSDPModule)], self._options.prefetch)


def _unmark(model: nn.Module, compiled: Sequence[str]) -> None:
    """Take away torch's mark of sharded modules, which is for its compiler: models of transformers that read it leave
    out no layers by chance (`layerdrop`), and so compute other numbers.
    """
    kept = {part for name, module in model.named_modules() if name in compiled for part in module.modules()}
    for module in model.modules():
        if module not in kept:
            vars(module).pop("_is_fsdp_managed_module", None)


def _refuse_copies(model: nn.Module, strategy: str) -> None:
    """Have a copy of a module in a pass raise ConfigError: torch copies nothing of which it gathers parameters."""

    def refuse(name: str, kind: str, memo: object) -> NoReturn:
        raise ConfigError(
            f"{strategy}: the forward pass copies {name or 'the model'} ({kind}) with copy.deepcopy(), and its "
            "parameters are divided over ranks; pass them to torch.func.functional_call() instead, or use strategy=ddp"
        )

    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            kind = type(module).__name__.removeprefix("FSDP")
            vars(module)["__deepcopy__"] = partial(refuse, name, kind)


def _prefetch(heads: Sequence[FSDPModule], count: int) -> None:
    """Have each unit gather the `count` units after it, in backward before it, while it computes."""
    for i, head in enumerate(heads):
        head.set_modules_to_forward_prefetch([*heads[i + 1 : i + 1 + count]])
        head.set_modules_to_backward_prefetch([*heads[max(0, i - count) : i][::-1]])


def _keep_weights_in_place(model: nn.Module) -> None:
    """On CUDA recurrent layers give their weights memory of their own in each pass that meets new ones. Gathered ones
    would never change again. cuDNN brings them together by itself.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _leave_in_place


def _leave_in_place() -> None:
    """A function of this module, so that a model that has it can be copied."""


def _refuse_cuts(model: nn.Module, compiled: Sequence[str], strategy: str) -> None:
    """Raise ConfigError for a compiled module in the middle of which parameters are gathered."""
    modules = dict(model.named_modules())
    for name in compiled:
        if name not in modules:  # of another stage
            continue
        for at, part in modules[name].named_modules(prefix=name):
            if at != name and isinstance(part, FSDPModule):
                raise ConfigError(
                    f"step.compile=blocks: {strategy} gathers {at} apart from the rest of {name}, in the middle of "
                    "what would be one piece; use strategy=ddp, or step.compile=off"
                )


def _refuse_own_equality(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError for a module that says itself what it is equal to."""
    for name, module in model.named_modules():
        if type(module).__eq__ is not object.__eq__:
            raise ConfigError(
                f"{strategy}: {name or 'the model'} ({type(module).__name__}) has an __eq__() of its own, and torch "
                "looks modules up in dicts; leave it out, or use strategy=ddp"
            )


def _use(model: nn.Module, strategy: str, task: Task) -> ParamUse | None:
    """What a pass over a few rows shows of the use of parameters. None without values, or without rows to pass.

    The rows are the same on all ranks. ConfigError for a model that cannot compute them.
    """
    if task.sample is None or draws_by_name(task.recipe):
        return None
    use = ParamUse(model)
    rows = task.sample(2 * TRIALS)
    use.watch_passes(model, [nest.rows(rows, 2 * i, 2 * i + 2) for i in range(TRIALS)])
    if use.uneven and not hasattr(FSDPModule, SUMS_UNUSED):
        raise ConfigError(
            f"{strategy}: some rows use {min(use.uneven)} and others do not, and torch "
            f"{torch.__version__} cannot sum gradients that only some ranks have; use torch 2.14 or "
            "newer, or strategy=ddp"
        )
    return use
