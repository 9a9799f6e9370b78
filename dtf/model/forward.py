"""The forward pass and loss of one micro-batch: dtypes, losses per row, what is differentiated.

Knows no other micro-batch and no rank. B: rows of the micro-batch; M: numbers of the metric state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dtf.api.precision import Cast
from dtf.api.sparse_table import Table, inputs_of
from dtf.api.task import Task
from dtf.core import nest
from dtf.core.errors import ConfigError
from dtf.core.types import Batch, Evaluated
from dtf.distributed.sharding import is_dtensor
from dtf.host import devices
from dtf.model.init import DTYPES
from dtf.model.loss_terms import Losses, LossTerms
from dtf.model.memory_format import channels_first, channels_last
from dtf.model.metric_checks import check_rows, check_sums

HALF = (torch.bfloat16, torch.float16)


class ForwardPass:
    """What all strategies do alike with a micro-batch, on one device."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._recipe, self._device = task.recipe, device
        self.loss = Losses(task.recipe)
        self.watch: Callable[[Tensor], None] | None = None
        """Is shown each tensor that is to be differentiated."""
        self.carry: Callable[[Tensor], Tensor] | None = None
        """Makes an output of positions that ranks divide one that says so."""
        self._measured, self._evaluated = False, False  # whether the first answers of the recipe were checked
        compute = DTYPES[task.precision.compute]
        self._channels_last = task.channels_last
        self._autocast = compute if task.precision.cast is Cast.autocast else None
        self._input = None if self._autocast else compute

    def forward(self, model: Callable[..., Any], *inputs: Any, cast: bool = True, narrow: bool = True) -> Any:
        """`model(*inputs)` in the dtypes and the memory format of the run. `cast`: convert floating inputs to these;
        False for a part of a model that gets the outputs of another part. `narrow`: whether autocast may.
        """
        if self._channels_last is not None and cast:
            inputs = tuple(map(channels_last if self._channels_last else channels_first, inputs))
        if self._autocast is None or not narrow:
            return model(*(cast_floating(value, self._input if cast else None) for value in inputs))
        with torch.autocast(self._device.type, dtype=self._autocast):
            return model(*inputs)

    def carried(self, outputs: Any) -> Any:
        """The model's outputs, which say what they are a part of."""
        return outputs if self.carry is None else tree_map(self.carry, outputs)

    def losses(self, outputs: Any, batch: Batch) -> tuple[Any, LossTerms]:
        """The model's outputs, in fp32 at least, and the recipe's loss. ConfigError for a loss of no known form."""
        if self._channels_last:  # a recipe may look at outputs by `view`
            outputs = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, outputs)
        outputs = self.carried(outputs)
        # a loss in half precision loses the small differences it is made of
        outputs = cast_floating(outputs, torch.float32, HALF)
        return outputs, self.loss(outputs, batch)

    def seeded(self, loss: LossTerms, factor: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor () to differentiate, and the gradient () to start from. The resulting gradient is that of `factor`
        x (sum of the loss over rows), and NaN where the loss is not finite.
        """
        if self.watch is not None:
            self.watch(loss.total)
        # 0 x a non-finite loss is NaN: it reaches every gradient here and, summed, every rank, before anything is
        # updated. Where the host can read the loss without waiting, it need not compute that.
        read = devices.host_reads(self._device.type) and not is_dtensor(loss.total)
        if read and math.isfinite(loss.total.item()):
            return loss.total, factor
        return loss.total, loss.total.detach() * 0 + factor

    @torch.no_grad()
    def measure(self, outputs: Any, batch: Batch, loss: LossTerms) -> Tensor:
        """Metric sums (M,), see `Recipe.measure`."""
        sums = self._recipe.measure(_detach(outputs), batch, loss.value.detach())
        if not self._measured:
            check_sums(self._recipe, sums)
            self._measured = True
        return sums

    @torch.no_grad()
    def evaluated(self, outputs: Any, batch: Batch, loss: LossTerms) -> Evaluated:
        """What an evaluation needs of a micro-batch."""
        sums, rows = self.measure(outputs, batch, loss), self._recipe.eval_outputs(_detach(outputs), batch)
        if not self._evaluated:
            check_rows(self._recipe, rows, batch)
            self._evaluated = True
        return Evaluated(sums, rows)


def merge_evaluated(parts: Sequence[Evaluated], device: torch.device) -> Evaluated:
    """The results of several micro-batches as one, on one device."""
    sums, rows = ([part.to(device) for part in column if part is not None] for column in zip(*parts, strict=True))
    return Evaluated(functools.reduce(torch.add, sums), torch.cat(rows) if rows else None)


def rows_of(batch: Batch, first: int, last: int) -> Batch:
    """Rows [first, last) of a batch, in its memory. A model may write into them: that counts as no change of others."""
    return Batch(
        nest.rows(batch.inputs, first, last),
        nest.rows(batch.targets, first, last),
        batch.weight[first:last],
        batch.ids[first:last],
    )


def copy_of(batch: Batch) -> Batch:
    """The same rows in memory of their own, for a pass after which others take them: a model may write into them."""
    inputs, targets = (nest.map_leaves(torch.clone, part) for part in (batch.inputs, batch.targets))
    return Batch(inputs, targets, batch.weight.clone(), batch.ids.copy())


def as_padding(batch: Batch) -> Batch:
    """A copy of the rows that count for nothing."""
    copy = copy_of(batch)
    return copy._replace(weight=torch.zeros_like(copy.weight))


def few_rows(batch: Batch) -> Batch:
    """The first four rows, or all there are, in memory of their own."""
    return copy_of(rows_of(batch, 0, 4))


def with_leaves(batch: Batch, names: Iterable[str]) -> Batch:
    """The batch with the inputs of these names as leaves of a new graph, so that they get gradients."""
    inputs = batch.inputs
    return (
        batch._replace(inputs=inputs | {name: inputs[name].detach().requires_grad_() for name in names})
        if names
        else batch
    )


def leaf_gradients(parts: Sequence[Batch], names: Iterable[str]) -> dict[str, Tensor]:
    """The gradients of the leaves of several parts of a batch, one tensor by name; zeros where the model did not use a
    leaf.

    Empty without parts.
    """
    leaves = {name: [part.inputs[name] for part in parts] for name in names if parts}
    return {
        name: torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in parts_of_input])
        for name, parts_of_input in leaves.items()
    }


def zero_rows_for_tables(inputs: Any, tables: Mapping[str, Table]) -> Any:
    """Inputs as the model gets them, with zeros in place of rows of sparse tables."""
    if not tables:
        return inputs
    ids = {name: inputs[name].lengths if isinstance(inputs[name], nest.Bags) else inputs[name] for name in inputs}
    return inputs | {
        name: torch.zeros(*ids[name].shape, table.width, device=ids[name].device)
        for name, table in inputs_of(tables).items()
    }


def to_device(batch: Batch, device: torch.device, task: Task) -> Batch:
    """The batch on the device, with `weight` in the dtype of the loss, and in fp64 runs floating targets too: some of
    torch's losses compute in the dtype of targets. Copies from pinned memory are asynchronous.

    `Recipe.receive` comes next, see `Receiver`.
    """
    if device == batch.weight.device and loss_dtype(task) is batch.weight.dtype is torch.float32:
        return batch  # as loaders make it
    # converted there: the host would convert into memory that is not pinned
    weights = batch.weight.to(device, non_blocking=True).to(loss_dtype(task))
    targets = on_device(batch.targets, device)
    if loss_dtype(task) is torch.float64:
        targets = nest.map_leaves(lambda leaf: cast_floating(leaf, torch.float64), targets)
    return Batch(on_device(batch.inputs, device), targets, weights, batch.ids)


def on_device(tensors: Any, device: torch.device) -> Any:
    """A nest of tensors on the device."""
    return nest.map_leaves(lambda tensor: tensor.to(device, non_blocking=True), tensors)


def loss_dtype(task: Task) -> torch.dtype:
    """The dtype in which losses of rows are weighted and summed."""
    return torch.float64 if DTYPES[task.precision.compute] is torch.float64 else torch.float32


def batch_norm_error(error: ValueError, rows: int) -> Exception:
    """The exception to raise for an error of a pass: a ConfigError for batch normalisation over a single value, else
    the error itself.
    """
    if "more than 1 value per channel" not in str(error):
        return error
    return ConfigError(
        f"a micro-batch of {rows} row is too small for batch normalisation over a single value; "
        "use sampler.tail=fill or drop, or another step.batch_size or step.micro_batch_rows"
    )


def global_rng_error(why: str, where: str = "") -> ConfigError:
    """The ConfigError for a model that draws from the global generator. `why`: why a strategy cannot run it
    correctly; `where`: the module that draws, where it is known.
    """
    where = f", in {where}" if where else " (torch.rand)"
    return ConfigError(
        f"the model draws random numbers in its forward pass{where}, {why}; draw with nn.Dropout "
        "or torch's functions of dropout only: stochastic depth as x * self.drop(x.new_ones(len(x), 1, 1, 1)) with "
        "self.drop = nn.Dropout(p); or use strategy=ddp"
    )


def cast_floating(value: Any, dtype: torch.dtype | None, only: tuple[torch.dtype, ...] | None = None) -> Any:
    """Floating tensors in `value` (a tensor, or a structure of tensors) as `dtype`. `only`: the dtypes to convert;
    None: all floating ones.
    """

    def cast(tensor: Any) -> Any:
        if dtype is None or not isinstance(tensor, Tensor):
            return tensor
        return tensor.to(dtype) if (tensor.dtype in only if only else tensor.dtype.is_floating_point) else tensor

    return _mapped(cast, value)


def _detach(value: Any) -> Any:
    return _mapped(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A tensor, or a structure of tensors, with each of them changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict and all(isinstance(leaf, Tensor) for leaf in value.values()):
        return {name: change(leaf) for name, leaf in value.items()}  # torch's way takes as long as a small layer
    return tree_map(change, value)
