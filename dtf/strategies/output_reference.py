"""Whether a model whose layers are divided still computes what it did: its outputs for some rows, before and after.

A layout may leave out a layer that must be divided too, or attention that dtf does not know. Shapes may fit all the
same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
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
from dtf.distributed.sharding import Slice, is_dtensor, local, offset, slice_of
from dtf.distributed.world import World
from dtf.model.author_errors import author_error
from dtf.model.draw_by_name import draws_by_name
from dtf.model.error_context import name_failing_module
from dtf.model.forward import cast_floating
from dtf.strategies.mesh_sharding import drop_gathered
from dtf.strategies.start_check import RAISED
from dtf.strategies.tensor_parallel.slices import slices_of
from dtf.strategies.trial_numbers import passes_without_trace

ROWS = 2
"""Rows of the pass."""

BOUNDS = {Format.fp64: 1e-4, Format.fp32: 1e-3, Format.bf16: 0.1, Format.fp16: 0.05}
"""Relative differences of outputs that formats and the order of sums may make. The whole model computes in fp32, and
neither with autocast.
"""

TF32 = 2e-2
"""The same, where a GPU rounds factors to TF32."""

LONG_S = 30.0
"""A whole model that takes longer for the first comparison makes no second one."""

Part = tuple[nn.Module, Mapping[str, str]]
"""A model or a part of one, and what the model calls the parameters that are called otherwise there."""


class OutputReference:
    """The outputs of a model on CPU before ranks divide its layers, in an evaluation of some rows, the same everywhere:
    as it starts, and with other numbers. A branch that starts at zero or nearly so shows with these alone. To make one
    leaves no trace in the model. Collective.
    """

    def __init__(self, model: nn.Module, task: Task, dims: ParallelDims, world: World) -> None:
        self._task, self._dims, self._world = task, dims, world
        precision = task.precision
        self._format = precision.param if precision.cast is Cast.autocast else precision.compute
        self._outputs: list[list[Tensor]] = []
        self._numbers = [_Numbers()]
        self._divided, self._skipped = dims.sizes.layer_ranks > 1, _why_not(task)
        if not self._divided or self._skipped:
            return
        assert task.sample is not None
        self._rows = task.sample(ROWS)
        self._skipped, quick = self._compute(model)
        if quick and not self._skipped and self._format in (Format.fp64, Format.fp32) and not precision.tf32:
            self._numbers.append(_Numbers.others(model))  # formats with fewer bits would make more of rounding
            with suppress(*RAISED), self._numbers[1].put([(model, {})]):  # it may not take all numbers
                self._outputs.append(self._whole(model))

    def _compute(self, model: nn.Module) -> tuple[str, bool]:
        """The outputs. Returns why there are none, as a model for GPUs may need one, and whether they took little time,
        alike on all ranks.
        """
        why, began = "", time.monotonic()
        try:
            self._outputs.append(self._whole(model))
        except Exception as error:
            if self._world.device.type == "cpu":
                raise
            why = f"the whole model does not run on CPU ({type(error).__name__}: {' '.join(str(error).split())})"
        everyone = self._world.gather((why, time.monotonic() - began < LONG_S))
        told = everyone and (next(filter(None, (why for why, _ in everyone)), ""), all(quick for _, quick in everyone))
        return self._world.broadcast(told)

    def _whole(self, model: nn.Module) -> list[Tensor]:
        dtype = next(model.parameters()).dtype
        with (
            passes_without_trace([model], self._task.recipe),
            torch.no_grad(),
            torch.compiler.set_stance("force_eager"),
        ):
            try:
                model.eval()
                return _floating(model(cast_floating(self._rows, dtype)))
            finally:
                model.train()

    def compare(self, run: Callable[[Any], Any], models: Sequence[Part], name: str) -> dict[str, str]:
        """A line for the start-up table. LayoutError on all ranks where the outputs now are others, on one where a pass
        fails there. `run`: computes them from rows with `models`, without autocast; None: other ranks have them.
        `name`: of the strategy. Collective.
        """
        if not self._divided:
            return {}
        if self._skipped:
            return {"compared": f"no outputs with those of the whole model: {self._skipped}"}
        modules, divided, errors = [model for model, _ in models], f"{name}: {self._dims.sizes}", list[float]()
        for before, numbers in zip(self._outputs, self._numbers, strict=False):
            with ExitStack() as stack:
                stack.enter_context(numbers.put(models))
                for model in modules:
                    stack.enter_context(name_failing_module(model))
                with passes_without_trace(modules, self._task.recipe):
                    outputs = self._computed(run, f"{name}: with {self._dims.sizes}")
                drop_gathered(module for model in modules for module in model.modules())
            sums = torch.zeros(2, dtype=torch.float64)  # squares of differences, squares
            for now, whole in zip(_floating(outputs), before if outputs is not None else (), strict=True):
                sums += _apart(now, whole, f"{name}: with {self._dims.sizes}")
            self._world.reduce(sums)
            errors.append(self._checked(sums, divided))
        if all(map(math.isnan, errors)):
            return {"compared": "no outputs with those of the whole model: they are not finite"}
        most = max(error for error in errors if not math.isnan(error))
        once = "" if len(errors) > 1 else ", as the model starts alone"
        return {
            "compared": f"outputs for {ROWS} rows with those of the whole model{once}: {most:.0e} of their size apart"
        }

    def _checked(self, sums: Tensor, divided: str) -> float:
        """The difference beside the outputs. LayoutError where it is more than rounding."""
        error = (sums[0] / sums[1].clamp(min=1e-300)).sqrt().item()
        if not torch.isfinite(sums[1]):
            return math.nan
        if error <= (TF32 if self._task.precision.tf32 else BOUNDS[self._format]):
            return error
        raise LayoutError(
            f"{divided} gives other outputs than the whole model, by {error:.1e} of their size: something looks across "
            "what ranks divide, and the recipe's layout does not say so. Name in its splits each layer with weights "
            "between a column and its row, and each attention by its heads, with SplitBy(parts=...) where one layer "
            "makes queries, keys and values; in its positions only modules that compute each position by itself, from "
            "no number of it that they count themselves. job=describe job.layout=true prints what was found where "
            "there is no layout"
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
                f"{divided} {named}. The whole model computes these rows. {self._remedy()}. See docs/strategies.md"
            ) from error

    def _remedy(self) -> str:
        sizes, remedies = self._dims.sizes, list[str]()
        if sizes.tensor > 1:
            remedies.append(
                "Behind a layer that the layout splits as column a rank has a part of the heads or channels, up to a "
                "row: name the row, take numbers of heads from shapes, as in x.unflatten(-1, (-1, head_width)), or "
                "leave both out of the splits"
            )
        if sizes.context > 1:
            remedies.append(
                "From the first of the layout's positions on, a rank has a part of these, and attention has all: take "
                "their number from shapes, and make masks before, and angles as (cos, sin) of shape (B, T, D)"
            )
        return ". ".join(remedies)


def _why_not(task: Task) -> str:
    """Why outputs of the whole model cannot be had; empty where they can."""
    if draws_by_name(task.recipe):
        return f"{type(task.recipe).__name__}.initialise draws numbers for the ranks' slices, and no rank has them all"
    if task.recipe.table_widths():
        return "the model takes rows of sparse tables"
    return "" if task.sample is not None else "there are no rows to try"


class _Numbers(NamedTuple):
    """Numbers for the parameters of these names; by default those that they start from. To take them, and to go back,
    changes no bit.
    """

    constants: Mapping[str, float] = MappingProxyType({})
    """Of those that start at one value, it; they get others around it, drawn by their names."""

    factors: Mapping[str, float] = MappingProxyType({})
    """Of matrices with small numbers, by what they are multiplied: a power of two."""

    @classmethod
    def others(cls, model: nn.Module) -> _Numbers:
        usual = (torch.float64, torch.float32)
        real = {name: p.detach() for name, p in model.named_parameters() if p.dtype in usual and p.numel()}
        constants = {name: p.flatten()[0].item() for name, p in real.items() if bool((p == p.flatten()[0]).all())}
        matrices = {name: p for name, p in real.items() if p.dim() > 1 and name not in constants}
        sizes = {name: float(p.norm(dtype=torch.float64)) / len(p) ** 0.5 for name, p in matrices.items()}
        return cls(constants, {name: 2.0 ** round(-math.log2(size)) for name, size in sizes.items() if 0 < size < 0.7})

    @contextmanager
    def put(self, models: Sequence[Part]) -> Iterator[None]:
        """A context in which the parameters have them, the same in a model and in parts of it."""
        here: dict[int, tuple[str, Tensor, Slice]] = {}  # by place in memory: stages of a rank may share some
        for model, names in models if self.constants or self.factors else ():
            divided = slices_of(model)
            for name, parameter in model.named_parameters():
                first = names.get(name, name)
                if first in self.constants or first in self.factors:
                    tensor = local(parameter.detach())
                    here[tensor.data_ptr()] = first, tensor, slice_of(parameter, divided.get(name))
        for name, tensor, place in here.values():
            if name in self.factors:
                tensor.mul_(self.factors[name])
                continue
            generator = torch.Generator().manual_seed(seed_of("other", name))
            numbers = torch.empty(place.shape).uniform_(-1, 3, generator=generator) + self.constants[name]
            for piece in place.pieces:
                piece.here(tensor).copy_(piece.of(numbers))
        try:
            yield
        finally:
            for name, tensor, _ in here.values():
                if name in self.factors:
                    tensor.mul_(1 / self.factors[name])
                else:
                    tensor.fill_(self.constants[name])


def _apart(now: Tensor, before: Tensor, divided: str) -> Tensor:
    """Squares of differences from the whole output, and squares of this, where this rank has them, (2,)."""
    whole, here = before[_place(now)].to(torch.float64), local(now).to("cpu", torch.float64)
    if here.shape != whole.shape:
        raise LayoutError(
            f"{divided} an output of the model has shape {tuple(now.shape)}, and that of the whole model "
            f"{tuple(before.shape)}: it is taken where ranks divide positions or channels; take it behind the last "
            "module of the layout's positions, and behind a row of the splits"
        )
    return torch.stack([(here - whole).square().sum(), whole.square().sum()])


def _floating(outputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _place(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of a tensor lies in the whole one."""
    if not is_dtensor(tensor):
        return (slice(None),) * tensor.dim()
    return tuple(slice(at, at + n) for at, n in zip(offset(tensor), local(tensor).shape, strict=True))
