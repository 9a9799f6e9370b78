"""Whether a model whose layers are divided still computes what it did: its outputs for some rows, before and after.

A layout may leave out a layer that must be divided too, or attention that dtf does not know. Shapes may fit all the
same.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.api.precision import Cast, Format
from dtf.api.task import Task
from dtf.core.errors import LayoutError
from dtf.core.seeding import seed_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import is_dtensor, local, offset
from dtf.distributed.world import World
from dtf.model.author_errors import author_error
from dtf.model.draw_by_name import draws_by_name
from dtf.model.error_context import name_failing_module
from dtf.model.forward import cast_floating
from dtf.optim.sharding import ParamShard, full_params
from dtf.strategies.mesh_sharding import drop_gathered
from dtf.strategies.start_check import RAISED
from dtf.strategies.trial_numbers import passes_without_trace

ROWS = 2
"""Rows of the pass."""

BOUNDS = {Format.fp64: 1e-4, Format.fp32: 1e-3, Format.bf16: 0.1, Format.fp16: 0.05}
"""Relative differences of outputs that formats and the order of sums may make. The whole model computes in fp32, and
neither with autocast.
"""

TF32 = 2e-2
"""The same, where a GPU rounds factors to TF32."""


class OutputReference:
    """The outputs of a whole model on CPU, in an evaluation of some rows, the same on all ranks: as it starts, and with
    other numbers. A branch that starts at zero or nearly so shows with these alone. To make one leaves no trace in the
    model.
    """

    def __init__(self, model: nn.Module, rows: Any, task: Task) -> None:
        self._rows, self._task, precision = rows, task, task.precision
        self._format = precision.param if precision.cast is Cast.autocast else precision.compute
        params = full_params(model, {name: parameter.data for name, parameter in model.named_parameters()})
        exact = self._format in (Format.fp64, Format.fp32) and not precision.tf32  # others would make more of rounding
        self._others = [_Others(), *([_Others.of(model)] if exact else [])]
        self._outputs = [self._whole(model)]
        for others in self._others[1:]:
            with contextlib.suppress(*RAISED), others.put(params):  # it may not take all numbers
                self._outputs.append(self._whole(model))

    def _whole(self, model: nn.Module) -> list[Tensor]:
        dtype = next(model.parameters()).dtype
        with (
            passes_without_trace([model], self._task.recipe),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            model.eval()
            outputs = _numbers(model(cast_floating(self._rows, dtype)))
            model.train()
        return outputs

    def compare(
        self,
        run: Callable[[Any], Any],
        models: Sequence[nn.Module],
        params: Mapping[str, ParamShard],
        name: str,
        dims: ParallelDims,
        world: World,
    ) -> None:
        """Raise LayoutError on all ranks where the outputs now are others, on one where a pass fails there. `run`:
        computes them from rows with `models`, without autocast; None: other ranks have them. `params`: what is here of
        the parameters, by first name. Collective.
        """
        for before, others in zip(self._outputs, self._others, strict=False):
            with contextlib.ExitStack() as stack:
                stack.enter_context(others.put(params))
                for model in models:
                    stack.enter_context(name_failing_module(model))
                with passes_without_trace(models, self._task.recipe):
                    outputs = self._computed(run, f"{name}: with {dims.sizes}")
                drop_gathered(module for model in models for module in model.modules())
            sums = torch.zeros(2, dtype=torch.float64)  # squares of differences, squares
            for now, whole in zip(_numbers(outputs), before if outputs is not None else (), strict=True):
                sums += _apart(now, whole, f"{name}: with {dims.sizes}")
            world.reduce(sums)
            self._refuse(sums, f"{name}: {dims.sizes}")

    def _refuse(self, sums: Tensor, divided: str) -> None:
        """Raise LayoutError where the squares of differences, beside those of outputs, are more than rounding."""
        error = (sums[0] / sums[1].clamp(min=1e-300)).sqrt().item()
        bound = TF32 if self._task.precision.tf32 else BOUNDS[self._format]
        if not error <= bound and torch.isfinite(sums[1]):
            raise LayoutError(
                f"{divided} gives other outputs than the whole model, by {error:.1e} of their size: something looks "
                "across what ranks divide, and the recipe's layout does not say so. Name in its splits each layer with "
                "weights between a column and its row, and each attention by its heads; in its positions only modules "
                "that compute each position by itself, from no number of it that they count themselves. "
                "job=describe job.layout=true prints what was found where there is no layout"
            )

    def _computed(self, run: Callable[[Any], Any], divided: str) -> Any:
        """The outputs now. The whole model has computed these rows: if a module fails now, this is because of what is
        divided.
        """
        try:
            return run(self._rows)
        except Exception as error:
            named = author_error(error)
            if named is None:
                raise
            raise LayoutError(
                f"{divided} {named}. The whole model computes these rows. Where the layout splits layers, a rank "
                "has a part of their heads or channels: take their number from shapes, as in "
                "x.unflatten(-1, (-1, head_width)), or leave them out of the splits. In the layout's positions it has "
                "a part of these, and attention has all: make masks before the first of them, and angles as (cos, sin) "
                "of shape (B, T, D). See docs/strategies.md"
            ) from error


def output_reference(model: nn.Module, task: Task) -> OutputReference | None:
    """Of a model before anything divides it; None where there are no rows, or no numbers in the model yet."""
    if task.sample is None or draws_by_name(task.recipe) or task.recipe.table_widths():
        return None
    return OutputReference(model, task.sample(ROWS), task)


def _apart(now: Tensor, before: Tensor, divided: str) -> Tensor:
    """Squares of differences from the whole output, and squares of this, where this rank has them, (2,)."""
    whole, here = before[_part(now)].to(torch.float64), local(now).to("cpu", torch.float64)
    if here.shape != whole.shape:
        raise LayoutError(
            f"{divided} an output of the model has shape {tuple(now.shape)}, and that of the whole model "
            f"{tuple(before.shape)}: it is taken where ranks divide positions or channels; take it behind the last "
            "module of the layout's positions, and behind a row of the splits"
        )
    return torch.stack([(here - whole).square().sum(), whole.square().sum()])


class _Others(NamedTuple):
    """Other numbers for the parameters of these names. To take them, and to go back, changes no bit."""

    constants: Mapping[str, float] = MappingProxyType({})
    """Of those that start at one value, it; they get others around it, drawn by their names."""

    factors: Mapping[str, float] = MappingProxyType({})
    """Of matrices with small numbers, by what they are multiplied: a power of two."""

    @classmethod
    def of(cls, model: nn.Module) -> _Others:
        real = {name: p for name, p in model.named_parameters() if p.is_floating_point() and p.numel()}
        constants = {name: p.flatten()[0].item() for name, p in real.items() if bool((p == p.flatten()[0]).all())}
        matrices = {name: p for name, p in real.items() if p.dim() > 1 and name not in constants}
        sizes = {name: float(p.detach().norm(dtype=torch.float64)) / len(p) ** 0.5 for name, p in matrices.items()}
        return cls(constants, {name: 2.0 ** round(-math.log2(size)) for name, size in sizes.items() if 0 < size < 0.7})

    @contextlib.contextmanager
    def put(self, params: Mapping[str, ParamShard]) -> Iterator[None]:
        """A context in which parameters have them. `params`: what is here of these."""
        for name, shard in params.items():
            if name in self.constants:
                generator = torch.Generator().manual_seed(seed_of("other", name))
                numbers = torch.empty(shard.shape).uniform_(-1, 3, generator=generator) + self.constants[name]
                for box in shard.boxes:
                    box.here(shard.local).copy_(box.of(numbers))
            shard.local.mul_(self.factors.get(name, 1.0))
        try:
            yield
        finally:
            for name, shard in params.items():
                if name in self.constants:
                    shard.local.fill_(self.constants[name])
                shard.local.mul_(1 / self.factors.get(name, 1.0))


def _numbers(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole one."""
    if not is_dtensor(tensor):
        return (slice(None),) * tensor.dim()
    return tuple(slice(at, at + n) for at, n in zip(offset(tensor), local(tensor).shape, strict=True))
