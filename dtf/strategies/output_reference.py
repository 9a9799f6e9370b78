"""Whether a model whose layers are divided still computes what it did: its outputs for some rows, before and after.

A layout may leave out a layer that must be divided too, or attention that dtf does not know. Shapes may fit all the
same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtf.api.precision import Format
from dtf.api.task import Task
from dtf.core.errors import LayoutError
from dtf.distributed.device_mesh import ParallelDims
from dtf.distributed.sharding import is_dtensor, local, offset
from dtf.distributed.world import World
from dtf.model.author_errors import author_error
from dtf.model.draw_by_name import draws_by_name
from dtf.model.forward import cast_floating
from dtf.strategies.mesh_sharding import drop_gathered
from dtf.strategies.trial_numbers import passes_without_trace

ROWS = 2
"""Rows of the pass."""

BOUNDS = {Format.fp64: 1e-4, Format.fp32: 1e-3, Format.bf16: 0.1, Format.fp16: 0.05}
"""Relative differences of outputs that formats and the order of sums may make. The whole model computes in fp32."""

TF32 = 2e-2
"""The same, where a GPU rounds factors to TF32."""


class OutputReference:
    """The outputs of a whole model on CPU, in an evaluation of some rows, the same on all ranks. To make one leaves no
    trace in the model.
    """

    def __init__(self, model: nn.Module, rows: Any, task: Task) -> None:
        self._rows, self._task = rows, task
        dtype = next(model.parameters()).dtype
        with passes_without_trace([model], task.recipe), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()
            self._outputs = _numbers(model(cast_floating(rows, dtype)))
            model.train()

    def compare(
        self, run: Callable[[Any], Any], models: Sequence[nn.Module], name: str, dims: ParallelDims, world: World
    ) -> None:
        """Raise LayoutError on all ranks where the outputs now are others, on one where a pass fails there. `run`:
        computes them from rows with `models`; None: other ranks have them. Collective.
        """
        with passes_without_trace(models, self._task.recipe):
            outputs = self._computed(run, f"{name}: with {dims.sizes}")
        drop_gathered(module for model in models for module in model.modules())
        sums = torch.zeros(2, dtype=torch.float64)  # squares of differences, squares
        for now, before in zip(_numbers(outputs), self._outputs if outputs is not None else (), strict=True):
            whole = before[_part(now)].to(torch.float64)
            difference = local(now).to("cpu", torch.float64) - whole
            sums += torch.stack([difference.square().sum(), whole.square().sum()])
        world.reduce(sums)
        error = (sums[0] / sums[1].clamp(min=1e-300)).sqrt().item()
        bound = TF32 if self._task.precision.tf32 else BOUNDS[self._task.precision.compute]
        if not error <= bound and torch.isfinite(sums[1]):
            raise LayoutError(
                f"{name}: {dims.sizes} gives other outputs than the whole model, by {error:.1e} of their size: "
                "something looks across what ranks divide, and the recipe's layout does not say so. Name in its splits "
                "each layer with weights between a column and its row, and each attention by its heads; in its "
                "positions only modules that compute each position by itself"
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
                "x.unflatten(-1, (-1, head_width)), or leave them out of the splits, see docs/strategies.md"
            ) from error


def output_reference(model: nn.Module, task: Task) -> OutputReference | None:
    """Of a model before anything divides it; None where there are no rows, or no numbers in the model yet."""
    if task.sample is None or draws_by_name(task.recipe) or task.recipe.table_widths():
        return None
    return OutputReference(model, task.sample(ROWS), task)


def _numbers(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole one."""
    if not is_dtensor(tensor):
        return (slice(None),) * tensor.dim()
    return tuple(slice(at, at + n) for at, n in zip(offset(tensor), local(tensor).shape, strict=True))
