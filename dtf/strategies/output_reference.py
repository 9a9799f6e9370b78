"""Whether a model whose layers are divided still computes what it did: its outputs for some rows, before and after.

A layout may leave out a layer that must be divided too, or attention that dtf does not know. Shapes may fit all the
same. Many models start with zeros at the end of each branch or in the last layer, which hide what is before them: both
evaluations have other numbers there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.api.precision import Format
from dtf.api.task import Task
from dtf.core.errors import LayoutError
from dtf.core.seeding import seed_of
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import is_dtensor, local, offset, slice_of
from dtf.distributed.world import World
from dtf.model.author_errors import author_error
from dtf.model.draw_by_name import draws_by_name
from dtf.model.forward import cast_floating
from dtf.strategies.mesh_sharding import drop_gathered
from dtf.strategies.tensor_parallel.slices import slices_of
from dtf.strategies.trial_numbers import passes_without_trace

ROWS = 2
"""Rows of the pass."""

BOUNDS = {Format.fp64: 1e-4, Format.fp32: 1e-3, Format.bf16: 0.1, Format.fp16: 0.05}
"""Relative differences of outputs that formats and the order of sums may make. The whole model computes in fp32."""

TF32 = 2e-2
"""The same, where a GPU rounds factors to TF32."""


Part = tuple[nn.Module, Mapping[str, str]]
"""A model or a part of one, and what the model calls the parameters that are called otherwise there."""


class OutputReference:
    """The outputs of a model on CPU before ranks divide its layers, in an evaluation of some rows, the same everywhere.
    To make one leaves no trace in the model. Collective.
    """

    def __init__(self, model: nn.Module, task: Task, dims: ParallelDims, world: World) -> None:
        self._task, self._dims, self._world = task, dims, world
        self._outputs: list[Tensor] = []
        self._constants: dict[str, float] = {}
        self._divided, self._skipped = dims.sizes.layer_ranks > 1, _why_not(task)
        if self._divided and not self._skipped:
            assert task.sample is not None
            self._rows = task.sample(ROWS)
            self._constants = _constants(model)
            self._skipped = self._compute(model)

    def _compute(self, model: nn.Module) -> str:
        """The outputs, or why there are none, alike on all ranks: a model for GPUs may need one."""
        dtype, why = next(model.parameters()).dtype, ""
        with _varied([(model, {})], self._constants), passes_without_trace([model], self._task.recipe), torch.no_grad():
            model.eval()
            try:
                with torch.compiler.set_stance("force_eager"):
                    self._outputs = _numbers(model(cast_floating(self._rows, dtype)))
            except Exception as error:
                if self._world.device.type == "cpu":
                    raise
                why = f"the whole model does not run on CPU ({type(error).__name__}: {' '.join(str(error).split())})"
            model.train()
        everyone = self._world.gather(why)
        return self._world.broadcast(everyone and next(filter(None, everyone), ""))

    def compare(self, run: Callable[[Any], Any], models: Sequence[Part], name: str) -> dict[str, str]:
        """A line for the start-up table. LayoutError on all ranks where the outputs now are others, on one where a pass
        fails there. `run`: computes them from rows with `models`; None: other ranks have them. Collective.
        """
        if not self._divided:
            return {}
        if self._skipped:
            return {"compared": f"no outputs with those of the whole model: {self._skipped}"}
        dims, modules = self._dims, [model for model, _ in models]
        with _varied(models, self._constants):
            with passes_without_trace(modules, self._task.recipe):
                outputs = self._computed(run, f"{name}: with {dims.sizes}")
            drop_gathered(module for model in modules for module in model.modules())
        sums = torch.zeros(2, dtype=torch.float64)  # squares of differences, squares
        for now, before in zip(_numbers(outputs), self._outputs if outputs is not None else (), strict=True):
            whole = before[_part(now)].to(torch.float64)
            difference = local(now).to("cpu", torch.float64) - whole
            sums += torch.stack([difference.square().sum(), whole.square().sum()])
        self._world.reduce(sums)
        error = (sums[0] / sums[1].clamp(min=1e-300)).sqrt().item()
        bound = TF32 if self._task.precision.tf32 else BOUNDS[self._task.precision.compute]
        if not error <= bound and torch.isfinite(sums[1]):
            raise LayoutError(
                f"{name}: {dims.sizes} gives other outputs than the whole model, by {error:.1e} of their size: "
                "something looks across what ranks divide, and the recipe's layout does not say so. Name in its splits "
                "each layer with weights between a column and its row, and each attention by its heads; in its "
                "positions only modules that compute each position by itself"
            )
        return {"compared": f"outputs for {ROWS} rows with those of the whole model: {error:.0e} of their size apart"}

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
                f"{divided} {named}. The whole model computes these rows. {self._remedy()}, see docs/strategies.md"
            ) from error

    def _remedy(self) -> str:
        sizes, remedies = self._dims.sizes, list[str]()
        if sizes.tensor > 1:
            remedies.append(
                "Where the layout splits layers, a rank has a part of their heads or channels: take their number from "
                "shapes, as in x.unflatten(-1, (-1, head_width)), or leave them out of the splits"
            )
        if sizes.context > 1:
            remedies.append(
                "From the first to the last module of the layout's positions, and in what follows, a rank has a part "
                "of the positions: take their number from shapes there, or use strategy.tensor in place of "
                "strategy.context"
            )
        return ". ".join(remedies)


def _why_not(task: Task) -> str:
    """Why outputs of the whole model cannot be had; empty where they can."""
    if draws_by_name(task.recipe):
        return f"{type(task.recipe).__name__}.initialise draws numbers for the ranks' slices, and no rank has them all"
    if task.recipe.table_widths():
        return "the model takes rows of sparse tables"
    return "" if task.sample is not None else "there are no rows to try"


def _constants(model: nn.Module) -> dict[str, float]:
    """Name of each parameter whose elements are all equal -> what they are."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.numel():
            least, most = parameter.detach().aminmax()
            if least == most and torch.isfinite(least):
                found[name] = least.item()
    return found


@contextmanager
@torch.no_grad()
def _varied(models: Sequence[Part], constants: Mapping[str, float]) -> Iterator[None]:
    """A context in which these parameters have elements that differ, the same in a model and in parts of it."""
    here = [
        (local(parameter.detach()), constants[first], slice_of(parameter, divided.get(name)), first)
        for model, names in models
        for divided in [slices_of(model)]
        for name, parameter in model.named_parameters()
        if (first := names.get(name, name)) in constants
    ]
    for tensor, value, part, name in here:
        some = torch.rand(part.shape, generator=torch.Generator().manual_seed(seed_of("varied", name)))
        for piece in part.pieces:
            piece.here(tensor).copy_(value + piece.of(some) / 8)
    try:
        yield
    finally:
        for tensor, value, *_ in here:
            tensor.fill_(value)


def _numbers(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole one."""
    if not is_dtensor(tensor):
        return (slice(None),) * tensor.dim()
    return tuple(slice(at, at + n) for at, n in zip(offset(tensor), local(tensor).shape, strict=True))
